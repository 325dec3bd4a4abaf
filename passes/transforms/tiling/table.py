"""The legal tilings of each op: the axes, how operands are cut, how pieces are combined, which results are bitwise equal."""

from collections.abc import Callable, Iterator

from torch import fx

from zinf_compile.passes.transforms.tiling.calls import ELEMENT_WISE, Call, read_call
from zinf_compile.passes.transforms.tiling.tilings import OUTPUT, Combine, Cut, Pieces, Tiling

_Rule = Callable[[Call], Iterator[Tiling]]


def legal_tilings(node: fx.Node) -> tuple[Tiling, ...]:
    """Return the legal tilings of a node of a torch-level graph; none if the op is not in the table."""
    call = read_call(node)
    return () if call is None else tilings_of_call(call)


def tilings_of_call(call: Call) -> tuple[Tiling, ...]:
    """Return the legal tilings of an op for these shapes, along axes of fixed length of at least two."""
    return tuple(tiling for tiling in _RULES[call.op](call) if tiling.size > 1 and not _changes(call, tiling))


def _changes(call: Call, tiling: Tiling) -> bool:
    """Return whether a tiling cuts a dimension that changes from call to call, or depends on the number of keys."""
    cuts = {(cut.operand, cut.dim) for cut in tiling.cuts}
    if tiling.pieces is Pieces.CAUSAL:
        cuts.add(("key", len(call.shapes["key"]) - 2))
    return not cuts.isdisjoint(call.changing)


def _cuts(call: Call, *cuts: Cut) -> tuple[Cut, ...]:
    """Return the cuts of those operands that were passed."""
    return tuple(cut for cut in cuts if call.has(cut.operand))


def _linear(call: Call) -> Iterator[Tiling]:
    last = len(call.shapes["input"]) - 1
    for dim in range(last):
        yield _rows(call, dim)
    if len(call.shapes["weight"]) == 2:
        yield Tiling(
            axis="output features",
            size=call.shapes["weight"][0],
            cuts=_cuts(call, Cut(operand="weight", dim=0), Cut(operand="bias", dim=0)),
            combine=Combine.CONCATENATE,
            dim=last,
        )
    yield Tiling(
        axis="input features",
        size=call.shapes["input"][last],
        cuts=(Cut(operand="input", dim=last), Cut(operand="weight", dim=len(call.shapes["weight"]) - 1)),
        combine=Combine.ADD,
        pieces=Pieces.BIAS_ONCE,
    )


def _rows(call: Call, dim: int, *, exact: tuple[str, ...] = ()) -> Tiling:
    """Return the tiling of an op that treats every index of an input dimension alike."""
    return Tiling(
        axis="rows",
        size=call.output[dim],
        cuts=(Cut(operand="input", dim=dim),),
        combine=Combine.CONCATENATE,
        dim=dim,
        exact=exact,
    )


def _matmul(call: Call) -> Iterator[Tiling]:
    left, right = call.shapes["input"], call.shapes["other"]
    out = len(call.output)
    num_batch = out - (len(left) > 1) - (len(right) > 1)
    for dim in range(num_batch):
        yield Tiling(
            axis="batch",
            size=call.output[dim],
            cuts=(
                *_aligned(call, "input", dim, num_batch + 2),
                *_aligned(call, "other", dim, num_batch + 2),
            ),
            combine=Combine.CONCATENATE,
            dim=dim,
        )
    if len(left) > 1:
        yield Tiling(
            axis="rows",
            size=left[-2],
            cuts=(Cut(operand="input", dim=len(left) - 2),),
            combine=Combine.CONCATENATE,
            dim=num_batch,
        )
    if len(right) > 1:
        yield Tiling(
            axis="columns",
            size=right[-1],
            cuts=(Cut(operand="other", dim=len(right) - 1),),
            combine=Combine.CONCATENATE,
            dim=out - 1,
        )
    yield Tiling(
        axis="inner",
        size=left[-1],
        cuts=(Cut(operand="input", dim=len(left) - 1), Cut(operand="other", dim=max(0, len(right) - 2))),
        combine=Combine.ADD,
    )


def _aligned(call: Call, operand: str, dim: int, num_dims: int, *, unit: int = 1) -> tuple[Cut, ...]:
    """Return the cut of an operand along a dimension of the ``num_dims`` it is broadcast to; none if its size there is 1."""
    if not call.has(operand):
        return ()
    shape = call.shapes[operand]
    own = dim - (num_dims - len(shape))
    return (Cut(operand=operand, dim=own, unit=unit),) if own >= 0 and shape[own] != 1 else ()


