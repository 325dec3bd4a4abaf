"""The model of one rank of a mesh with tensor and pipeline parallelism: its part of the divided weights, its stage's blocks.

It is a module like any other, on meta, so it is captured and planned like any other. Weights are divided as in Megatron
(Shoeybi et al., https://arxiv.org/abs/1909.08053, section 3), by the name of their layer::

    colwise                   a part of the outputs: ``enter_columns`` before it, nothing behind
    rowwise                   a part of the inputs: nothing before it, ``all_reduce`` behind, and then the whole bias
    vocabulary                of an embedding, a part of its rows, and ``all_reduce`` behind; of a head, a part of the
                              logits, for a loss that the ranks compute together. Rows are padded to equally many
    colwise_gather_output     a part of the outputs, and ``all_gather_columns`` behind

A stage is the whole model with few of its blocks, of which the first gets what the stage before returns, and the last one's
result is what the stage returns. What neither needs is not in its graph: embedding, head, loss.
"""

import copy
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import Embedding, Linear, Module, Parameter
from torch.utils import _pytree as pytree

from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.passes.analysis.repeats import Run
from zinf_compile.passes.capture.offline.runs import dropped_blocks, find_runs, shorten_runs
from zinf_compile.passes.capture.offline.skeleton import as_fake, make_skeleton
from zinf_compile.passes.capture.offline.trace import Inputs

STAGE_INPUT = "zinf_stage_input"  # the argument in which a stage gets what the one before returns
_COLWISE, _ROWWISE, _VOCABULARY, _GATHERED = "colwise", "rowwise", "vocabulary", "colwise_gather_output"
_STYLES = {
    _COLWISE: _COLWISE,
    _ROWWISE: _ROWWISE,
    _VOCABULARY: _VOCABULARY,
    _GATHERED: _GATHERED,
    "embedding_rowwise": _VOCABULARY,  # so transformers calls it
    "colwise_rep": _GATHERED,  # so transformers called it before
}
_HEAD_WIDTHS = ("head_dim", "head_width")  # attributes of attention modules


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Which of a model's repeated blocks are in a stage, and how many forwards of it are open at the most."""

    number: int
    num_blocks: int
    num_open: int
    is_first: bool
    is_last: bool


