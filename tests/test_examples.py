"""The examples of the documentation run, and show what they say."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tk_kernel_core.numerics import rounding_tolerance

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"


def numbers_after(start: str, text: str) -> list[float]:
    """Return the numbers in the one line that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*\.?\d*(?:e-?\d+)?", line[len(start) :])]


def output_of(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    path = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, *arguments])
    runpy.run_path(path, run_name="__main__")
    return capsys.readouterr().out


def test_the_page_lists_every_example() -> None:
    """All of these have a test below."""
    names = ["int4_gemm.py", "int8_schemes.py", "llama_decode.py", "moe_load.py"]
    assert sorted(file.name for file in EXAMPLES.glob("*.py")) == names
    page = EXAMPLES.with_suffix(".md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(examples/(\w+\.py)\)", page)) == names


def test_asymmetric_int8_gains_six_decibels_where_weights_are_of_one_sign(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = output_of("int8_schemes", capsys, monkeypatch)
    assert numbers_after("skewed: absolute values  asymmetric gains", text) == [pytest.approx(6.0, abs=0.3)]
    assert numbers_after("centred: normal          asymmetric gains", text)[0] < 1.0
    symmetric, asymmetric = (
        numbers_after(f"skewed: absolute values  {kind}  ", text) for kind in ("symmetric", "asymmetric")
    )
    assert all(half < 0.6 * whole for half, whole in zip(asymmetric[::2], symmetric[::2], strict=True))


def test_four_bits_take_as_many_bytes_as_codes_and_groups_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = output_of("int4_gemm", capsys, monkeypatch)
    k, n = 2048, 1024
    errors = []
    for group_size in (256, 128, 32):
        size, saved, error, product = numbers_after(f"4 bits, groups of {group_size}", text)
        assert size == k * n // 2 + 2 * 2 * k // group_size * n
        assert saved == pytest.approx(100 - 100 * size / (2 * k * n), abs=0.05)
        # In per cent; the product itself is as exact as one with float16 weights.
        assert product < 100 * rounding_tolerance(torch.float16, k).relative
        errors.append(error)
    assert errors == sorted(errors, reverse=True)


def test_loads_of_experts_add_up_and_the_layer_is_the_sum_over_experts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = output_of("moe_load", capsys, monkeypatch)
    loads = [numbers_after(f"expert {expert} ", text)[:2] for expert in range(8)]
    assert sum(tokens for tokens, _ in loads) == 512 * 2 == numbers_after("all ", text)[0]
    assert all(share == pytest.approx(tokens / 128, abs=0.005) for tokens, share in loads)
    error, largest = numbers_after("largest difference from a loop over experts in fp64:", text)
    assert 0 < error < largest * rounding_tolerance(torch.bfloat16, 512, roundings=3).relative


@pytest.fixture(scope="module")
def llama_decode() -> SimpleNamespace:
    pytest.importorskip("transformers", reason="transformers is an optional test dependency")
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / "llama_decode.py")))


def test_a_model_decodes_after_every_step_and_its_logits_stay(
    llama_decode: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "llama_decode.json"
    llama_decode.main(["--size", "small", "--batch", "1", "3", "--compile", "none", "--json", str(file)])
    document = json.loads(file.read_text(encoding="utf-8"))
    provenance, rows = document["provenance"], document["rows"]
    assert {"made_at", "hardware", "driver", "torch", "triton", "transformers", "tk-w4a16"} <= set(provenance)
    assert document["settings"]["prompt_tokens"] == 16
    of_llama = ["as it was", "norm + activation", "int8", "int4"]
    assert [(row["model"], row["step"], row["batch"]) for row in rows] == [
        *(("llama", step, batch) for step in of_llama for batch in (1, 3)),
        *(("mixtral", step, batch) for step in ("as it was", "MoE") for batch in (1, 3)),
    ]
    # Two layers of seven projections, five norms and two MLPs; one layer, three norms and one mixture.
    assert [row["replaced"] for row in rows[::2]] == [0, 7, 21, 21, 0, 4]
    assert all(row["prefill_tokens_per_s"] > 0 and row["decode_tokens_per_s"] > 0 for row in rows)
    assert all((row["peak_bytes"] is None) == (provenance["driver"] is None) for row in rows)

    def of(step: str, key: str) -> list[Any]:
        return [row[key] for row in rows if row["step"] == step]

    assert of("as it was", "logit_difference") == [0.0] * 4
    largest = max(row["largest_logit"] for row in rows)
    for step in ("norm + activation", "MoE"):
        assert max(of(step, "logit_difference")) < largest * rounding_tolerance(torch.bfloat16, 512).relative
    for eight, four in zip(of("int8", "logit_difference"), of("int4", "logit_difference"), strict=True):
        assert 0 < eight < four < largest
    # Embeddings, head and norms stay in 16 bits; the rest has one byte, or half of one, and its scales.
    whole, eight, four = (of(step, "weight_bytes")[0] for step in ("norm + activation", "int8", "int4"))
    kept = 2 * (2 * 1000 * 256 + 5 * 256)
    assert 0.5 < (eight - kept) / (whole - kept) < 0.52
    assert 0.25 < (four - kept) / (whole - kept) < 0.29
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(("llama ", "mixtral "))]) == len(rows)


@torch.no_grad()
def test_the_static_cache_gives_the_logits_of_whole_sequences(llama_decode: SimpleNamespace) -> None:
    model = llama_decode.build("llama", "small", "cpu").float()
    decoding = llama_decode.Decoding(model, model.forward, batch=2, prompt=5, new=3)
    prefill_s, decode_s, logits, _ = llama_decode.measure(decoding, samples=1)
    assert min(prefill_s, decode_s) > 0
    expected = model(decoding.tokens).logits[:, [4, 7]].transpose(0, 1)
    # Sums cancel: what counts is the size of their terms.
    tolerance = rounding_tolerance(torch.float32, 512).relative * expected.abs().max()
    assert (logits - expected).abs().max() < tolerance


def test_what_runs_compiled_is_a_choice(llama_decode: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    eager, compiled = "eager", "torch.compile"
    assert llama_decode.contenders(["MoE", "int8"], "original") == [
        ("mixtral", "as it was", eager), ("mixtral", "as it was", compiled), ("mixtral", "MoE", eager),
        ("llama", "as it was", eager), ("llama", "as it was", compiled), ("llama", "int8", eager),
    ]  # fmt: skip
    assert llama_decode.contenders(["int4"], "all")[2:] == [("llama", "int4", eager), ("llama", "int4", compiled)]
    rows = [
        llama_decode.Row("llama", step, how, 1, 0, 10.0 * speed, speed, 10**9, 2 * 10**9, 0.5, 4.0, "")
        for step, how, speed in (("as it was", eager, 2.0), ("as it was", compiled, 4.0), ("int8", eager, 3.0))
    ]
    *_, last = llama_decode.table(rows).splitlines()
    assert [cell.split() for cell in last.split("|")[1:]] == [
        ["30", "1.50", "0.75"], ["3", "1.50", "0.75"], ["1", "2"], ["0.5", "4"],
    ]  # fmt: skip
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            llama_decode.main(["--size", "8b"])
        assert "--size 8b needs a GPU" in capsys.readouterr().err
