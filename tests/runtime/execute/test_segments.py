"""Segments at run time: identical ones share a number and are compiled once; what cannot be compiled runs op by op."""

import gc
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch._inductor
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.transforms.segments.structure import describe_structure
from zinf_compile.runtime.execute import segments
from zinf_compile.runtime.execute.op_bodies import register
from zinf_compile.runtime.native.compiled import find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")


@pytest.fixture(autouse=True)
def _no_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    register()
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_numbers", {})
        patch.setattr(segments, "_segments", {})
        patch.setattr(segments, "_compiled", {})
        patch.setattr(segments, "_remarks", {})
        yield


@contextmanager
def compiled_as(run: Callable[..., object]) -> Iterator[None]:
    """Let Inductor return this function for anything it is asked to compile."""
    with mock.patch.object(torch._inductor, "standalone_compile", return_value=run):
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
    """Return a segment with symbolic numbers of rows and columns, which are its first inputs."""
    graph_module = make_fx(lambda x: (torch.relu(x) * 2 + 1,), tracing_mode="symbolic")(torch.empty(6, 4))
    (x,) = graph_module.graph.find_nodes(op="placeholder")
    for name, size in zip(("rows", "columns"), x.meta["val"].shape, strict=True):
        with graph_module.graph.inserting_before(x):
            graph_module.graph.placeholder(name).meta["val"] = size
    graph_module.recompile()
    return graph_module


@needs_compiler
def test_changing_sizes_are_compiled_once_for_each_capture() -> None:
    first, second = make_changing_segment(), make_changing_segment()
    assert [number_of(segment) for segment in (first, first, second)] == [0, 0, 1]
    for rows in (6, 9, 100):
        x = torch.randn(rows, 4)
        assert torch.equal(segments.run_segment([x], [rows, 4], 0)[0], torch.relu(x) * 2 + 1)
    assert [key.number for key in segments._compiled] == [0]


