"""Segments: what a block computes between our ops, compiled by Inductor, once for each distinct structure in the process.

Ops name a segment by a number, which stands for its structure. Inductor keeps what it has compiled on the disk, for the next
process. A segment that cannot be compiled runs op by op, and the log says why, once.

What is compiled with sizes in symbols holds for all that the guards of its capture let through. So a structure with symbols
is one of its capture alone, and to compile it again later must ask for no guard more.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing

_Run = Callable[..., Sequence[Tensor]]

_lock = threading.Lock()
_numbers: dict[tuple[str, int | None], int] = {}  # by structure, and by capture where it has symbols
_segments: list[fx.GraphModule] = []
_compiled: dict[tuple[int, int], _Run] = {}  # by number and threads, whose count Inductor writes into its loops
_log = logging.getLogger(__name__)


def number_of(structure: str, segment: fx.GraphModule) -> int:
    """Return the number of a structure; ``segment`` is one that has it."""
    symbols = _symbols(segment)
    with _lock:
        number = _numbers.setdefault((structure, None if symbols is None else id(symbols)), len(_segments))
        if number == len(_segments):
            _segments.append(segment)  # which keeps its symbols alive
        return number


def compile_segment(number: int) -> None:
    """Compile a segment for as many threads as torch has now, unless that is done."""
    key = number, torch.get_num_threads()
    with _lock:
        if key not in _compiled:
            _compiled[key] = _compile(_segments[number])


def run_segment(inputs: Sequence[Tensor], sizes: Sequence[int], segment: int) -> list[Tensor]:
    """Return the results of a segment."""
    key = segment, torch.get_num_threads()
    if key not in _compiled:
        compile_segment(segment)
    return list(_compiled[key](*sizes, *inputs))


def _compile(segment: fx.GraphModule) -> _Run:
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
        except (RuntimeError, OSError) as error:  # Inductor's own are RuntimeErrors; what it cannot do, ops can
            return _op_by_op(segment, f"{type(error).__name__}: {error}")
    if symbols is not None and not is_guarded and len(symbols.guards) > num_guards:
        return _op_by_op(segment, f"it holds only where {symbols.guards[-1].expr}, which its capture did not ask for")
    run: _Run = compiled
    return run


def _op_by_op(segment: fx.GraphModule, reason: str) -> _Run:
    _log.warning("a segment is not compiled and runs op by op: %s", reason)
    return segment.forward


def _symbols(segment: fx.GraphModule) -> Any:
    """Return torch's table of the symbols in the sizes of a segment; None if all of them are fixed."""
    values = (node.meta["val"] for node in segment.graph.find_nodes(op="placeholder"))
    return next((value.node.shape_env for value in values if isinstance(value, torch.SymInt)), None)


def _example(value: Tensor | torch.SymInt) -> Tensor | torch.SymInt:
    if isinstance(value, torch.SymInt):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
