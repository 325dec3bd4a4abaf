"""Segments: the compute of a block between our ops, compiled by Inductor once per distinct structure and process.

Ops refer to a segment by the number of its structure. Inductor caches compiled code on disk for the next process. A
segment that cannot be compiled, or that fails when it runs, runs op by op; the log (once) and the report say why.

Compiled code takes and returns tensors with the layouts of the capture. An input with other strides, which happens if
the fake kernel of the op that made it is wrong, is copied; the log and the report say that too.

Code compiled with symbolic sizes is valid for all sizes that the guards of its capture allow. So a structure with
symbols belongs to one capture, and compiling it again later must not need further guards.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing

from zinf_compile.ir.glossary import printable
from zinf_compile.runtime.execute.compiled_memory import collecting_code, count_compiled_workspace
from zinf_compile.runtime.execute.layouts import Layouts
from zinf_compile.runtime.observe.progress import say

_Run = Callable[..., Sequence[Tensor]]
_Structure = tuple[str, int | None]  # its description, and the id of the table of its symbols, if it has any


class _Key(NamedTuple):
    """A segment, and the settings of torch that compiled code depends on."""

    number: int
    num_threads: int
    is_deterministic: bool
    precision: str  # of float32 products


_OF_FAKE_KERNEL = "the fake kernel of the op that made it says otherwise"
_SAME = "zinf_same_structure"  # key in a segment's ``meta``: the segment that represents its structure
_lock = threading.RLock()  # reentrant: garbage collection while it is held may forget segments
_numbers: dict[_Structure, int] = {}
_segments: dict[int, Callable[[], fx.GraphModule | None]] = {}  # if sizes are symbolic, only while the capture lives
_compiled: dict[_Key, "_Compiled"] = {}
_remarks: dict[int, dict[str, None]] = {}  # by segment: what does not run as compiled, and why
_log = logging.getLogger(__name__)


def _forget_other_threads() -> None:
    """In a forked child: replace the lock, since its owner may not exist here and the collector would wait for it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_other_threads)


def number_of(structure: str, segment: fx.GraphModule) -> int:
    """Return the number of a structure; ``segment`` has that structure.

    With symbols the number is valid as long as one of the segments lives for which it was returned.
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
        _remarks.pop(number, None)
        for key in list(_compiled):  # garbage collection may run in between and forget others
            if key.number == number:
                _compiled.pop(key, None)


def is_compiled(number: int) -> bool:
    """Return whether a segment is compiled for torch's current settings."""
    return _key(number) in _compiled


def compile_segment(number: int) -> None:
    """Compile a segment for torch's current settings, unless it is compiled already."""
    key = _key(number)
    with _lock:
        if key not in _compiled:
            segment = _segment(number)
            with collecting_code() as code:
                run = _compile(number, segment)
            workspace = count_compiled_workspace(code[0], segment.graph) if run and len(code) == 1 else None
            _compiled[key] = _Compiled(number, segment, run, workspace)


def run_segment(inputs: Sequence[Tensor], sizes: Sequence[int], segment: int) -> list[Tensor]:
    """Return the results of a segment."""
    key = _key(segment)
    if key not in _compiled:
        say(f"compiling a segment for {key.num_threads} threads, since torch's settings have changed")
        compile_segment(segment)
    return _compiled[key].run(inputs, tuple(sizes))


def compiled_workspace(number: int) -> int | None:
    """Return the bytes that the compiled code of a segment allocates at once beside its results; None if unknown."""
    compiled = _compiled.get(_key(number))
    return None if compiled is None else compiled.workspace


def remarks_on(number: int) -> tuple[str, ...]:
    """Return, as text, which parts of a segment do not run as compiled, and why."""
    return tuple(_remarks.get(number, ()))


