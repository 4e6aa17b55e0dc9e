"""What several tests of the repository need."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="session")
def noxfile() -> ModuleType:
    """The module noxfile.py, loaded once: nox refuses a session that is defined again."""
    spec = importlib.util.spec_from_file_location("noxfile", Path(__file__).resolve().parents[1] / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files without writing of it."""

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[Path], str]]:
    """Serve a folder on this machine, until all tests are done; returns its address."""
    with contextlib.ExitStack() as stack:

        def start(folder: Path) -> str:
            handler = functools.partial(Handler, directory=str(folder))
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}/"

        yield start


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The browser that `nox -s site` found, with a profile of its own."""
    executable = os.environ.get("TK_BROWSER")
    if not executable:
        pytest.skip("`nox -s site` runs this in a browser")
    from playwright.sync_api import sync_playwright

    # Nothing but the site is to be asked for anything.
    quiet = ("background-networking", "component-update", "gpu", "quic", "sync")
    options = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=options)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page. Whatever is opened in it may complain of nothing, and ask no other host for anything."""
    opened = browser.new_page()
    complaints: list[str] = []

    def complain(address: str, what: str) -> None:
        # asv's page asks for the graphs of all combinations of machines and versions, whether there are any or not. And
        # what was still on its way when the next page was opened is no failure.
        if "/graphs/" not in address and what != "net::ERR_ABORTED":
            complaints.append(f"{address}: {what}")

    opened.on("console", lambda said: complain(said.location["url"], said.text))
    opened.on("pageerror", lambda error: complain("a script", str(error)))
    opened.on("requestfailed", lambda request: complain(request.url, str(request.failure)))
    opened.on("response", lambda got: complain(got.url, str(got.status)) if got.status >= 400 else None)
    opened.on("request", lambda sent: complain(sent.url, "elsewhere") if "//127.0.0.1:" not in sent.url else None)
    yield opened
    opened.close()
    assert complaints == []
