"""Kernels of ``cuda/`` compiled for a CPU, behind a CuPy that runs them in two blocks of threads."""

import ctypes
import re
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from zinf_compile.runtime.native.compiled import find_compiler
from zinf_compile.runtime.storage.cuda_kernels import OPTIONS, Kernels

STREAM = 77  # torch's current one, as ``on_a_gpu`` says
_NUMBERS = {"long long": ctypes.c_longlong, "unsigned": ctypes.c_uint}
_SIZES = {"long long": 8, "unsigned": 4}
KernelsT = TypeVar("KernelsT", bound=Kernels)


def compile_for_cpu(kind: type[KernelsT], folder: Path) -> KernelsT:
    """Return kernels that run on tensors of a CPU; skip the test where there is no compiler."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    lines, parameters = ['#include "cuda_on_cpu.hpp"', f'#include "{kind.SOURCE}"'], {}
    for name in kind.NAMES:
        declared = re.search(rf"{name}\((.*?)\) {{", kind.SOURCE.read_text(), re.DOTALL)
        assert declared is not None
        listed = [each.strip() for each in declared[1].replace("__restrict__", "").split(",")]
        parameters[name] = [" ".join(each.split()[:-1]) for each in listed]
        arguments = ", ".join(each.split()[-1].lstrip("*") for each in listed)
        lines.append(
            f'extern "C" void run_{name}(unsigned num_blocks, unsigned num_threads, {", ".join(listed)}) '
            f"{{ launch(num_blocks, num_threads, {name}, {arguments}); }}"
        )
    (folder / "kernels.cpp").write_text("\n".join(lines) + "\n")
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-ffp-contract=off"]
    files = ["-o", str(folder / "kernels.so"), str(folder / "kernels.cpp")]
    subprocess.run([*command, f"-I{Path(__file__).parent}", *files], check=True)
    library = ctypes.CDLL(str(folder / "kernels.so"))

    class Module:
        """What CuPy makes of a source."""

        def __init__(self, *, code: str, options: tuple[str, ...], backend: str) -> None:
            assert (code, options, backend) == (kind.SOURCE.read_text(), OPTIONS, "nvrtc")

        def compile(self) -> None:
            """Do nothing: it is compiled."""

        def get_function(self, name: str) -> Callable[..., None]:
            def run(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], *, stream: object) -> None:
                assert stream == (0, STREAM)
                given = [*zip(parameters[name], arguments, strict=True)]
                assert all(value.nbytes == _SIZES.get(type_, 8) for type_, value in given)
                called = [_NUMBERS.get(type_, ctypes.c_void_p)(int(value)) for type_, value in given]
                assert 1 <= grid[0] <= 16
                assert block == (256,)
                # Each of its threads is one of the system's: fewer of them do the same.
                getattr(library, f"run_{name}")(ctypes.c_uint(min(grid[0], 2)), ctypes.c_uint(24), *called)

            return run

    cuda = SimpleNamespace(
        Device=lambda index: nullcontext(),
        Stream=SimpleNamespace(from_external=lambda stream: stream.__cuda_stream__()),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2))
        return kind(SimpleNamespace(RawModule=Module, cuda=cuda), torch.device("cuda", 0))


def on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let what is enqueued now be on torch's current stream of a GPU."""
    patch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=STREAM))