@needs_compiler
def test_what_a_capture_did_not_ask_for_is_not_taken_for_granted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_one = torch._inductor.standalone_compile

    def guard(segment: fx.GraphModule, examples: list[object], **kwargs: object) -> object:
        assert isinstance(examples[0], torch.SymInt)
        assert examples[0] < 50  # adds a guard to the table of symbols
        return compile_one(segment, examples, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch._inductor, "standalone_compile", guard)
    number, x = number_of(make_changing_segment()), torch.randn(100, 4)
    with caplog.at_level(logging.WARNING, logger="zinf_compile"):
        assert torch.equal(segments.run_segment([x], [100, 4], number)[0], torch.relu(x) * 2 + 1)
    assert [re.sub(r"s\d+", "s0", record.message) for record in caplog.records] == [
        "a segment is not compiled and runs op by op: it holds only where s0 < 50, which its capture did not require"
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
    monkeypatch.setattr(segments, "_compile", lambda number, segment: None)
    segment = make_changing_segment()
    number, fixed = number_of(segment), number_of(make_segment(3, 4))
    same = copy_graph_module(segment)  # such as that of another block
    assert number_of(same) == number
    del segment
    gc.collect()
    x = torch.randn(9, 4)
    assert torch.equal(segments.run_segment([x], [9, 4], number)[0], torch.relu(x) * 2 + 1)
    del same
    gc.collect()
    assert list(segments._segments) == list(segments._numbers.values()) == [fixed]
    assert segments._compiled == {}


def trace(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(run, tracing_mode="fake")(*inputs)


@needs_compiler
def test_results_and_views_inside_have_the_strides_of_the_ops() -> None:
    """Inductor decomposes a cat with an empty tensor to a clone, which keeps the strides of the other tensor."""

    def run(empty: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        key = torch.cat((empty, x.transpose(1, 2)), dim=-2)
        return key, torch.ops.aten.view(key, [8, 5, 3]) * 2

    inputs = [torch.empty(0), torch.randn(2, 5, 4, 3)]
    segment = trace(run, *inputs)
    number = number_of(segment)
    results = segments.run_segment(inputs, [], number)
    assert segments.remarks_on(number) == ()
    for ours, theirs in zip(results, segment(*inputs), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


@needs_compiler
def test_an_input_with_other_strides_is_copied_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    number, x = number_of(make_segment(3, 4)), torch.randn(4, 3).t()
    with caplog.at_level(logging.WARNING, logger="zinf_compile"):
        for _ in range(2):
            first, second = segments.run_segment([x], [], number)
            assert torch.equal(first, torch.relu(x) * 2 + 1)
            assert (first.stride(), second.stride()) == ((4, 1), (3, 1))
    strides = "(1, 3), and not (4, 1)"
    remark = f"copies input 0, whose strides are {strides}: the fake kernel of the op that made it says otherwise"
    assert segments.remarks_on(number) == (remark,)
    assert [record.message for record in caplog.records] == [f"a segment {remark}"]


@needs_compiler
def test_sizes_that_change_have_strides_that_change() -> None:
    number = number_of(make_changing_segment())
    for rows in (6, 9):
        for x in (torch.randn(rows, 4), torch.randn(4, rows).t()):
            (result,) = segments.run_segment([x], [rows, 4], number)
            assert torch.equal(result, torch.relu(x) * 2 + 1)
            assert result.stride() == (4, 1)
    (remark,) = segments.remarks_on(number)
    assert "whose strides are (1, 6), and not (4, 1)" in remark


def test_examples_are_fake_and_graphs_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU real examples would take memory that no plan has counted, and CUDA graphs replay with old addresses."""
    seen: list[object] = []

    def note(segment: fx.GraphModule, examples: list[object], **kwargs: object) -> object:
        seen.append((isinstance(examples[0], FakeTensor), torch._inductor.config.triton.cudagraphs))
        return lambda *inputs: segment(*inputs)

    monkeypatch.setattr(torch._inductor, "standalone_compile", note)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        segments.compile_segment(number_of(make_segment(3, 4)))
    assert seen == [(True, False)]


@needs_compiler
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_of_a_gpu_are_compiled_by_the_worker_processes_of_torch(device: str) -> None:
    """One process would take a minute for the kernels of Triton of a large model. On a CPU there are none of these."""
    seen = []

    def compile_one(segment: fx.GraphModule, examples: object, **kwargs: object) -> Callable[..., object]:
        seen.append(torch._inductor.config.compile_threads)
        return segment.forward

    with (
        mock.patch.object(torch._inductor, "standalone_compile", compile_one),
        mock.patch.object(torch._inductor.async_compile, "maybe_warm_pool") as warm,
        torch._inductor.config.patch(compile_threads=7),
        FakeTensorMode(),
    ):
        segment = make_fx(lambda x: (torch.relu(x) + 1,), tracing_mode="real")(torch.empty(2, 3, device=device))
        assert segments._compile(0, segment) is not None
    assert seen == [1 if device == "cpu" else 7]
    assert warm.called == (device == "cuda")


def test_code_on_disk_is_not_used_where_it_may_hold_for_fewer_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of another capture may have guards, and this one has ended: it takes none any more."""
    keys: list[object] = []
    compile_one = torch._inductor.standalone_compile

    def note(segment: fx.GraphModule, *args: object, **kwargs: object) -> object:
        keys.append(torch._inductor.config.post_grad_custom_pre_pass.uuid())
        return compile_one(segment, *args, **kwargs)

    monkeypatch.setattr(torch._inductor, "standalone_compile", note)
    for make in (lambda: make_segment(3, 4), make_changing_segment):
        for _ in range(2):
            segments._compiled.clear()
            segments.compile_segment(number_of(make()))
    assert keys[0] == keys[1]
    assert keys[2] != keys[3]


@needs_compiler
def test_the_stride_of_one_element_is_nothing() -> None:
    number = number_of(trace(lambda x: (torch.relu(x) * 2 + 1,), torch.empty(3, 1)))
    segments.run_segment([torch.randn(1, 3).t()], [], number)
    assert segments.remarks_on(number) == ()


@needs_compiler
def test_bytes_that_are_not_the_values_are_not_read() -> None:
    """The imaginary part of a conjugate is a negated view: its bytes have the other sign."""
    number, x = number_of(make_segment(3, 4)), torch.randn(3, 4, dtype=torch.complex64).conj()
    (part,) = segments.run_segment([torch.empty(3, 4).copy_(x.imag)], [], number)[:1]
    shown = torch._neg_view(torch.empty(3, 4).copy_(-x.imag))
    assert shown.is_neg()
    assert torch.equal(segments.run_segment([shown], [], number)[0], part)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(4, 3), "(4, 3) of torch.float32 on cpu, and not (3, 4) of torch.float32 on cpu"),
        (torch.zeros(3, 4).double(), "(3, 4) of torch.float64 on cpu, and not (3, 4) of torch.float32 on cpu"),
    ],
)
def test_an_input_that_is_no_such_tensor_at_all_runs_op_by_op(x: Tensor, words: str) -> None:
    number = number_of(make_segment(3, 4))
    with compiled_as(lambda x: pytest.fail("it is compiled for others")):
        (result, _) = segments.run_segment([x], [], number)
    assert torch.equal(result, torch.relu(x) * 2 + 1)
    (remark,) = segments.remarks_on(number)
    assert remark.startswith(f"runs op by op: input 0 is {words}: ")


def test_what_fails_when_it_runs_runs_op_by_op_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(x: Tensor) -> object:
        raise AssertionError("expected size 3==3, stride 1==4 at dim=0\nError in op: input")

    number, x = number_of(make_segment(3, 4)), torch.randn(3, 4)
    with compiled_as(fail), caplog.at_level(logging.WARNING, logger="zinf_compile"):
        for _ in range(2):
            assert torch.equal(segments.run_segment([x], [], number)[0], torch.relu(x) * 2 + 1)
    reason = "it fails when it runs: AssertionError: expected size 3==3, stride 1==4 at dim=0"
    assert segments.remarks_on(number) == (f"runs op by op: {reason}",)
    assert [record.message for record in caplog.records] == [f"a segment is not compiled and runs op by op: {reason}"]


def test_an_error_that_ops_raise_too_is_no_reason_to_run_op_by_op() -> None:
    segment = trace(lambda x, rows: (x[rows] * 2 + 1,), torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))
    number, x = number_of(segment), torch.randn(3, 4)
    with compiled_as(segment):
        with pytest.raises(IndexError):
            segments.run_segment([x, torch.tensor([0, 3])], [], number)
        segments.run_segment([x, torch.tensor([0, 2])], [], number)
    assert segments.remarks_on(number) == ()


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError()])
def test_without_memory_ops_are_not_tried(error: Exception) -> None:
    def fail(x: Tensor) -> object:
        raise error

    number = number_of(make_segment(3, 4))
    with compiled_as(fail), pytest.raises(type(error)):
        segments.run_segment([torch.zeros(3, 4)], [], number)
    assert segments.remarks_on(number) == ()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            lambda x: ((torch.relu(x) * 2 + 1).t().contiguous().t(), x.t().contiguous()),
            "with strides (1, 3)",
        ),
        (lambda x: (torch.relu(x) * 2 + 1, x.t()), "result 1 as (4, 3) of torch.float32 with strides (1, 4)"),
        (lambda x: (x.copy_(torch.relu(x) * 2 + 1), x.t().contiguous()), "result 0 in memory that is not its own"),
    ],
)
def test_results_that_are_not_as_captured_are_not_given(run: Callable[..., object], words: str) -> None:
    number, x = number_of(make_segment(3, 4)), torch.rand(3, 4)
    with compiled_as(run):
        results = segments.run_segment([x], [], number)
    for ours, theirs in zip(results, make_segment(3, 4)(x), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    (remark,) = segments.remarks_on(number)
    assert words in remark
