"""The bodies of the ``zinf::`` operators. ``register`` is called once, when the first store is made."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zinf_compile import ops
from zinf_compile.runtime.gradients import store_gradient
from zinf_compile.runtime.logit_sums import logit_sums, logit_sums_backward, scale_gradient, weigh_logit_sums
from zinf_compile.runtime.numbers import find_record, find_store
from zinf_compile.runtime.segments import run_segment
from zinf_compile.runtime.slots import torch_dtype
from zinf_compile.terms import Tier


def gather(anchor: Tensor, param: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the full value of a parameter; blocks until it is there."""
    record = find_record(param)
    return record.store.gather_value(record, dtype)


def store_grad(grad: Tensor, param: int, part: int = 0) -> Tensor:
    """Move a gradient home, or add it to what is there; blocks until it is there. ``part`` tells equal ones apart."""
    record = find_record(param)
    store_gradient(record, grad)
    with record.store.failing_on_error():
        record.store.transfers.wait_writes()
    return torch.empty(0)


def issue_gather(store: int, params: Sequence[int], dtypes: Sequence[str], offsets: Sequence[int]) -> Tensor:
    """Start a transfer of copies of the dtypes that are named; the ticket is a tensor of one integer."""
    records = [find_record(param) for param in params]
    ticket = find_store(store).transfers.issue_gather(records, [torch_dtype(name) for name in dtypes], offsets)
    return torch.tensor([ticket], dtype=torch.int64)


def wait_gather(
    ticket: Tensor, store: int, offset: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Block until a transfer has landed; return a view of arena bytes."""
    owner = find_store(store)
    if owner.transfers.wait_gather(int(ticket)):
        owner.sample_memory()
    return owner.arena.view(offset, tuple(shape), dtype)


def release(ticket: Tensor, store: int) -> None:
    """Give a transfer's bytes back."""
    find_store(store).transfers.release(int(ticket))


def sink_grad(grad: Tensor, store: int, param: int) -> None:
    """Copy a gradient out and let it go home in the background."""
    owner = find_store(store)
    store_gradient(find_record(param), grad)
    owner.sample_memory()


def wait_sinks(store: int) -> None:
    """Block until every gradient is home."""
    find_store(store).transfers.wait_writes()


def arena_view(
    store: int,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return arena bytes for an op to write its result into."""
    return find_store(store).arena.strided_view(offset, tuple(shape), tuple(stride), dtype)


def swap_out(value: Tensor, store: int, name: str, tier: str, stride: Sequence[int]) -> Tensor:
    """Start moving an activation out; the token is a tensor of one integer, and keeps what it stands for."""
    owner = find_store(store)
    token = owner.activations.swap_out(value, stride, name, Tier(tier))
    owner.sample_memory()
    return token


def wait_swap_out(token: Tensor, store: int) -> None:
    """Block until an activation's bytes on the device are free."""
    find_store(store).activations.wait_out(token)


def issue_swap_in(token: Tensor, store: int, offset: int) -> Tensor:
    """Start moving an activation back; the ticket is a tensor of one integer."""
    return torch.tensor([find_store(store).activations.issue_back(token, offset)], dtype=torch.int64)


def wait_swap_in(
    ticket: Tensor,
    store: int,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    storage_offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Block until an activation is back; return it, or a view of it, in arena bytes."""
    owner = find_store(store)
    if owner.transfers.wait_gather(int(ticket)):
        owner.sample_memory()
    return owner.arena.strided_view(offset, tuple(shape), tuple(stride), dtype, storage_offset=storage_offset)


@functools.cache
def register() -> torch.library.Library:
    """Register the bodies above; the library must stay alive as long as they are used."""
    library = torch.library.Library("zinf", "IMPL")
    for op, body in (
        (ops.GATHER, gather),
        (ops.STORE_GRAD, store_grad),
        (ops.ISSUE_GATHER, issue_gather),
        (ops.WAIT_GATHER, wait_gather),
        (ops.RELEASE, release),
        (ops.SINK_GRAD, sink_grad),
        (ops.WAIT_SINKS, wait_sinks),
        (ops.ARENA_VIEW, arena_view),
        (ops.SWAP_OUT, swap_out),
        (ops.WAIT_SWAP_OUT, wait_swap_out),
        (ops.ISSUE_SWAP_IN, issue_swap_in),
        (ops.WAIT_SWAP_IN, wait_swap_in),
        (ops.LOGIT_SUMS, logit_sums),
        (ops.LOGIT_SUMS_BACKWARD, logit_sums_backward),
        (ops.WEIGH_LOGIT_SUMS, weigh_logit_sums),
        (ops.SCALE_GRADIENT, scale_gradient),
        (ops.RUN_SEGMENT, run_segment),
    ):
        # Some ops take no tensor, so that no device key would choose them: one body serves every device.
        library.impl(op, body, "CompositeExplicitAutograd")
    return library
