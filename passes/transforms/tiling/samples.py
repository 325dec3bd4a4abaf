"""Where each value has the samples of a batch, through ops that compute every sample by itself.

Micro-batches of a block are computed one after another, so no op in between may mix samples. The table of tilings knows
products, norms, attention and element-wise ops; here are those that move dimensions, reduce some of them, or have sizes
among their arguments.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from zinf_compile.passes.transforms.tiling.calls import Call, arguments_of, read_call, value_of
from zinf_compile.passes.transforms.tiling.table import tilings_of_call
from zinf_compile.passes.transforms.tiling.tilings import Combine, Pieces


class MixedSamplesError(Exception):
    """An op may read one sample for the result of another, or it is not known whether it does."""

    def __init__(self, node: fx.Node, why: str = "may mix samples") -> None:
        super().__init__(f"{name_of(node)} {why}")
        self.node = node


@dataclass(frozen=True, slots=True)
class Samples:
    """Where a tensor has its samples: along a dimension, ``unit`` consecutive indices for each.

    After ``view(batch * length, width)`` each sample has ``length`` rows, so that is the unit.
    """

    dim: int
    unit: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BySample:
    """How an op is called for some of the samples."""

    result: Samples
    cuts: Mapping[fx.Node, Samples] = field(default_factory=dict)  # operands of which it reads only these samples
    # Its arguments for a number of samples; None: they contain no size that depends on it.
    resize: Callable[[int], tuple[Any, ...]] | None = None


def name_of(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def follow_samples(node: fx.Node, at: Mapping[fx.Node, Samples], num_samples: int) -> BySample:
    """Return how a node of a torch-level graph is called for some of the samples.

    ``at`` says where its operands have them, of which there is at least one. Raises MixedSamplesError.
    """
    call = read_call(node)
    if call is not None:
        return _by_table(node, call, at)
    rule = _RULES.get(node.target)
    if rule is None or node.op not in ("call_function", "call_method"):
        raise MixedSamplesError(node)
    unknown = node.kwargs.keys() - _KEYWORDS
    if not node.args or (unknown and rule not in (_of_first_dim, _attention_layer)):
        raise MixedSamplesError(node, f"is called with {', '.join(sorted(unknown))} by name, which is not followed")
    return rule(_Op(node, at, num_samples))


def _by_table(node: fx.Node, call: Call, at: Mapping[fx.Node, Samples]) -> BySample:
    # Every micro-batch drops out other elements than the whole batch would: with the same probability.
    call = replace(call, options={**call.options, "dropout_p": 0.0}) if "dropout_p" in call.options else call
    arguments = {name: given for name, given in arguments_of(node).items() if isinstance(given, fx.Node)}
    own = {name: at[given] for name, given in arguments.items() if given in at}
    units = {samples.unit for samples in own.values()}
    for tiling in tilings_of_call(call):
        is_alike = tiling.combine is Combine.CONCATENATE and tiling.pieces is Pieces.ALIKE
        dims = {name: cut.dim for name in own if (cut := tiling.cut_of(name)) is not None and cut.unit == 1}
        if is_alike and len(units) == 1 and dims == {name: samples.dim for name, samples in own.items()}:
            unit = units.pop()
            others = {arguments[cut.operand]: Samples(cut.dim, unit) for cut in tiling.cuts if cut.operand not in own}
            if at.keys().isdisjoint(others):
                return BySample(result=Samples(tiling.dim, unit), cuts=others)
    raise MixedSamplesError(node)


class _Op:
    """A call that reads samples, as a rule sees it."""

    def __init__(self, node: fx.Node, at: Mapping[fx.Node, Samples], num_samples: int) -> None:
        self.node, self.at, self.num_samples = node, at, num_samples

    @property
    def input(self) -> Samples:
        """Where the first operand has its samples. MixedSamplesError if only another one has any."""
        source = self.node.args[0] if self.node.args else None
        if not isinstance(source, fx.Node) or source not in self.at:
            raise self.mixed()
        return self.at[source]

    @property
    def is_only_input(self) -> bool:
        """Whether no other operand has samples."""
        return all(used is self.node.args[0] for used in self.node.all_input_nodes if used in self.at)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first operand."""
        return self.shape_of(self.node.args[0])

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.shape_of(self.node)

    def shape_of(self, node: Any) -> tuple[int, ...]:
        """Return a shape of numbers. MixedSamplesError if it changes from call to call."""
        value = value_of(node) if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
            raise self.mixed("has sizes that change from call to call")
        return tuple(value.shape)

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        if len(self.node.args) > position:
            return self.node.args[position]
        return next((self.node.kwargs[name] for name in names if name in self.node.kwargs), default)

    def listed(self, position: int, *names: str) -> tuple[Any, ...]:
        """Return sizes or dimensions that are given in one argument, or one after another from a position."""
        first = self.argument(position, *names, default=())
        return tuple(first) if isinstance(first, Sequence) else tuple(self.node.args[position:]) or (first,)

    def dim(self, given: Any, num_dims: int | None = None) -> int:
        """Return a dimension counted from the first. MixedSamplesError if it is not a number."""
        if isinstance(given, bool) or not isinstance(given, int):
            raise self.mixed()
        return given % (len(self.shape) if num_dims is None else num_dims)

    def mixed(self, why: str = "may mix samples") -> MixedSamplesError:
        return MixedSamplesError(self.node, why)


