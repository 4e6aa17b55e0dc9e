from __future__ import annotations

import base64
import importlib.util
import struct
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from tk_kernel_core import plot, report
from tk_kernel_core.bench import environment
from tk_kernel_core.device import Fact, known_device
from tk_kernel_core.results import BaselineResult, BenchResult, CheckResult, Report, Setting, Timing
from tk_kernel_core.roofline import place
from tk_kernel_core.spec import Case, Cost
from tk_kernel_core.timing import summarise

H200 = known_device("H200")
COST = Cost(2.0**24, 2**23, 2**23)
VOID_ELEMENTS = {"meta", "img", "br", "link"}


def timing(latency_us: float, note: str = "") -> Timing:
    measured = summarise([latency_us] * 3, 10, "cuda-graph", note=note, host_us=7.5)
    return Timing(latency_us=latency_us, spread_us=0.0, host_us=7.5, rounds=(measured,) * 3)


def result(case: str, latency_us: float | None = 5.0, *, cost: Cost = COST, **changes: Any) -> BenchResult:
    fields: dict[str, Any] = {
        "package": "tk-sample",
        "case": case,
        "source": "a model's layer",
        "params": {"n_rows": 8, "dtype": "bfloat16"},
        "cost": cost,
        "placement": place(cost, H200, latency_us),
        "timing": None if latency_us is None else timing(latency_us),
    }
    return BenchResult(**{**fields, **changes})


def make_report(setting: Setting = "gpu", *results: BenchResult, **changes: Any) -> Report:
    return Report(environment=environment(setting, H200), results=results, **changes)


