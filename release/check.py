"""May a distribution be released? What can be said without running its tests; `nox -s release_check` does the rest.

    python release/check.py plan NAME FOLDER        # before anything is built; a tag is as good as the name
    python release/check.py contents NAME DIST      # of the source distribution that was built

The first form holds version, tags, changelog and public interface against what was released before. It writes the
notes of the release, a plan of what remains to be tested, and the sources of the releases that this needs.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nox.project import load_toml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
CORE = "tk-kernel-core"
GENERATED = ("PKG-INFO", ".gitignore")
"""What the build adds to a source distribution."""


class Refused(Exception):
    """The release must not be made; the message says why."""


@dataclass(frozen=True)
class Plan:
    """What remains to be tested of a release.

    Attributes:
        distribution: Its name.
        version: Its version.
        floor: Tag of the oldest core that a kernel package asks for; None for the core, and where there is no such tag.
        kernels: For a release of the core: the last tag of every kernel package whose range holds the new core.
    """

    distribution: str
    version: str
    floor: str | None
    kernels: dict[str, str]


def releases(name: str, tags: Iterable[str]) -> dict[Version, str]:
    """Return the tags of one distribution by version."""
    found = (re.fullmatch(rf"{re.escape(name)}-v(\d+\.\d+\.\d+)", tag) for tag in tags)
    return {Version(match[1]): match[0] for match in found if match}


def distribution_of(wanted: str, versions: Mapping[str, str]) -> str:
    """Return the distribution that a name, or the tag of its present version, stands for.

    Args:
        wanted: Name or tag.
        versions: Present versions of the published distributions.

    Raises:
        Refused: It is neither.
    """
    for name, version in versions.items():
        if wanted in {name, f"{name}-v{version}"}:
            return name
    possible = ", ".join(f"{name}-v{version}" for name, version in sorted(versions.items()))
    raise Refused(f"wanted a distribution or its tag, which by pyproject.toml is one of {possible}; got {wanted}")


def check_version(name: str, version: str, tags: Iterable[str], tags_of_head: Iterable[str]) -> str | None:
    """Hold a version against the tags; returns the distribution's last tag before this release.

    Raises:
        Refused: The commit is tagged as another version, or the version is not above the last.
    """
    here = releases(name, tags_of_head)
    if here and [*here] != [Version(version)]:
        raise Refused(f"pyproject.toml has version {version}, but this commit is tagged {', '.join(here.values())}")
    before = {found: tag for found, tag in releases(name, tags).items() if found not in here}
    if not before:
        return None
    last = max(before)
    if Version(version) <= last:
        raise Refused(f"wanted a version above {last}, which is tagged already, got {version}")
    return before[last]


def release_notes(changelog: str, version: str) -> str:
    """Return the section of a changelog that tells of a version.

    Raises:
        Refused: There is none, it has no date, or nothing is in it.
    """
    section = rf"^## \[{re.escape(version)}\] - (\S+)\n(.*?)(?=^## |\Z)"
    found = re.search(section, changelog, re.DOTALL | re.MULTILINE)
    if not found:
        raise Refused(f"CHANGELOG.md has no heading `## [{version}] - YYYY-MM-DD`")
    try:
        date.fromisoformat(found[1])
    except ValueError as reason:
        raise Refused(f"CHANGELOG.md dates {version} {found[1]!r}, wanted YYYY-MM-DD") from reason
    if not found[2].strip():
        raise Refused(f"CHANGELOG.md says nothing about {version}")
    return found[2].strip() + "\n"


def may_break(last: str, version: str) -> bool:
    """Whether a release may break its users' code: a major one, and below 1.0 a minor one."""
    old, new = Version(last), Version(version)
    return new.major > old.major or (old.major == 0 and new.minor > old.minor)


def core_range(project: Mapping[str, Any]) -> SpecifierSet:
    """Return the range of the core that a kernel package asks for.

    Raises:
        Refused: It asks for none.
    """
    for requirement in map(Requirement, project["dependencies"]):
        if canonicalize_name(requirement.name) == CORE:
            return requirement.specifier
    raise Refused(f"{project['name']} does not depend on {CORE}")


def floor_of(specifiers: SpecifierSet) -> Version:
    """Return the lowest version that a range such as `>=0.1,<0.2` admits.

    Raises:
        Refused: The range has no lower end.
    """
    floors = [Version(specifier.version) for specifier in specifiers if specifier.operator in {">=", "=="}]
    if not floors:
        raise Refused(f"wanted a lowest version of {CORE}, as in >=0.1,<0.2, got {str(specifiers) or 'none'}")
    return max(floors)


def differences(tracked: Iterable[str], archived: Iterable[str]) -> list[str]:
    """Return in what a source distribution differs from the files of its folder in the repository."""
    tracked, archived = {*tracked}, {*archived} - {*GENERATED}
    missing = [f"{name} is missing" for name in sorted(tracked - archived)]
    return missing + [f"{name} is not in the repository" for name in sorted(archived - tracked)]