def _as_it_is(op: _Op) -> BySample:
    """Each element of the result is computed from that of the first operand, at the same place."""
    if not op.is_only_input or op.input.dim >= len(op.output):  # view_as_complex joins the last dimension
        raise op.mixed()
    return BySample(result=op.input)


def _with_dtype_of(op: _Op) -> BySample:
    """The first operand in the dtype of another."""
    return BySample(result=op.input)


def _of_first_dim(op: _Op) -> BySample:
    """An op on images, which have no other samples than along their first dimension."""
    if op.input != Samples(0) or len(op.shape) != 4 or not op.is_only_input:
        raise op.mixed()
    return BySample(result=op.input)


def _along(op: _Op) -> BySample:
    """An op along given dimensions, which may remove them."""
    if not op.is_only_input:
        raise op.mixed()
    at, given = op.input, op.argument(1, "dim", "axis", default=())
    dims = {op.dim(each) for each in (given if isinstance(given, Sequence) else (given,)) if each is not None}
    if not dims or at.dim in dims:
        raise op.mixed("reads all samples")
    removed = len(op.shape) - len(op.output)
    if removed not in (0, len(dims)):
        raise op.mixed()
    return BySample(result=replace(at, dim=at.dim - (sum(dim < at.dim for dim in dims) if removed else 0)))


