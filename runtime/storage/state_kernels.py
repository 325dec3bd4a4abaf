"""Kernels of ``cuda/state_codes.cu``, which decode and encode optimizer state on a GPU."""

import torch
from torch import Tensor

from zinf_compile.ir.copies import Code
from zinf_compile.runtime.storage.cuda_kernels import FOLDER, Kernels, load_kernels


class StateKernels(Kernels):
    """The compiled kernels of one device."""

    SOURCE = FOLDER / "state_codes.cu"
    NAMES = ("zinf_decode_int8", "zinf_encode_int8", "zinf_decode_bfloat16", "zinf_encode_bfloat16")
    OF_TORCH = "optimizer state is encoded"

    def decode(self, code: Code, pages: Tensor, values: Tensor, maps: Tensor | None) -> None:
        """Enqueue what ``state_codes.decode`` does. ``maps``, for int8: the values of codes, float32 [2, 256]."""
        more = () if maps is None else (maps.data_ptr(),)
        given = (pages.data_ptr(), values.data_ptr(), values.numel(), *more)
        self.launch(f"zinf_decode_{code}", _num_pages(code, values), *given)

    def encode(
        self,
        code: Code,
        values: Tensor,
        pages: Tensor,
        codes: Tensor | None,
        *,
        first: int,
        seed: int,
        drawn_from: Tensor | None,
    ) -> None:
        """Enqueue what ``state_codes.encode`` does. ``codes``, for int8: by upper bits of a float32, uint8 [2, 2**18]."""
        import numpy

        others = 0 if drawn_from is None else drawn_from.data_ptr()
        more = (first, numpy.uint32(seed), others) if codes is None else (codes.data_ptr(),)
        given = (values.data_ptr(), pages.data_ptr(), values.numel(), *more)
        self.launch(f"zinf_encode_{code}", _num_pages(code, values), *given)


def _num_pages(code: Code, values: Tensor) -> int:
    return -(-values.numel() // code.page_elements)


def load_state_kernels(device: torch.device) -> StateKernels | None:
    """Return the kernels of a device; see ``load_kernels``."""
    return load_kernels(StateKernels, device)
