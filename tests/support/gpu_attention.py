"""Stand-ins on a CPU for the attention kernels of a GPU, so that graphs with their ops run on the fake device.

They return as many results as the kernels, with the shapes and strides that torch promises for them. A backward computes
from the output and the log-sum-exp that were saved, and checks what else is saved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from tests.support.small_models import token_batches

KERNELS = ("cudnn", "efficient", "flash")
GROUPED = ("cudnn", "flash")  # they take fewer heads of keys than of queries
VOCABULARY, WIDTH, HEADS, HEAD_WIDTH, BATCH, SEQUENCE, LAYERS = 64, 32, 4, 8, 2, 8, 2
_SEED = 1234  # what a kernel says about its random numbers


def forward_op(kernel: str) -> Any:
    """Return the op of a kernel."""
    return getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default


def backward_op(kernel: str) -> Any:
    """Return the op of its backward."""
    return getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default


class _Block(nn.Module):
    def __init__(self, kernel: str, key_heads: int) -> None:
        super().__init__()
        self.kernel, self.key_heads = kernel, key_heads
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, key_heads * HEAD_WIDTH) for _ in range(2))
        self.out = nn.Linear(HEADS * HEAD_WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        projected = (each(inner) for each in (self.query, self.key, self.value))
        heads = [each.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for each in projected]
        # As scaled_dot_product_attention calls them. Flash attention takes no bias, and always returns the log-sum-exp.
        options = () if self.kernel == "flash" else (None, True)
        attended = forward_op(self.kernel)(*heads, *options, 0.0, True)[0]
        return x + F.gelu(self.out(attended.transpose(1, 2).flatten(2)))


class GPUTransformer(nn.Module):
    """A small language model whose attention is a kernel's."""

    def __init__(self, kernel: str, key_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_Block(kernel, key_heads) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def transformer(kernel: str, key_heads: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return the model and its batches."""
    torch.manual_seed(0)
    return GPUTransformer(kernel, key_heads), token_batches(VOCABULARY, batch=BATCH, seq=SEQUENCE)[:3]


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """A block in which the kernels' ops run on a CPU."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    try:
        for kernel in KERNELS:
            library.impl(forward_op(kernel), partial(_attend, forward_op(kernel)))
            library.impl(backward_op(kernel), partial(_attend_backward, backward_op(kernel)))
        yield
    finally:
        library._destroy()


def _attend(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    given = _named(op, args, kwargs)
    scores = _scores(given)
    sums = torch.logsumexp(scores, -1)
    output = (scores - sums[..., None]).exp() @ _per_query_head(given, "value")
    rows = given["query"].shape[2]
    made = _promised(op, args, kwargs)
    made[0].copy_(output)
    made[1].fill_(torch.inf).view(*sums.shape[:2], -1)[..., :rows] = (
        sums  # there may be more rows, up to a multiple of 32
    )
    return made


def _attend_backward(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    given = _named(op, args, kwargs)
    query, key, output, grad = given["query"], given["key"], given["out"], args[0]
    rows, columns = query.shape[2], key.shape[2]
    assert (given.get("max_q", rows), given.get("max_k", columns)) == (rows, columns)
    assert given.get("cum_seq_q") is None
    assert given.get("cum_seq_k") is None
    assert all((given[name] == _SEED).all() for name in ("philox_seed", "philox_offset"))
    sums = given["logsumexp"].reshape(*query.shape[:2], -1)[..., :rows]
    weights = (_scores(given) - sums[..., None]).exp()
    on_weights = grad @ _per_query_head(given, "value").mT
    on_scores = weights * (on_weights - (grad * output).sum(-1, keepdim=True)) * _scale(given)
    on_queries = on_scores @ _per_query_head(given, "key")
    on_keys, on_values = (
        each.unflatten(1, (key.shape[1], -1)).sum(2) for each in (on_scores.mT @ query, weights.mT @ grad)
    )
    made = _promised(op, args, kwargs)
    for there, value in zip(made, (on_queries, on_keys, on_values), strict=False):
        there.copy_(value)
    return made


def _named(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    arguments = op._schema.arguments
    defaults = {each.name: each.default_value for each in arguments}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def _scale(given: dict[str, Any]) -> float:
    return given["query"].shape[-1] ** -0.5 if given["scale"] is None else given["scale"]


def _per_query_head(given: dict[str, Any], name: str) -> Tensor:
    """Return keys or values once for each head of queries."""
    return given[name].repeat_interleave(given["query"].shape[1] // given[name].shape[1], 1)


def _scores(given: dict[str, Any]) -> Tensor:
    assert given["dropout_p"] == 0.0
    assert given.get("attn_bias") is None
    scores = given["query"] @ _per_query_head(given, "key").mT * _scale(given)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf) if given["is_causal"] else scores


def _promised(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what torch promises as results of a call: numbers, None, and tensors that say nothing yet."""
    on_meta = tree_map_only(Tensor, lambda each: each.to("meta"), (args, kwargs))

    def make(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        made = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)
        return made if each.is_floating_point() else made.fill_(_SEED)

    return tuple(tree_map(make, op(*on_meta[0], **on_meta[1])))