def _with_shape(op: _Op) -> BySample:
    """The same elements in another shape, which may be given by sizes."""
    at, shape, output = op.input, op.shape, op.output
    before = math.prod(shape[: at.dim])
    for dim, size in enumerate(output):
        if math.prod(output[:dim]) == before and size % op.num_samples == 0 and size > 0:
            result = Samples(dim, size // op.num_samples)
            break
    else:
        raise op.mixed("joins samples with what is not of them")
    if name_of(op.node) == "flatten":
        return BySample(result=result)
    if not all(isinstance(size, int) for size in op.listed(1, "shape", "size")):
        raise op.mixed()  # a view of another dtype, or sizes that are computed

    def resize(num_samples: int) -> tuple[Any, ...]:
        sizes = [*output[: result.dim], num_samples * result.unit, *output[result.dim + 1 :]]
        is_list = isinstance(op.argument(1), Sequence)
        return (op.node.args[0], sizes) if is_list else (op.node.args[0], *sizes)

    if "shape" in op.node.kwargs or "size" in op.node.kwargs:
        raise op.mixed()
    return BySample(result=result, resize=resize)


def _unflatten(op: _Op) -> BySample:
    """One dimension as several."""
    dim, sizes = op.dim(op.argument(1, "dim")), op.argument(2, "sizes", "unflattened_size")
    if dim == op.input.dim:
        raise op.mixed("divides the samples")
    return BySample(result=replace(op.input, dim=op.input.dim + (len(sizes) - 1 if dim < op.input.dim else 0)))


def _expand(op: _Op) -> BySample:
    at, sizes = op.input, op.listed(1)
    dim = at.dim + len(op.output) - len(op.shape)
    if "size" in op.node.kwargs or not all(isinstance(size, int) for size in sizes):
        raise op.mixed()

    def resize(num_samples: int) -> tuple[Any, ...]:
        return (op.node.args[0], *sizes[:dim], num_samples * at.unit, *sizes[dim + 1 :])

    return BySample(result=replace(at, dim=dim), resize=resize)


def _transpose(op: _Op) -> BySample:
    at, first, second = op.input, op.dim(op.argument(1, "dim0", "axis0")), op.dim(op.argument(2, "dim1", "axis1"))
    return BySample(result=replace(at, dim={first: second, second: first}.get(at.dim, at.dim)))


def _permute(op: _Op) -> BySample:
    dims = [op.dim(dim) for dim in op.listed(1, "dims")]
    return BySample(result=replace(op.input, dim=dims.index(op.input.dim)))


def _unsqueeze(op: _Op) -> BySample:
    dim = op.dim(op.argument(1, "dim", "axis"), len(op.shape) + 1)
    return BySample(result=replace(op.input, dim=op.input.dim + (dim <= op.input.dim)))


def _squeeze(op: _Op) -> BySample:
    given = {op.dim(dim) for dim in op.listed(1, "dim", "axis")}
    if not given or op.input.dim in given:
        raise op.mixed("may remove the dimension of the samples")
    dims = {dim for dim in given if op.shape[dim] == 1}
    return BySample(result=replace(op.input, dim=op.input.dim - sum(dim < op.input.dim for dim in dims)))


def _part(op: _Op) -> BySample:
    """A part along a dimension, or all parts of it."""
    position = 2 if name_of(op.node) in ("split", "chunk") else 1
    if op.dim(op.argument(position, "dim", "axis", default=0)) == op.input.dim:
        raise op.mixed("reads some of the samples")
    return BySample(result=op.input)


def _without_dim(op: _Op) -> BySample:
    """One index of a dimension, or all of them."""
    dim = op.dim(op.argument(1, "dim", "axis", default=0))
    if dim == op.input.dim:
        raise op.mixed("reads some of the samples")
    return BySample(result=replace(op.input, dim=op.input.dim - (dim < op.input.dim)))


def _getitem(op: _Op) -> BySample:
    if isinstance(value_of(op.node.args[0]), tuple | list):  # type: ignore[arg-type]  # op.input checks it
        return BySample(result=op.input)
    index = op.argument(1)
    index = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is Ellipsis or type(each) in (int, slice) for each in index):
        raise op.mixed("reads samples by their number")
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    left = len(op.shape) - sum(each is not None and each is not Ellipsis for each in index)
    dim = result = 0
    for each in index:
        if each is Ellipsis:
            if dim <= op.input.dim < dim + left:
                return BySample(result=replace(op.input, dim=result + op.input.dim - dim))
            dim, result = dim + left, result + left
        elif each is None:
            result += 1
        elif dim == op.input.dim:
            if each != slice(None):
                raise op.mixed("reads some of the samples")
            return BySample(result=replace(op.input, dim=result))
        else:
            dim, result = dim + 1, result + (type(each) is slice)
    raise op.mixed()


def _cat(op: _Op) -> BySample:
    joined = op.argument(0, "tensors")
    if not isinstance(joined, Sequence) or not all(isinstance(each, fx.Node) for each in joined):
        raise op.mixed()
    first, *others = {op.at[each] for each in joined if each in op.at}
    num_dims = len(op.output)
    dim, is_stack = op.dim(op.argument(1, "dim", "axis", default=0), num_dims), name_of(op.node) == "stack"
    if others or (not is_stack and dim == first.dim):
        raise op.mixed("joins samples along their own dimension")
    size = op.num_samples * first.unit
    nothing = {each for each in joined if op.shape_of(each) == (0,)}  # an empty cache of keys has no dimensions
    cuts = {each: first for each in joined if each not in op.at and each not in nothing}
    if any(op.shape_of(each)[first.dim] != size for each in cuts):
        raise op.mixed()
    return BySample(result=replace(first, dim=first.dim + (is_stack and dim <= first.dim)), cuts=cuts)


