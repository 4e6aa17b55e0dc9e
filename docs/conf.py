"""Sphinx configuration. The pages on the API and on performance are written when the documentation is built."""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

DOCS = Path(__file__).resolve().parent
PACKAGES = sorted(file.parent.name for file in DOCS.parent.glob("packages/tk-*/pyproject.toml"))
sys.path.insert(0, str(DOCS.parent / "perf"))

project = "tk kernels"
author = "tk-kernels contributors"
release = version = metadata.version("tk-kernel-core")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "tk kernels"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/favicon.svg"
html_show_copyright = False
# No page loads anything from elsewhere.
html_math_renderer = "mathml"

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
    pages |= {name: [name.replace("-", "_")] for name in PACKAGES}
    for name, names in pages.items():
        sections = "".join(MODULE.format(module=module) for module in names)
        (folder / f"{name}.md").write_text(f"# {name} API\n{sections}", encoding="utf-8")


def escape_bars(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Keep the bars of absolute values, which reStructuredText takes for substitutions."""
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda match: match[1] or r"\|", line) for line in lines]


def write_mathml(translator: Any, node: Any) -> None:
    """Write a formula in the language that browsers show without a script."""
    is_block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=is_block)
    translator.body.append(f'<div class="formula">{formula}</div>\n' if is_block else formula)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (write_mathml, None), (write_mathml, None))
    app.connect("autodoc-process-docstring", escape_bars)


write_api_pages()
importlib.import_module("report_pages").write_pages(DOCS / "performance", PACKAGES)