def in_terminal(renderable: Any, width: int = 200) -> str:
    console = Console(width=width, markup=False, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


class Page(HTMLParser):
    """Reads a page: its text, headings, attributes, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.headings: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)
        if tag in {"h1", "h2"}:
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += f" {data}"
        if {"h1", "h2"} & set(self.open):
            self.headings[-1] += data


def page_of(shown: Report, png: bytes = b"figure") -> Page:
    page = Page(report.html_page(shown, png))
    assert page.open == []
    return page


def test_page_is_self_contained() -> None:
    page = page_of(make_report("gpu", result("decode")), b"\x89PNG figure")
    assert "script" not in page.tags
    assert "link" not in page.tags
    (source,) = [value for name, value in page.attributes if name == "src"]
    kind, _, data = source.partition(";base64,")
    assert kind == "data:image/png"
    assert base64.b64decode(data) == b"\x89PNG figure"
    assert not [value for name, value in page.attributes if name != "src" and "//" in value]
    assert ("content", "width=device-width, initial-scale=1") in page.attributes
    text = report.html_page(make_report("gpu", result("decode")), b"")
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text
    assert "url(" not in text


@pytest.mark.parametrize("setting", ["gpu", "interpreter", "prediction"])
def test_every_heading_of_the_page_says_how_results_came_about(setting: Setting) -> None:
    checks = (CheckResult(package="tk-sample", case="decode", params={}, passed=True),)
    page = page_of(make_report(setting, result("decode", None), checks=checks))
    words = {
        "gpu": "measured on H200",
        "interpreter": "times are not GPU times",
        "prediction": "nothing was run",
    }[setting]
    assert len(page.headings) >= 4
    assert all(words in heading for heading in page.headings if not heading.startswith("Triton kernels"))
    assert page.text.partition("What was run")[0].count(words) >= 1


def test_page_names_the_commit_where_one_is_known() -> None:
    shown = make_report("gpu", result("decode"))
    for commit, times in (("0123abc-dirty", 1), (None, 0)):
        made_in = shown.environment.model_copy(update={"commit": commit})
        text = page_of(shown.model_copy(update={"environment": made_in})).text
        assert text.count("Commit") == times == text.count("0123abc-dirty")


def test_page_escapes_everything() -> None:
    evil = "<script>alert(1)</script>"
    shown = make_report(
        "gpu",
        result(evil, source=evil, params={"n": evil}, error=evil, timing=None),
        result("second", baselines=(BaselineResult(name=evil, unavailable=evil),)),
        checks=(CheckResult(package=evil, case=evil, params={evil: evil}, passed=False, message=evil),),
    )
    page = page_of(shown)
    assert "script" not in page.tags
    assert page.text.count(evil) >= 10


def test_page_shows_times_ratios_bars_and_roofs() -> None:
    baselines = (
        BaselineResult(name="torch", timing=timing(10.0), ratio=0.5, bar=0.75, bar_met=True),
        BaselineResult(name="compile", timing=timing(4.0), ratio=1.25, bar=1.0, bar_met=False),
        BaselineResult(name="liger", unavailable="liger_kernel is not installed"),
    )
    shown = make_report("gpu", result("decode", baselines=baselines))
    text = " ".join(page_of(shown).text.split())
    assert "0.500 × torch (10 µs), bar 0.75 met" in text
    assert "1.250 × compile (4 µs), bar 1 MISSED" in text
    assert "liger: could not run" in text
    assert "baseline liger could not run: liger_kernel is not installed" in text
    assert "1 failed" in text
    # 16 MiB at 4.8 TB/s
    assert "3.5 µs memory" in text
    assert "69.9 %" in text


def test_page_of_nothing_is_no_success() -> None:
    text = page_of(make_report("gpu")).text
    assert "No data" in text
    assert "none failed" not in text


def test_bench_table_joins_checks_times_and_roofs() -> None:
    baselines = (BaselineResult(name="torch", timing=timing(10.0), ratio=0.5, bar=0.4, bar_met=False),)
    checks = (
        CheckResult(package="tk-sample", case="decode", params={}, passed=True),
        CheckResult(package="tk-sample", case="prefill", params={}, passed=False, message="wrong"),
    )
    shown = make_report("gpu", result("decode", baselines=baselines), result("prefill"), checks=checks)
    lines = in_terminal(report.bench_table(shown)).splitlines()
    assert lines[0].startswith("Kernels on the roofline, measured on H200")
    (decode,) = [line for line in lines if " decode " in line]
    (prefill,) = [line for line in lines if " prefill " in line]
    assert "passed" in decode
    assert "0.500 × torch (10 µs), bar 0.4 MISSED" in decode
    assert "69.9 %" in decode
    assert "FAILED" in prefill


def test_a_baseline_that_could_not_run_is_in_the_notes_of_the_terminal() -> None:
    absent = BaselineResult(name="liger", unavailable="not installed")
    ran = BaselineResult(name="torch", timing=timing(10.0), ratio=0.5)
    shown = make_report("gpu", result("decode", baselines=(absent, ran)), result("prefill", baselines=(absent,)))
    lines = in_terminal(report.bench_table(shown)).splitlines()
    assert [line for line in lines if "decode" in line and "0.500 × torch (10 µs)" in line]
    assert [line for line in lines if "prefill" in line and "none, see notes" in line]
    assert "baseline liger could not run: not installed" in in_terminal(report.notes_text(shown))


@pytest.mark.parametrize(("setting", "expected"), [("gpu", True), ("interpreter", False), ("prediction", False)])
def test_only_a_gpu_has_a_percentage_of_its_roof(setting: Setting, expected: bool) -> None:
    shown = make_report(setting, result("decode", 5.0 if expected else None))
    assert (" of roof" in in_terminal(report.bench_table(shown)).replace("roof of", "")) is expected


def test_a_case_above_its_roof_is_flagged_and_not_clipped() -> None:
    shown = make_report("gpu", result("decode", 1.75))
    assert "200 % (above!)" in in_terminal(report.bench_table(shown))
    assert ["faster than the roof" in note for note in report.notes(shown)] == [True]


def test_text_in_brackets_survives_the_terminal() -> None:
    checks = (CheckResult(package="tk-sample", case="decode", params={}, passed=False, message="shape [4096] wrong"),)
    assert "shape [4096] wrong" in in_terminal(report.check_table(make_report("gpu", checks=checks)))


def test_notes_are_said_once_with_the_cases_they_hold_for() -> None:
    absent = (BaselineResult(name="liger", unavailable="not installed"),)
    shown = make_report(
        "gpu",
        result("decode", baselines=absent, timing=timing(5.0, note="no CUDA graph: it refused")),
        result("prefill", baselines=absent),
    )
    assert report.notes(shown) == [
        "tk-sample, all cases: baseline liger could not run: not installed",
        "tk-sample, decode: no CUDA graph: it refused",
    ]


def test_an_unknown_roof_is_a_note() -> None:
    blind = H200.model_copy(update={"bandwidth_bytes_per_s": Fact()})
    shown = Report(environment=environment("gpu", blind), results=(result("a", placement=place(COST, blind, 5.0)),))
    assert report.notes(shown) == ["tk-sample, all cases: no roof, because the bandwidth of H200 is unknown"]
    assert "unknown" in in_terminal(report.bench_table(shown))


def test_device_facts_have_units_and_provenance() -> None:
    rows = {row.fact: row for row in report.device_facts(H200)}
    assert rows["memory bandwidth"].value == "4.8 TB/s"
    assert rows["memory bandwidth"].provenance == "table"
    assert rows["compute units"].value == "132"
    assert rows["compute units"].source != ""
    assert rows["memory"].source == "as above"
    assert rows["peak int8"].value.endswith(" TOP/s")
    blind = H200.model_copy(update={"bandwidth_bytes_per_s": Fact()})
    assert {row.fact: row.value for row in report.device_facts(blind)}["memory bandwidth"] == "unknown"
    assert "4.8 TB/s" in in_terminal(report.device_table(H200, "Known card"))


def test_list_table_shows_cases_tags_and_sources() -> None:
    case = Case("decode", {}, source="a model", tags=frozenset({"smoke", "decode"}))
    text = in_terminal(report.list_table([("tk-sample", [case])]))
    assert "decode, smoke" in text
    assert "a model" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "unknown"), (0.5, "0.5 µs"), (999.4, "999 µs"), (999.6, "1 ms"), (12_345.0, "12.3 ms"), (2.5e6, "2.5 s")],
)
def test_times_get_a_unit_of_their_size(value: float | None, words: str) -> None:
    assert report.microseconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "0 B"), (16_384, "16.4 kB"), (999_600, "1 MB"), (2.3e10, "23 GB"), (1e17, "1e+05 TB")]
)
def test_quantities_get_a_prefix_of_their_size(value: float, words: str) -> None:
    assert report.scaled(value, "B") == words


def points_of(shown: Report) -> list[tuple[float, float]]:
    (axes,) = plot.roofline_figure(shown).axes
    return [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if len(line.get_xdata()) == 1
    ]


def texts_of(shown: Report) -> list[str]:
    figure = plot.roofline_figure(shown)
    (axes,) = figure.axes
    return [text.get_text() for text in (*axes.texts, *figure.texts)]


def test_figure_puts_measured_cases_where_their_times_are() -> None:
    shown = make_report("gpu", result("decode", 5.0))
    assert points_of(shown) == [(COST.intensity, pytest.approx(COST.flops / 5e-6))]
    assert "decode (69.9 % of roof)" in texts_of(shown)


@pytest.mark.parametrize("setting", ["interpreter", "prediction"])
def test_figure_puts_other_cases_on_the_roof(setting: Setting) -> None:
    interpreted = result("decode", None, timing=timing(1e6) if setting == "interpreter" else None)
    shown = make_report(setting, interpreted)
    assert points_of(shown) == [(COST.intensity, pytest.approx(COST.intensity * 4.8e12))]
    assert "decode" in texts_of(shown)
    (axes,) = plot.roofline_figure(shown).axes
    assert axes.get_title(loc="left") == "Roofline of H200: predicted, not measured"


def test_figure_shows_the_card_s_roofs_with_units() -> None:
    texts = texts_of(make_report("gpu", result("decode")))
    assert "memory 4.8 TB/s" in texts
    assert [text for text in texts if text.startswith("vector ") and text.endswith(" TFLOP/s")]
    assert [text for text in texts if text.startswith("float16, bfloat16 ")]
    assert [text for text in texts if text.startswith("int8 ") and text.endswith(" TOP/s")]
    (axes,) = plot.roofline_figure(make_report("gpu", result("decode"))).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "FLOP/byte" in axes.get_xlabel()
    assert "FLOP/s" in axes.get_ylabel()


def test_figure_says_what_it_leaves_out() -> None:
    failed = result("failed", None, placement=place(COST, H200, None), error="RuntimeError: no")
    copy = result("copy", cost=Cost(0.0, 8, 8))
    shown = make_report("gpu", failed, copy, result("decode"))
    assert len(points_of(shown)) == 1
    assert [text for text in texts_of(shown) if text.startswith("2 of 3 cases not drawn")]


@pytest.mark.parametrize("count", [0, 1, 60])
def test_png_is_wide_enough_for_any_number_of_cases(count: int) -> None:
    png = plot.roofline_png(make_report("gpu", *(result(f"case-{n}", 5.0 + n) for n in range(count))))
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width >= 1500
    assert height >= max(900, 25 * count)


def test_long_names_are_not_cut_off() -> None:
    short, long = (plot.roofline_png(make_report("gpu", result(name))) for name in ("decode", "decode-" * 20))
    assert struct.unpack(">I", long[16:20])[0] > struct.unpack(">I", short[16:20])[0]


def test_a_card_of_unknown_bandwidth_has_a_figure_too() -> None:
    blind = H200.model_copy(update={"bandwidth_bytes_per_s": Fact(), "peak_flops": {}})
    shown = Report(environment=environment("gpu", blind), results=(result("a", placement=place(COST, blind, 5.0)),))
    assert len(points_of(shown)) == 1


def test_a_missing_matplotlib_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tk-kernel-core\[plot\]'"):
        plot.roofline_png(make_report("gpu", result("decode")))
