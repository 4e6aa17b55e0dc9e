"""Make asv's site self-contained: the scripts that it loads from other hosts are put beside it.

python publish.py HTML MODULES     # asv's html_dir, and the node_modules of perf/site/package.json
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

LIBRARIES = {
    "jquery-3.3.1.min.js": "jquery/dist/jquery.min.js",
    "jquery.flot.min.js": "flot/jquery.flot.js",
    "jquery.flot.time.min.js": "flot/jquery.flot.time.js",
    "jquery.flot.selection.min.js": "flot/jquery.flot.selection.js",
    "jquery.flot.categories.min.js": "flot/jquery.flot.categories.js",
    "jquery.flot.orderBars.js": "flot-orderbars/js/jquery.flot.orderBars.js",
    "stupidtable.min.js": "stupid-table-plugin/stupidtable.min.js",
    "md5.min.js": "blueimp-md5/js/md5.min.js",
    "bootstrap.min.js": "bootstrap/dist/js/bootstrap.min.js",
    "bootstrap.min.css": "bootstrap/dist/css/bootstrap.min.css",
}
"""Where a module keeps the file that the site names."""

# The hashes beside an address are those of the minified files of that host.
_FOREIGN = re.compile(
    r'(src|href)="https://[^"]+/([^"/]+\.(?:js|css))"(?: (?:integrity|crossorigin|referrerpolicy)="[^"]*")*'
)


def localise(html: Path, modules: Path) -> list[str]:
    """Copy the libraries to HTML/vendor, let the page load them from there, and return their names.

    Raises:
        ValueError: The page names no library, or one that is not known here.
    """
    page = html / "index.html"
    text = page.read_text(encoding="utf-8")
    names = [match.group(2) for match in _FOREIGN.finditer(text)]
    if not names or set(names) - LIBRARIES.keys():
        raise ValueError(f"{page} should load some of {sorted(LIBRARIES)}, and loads {names}")
    (html / "vendor").mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(modules / LIBRARIES[name], html / "vendor" / name)
    page.write_text(_FOREIGN.sub(r'\1="vendor/\2"', text), encoding="utf-8")
    return names


if __name__ == "__main__":
    print("beside the site:", *localise(*map(Path, sys.argv[1:])))
