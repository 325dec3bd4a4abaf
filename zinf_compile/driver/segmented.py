"""Compiles the segments of a captured graph on this machine, and reports what falls back to eager ops."""

import functools
import logging
from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from zinf_compile.ir.facts import GraphFacts
from zinf_compile.ir.ops import RUN_SEGMENT
from zinf_compile.ir.sizes import Size
from zinf_compile.passes.analysis.collect import CapturedGraph, workspace_name
from zinf_compile.passes.contract import BLOCK
from zinf_compile.passes.transforms.segments.structure import describe_structure
from zinf_compile.runtime.execute.segments import (
    compile_segment,
    compiled_workspace,
    is_compiled,
    number_of,
    remarks_on,
)
from zinf_compile.runtime.native.compiled import find_compiler
from zinf_compile.runtime.observe.progress import say

_log = logging.getLogger(__name__)
_MOST_NAMES = 3  # of blocks, in a sentence
_NO_COMPILER = (
    "Inductor needs a C++ compiler, such as g++, and there is none on the PATH; install one, or say compute='aten'"
)


def describe_missing_compiler() -> str | None:
    """Return why nothing can be compiled on this machine; None if there is a compiler. Logged once."""
    if find_compiler() is not None:
        return None
    _say_without_compiler()
    return _NO_COMPILER


def number_of_segment(segment: fx.GraphModule) -> int:
    """Return the runtime's number of a segment's structure."""
    return number_of(describe_structure(segment.graph), segment)


def compile_segments(captured: CapturedGraph) -> None:
    """Compile every segment of a captured graph that is not compiled yet."""
    new = [number for number in _numbers(captured) if not is_compiled(number)]
    for position, number in enumerate(new, start=1):
        say(f"compiling segment {position} of {len(new)}")
        compile_segment(number)


def with_compiled_workspaces(captured: CapturedGraph, facts: GraphFacts[Size]) -> GraphFacts[Size]:
    """Return facts in which compiled segments need the memory that their code allocates, where that is known."""
    known: dict[str, int] = {}
    for node in _calls(captured):
        if (nbytes := compiled_workspace(_number(node))) is not None:
            known[workspace_name(node)] = nbytes
    values = tuple(replace(value, nbytes=known[value.name]) if value.name in known else value for value in facts.values)
    return replace(facts, values=values)


def find_fallbacks(captured: CapturedGraph) -> list[str]:
    """Return sentences about the blocks that have not run as compiled so far, with the reasons."""
    blocks: dict[str, dict[str, None]] = {}
    for node in _calls(captured):
        for remark in remarks_on(_number(node)):
            blocks.setdefault(remark, {})[node.meta[BLOCK]] = None
    return [f"{_some(list(each))}: {remark}" for remark, each in blocks.items()]


def _some(names: list[str]) -> str:
    """Join the first names of a list, and say how many more there are."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more blocks"


@functools.cache  # logs once
def _say_without_compiler() -> None:
    _log.warning("graphs compute op by op: %s", _NO_COMPILER)


def _numbers(captured: CapturedGraph) -> dict[int, None]:
    return dict.fromkeys(_number(node) for node in _calls(captured))


def _calls(captured: CapturedGraph) -> Iterator[fx.Node]:
    graphs = [captured.forward] + ([captured.backward] if captured.backward is not None else [])
    for graph in graphs:
        yield from graph.graph.find_nodes(op="call_function", target=RUN_SEGMENT)


def _number(call: fx.Node) -> int:
    number = call.args[2]
    assert isinstance(number, int)
    return number
