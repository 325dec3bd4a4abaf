"""Compiles a C++ file of ours with the compiler found on the machine, once, and loads it.

The library is kept in the user's cache folder, under a name that says source, headers, flags and torch version. Processes
that compile the same file at once write it under names of their own, and the last rename wins.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from zinf_compile.runtime.observe.progress import say

SOURCES = Path(__file__).parent
COMPILE_SECONDS = 120  # takes about one; a machine that needs longer than this is stuck

_COMPILERS = ("g++", "c++", "clang++")
# No implicit FMA: the source says where a multiplication and an addition are fused, as ATen does.
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# The instructions that torch says its kernels may use here.
_CAPABILITIES: Mapping[str, tuple[str, ...]] = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}

_lock = threading.Lock()
_log = logging.getLogger(__name__)


def load_compiled(file: str) -> ctypes.CDLL | None:
    """Return the library of ``file`` in this folder; None, with one warning in the log, if it cannot be built."""
    with _lock:  # two threads would compile it twice
        return _load(file)


def cache_folder() -> Path:
    """Return where libraries are kept: ``zinf_compile`` in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zinf_compile"


def find_compiler() -> str | None:
    """Return the path of a C++ compiler; None if there is none."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


@functools.cache
def _load(file: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(compile_library(SOURCES / file)))
    except subprocess.CalledProcessError as error:
        _log.warning("compiling %s failed, torch's kernels are used: %s", file, error.stderr[-1000:])
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        _log.warning("there is no compiled %s, torch's kernels are used: %s", file, error)
    return None


def compile_library(source: Path) -> Path:
    """Return the compiled library of ``source``, from the cache or made now.

    Raises OSError without a compiler or a writable cache, and what ``subprocess.run`` raises for a compilation that fails.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    flags = (*_FLAGS, *_CAPABILITIES.get(capability, ()))
    texts = [file.read_text() for file in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256(repr((texts, flags, torch.__version__, platform.machine())).encode()).hexdigest()
    library = cache_folder() / f"{source.stem}-{key[:16]}.so"
    if library.exists():
        return library
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError(f"no C++ compiler ({', '.join(_COMPILERS)}) on the PATH")
    say(f"compiling {source.name}")
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *flags, str(source), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        made.replace(library)
    return library