class _Compiled:
    """A segment for one setting of torch: the layouts of its inputs and results, and its compiled code."""

    def __init__(self, number: int, segment: fx.GraphModule, run: _Run | None, workspace: int | None) -> None:
        """``run`` is None for one that runs op by op, and ``workspace`` if it is not known."""
        placeholders = [node.meta["val"] for node in segment.graph.find_nodes(op="placeholder")]
        (results,) = segment.graph.output_node().args
        assert isinstance(results, tuple | list)
        sizes = [value for value in placeholders if isinstance(value, torch.SymInt)]
        self._number, self._run, self.workspace = number, run, workspace
        self._inputs = Layouts(sizes, [value for value in placeholders if isinstance(value, Tensor)])
        self._results = Layouts(sizes, [node.meta["val"] for node in results if isinstance(node, fx.Node)])
        self._checked: tuple[int, ...] | None = None  # the sizes at which results were last checked
        self._copied: set[int] = set()  # positions of inputs that had other strides

    def run(self, inputs: Sequence[Tensor], sizes: tuple[int, ...]) -> list[Tensor]:
        """Return the results of the compiled code, or of the ops if it fails."""
        given = None if self._run is None else self._lay_out(inputs, sizes)
        if self._run is None or given is None:
            return self._run_ops(inputs, sizes)
        try:
            results = list(self._run(*sizes, *given))
        except (MemoryError, torch.OutOfMemoryError):  # running op by op needs no less memory
            raise
        except Exception as error:  # noqa: BLE001  # of any kind: running op by op shows whether the model raised it
            results = self._run_ops(inputs, sizes)
            self._give_up(f"it fails when it runs: {_in_words(error)}")
            return results
        if self._checked != sizes and not self._check(results, given, sizes):
            return self._run_ops(inputs, sizes)
        return results

    def _lay_out(self, inputs: Sequence[Tensor], sizes: tuple[int, ...]) -> list[Tensor] | None:
        """Return inputs with the strides of the compiled code; None if something other than strides differs."""
        given = list(inputs)
        for position, (layout, tensor) in enumerate(zip(self._inputs.at(sizes), inputs, strict=True)):
            if layout.accepts(tensor):
                continue
            difference = layout.difference(tensor)
            if difference is not None:
                self._give_up(f"input {position} is {difference}: {_OF_FAKE_KERNEL}")
                return None
            given[position] = layout.copy(tensor)
            if position not in self._copied and not (tensor.is_neg() or tensor.is_conj()):
                self._copied.add(position)
                strides = f"{tuple(tensor.stride())}, and not {layout.strides}"
                _remark(self._number, f"copies input {position}, whose strides are {strides}: {_OF_FAKE_KERNEL}")
        return given

    def _check(self, results: Sequence[Tensor], given: Sequence[Tensor], sizes: tuple[int, ...]) -> bool:
        """Return whether results have the captured layouts, each in its own memory; if not, ops run instead."""
        layouts = self._results.at(sizes)
        storages = [tensor.untyped_storage()._cdata for tensor in (*results, *given)]
        for position, (layout, result) in enumerate(zip(layouts, results, strict=True)):
            if not layout.accepts(result):
                theirs = f"{tuple(result.shape)} of {result.dtype} with strides {tuple(result.stride())}"
                wanted = f"{layout.shape} of {layout.dtype} with strides {layout.strides}"
                self._give_up(f"Inductor gives result {position} as {theirs}, where ops give {wanted}")
                return False
            if storages.count(storages[position]) > 1:
                self._give_up(f"Inductor gives result {position} in memory that is not its own")
                return False
        self._checked = sizes
        return True

    def _run_ops(self, inputs: Sequence[Tensor], sizes: tuple[int, ...]) -> list[Tensor]:
        results: Sequence[Tensor] = _segment(self._number).forward(*sizes, *inputs)
        return list(results)

    def _give_up(self, reason: str) -> None:
        """Run op by op from now on."""
        self._run = None
        _refuse(self._number, reason)


def _segment(number: int) -> fx.GraphModule:
    segment = _segments[number]()
    assert segment is not None
    return segment


def _key(number: int) -> _Key:
    return _Key(
        number,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _compile(number: int, segment: fx.GraphModule) -> _Run | None:
    """Return the compiled code of a segment; None, with a line in the log, if it cannot be compiled."""
    from torch._inductor import config, standalone_compile  # takes a second, and is needed only to compile
    from torch._inductor.async_compile import maybe_warm_pool

    from zinf_compile.runtime.execute.inductor import KeepStrides, example_of, for_inductor
    from zinf_compile.runtime.execute.vector_isa import probe_widest_first

    values = [node.meta["val"] for node in segment.graph.find_nodes(op="placeholder")]
    symbols = _symbols(segment)
    # Fake examples: on a GPU, real ones would take memory that no plan has counted.
    fake_mode = detect_fake_mode(values)
    context = TracingContext.try_get()
    is_guarded = context is not None and context.fake_mode is fake_mode  # the capture accepts guards until it ends
    num_guards = 0 if symbols is None else len(symbols.guards)
    with fake_mode or nullcontext():
        examples: list[Any] = [example_of(value) for value in values]
    source: Any = "from_example_inputs" if fake_mode is None else "from_tracing_context"
    # Code on disk may hold only for the sizes of the capture in which it was compiled, and this capture may have ended.
    keep = KeepStrides(segment, is_only_here=symbols is not None and not is_guarded)
    # No CUDA graphs, whatever is set for others: they would replay with the addresses of what moves.
    settings: dict[str, Any] = {"post_grad_custom_pre_pass": keep, "triton.cudagraphs": False}
    if any(isinstance(value, Tensor) and value.is_cuda for value in values):
        maybe_warm_pool()  # torch's worker processes compile the kernels of Triton, as under torch.compile
    else:
        settings["compile_threads"] = 1  # one after another: no worker processes, and nothing is compiled speculatively
    with torch.no_grad(), tracing(TracingContext(fake_mode)), config.patch(settings), probe_widest_first():
        try:
            compiled: Any = standalone_compile(for_inductor(segment), examples, dynamic_shapes=source)
        except Exception as error:  # noqa: BLE001  # of any kind: what Inductor cannot compile runs op by op
            _refuse(number, _in_words(error))
            return None
    if symbols is not None and not is_guarded and len(symbols.guards) > num_guards:
        _refuse(number, f"it holds only where {symbols.guards[-1].expr}, which its capture did not require")
        return None
    run: _Run = compiled
    return run


def _refuse(number: int, reason: str) -> None:
    _log.warning("a segment is not compiled and runs op by op: %s", printable(reason))
    _remarks.setdefault(number, {})[f"runs op by op: {reason}"] = None


def _remark(number: int, remark: str) -> None:
    """Keep a remark on a segment for the report; log it the first time."""
    remarks = _remarks.setdefault(number, {})
    if remark not in remarks:
        _log.warning("a segment %s", printable(remark))
        remarks[remark] = None


def _in_words(error: Exception) -> str:
    """Return the first line of an error, without the debugging hints that Inductor adds."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _symbols(segment: fx.GraphModule) -> Any:
    """Return torch's table of the symbols in the sizes of a segment; None if all of them are fixed."""
    values = (node.meta["val"] for node in segment.graph.find_nodes(op="placeholder"))
    return next((value.node.shape_env for value in values if isinstance(value, torch.SymInt)), None)
