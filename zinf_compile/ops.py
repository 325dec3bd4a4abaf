"""The ``zinf::`` operators: schemas, fake implementations, autograd formulas and side-effect marks. No bodies.

Semantics live in two ops, which are slow and correct anywhere, with no compiler at all::

    w     = zinf::gather(anchor, param, shape, dtype, device)      the full value of a parameter, ready on the device
    token = zinf::store_grad(grad, param)                          its gradient leaves; the token is the anchor's gradient

Lowering replaces them by ops that overlap movement with compute. A *ticket* ties them together by data, so that no
reordering can separate a transfer from its wait::

    ticket = zinf::issue_gather(store, params, dtypes, offsets)    start one transfer into the arena, return at once
    w      = zinf::wait_gather(ticket, store, offset, shape, ...)  block until it is there; a view of arena bytes
    zinf::release(ticket, store)                                   the bytes may be reused from here on
    zinf::sink_grad(grad, store, param)                            copy the gradient out; it is home after wait_sinks
    zinf::wait_sinks(store)                                        every gradient sunk so far is home
    m      = zinf::arena_view(store, offset, shape, stride, ...)   arena bytes for an op to write its result into

A *token* stands for an activation that has left the device, from forward to the last backward that may want it::

    token  = zinf::swap_out(value, store, name, tier, stride)      start moving it out; a copy of it lies in ``stride``
    zinf::wait_swap_out(token, store)                              its bytes on the device are free
    ticket = zinf::issue_swap_in(token, store, offset)             start moving it back into the arena
    v      = zinf::wait_swap_in(ticket, store, offset, ...)        block until it is there; it, or a view of it
    zinf::release(ticket, store)                                   the bytes may be reused from here on

``runtime/op_impls.py`` implements them. An op with a schema and a fake but no implementation traces, lints and plans.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_LIBRARY = torch.library.Library("zinf", "DEF")

_LIBRARY.define("gather(Tensor anchor, int param, SymInt[] shape, ScalarType dtype, Device device) -> Tensor")
_LIBRARY.define("store_grad(Tensor grad, int param) -> Tensor")
_LIBRARY.define("issue_gather(int store, int[] params, ScalarType[] dtypes, int[] offsets) -> Tensor")
_LIBRARY.define(
    "wait_gather(Tensor ticket, int store, int offset, SymInt[] shape, ScalarType dtype, Device device) -> Tensor"
)
_LIBRARY.define("release(Tensor ticket, int store) -> ()")
_LIBRARY.define("sink_grad(Tensor grad, int store, int param) -> ()")
_LIBRARY.define("wait_sinks(int store) -> ()")
_LIBRARY.define(
    "arena_view(int store, int offset, SymInt[] shape, SymInt[] stride, ScalarType dtype, Device device) -> Tensor"
)
_LIBRARY.define("swap_out(Tensor value, int store, str name, str tier, SymInt[] stride) -> Tensor")
_LIBRARY.define("wait_swap_out(Tensor token, int store) -> ()")
_LIBRARY.define("issue_swap_in(Tensor token, int store, int offset) -> Tensor")
_LIBRARY.define(
    "wait_swap_in(Tensor ticket, int store, int offset, SymInt[] shape, SymInt[] stride, SymInt storage_offset, "
    "ScalarType dtype, Device device) -> Tensor"
)

GATHER = torch.ops.zinf.gather.default
STORE_GRAD = torch.ops.zinf.store_grad.default
ISSUE_GATHER = torch.ops.zinf.issue_gather.default
WAIT_GATHER = torch.ops.zinf.wait_gather.default
RELEASE = torch.ops.zinf.release.default
SINK_GRAD = torch.ops.zinf.sink_grad.default
WAIT_SINKS = torch.ops.zinf.wait_sinks.default
ARENA_VIEW = torch.ops.zinf.arena_view.default
SWAP_OUT = torch.ops.zinf.swap_out.default
WAIT_SWAP_OUT = torch.ops.zinf.wait_swap_out.default
ISSUE_SWAP_IN = torch.ops.zinf.issue_swap_in.default
WAIT_SWAP_IN = torch.ops.zinf.wait_swap_in.default

ALL_OPS = (
    *(GATHER, STORE_GRAD, ISSUE_GATHER, WAIT_GATHER, RELEASE, SINK_GRAD, WAIT_SINKS, ARENA_VIEW),
    *(SWAP_OUT, WAIT_SWAP_OUT, ISSUE_SWAP_IN, WAIT_SWAP_IN),
)

# FX dead-code elimination deletes a node without users unless its target is known to have an effect.
for _op in (STORE_GRAD, ISSUE_GATHER, RELEASE, SINK_GRAD, WAIT_SINKS, SWAP_OUT, WAIT_SWAP_OUT, ISSUE_SWAP_IN):
    fx.node.has_side_effect(_op)


def make_anchor(*, requires_grad: bool) -> Tensor:
    """Return the zero-element tensor that gives gathers a place in the autograd graph."""
    return torch.empty(0, requires_grad=requires_grad)


@torch.library.register_fake("zinf::gather", lib=_LIBRARY)
def _gather_fake(anchor: Tensor, param: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.register_fake("zinf::store_grad", lib=_LIBRARY)
def _store_grad_fake(grad: Tensor, param: int) -> Tensor:
    return torch.empty(0)


@torch.library.register_fake("zinf::issue_gather", lib=_LIBRARY)
def _issue_gather_fake(
    store: int, params: Sequence[int], dtypes: Sequence[torch.dtype], offsets: Sequence[int]
) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


@torch.library.register_fake("zinf::wait_gather", lib=_LIBRARY)
def _wait_gather_fake(
    ticket: Tensor, store: int, offset: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.register_fake("zinf::release", lib=_LIBRARY)
def _release_fake(ticket: Tensor, store: int) -> None:
    return None


@torch.library.register_fake("zinf::sink_grad", lib=_LIBRARY)
def _sink_grad_fake(grad: Tensor, store: int, param: int) -> None:
    return None


@torch.library.register_fake("zinf::wait_sinks", lib=_LIBRARY)
def _wait_sinks_fake(store: int) -> None:
    return None


@torch.library.register_fake("zinf::arena_view", lib=_LIBRARY)
def _arena_view_fake(
    store: int,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


@torch.library.register_fake("zinf::swap_out", lib=_LIBRARY)
def _swap_out_fake(value: Tensor, store: int, name: str, tier: str, stride: Sequence[int]) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


@torch.library.register_fake("zinf::wait_swap_out", lib=_LIBRARY)
def _wait_swap_out_fake(token: Tensor, store: int) -> None:
    return None


@torch.library.register_fake("zinf::issue_swap_in", lib=_LIBRARY)
def _issue_swap_in_fake(token: Tensor, store: int, offset: int) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


@torch.library.register_fake("zinf::wait_swap_in", lib=_LIBRARY)
def _wait_swap_in_fake(
    ticket: Tensor,
    store: int,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    storage_offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.empty(storage_offset + reach, dtype=dtype, device=device).as_strided(shape, stride, storage_offset)


def _gather_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.param = inputs[1]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    return torch.ops.zinf.store_grad(grad, ctx.param), None, None, None, None


torch.library.register_autograd("zinf::gather", _gather_backward, setup_context=_gather_setup_context, lib=_LIBRARY)
