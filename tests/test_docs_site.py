"""The documentation as readers have it: built, served and opened in a browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "docs" / "_build" / "html"
# The end of one is only seen by scrolling.
WIDE_TABLES = "[...document.querySelectorAll('article table')].filter(t => t.scrollWidth > t.parentElement.clientWidth)"
PACKAGES = sorted(folder.name for folder in ROOT.glob("packages/tk-*"))


@pytest.fixture(scope="module")
def site(browser: Browser, serve: Callable[[Path], str]) -> str:
    assert (HTML / "index.html").is_file(), "`nox -s docs` builds the documentation"
    return serve(HTML)


def test_every_page_opens_with_its_images_and_without_complaint_and_measured_tables_fit(site: str, page: Page) -> None:
    names = sorted(str(file.relative_to(HTML)) for file in HTML.rglob("*.html"))
    assert {"index.html", "choosing.html", *(f"performance/{name}.html" for name in PACKAGES)} <= {*names}
    for name in names:
        page.goto(site + name, wait_until="load")
        assert page.title(), name
        images = page.evaluate("[...document.images].map(image => [image.src, image.complete && image.naturalWidth])")
        assert [source for source, width in images if not width] == []
        if name.startswith("performance/"):
            assert page.evaluate(f"{WIDE_TABLES}.length") == 0, name


@pytest.mark.parametrize("package", PACKAGES)
def test_measured_packages_have_a_figure(site: str, page: Page, package: str) -> None:
    page.goto(f"{site}performance/{package}.html")
    assert page.locator("h1").inner_text().startswith(f"{package}, measured")
    reports = list((ROOT / "perf" / "reports").glob(f"*/{package}.json"))
    figures = page.locator("article img")
    assert figures.count() == len(reports)
    for index in range(len(reports)):
        assert figures.nth(index).evaluate("image => image.naturalWidth") >= 1500


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("rmsnorm_quant_int8", "api/tk-rmsnorm.html"),
        ("act-order", "kernels/w4a16.html"),
        ("ROCm", "install.html"),
        ("deepseek-v3-128", "performance/tk-moe-dispatch.html"),
    ],
)
def test_search_finds_a_page_by_what_stands_in_it(site: str, page: Page, query: str, found: str) -> None:
    page.goto(site)
    page.locator("input[name=q]").fill(query)
    page.keyboard.press("Enter")
    page.locator("#search-results ul.search li").first.wait_for()
    page.wait_for_load_state("networkidle")
    links = page.locator("#search-results ul.search li > a")
    addresses = [str(link.get_attribute("href")).partition("#")[0].partition("?")[0] for link in links.all()]
    assert found in addresses


def test_formulas_are_drawn(site: str, page: Page) -> None:
    for package in PACKAGES:
        page.goto(f"{site}kernels/{package.removeprefix('tk-')}.html")
        formulas = page.locator("math").all()
        assert formulas
        assert all((box := formula.bounding_box()) and box["width"] > 0 and box["height"] > 0 for formula in formulas)
        assert r"\(" not in page.locator("article").inner_text()
