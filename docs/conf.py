"""Sphinx configuration. The API pages are written here, one for the core and one for each kernel package found."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent

project = "tk kernels"
author = "tk-kernels contributors"
release = version = metadata.version("tk-kernel-core")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "tk kernels"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True

MODULE = """
## {module}

```{{eval-rst}}
.. automodule:: {module}
   :members:
```
"""


def write_api_pages() -> None:
    """Write an API page for the core, module by module, and one for each kernel package's public names."""
    folder = DOCS / "api"
    folder.mkdir(exist_ok=True)
    for page in folder.glob("*.md"):
        page.unlink()
    core = DOCS.parent / "shared" / "tk-kernel-core" / "src" / "tk_kernel_core"
    modules = sorted(file.stem for file in core.glob("*.py") if not file.stem.startswith("_"))
    pages = {"tk-kernel-core": [f"tk_kernel_core.{module}" for module in modules]}
    for package in sorted(DOCS.parent.glob("packages/tk-*/pyproject.toml")):
        name = package.parent.name
        pages[name] = [name.replace("-", "_")]
    for name, names in pages.items():
        sections = "".join(MODULE.format(module=module) for module in names)
        (folder / f"{name}.md").write_text(f"# {name} API\n{sections}", encoding="utf-8")


def escape_bars(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Keep the bars of absolute values, which reStructuredText takes for substitutions."""
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda match: match[1] or r"\|", line) for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", escape_bars)


write_api_pages()