def _repeat_interleave(op: _Op) -> BySample:
    if type(op.argument(1, "repeats")) is not int or op.dim(op.argument(2, "dim", "axis")) == op.input.dim:
        raise op.mixed()
    return BySample(result=op.input)


def _addmm(op: _Op) -> BySample:
    """A bias plus a product of rows, which are the samples, with a matrix."""
    bias, rows, matrix = op.node.args[:3]
    if rows not in op.at or op.at[rows].dim != 0 or bias in op.at or matrix in op.at:  # type: ignore[index]
        raise op.mixed()
    if len(op.shape_of(bias)) != 1 or not isinstance(rows, fx.Node):
        raise op.mixed()
    return BySample(result=op.at[rows])


def _attention_layer(op: _Op) -> BySample:
    """All of torch.nn.MultiheadAttention in one call, on (sequence, sample, feature)."""
    query, key, value = op.node.args[:3]
    own = {query, key, value}
    padding = op.argument(14, "key_padding_mask")
    at = {used for used in op.node.all_input_nodes if used in op.at}
    if {op.at.get(each) for each in own} != {Samples(1)} or not at <= own | {padding}:  # type: ignore[arg-type]
        raise op.mixed()
    if op.argument(15, "need_weights", default=True) is not False:
        raise op.mixed("averages over heads what it returns beside its result; say need_weights=False")
    mask = op.argument(16, "attn_mask")
    if isinstance(mask, fx.Node) and len(op.shape_of(mask)) != 2:
        raise op.mixed("has a mask for each sample and head")
    if isinstance(padding, fx.Node) and op.at.get(padding, Samples(0)) != Samples(0):
        raise op.mixed()
    cuts = {padding: Samples(0)} if isinstance(padding, fx.Node) and padding not in op.at else {}
    return BySample(result=Samples(1), cuts=cuts)


# Of the arguments that calls may have by name. What decides about dimensions is read by the rules; the rest does not.
_KEYWORDS = frozenset(
    {
        *("dim", "axis", "dim0", "dim1", "axis0", "axis1", "dims", "keepdim", "keepdims", "sizes", "unflattened_size"),
        *("start", "length", "index", "split_size", "split_size_or_sections", "chunks", "repeats"),
        *("start_dim", "end_dim", "dtype", "p", "training", "inplace", "unbiased", "correction", "memory_format"),
        "_stacklevel",
    }
)

_NAMES: Mapping[Callable[[_Op], BySample], tuple[str, ...]] = {
    _as_it_is: (
        *("contiguous", "clone", "detach", "dropout", "alpha_dropout", "view_as_complex", "view_as_real"),
        *("logical_not", "isnan", "isinf", "bool", "int", "long", "nan_to_num"),
    ),
    _with_dtype_of: ("type_as",),
    _of_first_dim: ("group_norm", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "interpolate"),
    _along: (
        *("softmax", "log_softmax", "cumsum", "cumprod", "logsumexp", "sum", "mean", "var", "std", "amax", "amin"),
    ),
    _with_shape: ("view", "reshape", "flatten"),
    _unflatten: ("unflatten",),
    _expand: ("expand",),
    _transpose: ("transpose", "swapaxes"),
    _permute: ("permute",),
    _unsqueeze: ("unsqueeze",),
    _squeeze: ("squeeze",),
    _part: ("split", "chunk", "narrow"),
    _without_dim: ("unbind", "select"),
    _getitem: ("getitem",),
    _cat: ("cat", "concat", "stack"),
    _repeat_interleave: ("repeat_interleave",),
    _addmm: ("addmm",),
    _attention_layer: ("multi_head_attention_forward",),
}


def _rules() -> dict[object, Callable[[_Op], BySample]]:
    """Return the rules by the function or method that is called; a method has the same arguments as the function."""
    found: dict[object, Callable[[_Op], BySample]] = {}
    for rule, names in _NAMES.items():
        for name in names:
            found[name] = rule
            functions = (getattr(module, name, None) for module in (torch, F, operator))
            found |= {function: rule for function in functions if callable(function)}
    return found


_RULES = _rules()