def copy_on_meta(model: Module) -> Module:
    """Return a copy of a model without its values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = Parameter(_on_meta(parameter), requires_grad=parameter.requires_grad)
    memo |= {id(buffer): _on_meta(buffer) for buffer in model.buffers()}
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedError(f"{type(model).__name__} cannot be copied: {error}") from error


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def divide_weights(model: Module, tp_plan: Mapping[str, str] | None, num_tensor_ranks: int) -> frozenset[str]:
    """Leave one of so many tensor-parallel ranks its part of the weights that a plan names; return the names of the parts.

    ``tp_plan`` maps names of layers, in which ``*`` stands for a number or another part of a name, to how they are divided;
    by default it is the model's own, as transformers' models have one. ConfigError for a plan that names no layer or what
    cannot be divided, and for sizes that so many ranks do not divide.
    """
    found = tp_plan or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(
            f"{type(model).__name__} does not say which of its weights tensor-parallel ranks divide; give tp_plan, such as "
            "{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}"
        )
    modules = dict(model.named_modules())
    parts: dict[int, Parameter] = {}  # by the whole parameter: what is shared stays shared
    # Inputs of a rowwise layer behind attention are heads, one by one: it says best how many there are to divide.
    for pattern, style in sorted(found.items(), key=lambda item: item[1] != _ROWWISE):
        if style not in _STYLES:
            raise ConfigError(f"tp_plan divides {pattern!r} in the way {style!r}; it may say {', '.join(_STYLES)}")
        names = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        divided = [name for name in modules if names.fullmatch(name)]
        if not divided:
            raise ConfigError(
                f"tp_plan names {pattern!r}, and {type(model).__name__} has no such layer; its linear layers are "
                + ", ".join(dict.fromkeys(_pattern(name) for name, each in modules.items() if isinstance(each, Linear)))
            )
        for name in divided:
            _divide(name, modules, _STYLES[style], num_tensor_ranks, parts)
    made = set(map(id, parts.values()))
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if id(parameter) in made)


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _divide(
    name: str, modules: Mapping[str, Module], style: str, num_tensor_ranks: int, parts: dict[int, Parameter]
) -> None:
    """Divide the weights of one layer, and give it the forward of its style."""
    layer = modules[name]
    is_embedding = isinstance(layer, Embedding) and style == _VOCABULARY
    if not is_embedding and not isinstance(layer, Linear):
        raise ConfigError(
            f"tp_plan divides {name}, a {type(layer).__name__}, as {style}; it may divide torch.nn.Linear, and "
            f"torch.nn.Embedding as {_VOCABULARY}"
        )
    weight = layer.weight
    assert isinstance(weight, Tensor)
    dim = 1 if style == _ROWWISE else 0
    whole, part = weight.shape[dim], -(-weight.shape[dim] // num_tensor_ranks)
    parent = modules[name.rpartition(".")[0]]
    width = next((size for each in _HEAD_WIDTHS if type(size := getattr(parent, each, None)) is int), 1)
    if style != _VOCABULARY and (whole % num_tensor_ranks or whole // num_tensor_ranks % width):
        what = f"{whole // width} heads" if width > 1 and whole % width == 0 else "columns" if dim else "rows"
        raise ConfigError(
            f"{num_tensor_ranks} tensor-parallel ranks do not divide the {what} of {name}, whose weight is "
            f"{list(weight.shape)}; give a number that divides them"
        )

    def cut(parameter: Parameter, dim: int) -> Parameter:
        if id(parameter) not in parts:
            shape = [part if each == dim else size for each, size in enumerate(parameter.shape)]
            parts[id(parameter)] = Parameter(
                torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad
            )
        return parts[id(parameter)]

    assert isinstance(weight, Parameter)
    layer.weight = cut(weight, dim)
    if isinstance(layer, Linear) and style != _ROWWISE and layer.bias is not None:
        layer.bias = cut(layer.bias, 0)
    if isinstance(layer, Embedding):
        sizes = {"num_embeddings": part, "padding_idx": None}  # that row may be another rank's
    else:
        sizes = {"in_features" if style == _ROWWISE else "out_features": part}
    vars(layer).update(sizes, zinf_tensor_ranks=num_tensor_ranks, zinf_whole=whole)
    layer.__class__ = _divided_class(type(layer), style)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _divided_class(cls: type[Module], style: str) -> type[Module]:
    """Return a class with the name of ``cls`` and the forward of a style. One class for all layers: blocks stay alike."""
    ops: Any = torch.ops.zinf
    forward: Callable[..., Any]
    if issubclass(cls, Embedding):

        def forward(self: Any, tokens: Tensor) -> Any:
            return ops.all_reduce(F.embedding(tokens, self.weight), self.zinf_tensor_ranks)

    elif style == _ROWWISE:

        def forward(self: Any, x: Tensor) -> Any:
            y = ops.all_reduce(F.linear(x, self.weight), self.zinf_tensor_ranks)
            return y if self.bias is None else y + self.bias

    elif style == _GATHERED:

        def forward(self: Any, x: Tensor) -> Any:
            y = F.linear(ops.enter_columns(x, self.zinf_tensor_ranks), self.weight, self.bias)
            return ops.all_gather_columns(y, self.zinf_tensor_ranks, self.zinf_whole)

    else:

        def forward(self: Any, x: Tensor) -> Any:
            return F.linear(ops.enter_columns(x, self.zinf_tensor_ranks), self.weight, self.bias)

    return _subclass(cls, forward)


def _subclass(cls: type[Module], forward: Callable[..., Any]) -> type[Module]:
    """Return a class with the names of ``cls`` and another forward."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    made: type[Module] = metaclass(cls.__name__, (cls,), {**names, "forward": forward})
    return made


def find_pipeline(model: Module, num_stages: int) -> Run:
    """Return the run of identical blocks that stages divide, the longest. ConfigError if it has fewer than stages."""
    runs = find_runs(model, longer_than=0)
    run = max(runs, key=lambda run: run.num_blocks, default=None)
    if run is None or run.num_blocks < num_stages:
        has = "no list of blocks" if run is None else f"{run.num_blocks} alike, in {run.container or 'the model'}"
        raise ConfigError(
            f"{num_stages} pipeline stages need at least as many identical blocks, and {type(model).__name__} has {has}; "
            f"give at most {run.num_blocks if run is not None else 1} stages"
        )
    return run


