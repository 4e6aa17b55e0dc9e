"""The performance site, built from the recorded history and opened in a browser."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "perf" / "site"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files without writing of it."""

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if CHROMIUM is None or shutil.which("npm") is None:
        pytest.skip("needs Chromium and npm")
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
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(html))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def open_in_browser(address: str, profile: Path) -> tuple[str, list[str]]:
    """Return the page as it is once its scripts have run, and what the console says."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *QUIET, f"--user-data-dir={profile}", "--dump-dom", address]
    environment = {**os.environ, "HOME": str(profile)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_the_page_loads_nothing_from_other_hosts(site: str, tmp_path: Path) -> None:
    page, console = open_in_browser(site, tmp_path)
    assert console == []
    assert re.findall(r"<(?:script|link|img)[^>]+https?://[^>]+>", page) == []
    for suite in ("resources.Resources.track_registers", "host.Packages.track_size_kib"):
        assert suite in page


@pytest.mark.parametrize("what", ["registers", "spill_bytes", "shared_bytes", "instructions"])
@pytest.mark.parametrize("package", sorted(folder.name for folder in ROOT.glob("packages/tk-*")))
def test_every_kernel_has_its_graphs(site: str, tmp_path: Path, package: str, what: str) -> None:
    case = next(iter(json.loads((ROOT / "packages" / package / "perf_budget.json").read_text())["targets"]["sm_90"]))
    chosen = f"p-case='{package}%20{case}'&p-target='sm_90'&p-target='gfx942'"
    page, console = open_in_browser(f"{site}#resources.Resources.track_{what}?{chosen}", tmp_path)
    assert console == []
    assert 'class="flot-base"' in page
    # Beside case and target the legend names whatever differs between the machines that have a history.
    labels = re.findall(r'class="legendLabel">([^<]+)<', page)
    lines = [dict(part.split("-", 1) for part in label.split("; ")) for label in labels]
    assert [(line["case"], line["target"]) for line in lines] == [
        (f"{package} {case}", target) for target in ("sm_90", "gfx942")
    ]
