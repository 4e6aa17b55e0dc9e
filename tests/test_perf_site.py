"""The performance site, built from the recorded history and opened in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "perf" / "site"


@pytest.fixture(scope="module")
def site(browser: Browser, serve: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("site")
    html = folder / "html"
    configuration = json.loads((ROOT / "asv.conf.json").read_text())
    configuration |= {"repo": str(ROOT), "html_dir": str(html), "env_dir": str(folder / "env")}
    configuration |= {"results_dir": str(ROOT / "perf/results"), "benchmark_dir": str(ROOT / "perf/benchmarks")}
    (folder / "asv.conf.json").write_text(json.dumps(configuration))
    # The plugin is looked for beside the working directory.
    asv = [sys.executable, "-m", "asv", "--config", str(folder / "asv.conf.json"), "publish"]
    subprocess.run(asv, cwd=ROOT, check=True, capture_output=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SITE / name, folder)
    npm = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(npm, cwd=folder, check=True, capture_output=True)
    localise = [sys.executable, str(ROOT / "perf/publish.py"), str(html), str(folder / "node_modules")]
    subprocess.run(localise, check=True, capture_output=True)
    return serve(html)


def test_the_page_shows_every_suite(site: str, page: Page) -> None:
    page.goto(site)
    for suite in ("resources.Resources.track_registers", "host.Packages.track_size_kib"):
        page.locator(f"a[href^='#{suite}']").first.wait_for(state="attached")


@pytest.mark.parametrize("what", ["registers", "spill_bytes", "shared_bytes", "instructions"])
@pytest.mark.parametrize("package", sorted(folder.name for folder in ROOT.glob("packages/tk-*")))
def test_every_kernel_has_its_graphs(site: str, page: Page, package: str, what: str) -> None:
    case = next(iter(json.loads((ROOT / "packages" / package / "perf_budget.json").read_text())["targets"]["sm_90"]))
    chosen = f"p-case='{package}%20{case}'&p-target='sm_90'&p-target='gfx942'"
    page.goto(f"{site}#resources.Resources.track_{what}?{chosen}")
    page.locator("#main-graph .flot-base").wait_for()
    # Beside case and target the legend names whatever differs between the machines that have a history.
    labels = page.locator(".legendLabel").all_inner_texts()
    lines = [dict(part.split("-", 1) for part in label.split("; ")) for label in labels]
    assert [(line["case"], line["target"]) for line in lines] == [
        (f"{package} {case}", target) for target in ("sm_90", "gfx942")
    ]
