"""A plugin for pytest, `-p tests.support.gpu_image`: what a rented machine with a GPU may lack cannot be imported.

Such a machine has torch, CuPy, pytest and the usual numeric packages, and no network to install others.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

MISSING = frozenset({"bitsandbytes", "expecttest", "kvikio", "optimi", "plotly", "torchao"})


class _Hidden:
    """A finder that comes first, and says that a package is not there."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for what is missing; return None for everything else."""
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, _Hidden)  # type: ignore[arg-type]
