"""What reductions pass to collectives, which on a GPU take nothing that is elsewhere."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.ranks.reductions import Reductions


def test_a_rank_without_rows_passes_empty_tensors_of_its_device() -> None:
    """The device computes on torch's meta device, so that its tensors are told from those of the host."""
    device = mock.Mock(wraps=CPU, compute=CPU.compute)
    device.allocate = lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device="meta")
    passed: list[Tensor] = []

    def exchange(what: str, outgoing: Tensor, counts: Sequence[int], parts: Tensor) -> Any:
        passed.extend((outgoing, parts))
        return mock.Mock()

    ranks = mock.Mock(is_alone=True, num_replicas=1, size=2, rank=1, exchange_rows=exchange)
    reductions = Reductions(ranks, is_ordered=True, divide_by=1, device=device)
    results: list[Tensor] = []
    reductions.start(Slice.of_whole("w", (1, 5)), torch.ones(1, 5, device="meta"), results.append)
    reductions.finish()
    results += passed
    assert [each.numel() for each in results] == [0, 5, 0]
    assert {each.device.type for each in results} == {"meta"}
