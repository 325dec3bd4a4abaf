"""The ``zinf::`` operators: schemas, fake implementations, autograd formulas and side-effect marks. No bodies.

Semantics live in two ops, which are slow and correct anywhere, with no compiler at all::

    w     = zinf::gather(anchor, param, shape, dtype, device)      the full value of a parameter, ready on the device
    token = zinf::store_grad(grad, param, part)                    its gradient leaves; the token is the anchor's gradient

Lowering replaces them by ops that overlap movement with compute. A *ticket* ties them together by data, so that no
reordering can separate a transfer from its wait::

    ticket = zinf::issue_gather(store, params, dtypes, offsets)    start one transfer into the arena, return at once
    ticket = zinf::issue_gather(.., ends)                          only of the experts that have rows; the rest is undefined
    zinf::launch_gather(ticket, store)                             of several ranks: exchange the shards that came in
    w      = zinf::wait_gather(ticket, store, offset, shape, ...)  block until it is there; a view of arena bytes
    zinf::release(ticket, store)                                   the bytes may be reused from here on
    zinf::sink_grad(grad, store, param)                            copy the gradient out; it is home after wait_sinks
    zinf::sink_grad(grad, store, param, ends)                      only of the experts that have rows; the rest is zero
    zinf::wait_sinks(store)                                        every gradient sunk so far is home when backward ends
    m      = zinf::arena_view(store, offset, shape, stride, ...)   arena bytes for an op to write its result into

A *token* stands for an activation that has left the device, from forward to the last backward that may want it::

    token  = zinf::swap_out(value, store, name, tier, stride)      start moving it out; a copy of it lies in ``stride``
    zinf::wait_swap_out(token, store)                              its bytes on the device are free
    ticket = zinf::issue_swap_in(token, store, offset)             start moving it back into the arena
    v      = zinf::wait_swap_in(ticket, store, offset, ...)        block until it is there; it, or a view of it
    zinf::release(ticket, store)                                   the bytes may be reused from here on
    v      = zinf::read_swapped(token, store, ...)                 it, or a view of it, where it rests in host memory

Four more make the loss of a language model without its logits (``passes/transforms/tiling/linear_loss.py`` uses them)::

    l, p, s    = zinf::logit_sums(hidden, weight, ...)             of a row: logsumexp, logit of the target, sum of logits
    h, w, b    = zinf::logit_sums_backward(l, p, s, hidden, ...)   gradients, by those of the sums
    t, h, w, b = zinf::weigh_logit_sums(hidden, weight, ...)       a weighted sum of all of them, and its gradients at once
    g          = zinf::scale_gradient(gradient, factor, dtype)     such a gradient, when that of the loss is known

Where compute is compiled, one op stands for what a block computes between two of ours; it is inserted with its results'
fake values, and never traced::

    results    = zinf::run_segment(inputs, sizes, segment)         in memory of their own

``runtime/execute/op_bodies.py`` implements them. An op with a schema and a fake traces, lints and plans without one.

Between ranks that work in rounds, values and their gradients pass by two ops. A *token*, of no element, orders them, and
their mirror images in backward: a value that is sent gets its gradient received, and the other way round::

    token        = zinf::send(value, token, store, number, rank, differentiable)
    value, token = zinf::receive(token, store, number, rank, differentiable, shape, dtype, device)

Three have no body, since plans for tensor-parallel ranks are made ahead of the machine only. They stand for what Megatron's
ranks exchange (https://arxiv.org/abs/1909.08053, section 3); the forward of the first and the backwards of the others do
nothing or cut::

    x = zinf::enter_columns(x, ranks)                              before a weight divided by outputs; backward adds up
    y = zinf::all_reduce(y, ranks)                                 add up what ranks have, behind one divided by inputs
    y = zinf::all_gather_columns(y, ranks, size)                   join the last dimension, which then has ``size``
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_LIBRARY = torch.library.Library("zinf", "DEF")

_LIBRARY.define("gather(Tensor anchor, int param, SymInt[] shape, ScalarType dtype, Device device) -> Tensor")
_LIBRARY.define("store_grad(Tensor grad, int param, int part=0) -> Tensor")
# dtypes by name: torch 2.11 passes a list of dtypes to a Python implementation as integers
_LIBRARY.define("issue_gather(int store, int[] params, str[] dtypes, int[] offsets, Tensor? ends=None) -> Tensor")
_LIBRARY.define(
    "wait_gather(Tensor ticket, int store, int offset, SymInt[] shape, ScalarType dtype, Device device) -> Tensor"
)
_LIBRARY.define("launch_gather(Tensor ticket, int store) -> ()")
_LIBRARY.define("release(Tensor ticket, int store) -> ()")
_LIBRARY.define("sink_grad(Tensor grad, int store, int param, Tensor? ends=None) -> ()")
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
_LIBRARY.define(
    "read_swapped(Tensor token, int store, SymInt[] shape, SymInt[] stride, SymInt storage_offset, ScalarType dtype, "
    "Device device) -> Tensor"
)
_LIBRARY.define(
    "logit_sums(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, int first, bool last, "
    "SymInt tile_rows) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "logit_sums_backward(Tensor on_logsumexp, Tensor on_picked, Tensor? on_weighted, Tensor logsumexp, Tensor picked, "
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, int first, bool last, "
    "SymInt tile_rows, bool[3] wanted) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "weigh_logit_sums(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
    "Tensor on_logsumexp, Tensor on_picked, Tensor? on_weighted, SymInt tile_rows, bool[3] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("scale_gradient(Tensor gradient, Tensor factor, ScalarType dtype) -> Tensor")
_LIBRARY.define("run_segment(Tensor[] inputs, SymInt[] sizes, int segment) -> Tensor[]")
_LIBRARY.define("send(Tensor value, Tensor token, int store, int number, int rank, bool differentiable) -> Tensor")
_LIBRARY.define(
    "receive(Tensor token, int store, int number, int rank, bool differentiable, SymInt[] shape, ScalarType dtype, "
    "Device device) -> (Tensor, Tensor)"
)
_LIBRARY.define("enter_columns(Tensor x, int num_tensor_ranks) -> Tensor")
_LIBRARY.define("all_reduce(Tensor x, int num_tensor_ranks) -> Tensor")
_LIBRARY.define("all_gather_columns(Tensor x, int num_tensor_ranks, int size) -> Tensor")

GATHER = torch.ops.zinf.gather.default
STORE_GRAD = torch.ops.zinf.store_grad.default
ISSUE_GATHER = torch.ops.zinf.issue_gather.default
WAIT_GATHER = torch.ops.zinf.wait_gather.default
LAUNCH_GATHER = torch.ops.zinf.launch_gather.default
RELEASE = torch.ops.zinf.release.default
SINK_GRAD = torch.ops.zinf.sink_grad.default
WAIT_SINKS = torch.ops.zinf.wait_sinks.default
ARENA_VIEW = torch.ops.zinf.arena_view.default
SWAP_OUT = torch.ops.zinf.swap_out.default
WAIT_SWAP_OUT = torch.ops.zinf.wait_swap_out.default
ISSUE_SWAP_IN = torch.ops.zinf.issue_swap_in.default
WAIT_SWAP_IN = torch.ops.zinf.wait_swap_in.default
READ_SWAPPED = torch.ops.zinf.read_swapped.default
LOGIT_SUMS = torch.ops.zinf.logit_sums.default
LOGIT_SUMS_BACKWARD = torch.ops.zinf.logit_sums_backward.default
WEIGH_LOGIT_SUMS = torch.ops.zinf.weigh_logit_sums.default
SCALE_GRADIENT = torch.ops.zinf.scale_gradient.default
RUN_SEGMENT = torch.ops.zinf.run_segment.default
SEND = torch.ops.zinf.send.default
RECEIVE = torch.ops.zinf.receive.default
ENTER_COLUMNS = torch.ops.zinf.enter_columns.default
ALL_REDUCE = torch.ops.zinf.all_reduce.default
ALL_GATHER_COLUMNS = torch.ops.zinf.all_gather_columns.default

ALL_OPS = (
    *(GATHER, STORE_GRAD, ISSUE_GATHER, LAUNCH_GATHER, WAIT_GATHER, RELEASE, SINK_GRAD, WAIT_SINKS),
    *(ARENA_VIEW, SWAP_OUT, WAIT_SWAP_OUT, ISSUE_SWAP_IN, WAIT_SWAP_IN, READ_SWAPPED),
    *(LOGIT_SUMS, LOGIT_SUMS_BACKWARD, WEIGH_LOGIT_SUMS, SCALE_GRADIENT, RUN_SEGMENT),
    *(SEND, RECEIVE),
)

# FX dead-code elimination deletes a node without users unless its target is known to have an effect.
for _op in (
    *(STORE_GRAD, ISSUE_GATHER, LAUNCH_GATHER, RELEASE, SINK_GRAD, WAIT_SINKS),
    *(SWAP_OUT, WAIT_SWAP_OUT, ISSUE_SWAP_IN, SEND, RECEIVE),
):
    fx.node.has_side_effect(_op)


def make_anchor(*, requires_grad: bool) -> Tensor:
    """Return the zero-element tensor that gives gathers a place in the autograd graph."""
    return torch.empty(0, requires_grad=requires_grad)


@torch.library.register_fake("zinf::gather", lib=_LIBRARY)
def _gather_fake(anchor: Tensor, param: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.register_fake("zinf::store_grad", lib=_LIBRARY)
def _store_grad_fake(grad: Tensor, param: int, part: int = 0) -> Tensor:
    return torch.empty(0)


@torch.library.register_fake("zinf::issue_gather", lib=_LIBRARY)
def _issue_gather_fake(
    store: int, params: Sequence[int], dtypes: Sequence[str], offsets: Sequence[int], ends: Tensor | None = None
) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


@torch.library.register_fake("zinf::launch_gather", lib=_LIBRARY)
def _launch_gather_fake(ticket: Tensor, store: int) -> None:
    return None


@torch.library.register_fake("zinf::wait_gather", lib=_LIBRARY)
def _wait_gather_fake(
    ticket: Tensor, store: int, offset: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.register_fake("zinf::release", lib=_LIBRARY)
def _release_fake(ticket: Tensor, store: int) -> None:
    return None


@torch.library.register_fake("zinf::sink_grad", lib=_LIBRARY)
def _sink_grad_fake(grad: Tensor, store: int, param: int, ends: Tensor | None = None) -> None:
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
    return _view_of_swapped(shape, stride, storage_offset, dtype, device)


@torch.library.register_fake("zinf::read_swapped", lib=_LIBRARY)
def _read_swapped_fake(
    token: Tensor,
    store: int,
    shape: Sequence[int],
    stride: Sequence[int],
    storage_offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return _view_of_swapped(shape, stride, storage_offset, dtype, device)


def _view_of_swapped(
    shape: Sequence[int], stride: Sequence[int], storage_offset: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.empty(storage_offset + reach, dtype=dtype, device=device).as_strided(shape, stride, storage_offset)


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what sums of logits of this dtype, and of their gradients, are kept in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _gradients_fake(
    hidden: Tensor, weight: Tensor, wanted: Sequence[bool], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    of_hidden, of_weight, of_bias = (
        hidden.new_empty(shape if asked else (0,), dtype=dtype if asked else torch.float32)
        for shape, asked in zip((hidden.shape, weight.shape, weight.shape[:1]), wanted, strict=True)
    )
    return of_hidden, of_weight, of_bias


@torch.library.register_fake("zinf::logit_sums", lib=_LIBRARY)
def _logit_sums_fake(hidden: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    one, two, three = (hidden.new_empty(hidden.shape[0], dtype=sums_dtype(hidden.dtype)) for _ in range(3))
    return one, two, three


@torch.library.register_fake("zinf::logit_sums_backward", lib=_LIBRARY)
def _logit_sums_backward_fake(
    on_logsumexp: Tensor,
    on_picked: Tensor,
    on_weighted: Tensor | None,
    logsumexp: Tensor,
    picked: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    last: bool,
    tile_rows: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients_fake(hidden, weight, wanted, hidden.dtype)


@torch.library.register_fake("zinf::weigh_logit_sums", lib=_LIBRARY)
def _weigh_logit_sums_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    on_logsumexp: Tensor,
    on_picked: Tensor,
    on_weighted: Tensor | None,
    tile_rows: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = sums_dtype(hidden.dtype)
    return hidden.new_empty((), dtype=dtype), *_gradients_fake(hidden, weight, wanted, dtype)


@torch.library.register_fake("zinf::scale_gradient", lib=_LIBRARY)
def _scale_gradient_fake(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


def _gather_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.param = inputs[1]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    return torch.ops.zinf.store_grad(grad, ctx.param), None, None, None, None


torch.library.register_autograd("zinf::gather", _gather_backward, setup_context=_gather_setup_context, lib=_LIBRARY)


def _logit_sums_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, class_weight, ctx.first, ctx.last, ctx.tile_rows = inputs
    ctx.save_for_backward(*output[:2], hidden, weight, bias, target, class_weight)


def _logit_sums_backward(ctx: Any, *on_sums: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    gradients = torch.ops.zinf.logit_sums_backward(
        *on_sums, *ctx.saved_tensors, ctx.first, ctx.last, ctx.tile_rows, wanted
    )
    asked = (gradient if wants else None for gradient, wants in zip(gradients, wanted, strict=True))
    return *asked, None, None, None, None, None


def _weigh_logit_sums_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted, ctx.dtype = inputs[-1], inputs[0].dtype
    ctx.set_materialize_grads(False)  # nobody asks for the gradient of a gradient: no zeros are made for it
    ctx.save_for_backward(*output[1:])


def _weigh_logit_sums_backward(ctx: Any, on_total: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    scaled: tuple[Tensor | None, ...] = (None, None, None)
    if on_total is not None:
        scaled = tuple(
            torch.ops.zinf.scale_gradient(gradient, on_total, ctx.dtype) if asked else None
            for gradient, asked in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        )
    return *scaled, None, None, None, None, None, None, None


torch.library.register_autograd(
    "zinf::logit_sums", _logit_sums_backward, setup_context=_logit_sums_setup_context, lib=_LIBRARY
)
torch.library.register_autograd(
    "zinf::weigh_logit_sums", _weigh_logit_sums_backward, setup_context=_weigh_logit_sums_setup_context, lib=_LIBRARY
)


@torch.library.register_fake("zinf::send", lib=_LIBRARY)
def _send_fake(value: Tensor, token: Tensor, store: int, number: int, rank: int, differentiable: bool) -> Tensor:
    return torch.empty_like(token)


@torch.library.register_fake("zinf::receive", lib=_LIBRARY)
def _receive_fake(
    token: Tensor,
    store: int,
    number: int,
    rank: int,
    differentiable: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    return torch.empty(shape, dtype=dtype, device=device), torch.empty_like(token)


def _send_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    value, _, *ctx.message = inputs
    ctx.like = tuple(value.shape), value.dtype, value.device


def _send_backward(ctx: Any, on_token: Tensor) -> tuple[Tensor | None, ...]:
    store, number, rank, differentiable = ctx.message
    if not differentiable:
        return None, on_token, None, None, None, None
    grad, token = torch.ops.zinf.receive(on_token, store, gradient_of(number), rank, False, *ctx.like)
    return grad, token, None, None, None, None


def _receive_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, *ctx.message = inputs[:5]


def _receive_backward(ctx: Any, on_value: Tensor, on_token: Tensor) -> tuple[Tensor | None, ...]:
    store, number, rank, differentiable = ctx.message
    token = on_token
    if differentiable:
        token = torch.ops.zinf.send(on_value.contiguous(), on_token, store, gradient_of(number), rank, False)
    return token, None, None, None, None, None, None, None


def gradient_of(number: int) -> int:
    """Return the number of the message with the gradient of what message ``number`` has."""
    return -1 - number


torch.library.register_autograd("zinf::send", _send_backward, setup_context=_send_setup_context, lib=_LIBRARY)
torch.library.register_autograd("zinf::receive", _receive_backward, setup_context=_receive_setup_context, lib=_LIBRARY)


@torch.library.register_fake("zinf::enter_columns", lib=_LIBRARY)
@torch.library.register_fake("zinf::all_reduce", lib=_LIBRARY)
def _like_input_fake(x: Tensor, num_tensor_ranks: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("zinf::all_gather_columns", lib=_LIBRARY)
def _all_gather_columns_fake(x: Tensor, num_tensor_ranks: int, size: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], size))


def _enter_columns_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.num_tensor_ranks = inputs[1]


def _enter_columns_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.zinf.all_reduce(grad, ctx.num_tensor_ranks), None


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


def _all_gather_columns_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.num_columns = inputs[0].shape[-1]


def _all_gather_columns_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad[..., : ctx.num_columns], None, None


torch.library.register_autograd(
    "zinf::enter_columns", _enter_columns_backward, setup_context=_enter_columns_setup_context, lib=_LIBRARY
)
torch.library.register_autograd("zinf::all_reduce", _all_reduce_backward, lib=_LIBRARY)
torch.library.register_autograd(
    "zinf::all_gather_columns",
    _all_gather_columns_backward,
    setup_context=_all_gather_columns_setup_context,
    lib=_LIBRARY,
)

_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_ATTENTION_BACKWARDS = (  # on a GPU
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    _FLASH_BACKWARD,
)
_OPERANDS = slice(1, 4)  # the positions of queries, keys and values among their arguments
_HEADS = 1  # the dimension of heads


def attention_scratch(node: fx.Node, nbytes_of: Callable[[Tensor], Any]) -> Any:
    """Return the bytes that the kernel of a backward of attention allocates and frees: the float32 gradient of the queries.

    Where queries share keys, the kernel of flash attention has gradients of keys and values for each head of queries, too,
    and adds those of a group up at its end. 0 for other ops. ``nbytes_of`` counts the bytes of a value.
    """
    if node.target not in _ATTENTION_BACKWARDS:
        return 0
    query, key, value = (each.meta["val"] for each in node.args[_OPERANDS])  # type: ignore[union-attr]
    scratch = nbytes_of(query) * max(1, torch.float32.itemsize // query.dtype.itemsize)
    if node.target is _FLASH_BACKWARD and query.shape[_HEADS] != key.shape[_HEADS]:
        scratch += (nbytes_of(key) + nbytes_of(value)) * (query.shape[_HEADS] // key.shape[_HEADS])
    return scratch