def cut_stages(model: Module, run: Run, num_stages: int, num_micro_batches: int) -> tuple[StageShape, ...]:
    """Return the stages of a model, with about as many elements of blocks and of the head's matrices in each.

    A matrix costs its elements, so the last stage may get fewer blocks, for what follows them. Of the stages before it, the
    later ones get one more if their number does not divide the blocks: they have fewer forwards open.
    """
    blocks = list(model.get_submodule(run.container)._modules.values())[run.first : run.first + run.num_blocks]
    assert blocks[0] is not None
    block = sum(parameter.numel() for parameter in blocks[0].parameters())
    head = _count_behind(model, run)
    others = num_stages - 1

    def cost(last: int) -> tuple[int, int]:
        return max(last * block + head, -(-(run.num_blocks - last) // max(1, others)) * block), -last

    last = run.num_blocks if not others else min(range(1, run.num_blocks - others + 1), key=cost)
    each, more = divmod(run.num_blocks - last, others) if others else (0, 0)
    counts = [each + (number >= others - more) for number in range(others)] + [last]
    return tuple(
        StageShape(
            number=number,
            num_blocks=count,
            num_open=min(num_stages - number, num_micro_batches),
            is_first=number == 0,
            is_last=number == num_stages - 1,
        )
        for number, count in enumerate(counts)
    )


def _count_behind(model: Module, run: Run) -> int:
    """Return the elements of matrices of linear layers that are registered behind the blocks, such as the head's."""
    behind, seen = 0, False
    for name, module in model.named_modules():
        is_block = name.startswith(f"{run.container}." if run.container else "")
        seen |= is_block
        if seen and not is_block and isinstance(module, Linear):
            behind += module.weight.numel()
    return behind


class _Ports:
    """What a stage gets from the one before, and what it gives to the one after, of the call that is traced."""

    def __init__(self) -> None:
        self.entered: Tensor | None = None
        self.left: Tensor | None = None


def keep_stage(model: Module, run: Run, stages: Sequence[StageShape], stage: StageShape) -> None:
    """Leave a model the blocks of one stage, numbered from the run's first, and what is before or behind them."""
    container = model.get_submodule(run.container)
    children = list(container._modules.values())
    start = run.first + sum(each.num_blocks for each in stages[: stage.number])
    kept = [
        *children[: run.first],
        *children[start : start + stage.num_blocks],
        *children[run.first + run.num_blocks :],
    ]
    container._modules = {str(index): child for index, child in enumerate(kept)}
    ports = _Ports()
    if not stage.is_first:
        _change(kept[run.first], ports, _enter)
    if not stage.is_last:
        _change(kept[run.first + stage.num_blocks - 1], ports, _leave)
    _change(model, ports, _call_first if stage.is_first else _call_later)


def _change(module: Module | None, ports: _Ports, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    assert module is not None
    vars(module)["zinf_ports"] = ports
    module.__class__ = _subclass(type(module), change(type(module).forward))


def _enter(forward: Callable[..., Any]) -> Callable[..., Any]:
    def entering(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, self.zinf_ports.entered, *args, **kwargs)

    return entering


def _leave(forward: Callable[..., Any]) -> Callable[..., Any]:
    def leaving(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        self.zinf_ports.left = result[0] if isinstance(result, tuple) else result
        return result

    return leaving


def _call_first(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.zinf_ports.left = None
        result = forward(self, *args, **kwargs)
        return result if self.zinf_ports.left is None else self.zinf_ports.left

    return call


def _call_later(forward: Callable[..., Any]) -> Callable[..., Any]:
    call_first = _call_first(forward)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.zinf_ports.entered = kwargs.pop(STAGE_INPUT)
        return call_first(self, *args, **kwargs)

    return call


def find_stage_input(model: Module, run: Run, inputs: Inputs, *, compute_dtype: str | None, train: bool) -> Tensor:
    """Return a tensor on meta like those that stages pass on: what the first block of a run is called with.

    UnsupportedError if that is no tensor, or if blocks return something else.
    """
    fake_mode = FakeTensorMode()
    skeleton = make_skeleton(
        model,
        fake_mode,
        compute_dtype=compute_dtype,
        without=dropped_blocks(model, (run,), 1),
        edit=functools.partial(shorten_runs, runs=(run,), num_blocks=1),
    )
    block = skeleton.module.get_submodule(f"{run.container}.{run.first}".removeprefix("."))
    seen: list[Any] = []

    def look(_: Module, args: tuple[Any, ...], result: Any) -> None:
        seen.extend((args[0] if args else None, result[0] if isinstance(result, tuple) else result))

    block.register_forward_hook(look)
    skeleton.module.train(train)
    with fake_mode, torch.no_grad():
        args, kwargs = pytree.tree_map_only(Tensor, as_fake, (inputs.args, dict(inputs.kwargs)))
        skeleton.module(*args, **kwargs)
    entered, left = seen[:2] if seen else (None, None)
    if not (isinstance(entered, Tensor) and isinstance(left, Tensor) and entered.shape == left.shape):
        raise UnsupportedError(
            f"the blocks of {run.container or type(model).__name__} cannot be pipeline stages: they have to take a tensor "
            "first and return one of the same shape, alone or first; plan with one stage"
        )
    return torch.empty(entered.shape, dtype=entered.dtype, device="meta", requires_grad=train)


def count_tokens(inputs: Inputs) -> int:
    """Return the tokens of a call: the elements of its first input of integers, or else the rows of its first input."""
    tensors = [each for each in pytree.tree_leaves((inputs.args, dict(inputs.kwargs))) if isinstance(each, Tensor)]
    integers = next((each for each in tensors if not each.is_floating_point() and each.dim() > 0), None)
    if integers is not None:
        return integers.numel()
    return math.prod(tensors[0].shape[:-1]) if tensors else 1
