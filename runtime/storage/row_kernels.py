"""Kernels of ``cuda/row_codes.cu``, which decode frozen weights on a GPU."""

import torch
from torch import Tensor

from zinf_compile.ir.copies import RowCode
from zinf_compile.runtime.storage.cuda_kernels import FOLDER, Kernels, load_kernels

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class RowKernels(Kernels):
    """The compiled kernels of one device."""

    SOURCE = FOLDER / "row_codes.cu"
    NAMES = tuple(f"zinf_decode_rows_{dtype}" for dtype in _DTYPES.values())
    OF_TORCH = "frozen weights are decoded"

    def decode(self, code: RowCode, rows: Tensor, values: Tensor) -> None:
        """Enqueue what ``row_codes.decode_rows`` does to values in float32 or bfloat16."""
        count = values.numel() // code.columns
        if count:
            sizes = (count, code.columns, code.num_outliers, code.page_nbytes)
            self.launch(f"zinf_decode_rows_{_DTYPES[values.dtype]}", count, rows.data_ptr(), values.data_ptr(), *sizes)


def load_row_kernels(values: Tensor) -> RowKernels | None:
    """Return the kernels for values of a dtype on a device; None for others; see ``load_kernels``."""
    return load_kernels(RowKernels, values.device) if values.dtype in _DTYPES else None