def breaking_changes(module: str, old: Path, new: Path) -> list[str]:
    """Return by which changes of its public interface a module breaks code that was written for an older one.

    Args:
        module: Import name.
        old: Folder that holds the older module.
        new: Folder that holds the newer one.
    """
    import griffe

    before, after = (griffe.load(module, search_paths=[folder], allow_inspection=False) for folder in (old, new))
    found = []
    for change in griffe.find_breaking_changes(before, after):
        # Another value of a public constant, which older releases of griffe report, breaks no one's calls.
        if change.kind is not griffe.BreakageKind.ATTRIBUTE_CHANGED_VALUE:
            values = (change.old_value, change.new_value)
            parameter = next((f"({value.name})" for value in values if isinstance(value, griffe.Parameter)), "")
            found.append(f"{change.obj.path}{parameter}: {change.kind.value.lower()}")
    return found


def git(*arguments: str) -> bytes:
    """Run git in the repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def tags(*which: str) -> list[str]:
    """Return tags, all of them or those that `git tag` is asked for."""
    return git("tag", "--list", *which).decode().split()


def export(tag: str, folder: Path) -> Path:
    """Write the repository as it was at a tag into a folder named for it."""
    target = folder / tag
    with tarfile.open(fileobj=io.BytesIO(git("archive", tag))) as archive:
        archive.extractall(target, filter="data")
    return target


def read_project(file: Path) -> dict[str, Any]:
    """Return the table `project` of a pyproject.toml."""
    project: dict[str, Any] = load_toml(file)["project"]
    return project


def published() -> dict[str, Path]:
    """Return the folders of the distributions that are published, by name."""
    kernels = sorted(file.parent for file in ROOT.glob("packages/tk-*/pyproject.toml"))
    return {folder.name: folder for folder in (ROOT / "shared" / CORE, *kernels)}


def check(wanted: str, folder: Path) -> Plan:
    """Hold a distribution against the rules, and write what the rest of its release needs.

    Args:
        wanted: Name of the distribution, or the tag of its release.
        folder: Takes `notes.md`, `plan.json` and the folder `sources`.

    Raises:
        Refused: A rule is broken.
    """
    folders = published()
    projects = {name: read_project(path / "pyproject.toml") for name, path in folders.items()}
    name = distribution_of(wanted, {name: project["version"] for name, project in projects.items()})
    version, sources = projects[name]["version"], folder / "sources"
    known = tags()
    last = check_version(name, version, known, tags("--points-at", "HEAD"))
    print(f"{name} {version}: the last release is {last or 'none, so that there is no interface to keep'}")
    notes = release_notes((folders[name] / "CHANGELOG.md").read_text(encoding="utf-8"), version)

    if last:
        old = export(last, sources) / folders[name].relative_to(ROOT)
        broken = breaking_changes(name.replace("-", "_"), old / "src", folders[name] / "src")
        for change in broken:
            print(f"breaks: {change}")
        if broken and not may_break(last.removeprefix(f"{name}-v"), version):
            raise Refused(f"{version} breaks code written for {last}, which takes a higher version")

    floor, kernels = None, {}
    if name == CORE:
        for kernel in [name for name in folders if name != CORE]:
            earlier = releases(kernel, known)
            if not earlier:
                print(f"{kernel}: never released, so that nothing depends on the core")
                continue
            tag = earlier[max(earlier)]
            wants = core_range(read_project(export(tag, sources) / "packages" / kernel / "pyproject.toml"))
            if wants.contains(version):
                kernels[kernel] = tag
            print(f"{tag}: asks for {CORE}{wants}, {'to be tested' if kernel in kernels else 'not concerned'}")
    else:
        lowest = floor_of(core_range(projects[name]))
        floor = releases(CORE, known).get(lowest)
        print(f"asks for {CORE} {lowest} or newer: {f'tested with {floor}' if floor else 'no such tag, not tested'}")
        if floor:
            export(floor, sources)

    plan = Plan(name, version, floor, kernels)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "notes.md").write_text(notes, encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
    return plan


def check_contents(name: str, dist: Path) -> None:
    """Hold a source distribution against the files that git knows in its folder.

    Raises:
        Refused: It lacks files, or has others.
    """
    folder = published()[name]
    tracked = git("ls-files", "-z", str(folder)).decode().strip("\0").split("\0")
    (file,) = dist.glob(f"{name.replace('-', '_')}-*.tar.gz")
    with tarfile.open(file) as archive:
        archived = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    found = differences((str((ROOT / path).relative_to(folder)) for path in tracked), archived)
    if found:
        raise Refused(f"{file.name}: {'; '.join(found)}")
    print(f"{file.name} holds all {len(tracked)} files of its folder")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "contents"))
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        if options.what == "plan":
            check(options.name, options.folder)
        else:
            check_contents(options.name, options.folder)
    except Refused as reason:
        sys.exit(f"not to be released: {reason}")
