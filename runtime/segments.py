"""Segments: what a block computes between our ops, compiled by Inductor, once for each distinct structure in the process.

Ops name a segment by a number, which stands for its structure. Inductor keeps what it has compiled on the disk, for the next
process. A segment that cannot be compiled runs op by op, and the log says why, once.

What is compiled with sizes in symbols holds for all that the guards of its capture let through. So a structure with symbols
is one of its capture alone, and to compile it again later must ask for no guard more.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing

_Run = Callable[..., Sequence[Tensor]]
_Structure = tuple[str, int | None]  # its description, and which table of symbols it has its sizes in, if any


class _Key(NamedTuple):
    """A segment, and what Inductor writes into its code."""

    number: int
    num_threads: int
    is_deterministic: bool
    precision: str  # of float32 products


_SAME = "zinf_same_structure"  # in a segment's ``meta``: the one by which its structure is known
_lock = threading.RLock()  # what is collected while it is held forgets its segments
_numbers: dict[_Structure, int] = {}
_segments: dict[int, Callable[[], fx.GraphModule | None]] = {}  # for good, or as long as their capture lives
_compiled: dict[_Key, _Run] = {}
_log = logging.getLogger(__name__)


def number_of(structure: str, segment: fx.GraphModule) -> int:
    """Return the number of a structure; ``segment`` is one that has it.

    With symbols the number is good for as long as one of the segments lives that it was returned for.
    """
    symbols = _symbols(segment)
    key = structure, None if symbols is None else id(symbols)
    with _lock:
        number = _numbers.setdefault(key, max(_segments, default=-1) + 1)
        known = _segments[number]() if number in _segments else None
        if known is not None:
            segment.meta[_SAME] = known  # keeps it alive
        elif symbols is None:
            _segments[number] = lambda: segment
        else:
            reference = _segments[number] = weakref.ref(segment)
            weakref.finalize(segment, _forget, key, number, reference).atexit = False
        return number


def _forget(structure: _Structure, number: int, reference: object) -> None:
    with _lock:
        if _segments.get(number) is not reference:
            return
        del _numbers[structure], _segments[number]
        for key in list(_compiled):  # the collector may come in between, and forget others
            if key.number == number:
                _compiled.pop(key, None)


def compile_segment(number: int) -> None:
    """Compile a segment for what torch is set to now, unless that is done."""
    key = _key(number)
    with _lock:
        if key not in _compiled:
            segment = _segments[number]()
            assert segment is not None
            _compiled[key] = _compile(segment) or partial(_run_op_by_op, number)


def run_segment(inputs: Sequence[Tensor], sizes: Sequence[int], segment: int) -> list[Tensor]:
    """Return the results of a segment."""
    key = _key(segment)
    if key not in _compiled:
        compile_segment(segment)
    return list(_compiled[key](*sizes, *inputs))


def _key(number: int) -> _Key:
    return _Key(
        number,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _run_op_by_op(number: int, *inputs: Any) -> Sequence[Tensor]:
    segment = _segments[number]()
    assert segment is not None
    results: Sequence[Tensor] = segment.forward(*inputs)
    return results


def _compile(segment: fx.GraphModule) -> _Run | None:
    """Return what runs a segment; None, as the log says, where it cannot be compiled."""
    from torch._inductor import config, standalone_compile  # takes a second, and only who compiles needs it

    values = [node.meta["val"] for node in segment.graph.find_nodes(op="placeholder")]
    symbols = _symbols(segment)
    fake_mode = None if symbols is None else detect_fake_mode(values)
    context = TracingContext.try_get()
    is_guarded = context is not None and context.fake_mode is fake_mode  # its capture takes guards until it ends
    num_guards = 0 if symbols is None else len(symbols.guards)
    with fake_mode or nullcontext():
        examples: list[Any] = [_example(value) for value in values]
    source: Any = "from_example_inputs" if fake_mode is None else "from_tracing_context"
    # One after another and here: no processes that outlive us, and nothing is compiled for what is only probable.
    with torch.no_grad(), tracing(TracingContext(fake_mode)), config.patch(compile_threads=1):
        try:
            compiled: Any = standalone_compile(segment, examples, dynamic_shapes=source)
        except Exception as error:  # noqa: BLE001  # of any kind: what Inductor cannot do, ops can
            _refuse(f"{type(error).__name__}: {error}")
            return None
    if symbols is not None and not is_guarded and len(symbols.guards) > num_guards:
        _refuse(f"it holds only where {symbols.guards[-1].expr}, which its capture did not ask for")
        return None
    run: _Run = compiled
    return run


def _refuse(reason: str) -> None:
    _log.warning("a segment is not compiled and runs op by op: %s", reason)


def _symbols(segment: fx.GraphModule) -> Any:
    """Return torch's table of the symbols in the sizes of a segment; None if all of them are fixed."""
    values = (node.meta["val"] for node in segment.graph.find_nodes(op="placeholder"))
    return next((value.node.shape_env for value in values if isinstance(value, torch.SymInt)), None)


def _example(value: Tensor | torch.SymInt) -> Tensor | torch.SymInt:
    if isinstance(value, torch.SymInt):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
