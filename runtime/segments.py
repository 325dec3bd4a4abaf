"""Segments: what a block computes between our ops, compiled by Inductor, once for each distinct structure in the process.

Ops name a segment by a number, which stands for its structure. Inductor keeps what it has compiled on the disk, for the next
process. A segment that cannot be compiled runs op by op, and the log says why, once.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_Run = Callable[..., Sequence[Tensor]]

_lock = threading.Lock()
_numbers: dict[str, int] = {}
_segments: list[fx.GraphModule] = []
_compiled: dict[tuple[int, int], _Run] = {}  # by number and threads, whose count Inductor writes into its loops
_log = logging.getLogger(__name__)


def number_of(structure: str, segment: fx.GraphModule) -> int:
    """Return the number of a structure; ``segment`` is one that has it."""
    with _lock:
        number = _numbers.setdefault(structure, len(_segments))
        if number == len(_segments):
            _segments.append(segment)
        return number


def compile_segment(number: int) -> None:
    """Compile a segment for as many threads as torch has now, unless that is done."""
    key = number, torch.get_num_threads()
    with _lock:
        if key not in _compiled:
            _compiled[key] = _compile(_segments[number])


def run_segment(inputs: Sequence[Tensor], segment: int) -> list[Tensor]:
    """Return the results of a segment."""
    key = segment, torch.get_num_threads()
    if key not in _compiled:
        compile_segment(segment)
    return list(_compiled[key](*inputs))


def _compile(segment: fx.GraphModule) -> _Run:
    from torch._inductor import config, standalone_compile  # takes a second, and only who compiles needs it

    examples: list[Any] = [_example(node.meta["val"]) for node in segment.graph.find_nodes(op="placeholder")]
    # One after another and here: no processes that outlive us, and nothing is compiled for what is only probable.
    with torch.no_grad(), config.patch(compile_threads=1):
        try:
            compiled: Any = standalone_compile(segment, examples, dynamic_shapes="from_example_inputs")
        except (RuntimeError, OSError) as error:  # Inductor's own are RuntimeErrors; what it cannot do, ops can
            _log.warning("a segment is not compiled and runs op by op: %s: %s", type(error).__name__, error)
            return segment.forward
    run: _Run = compiled
    return run


def _example(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
