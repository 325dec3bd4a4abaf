"""A virtual environment with no more packages than a rented machine with a GPU has, which has no network to install others.

It has links to the packages of the environment that makes it.
"""

import importlib.metadata
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
_OF_IMAGE = ("pytest", "pytest-xdist", "transformers")  # besides what the package requires
_MISSING = frozenset({"plotly"})  # is imported only where a page of charts is made


def make_environment(folder: Path) -> Path:
    """Make the environment in a folder, and return its Python."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    required = tomllib.loads(_PYPROJECT.read_text())["project"]["dependencies"]
    for top in sorted({top for each in _find_needed([*required, *_OF_IMAGE]) for top in _tops_of(each)}):
        (packages / top.name).symlink_to(top)
    return folder / "bin" / "python"


def _find_needed(requirements: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """Return what is required, and what that requires, without extras."""
    seen, waiting = set(_MISSING), [Requirement(each) for each in requirements]
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        if name in seen or not (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        waiting += map(Requirement, found.requires or ())
        yield found


def _tops_of(found: importlib.metadata.Distribution) -> Iterator[Path]:
    """Return the files and folders of a package that lie where packages are imported from."""
    for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        yield Path(str(found.locate_file(name)))
