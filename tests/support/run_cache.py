"""What the processes of one test run make only once: plans, and the routes and dtypes of the machine.

Results are pickled into a folder that pytest's first process makes, and that its workers, and the ranks they start, find
in the environment. While one process makes a result, others that want the same one wait for it. Tests kill processes at
any point, so a file appears only when it is whole.
"""

import fcntl
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

Made = TypeVar("Made")
_VARIABLE = "ZINF_TEST_RUN_CACHE"
_loaded: dict[str, Any] = {}  # of this process


def open_cache() -> None:
    """Make the folder."""
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="zinf-tests-")


def remove_cache() -> None:
    """Remove the folder."""
    shutil.rmtree(os.environ.pop(_VARIABLE), ignore_errors=True)


def made_once(key: str, make: Callable[[], Made]) -> Made:
    """Return the result that an earlier call of this run made under ``key``, or else that of ``make``."""
    name = hashlib.sha256(key.encode()).hexdigest()
    if name not in _loaded:
        _loaded[name] = _made_by_one_process(Path(os.environ[_VARIABLE]) / name, make)
    return cast(Made, _loaded[name])


def _made_by_one_process(path: Path, make: Callable[[], Made]) -> Made:
    with open(path.with_suffix(".lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or its process ends
        if path.exists():
            return cast(Made, pickle.loads(path.read_bytes()))
        made = make()
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(made))
        part.replace(path)
        return made
