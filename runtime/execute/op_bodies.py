"""The bodies of the ``zinf::`` operators. ``register`` is called once, when the first store is created."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zinf_compile.ir import ops
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.execute.gradients import finish_with_backward, store_gradient
from zinf_compile.runtime.execute.logit_sums import logit_sums, logit_sums_backward, scale_gradient, weigh_logit_sums
from zinf_compile.runtime.execute.segments import run_segment
from zinf_compile.runtime.params.numbers import find_record
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.storage.slots import torch_dtype
from zinf_compile.runtime.store.store import find_store


def gather(anchor: Tensor, param: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the full value of a parameter; blocks until it is available."""
    record = find_record(param)
    return record.store.gather_value(record, dtype)


def store_grad(grad: Tensor, param: int, part: int = 0) -> Tensor:
    """Store a gradient, or add it to the stored one; blocks until done. ``part`` distinguishes equal calls."""
    record = find_record(param)
    store_gradient(record, grad)
    with record.store.failing_on_error():
        record.store.reductions.finish()
        record.store.tensor_io.wait_writes()
    return torch.empty(0)


def issue_gather(
    store: int, params: Sequence[int], dtypes: Sequence[str], offsets: Sequence[int], ends: Tensor | None = None
) -> Tensor:
    """Start a transfer of the copies with these dtypes; the ticket is a tensor of one integer.

    With ``ends`` only of the experts that have rows, which blocks until compute has found them.
    """
    records, transfers = [find_record(param) for param in params], find_store(store).transfers
    experts = None if ends is None else transfers.find_experts(ends)
    ticket = transfers.issue_gather(records, [torch_dtype(name) for name in dtypes], offsets, experts)
    return torch.tensor([ticket], dtype=torch.int64)


def launch_gather(ticket: Tensor, store: int) -> None:
    """Start the all-gather of a transfer, once this rank's shards have arrived."""
    find_store(store).transfers.launch_gather(int(ticket))


def wait_gather(
    ticket: Tensor, store: int, offset: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Block until a transfer has landed; return a view of arena bytes."""
    owner = find_store(store)
    if owner.transfers.wait_gather(int(ticket)):
        owner.held.sample()
    return owner.arena.view(offset, tuple(shape), dtype)


def release(ticket: Tensor, store: int) -> None:
    """Release a transfer's arena bytes."""
    find_store(store).transfers.release(int(ticket))


def sink_grad(grad: Tensor, store: int, param: int, ends: Tensor | None = None) -> None:
    """Offload a gradient in the background; it is stored after ``wait_sinks``.

    With ``ends`` it is zero for experts without rows, which do not move.
    """
    owner = find_store(store)
    store_gradient(find_record(param), grad, None if ends is None else owner.transfers.find_experts(ends))
    owner.held.sample()


def wait_sinks(store: int) -> None:
    """Have every gradient stored when backward ends; blocks, if there is none, until they are."""
    owner = find_store(store)
    owner.reductions.finish()
    finish_with_backward(owner)


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
    """Start offloading an activation. The token is a tensor of one integer; the offloaded bytes live as long as it does."""
    owner = find_store(store)
    token = owner.activations.swap_out(value, stride, name, Tier(tier))
    owner.held.sample()
    return token


def wait_swap_out(token: Tensor, store: int) -> None:
    """Block until an activation's bytes on the device may be reused."""
    find_store(store).activations.wait_out(token)


def issue_swap_in(token: Tensor, store: int, offset: int) -> Tensor:
    """Start reloading an activation; the ticket is a tensor of one integer."""
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
    """Block until an activation is reloaded; return it, or a view of it, in arena bytes."""
    owner = find_store(store)
    if owner.transfers.wait_gather(int(ticket)):
        owner.held.sample()
    return owner.arena.strided_view(offset, tuple(shape), tuple(stride), dtype, storage_offset=storage_offset)


def read_swapped(
    token: Tensor,
    store: int,
    shape: Sequence[int],
    stride: Sequence[int],
    storage_offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return an offloaded activation, or a view of it, in the host memory where it rests."""
    flat = find_store(store).activations.read_in_place(token, dtype)
    return flat.as_strided(tuple(shape), tuple(stride), storage_offset)


def send(value: Tensor, token: Tensor, store: int, number: int, rank: int, differentiable: bool) -> Tensor:
    """Start sending a value to another rank. The caller may reuse its bytes at once: what is sent is a copy."""
    owner = find_store(store)
    assert owner.messages is not None
    here = torch.empty(value.numel(), dtype=value.dtype, device="cpu")
    left = owner.tensor_io.copy_out(value, here, f"message {number}", Tier.DEVICE)
    owner.messages.send(here, number, rank, behind=left)
    return torch.empty_like(token)


def receive(
    token: Tensor,
    store: int,
    number: int,
    rank: int,
    differentiable: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return a value from another rank; blocks until it is there."""
    owner = find_store(store)
    assert owner.messages is not None
    value, link = owner.memory.new_value(torch.Size(shape), dtype), owner.tensor_io.link
    here = torch.empty(value.shape, dtype=dtype, device="cpu") if link.is_crossed else value
    owner.messages.receive(here, number, rank)
    if link.is_crossed and value.numel():
        flat = [each.view(-1).view(torch.uint8) for each in (here, value)]
        link.join(link.bring(*flat, behind=link.mark()).event)
    return value, torch.empty_like(token)


@functools.cache
def register() -> torch.library.Library:
    """Register the bodies above; the library must stay alive as long as they are used."""
    library = torch.library.Library("zinf", "IMPL")
    for op, body in (
        (ops.GATHER, without_interrupts(gather)),
        (ops.STORE_GRAD, without_interrupts(store_grad)),
        (ops.ISSUE_GATHER, without_interrupts(issue_gather)),
        (ops.LAUNCH_GATHER, without_interrupts(launch_gather)),
        (ops.WAIT_GATHER, without_interrupts(wait_gather)),
        (ops.RELEASE, without_interrupts(release)),
        (ops.SINK_GRAD, without_interrupts(sink_grad)),
        (ops.WAIT_SINKS, without_interrupts(wait_sinks)),
        (ops.ARENA_VIEW, without_interrupts(arena_view)),
        (ops.SWAP_OUT, without_interrupts(swap_out)),
        (ops.WAIT_SWAP_OUT, without_interrupts(wait_swap_out)),
        (ops.ISSUE_SWAP_IN, without_interrupts(issue_swap_in)),
        (ops.WAIT_SWAP_IN, without_interrupts(wait_swap_in)),
        (ops.READ_SWAPPED, without_interrupts(read_swapped)),
        (ops.LOGIT_SUMS, logit_sums),
        (ops.LOGIT_SUMS_BACKWARD, logit_sums_backward),
        (ops.WEIGH_LOGIT_SUMS, weigh_logit_sums),
        (ops.SCALE_GRADIENT, scale_gradient),
        (ops.RUN_SEGMENT, run_segment),
        (ops.SEND, send),
        (ops.RECEIVE, receive),
    ):
        # Some ops take no tensor, so no device key would be dispatched: one body serves every device.
        library.impl(op, body, "CompositeExplicitAutograd")
    return library
