"""Kernels of ``cuda/``, compiled for a GPU by CuPy at first use, and enqueued on torch's current stream."""

import functools
import importlib
import logging
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

FOLDER = Path(__file__).parents[2] / "cuda"
OPTIONS = ("-std=c++17",)
_THREADS = 256  # of a block
_BLOCKS_PER_PROCESSOR = 8
_log = logging.getLogger(__name__)


class Kernels:
    """The compiled kernels of one source on one device."""

    SOURCE: ClassVar[Path]
    NAMES: ClassVar[tuple[str, ...]]
    OF_TORCH: ClassVar[str]  # what torch does where there are none, for the log

    def __init__(self, cupy: Any, device: torch.device) -> None:
        """Compile them with CuPy, which keeps them on disk between runs."""
        self._cupy, self._device = cupy, device
        module = cupy.RawModule(code=self.SOURCE.read_text(), options=OPTIONS, backend="nvrtc")
        with cupy.cuda.Device(device.index):
            module.compile()
            self._functions = {name: module.get_function(name) for name in self.NAMES}
        self._most = _BLOCKS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count

    def launch(self, name: str, num_blocks: int, *given: Any) -> None:
        """Enqueue a kernel with up to so many blocks. Its arguments are 64 bits each, but numbers of numpy as they are."""
        import numpy

        cupy = self._cupy
        arguments = tuple(numpy.int64(each) if isinstance(each, int) else each for each in given)
        with cupy.cuda.Device(self._device.index):
            stream = cupy.cuda.Stream.from_external(_Stream(torch.cuda.current_stream(self._device).cuda_stream))
            grid = (max(1, min(num_blocks, self._most)),)
            self._functions[name](grid, (_THREADS,), arguments, stream=stream)


class _Stream:
    """A stream of torch's, by the protocol with which CuPy takes streams; torch's own class has it in later versions."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


KernelsT = TypeVar("KernelsT", bound=Kernels)


@functools.cache
def load_kernels(kind: type[KernelsT], device: torch.device) -> KernelsT | None:
    """Return the kernels of a device; None where it has none, or where CuPy is missing or cannot compile them.

    The log says once why torch takes their place.
    """
    if device.type != "cuda":
        return None
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        _tell(
            kind.OF_TORCH,
            f"CuPy cannot be imported ({error}); torch here is built for CUDA {torch.version.cuda}: "
            "pip install 'zinf_compile[cuda]', which is for CUDA 13",
        )
        return None
    try:
        return kind(cupy, device)
    except (
        cupy.cuda.compiler.CompileException,
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # of NVRTC and the driver
        _tell(kind.OF_TORCH, f"CuPy cannot compile {kind.SOURCE.name}: {error}")
        return None


@functools.cache
def _tell(what: str, why: str) -> None:
    _log.warning("%s on the GPU by torch, which takes longer than our kernels: %s", what, why)