def _embedding(call: Call) -> Iterator[Tiling]:
    if call.options.get("max_norm") is not None or call.options.get("sparse"):
        return  # max_norm writes to the table; sparse gradients cannot be concatenated
    counts = bool(
        call.options.get("scale_grad_by_freq")
    )  # counts how often an index occurs; a piece would count too few
    last = len(call.output) - 1
    if not counts:
        for dim in range(last):
            yield _rows(call, dim, exact=(OUTPUT,))
        yield Tiling(
            axis="vocabulary",
            size=call.shapes["weight"][0],
            cuts=(Cut(operand="weight", dim=0),),
            combine=Combine.SELECT,
            pieces=Pieces.VOCABULARY,
            exact=(OUTPUT, "weight"),
        )
    yield Tiling(
        axis="features",
        size=call.shapes["weight"][1],
        cuts=(Cut(operand="weight", dim=1),),
        combine=Combine.CONCATENATE,
        dim=last,
        exact=(OUTPUT, "weight"),
    )


def _conv(call: Call) -> Iterator[Tiling]:
    weight = call.shapes["weight"]
    channels = len(call.shapes["input"]) - len(weight) + 1  # their dimension; an input may have no batch
    groups = call.options.get("groups", 1)
    if channels == 1:
        yield _rows(call, 0)
    if groups > 1:
        yield Tiling(
            axis="groups",
            size=groups,
            cuts=_cuts(
                call,
                Cut(operand="input", dim=channels, unit=weight[1]),
                Cut(operand="weight", dim=0, unit=weight[0] // groups),
                Cut(operand="bias", dim=0, unit=weight[0] // groups),
            ),
            combine=Combine.CONCATENATE,
            dim=channels,
            pieces=Pieces.GROUPS,
        )
        return
    yield Tiling(
        axis="output channels",
        size=weight[0],
        cuts=_cuts(call, Cut(operand="weight", dim=0), Cut(operand="bias", dim=0)),
        combine=Combine.CONCATENATE,
        dim=channels,
    )
    yield Tiling(
        axis="input channels",
        size=weight[1],
        cuts=(Cut(operand="input", dim=channels), Cut(operand="weight", dim=1)),
        combine=Combine.ADD,
        pieces=Pieces.BIAS_ONCE,
    )


def _attention(call: Call) -> Iterator[Tiling]:
    if call.options.get("dropout_p", 0.0) != 0.0:
        return  # each piece would draw different random numbers
    query, key, value = call.shapes["query"], call.shapes["key"], call.shapes["value"]
    num_dims = len(query)
    grouped = bool(call.options.get("enable_gqa"))
    for dim in range(num_dims - 2):
        is_heads = dim == num_dims - 3 and num_dims > 3
        sizes = {shape[dim] for shape in (key, value)} if len(key) == len(value) == num_dims else set()
        if len(sizes) != 1 or query[dim] % (size := sizes.pop()) or (query[dim] != size and not (is_heads and grouped)):
            continue  # operands are broadcast: each would have to be cut differently
        unit = query[dim] // size
        yield Tiling(
            axis="heads" if is_heads else "batch",
            size=size,
            cuts=(
                Cut(operand="query", dim=dim, unit=unit),
                Cut(operand="key", dim=dim),
                Cut(operand="value", dim=dim),
                *_aligned(call, "attn_mask", dim, num_dims, unit=unit),
            ),
            combine=Combine.CONCATENATE,
            dim=dim,
            exact=(OUTPUT, "query", "key", "value"),
        )
    yield Tiling(
        axis="queries",
        size=query[-2],
        cuts=(Cut(operand="query", dim=num_dims - 2), *_aligned(call, "attn_mask", num_dims - 2, num_dims)),
        combine=Combine.CONCATENATE,
        dim=len(call.output) - 2,
        pieces=Pieces.CAUSAL if call.options.get("is_causal") else Pieces.ALIKE,
    )


def _norm(call: Call) -> Iterator[Tiling]:
    for dim in range(len(call.output) - len(call.options["normalized_shape"])):
        yield _rows(call, dim, exact=(OUTPUT, "input"))


def _element_wise(call: Call) -> Iterator[Tiling]:
    # An in-place op would write to what the other pieces read; a positional True may mean in-place.
    if "out" in call.options or any(option is True for option in call.options.values()):
        return
    num_dims = len(call.output)
    if not all(_is_broadcast(shape, call.output) for shape in call.shapes.values()):
        return  # x.to(y) reads only the dtype of y
    alike = tuple(operand for operand, shape in call.shapes.items() if shape == call.output)
    for dim in range(num_dims):
        cuts = tuple(cut for operand in call.shapes for cut in _aligned(call, operand, dim, num_dims))
        if cuts:
            yield Tiling(
                axis="elements",
                size=call.output[dim],
                cuts=cuts,
                combine=Combine.CONCATENATE,
                dim=dim,
                exact=(OUTPUT, *alike) if call.rounded_once else (),
            )


def _is_broadcast(shape: tuple[int, ...], output: tuple[int, ...]) -> bool:
    """Return whether an operand is broadcast to the output."""
    aligned = output[len(output) - len(shape) :]
    return len(shape) <= len(output) and all(own in (1, size) for own, size in zip(shape, aligned, strict=True))


_RULES: dict[str, _Rule] = {
    "linear": _linear,
    "matmul": _matmul,
    "embedding": _embedding,
    "conv": _conv,
    "attention": _attention,
    "layer_norm": _norm,
    "rms_norm": _norm,
    ELEMENT_WISE: _element_wise,
}
