"""What the processes of one test run make only once: plans, and the routes and dtypes of the machine.

Results are pickled into a folder that pytest's first process makes, and that its workers, and the ranks they start, find
in the environment. While one process makes a result, others that want the same one wait for it.
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


def open_cache() -> bool:
    """Make the folder, unless a parent process has made it. Return whether it was made, and so is to be removed."""
    if _VARIABLE in os.environ:
        return False
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="zinf-tests-")
    return True


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
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or its process ends
        file.seek(0)
        if pickled := file.read():
            return cast(Made, pickle.loads(pickled))
        made = make()
        file.write(pickle.dumps(made))
        return made
