"""Links between the repository's pages lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ("docs/api/", "docs/performance/", "docs/_build/")
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "perf/*.md", "packages/*/*.md", "shared/*/*.md", ".github/**/*.md")
    for page in ROOT.glob(pattern)
    if not str(page.relative_to(ROOT)).startswith(GENERATED)
)


def links(page: Path) -> list[str]:
    """Return the targets of a page's links, outside code."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_links_are_found() -> None:
    """The pages that lead to others have links, so that the pattern above has not come to match nothing."""
    assert "docs/install.md" in links(ROOT / "README.md")
    assert "examples.md#a-whole-model" in links(ROOT / "docs" / "choosing.md")


@pytest.mark.parametrize("page", sorted(ROOT.glob("packages/*/README.md")), ids=lambda page: page.parent.name)
def test_what_a_package_shows_in_an_index_does_not_depend_on_the_repository(page: Path) -> None:
    assert links(page) == []
