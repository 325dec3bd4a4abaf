"""Segments at run time: one number for each structure, compiled once, op by op where that cannot be."""

import gc
import logging
import re
from collections.abc import Iterator

import pytest
import torch
import torch._inductor
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.segments.structure import describe_structure
from zinf_compile.runtime import segments
from zinf_compile.runtime.compiled import find_compiler
from zinf_compile.runtime.op_impls import register

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")


@pytest.fixture(autouse=True)
def _no_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    register()
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_numbers", {})
        patch.setattr(segments, "_segments", {})
        patch.setattr(segments, "_compiled", {})
        yield


def make_segment(*shape: int) -> fx.GraphModule:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x) * 2 + 1, x.t().contiguous()

    return make_fx(run, tracing_mode="fake")(torch.empty(shape))


def number_of(segment: fx.GraphModule) -> int:
    return segments.number_of(describe_structure(segment.graph), segment)


@needs_compiler
def test_alike_segments_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_one = torch._inductor.standalone_compile

    def count(segment: fx.GraphModule, *args: object, **kwargs: object) -> object:
        compiled.append(segment)
        return compile_one(segment, *args, **kwargs)

    monkeypatch.setattr(torch._inductor, "standalone_compile", count)
    numbers = [number_of(make_segment(*shape)) for shape in ((3, 4), (3, 4), (4, 4))]
    assert numbers == [0, 0, 1]
    for number in numbers:
        segments.compile_segment(number)
    assert len(compiled) == 2
    x = torch.randn(3, 4)
    results = torch.ops.zinf.run_segment([x], [], 0)
    assert len(compiled) == 2
    for ours, theirs in zip(results, make_segment(3, 4)(x), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


@needs_compiler
def test_other_threads_are_other_loops() -> None:
    number, threads = number_of(make_segment(64, 64)), torch.get_num_threads()
    x = torch.randn(64, 64)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(segments.run_segment([x], [], number)[0], torch.relu(x) * 2 + 1)
    finally:
        torch.set_num_threads(threads)
    assert {(key.number, key.num_threads) for key in segments._compiled} == {(number, 1), (number, 2)}


def test_what_cannot_be_compiled_runs_op_by_op_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(torch._inductor, "standalone_compile", refuse)
    number = number_of(make_segment(3, 4))
    x = torch.randn(3, 4)
    with caplog.at_level(logging.WARNING, logger="zinf_compile"):
        for _ in range(2):
            assert torch.equal(segments.run_segment([x], [], number)[0], torch.relu(x) * 2 + 1)
    assert [record.message for record in caplog.records] == [
        "a segment is not compiled and runs op by op: RuntimeError: no such instruction"
    ]


def make_changing_segment() -> fx.GraphModule:
    """Return a segment of rows of any number, which is its first input."""
    graph_module = make_fx(lambda x: (torch.relu(x) * 2 + 1,), tracing_mode="symbolic")(torch.empty(6, 4))
    (x,) = graph_module.graph.find_nodes(op="placeholder")
    with graph_module.graph.inserting_before(x):
        rows = graph_module.graph.placeholder("rows")
    rows.meta["val"] = x.meta["val"].shape[0]
    graph_module.recompile()
    return graph_module


@needs_compiler
def test_changing_sizes_are_compiled_once_for_each_capture() -> None:
    first, second = make_changing_segment(), make_changing_segment()
    assert [number_of(segment) for segment in (first, first, second)] == [0, 0, 1]
    for rows in (6, 9, 100):
        x = torch.randn(rows, 4)
        assert torch.equal(segments.run_segment([x], [rows], 0)[0], torch.relu(x) * 2 + 1)
    assert [key.number for key in segments._compiled] == [0]


@needs_compiler
def test_what_a_capture_did_not_ask_for_is_not_taken_for_granted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_one = torch._inductor.standalone_compile

    def guard(segment: fx.GraphModule, examples: list[object], **kwargs: object) -> object:
        assert isinstance(examples[0], torch.SymInt)
        assert examples[0] < 50  # now the table of symbols has a guard more
        return compile_one(segment, examples, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch._inductor, "standalone_compile", guard)
    number, x = number_of(make_changing_segment()), torch.randn(100, 4)
    with caplog.at_level(logging.WARNING, logger="zinf_compile"):
        assert torch.equal(segments.run_segment([x], [100], number)[0], torch.relu(x) * 2 + 1)
    assert [re.sub(r"s\d+", "s0", record.message) for record in caplog.records] == [
        "a segment is not compiled and runs op by op: it holds only where s0 < 50, which its capture did not ask for"
    ]


@needs_compiler
def test_other_settings_are_other_code() -> None:
    number, x = number_of(make_segment(8, 8)), torch.randn(8, 8)
    try:
        for is_deterministic in (False, True):
            torch.use_deterministic_algorithms(is_deterministic)
            assert torch.equal(segments.run_segment([x], [], number)[0], torch.relu(x) * 2 + 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {key.is_deterministic for key in segments._compiled} == {False, True}


def test_segments_with_symbols_are_gone_when_their_capture_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_compile", lambda segment: None)
    segment = make_changing_segment()
    number, fixed = number_of(segment), number_of(make_segment(3, 4))
    same = copy_graph_module(segment)  # of another block, say
    assert number_of(same) == number
    del segment
    gc.collect()
    x = torch.randn(9, 4)
    assert torch.equal(segments.run_segment([x], [9], number)[0], torch.relu(x) * 2 + 1)
    del same
    gc.collect()
    assert list(segments._segments) == list(segments._numbers.values()) == [fixed]
    assert segments._compiled == {}
