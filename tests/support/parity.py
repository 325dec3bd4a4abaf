"""The harness of the parity tests: train a workload in plain PyTorch and under zinf_compile, and compare bit by bit.

A workload is a function without arguments. It returns a model and its batches, the same at every call.
``model(**batch)`` returns the loss, or an output with a ``.loss``. A placement says where parameters live:

    nvme    parameters, gradients and optimizer state on disk; host memory only stages, the device holds the least it can
    host    all of it in host memory
    mixed   some parameters resident on the device, some in host memory, some on disk

A ``way`` says what runs the ops. ``aten`` has the bits of plain PyTorch. Inductor fuses ops and reorders sums, so its runs
are compared with the same compiled segments when all parameters are resident and nothing moves. The first step of that
resident run is compared with plain PyTorch, to rounding. Segments depend on what is recomputed, and that depends on the
budget, unless ``recompute`` is given.
"""

import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import zinf_compile
from tests.support.fake_device import FakeDevice, on_fake_device
from tests.support.fixed_rates import with_fixed_rates
from tests.support.traces import (
    Batch,
    Loss,
    Trace,
    Workload,
    assert_equal,
    assert_same,
    compile_plainly,
    is_same,
    plain_loss,
    train,
)
from zinf_compile.driver import session as session_module
from zinf_compile.inspect.reports import Report
from zinf_compile.ir.config import Config, make_config, parse_size
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.passes.planner.placement import homes as placement_module

PLACEMENTS = ("nvme", "host", "mixed")
# The least a streamed AdamW step needs, with a margin for a separate compute copy; beside a GPU updates run in half of it.
_STAGING = (1024 if {"ZINF_GPU", "ZINF_STREAMS"} & set(os.environ) else 512) * 2**10
_PLENTY = 64 * 2**20
_EVERY_BIT = {"tiles": False}  # with so little memory the loss would be fused with its layer, which changes bits
_ROUNDING = 1e-5  # relative, for float32 sums that Inductor reorders; a wrong value is off by percents
NEEDS = re.compile(r"needs (\d+(?:\.\d+)? \w+)")


def needed_device_memory(error: Exception) -> int:
    """Return the device budget that a CapacityError asks for; raise any other error again."""
    if not isinstance(getattr(error, "inner_exception", error), CapacityError):
        raise error
    found = NEEDS.search(str(error))
    assert found is not None, str(error)
    needed = parse_size(found[1], option="device_memory")
    assert needed < 2**20, f"the error asks for {found[1]}: from 1 MiB on, it is rounded too coarsely for a budget"
    return needed + 103  # the message rounds to a tenth of a KiB


@contextmanager
def on_cuda(more: Mapping[str, float] | None = None) -> Iterator[None]:
    """Optimize models inside for ``device="cuda"``, where no device is said.

    ``more`` says what some of their budgets are multiplied by.
    """

    def make(options: Mapping[str, object], **given: Any) -> Config:
        if "device" in options:
            return make_config(options, **given)
        scaled = {
            name: int(parse_size(size, option=name) * factor)  # type: ignore[arg-type]  # it checks the type
            for name, factor in (more or {}).items()
            if (size := options.get(name)) is not None
        }
        return make_config({**options, **scaled, "device": "cuda"}, **given)

    with mock.patch("zinf_compile.frontend.api.make_config", make):
        yield


@contextmanager
def on_streams(more: Mapping[str, float] | None = None, *, integrated: bool = False) -> Iterator[FakeDevice]:
    """Run models that are optimized inside on a fake device with streams, with ``more`` memory, as in ``on_cuda``."""
    with on_fake_device(FakeDevice(integrated=integrated)) as device, on_cuda(more):
        yield device


def on_gpu(workload: Workload, *, plain: bool) -> tuple[nn.Module, Sequence[Batch]]:
    """Return a workload with its batches on the GPU; a ``plain`` model is there, too."""
    model, batches = workload()
    moved = [{name: value.cuda() for name, value in batch.items()} for batch in batches]
    return (model.cuda() if plain else model), moved


class Parity:
    """Runs workloads and compares them; one per test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, cache: dict[Any, Any], case: Hashable) -> None:
        """``case`` identifies the plain runs that this test shares with others: its parameters without the placement."""
        self._folder = folder
        self._case = case
        self._num_loops = 0
        self._monkeypatch = monkeypatch
        self._cache = cache
        self._models: list[nn.Module] = []
        self.has_gpu = "ZINF_GPU" in os.environ
        self.has_streams = self.has_gpu or "ZINF_STREAMS" in os.environ
        self.is_integrated = os.environ.get("ZINF_STREAMS") == "integrated"  # what is in host memory is read in place
        self._exits = ExitStack()
        # These models are tiny. By default they would be resident, and half of host memory would be used for homes.
        monkeypatch.setattr(placement_module, "RESIDENT_THRESHOLD", 0)
        monkeypatch.setattr(Config, "staging_memory", property(lambda config: min(config.host_memory, _STAGING)))
        monkeypatch.setattr(session_module, "measure_hardware", with_fixed_rates)

    def make(self, workload: Workload, *, plain: bool = False) -> tuple[nn.Module, Sequence[Batch]]:
        """Return a model and its batches, which are on the GPU if these tests run on one."""
        return on_gpu(workload, plain=plain) if self.has_gpu else workload()

    trace = Trace
    train = staticmethod(train)
    plain_loss = staticmethod(plain_loss)
    assert_same = staticmethod(assert_same)
    assert_equal = staticmethod(assert_equal)

    def on_streams(self, *, integrated: bool = False) -> FakeDevice:
        """Use a fake device with streams for models that are optimized from now on; return it."""
        self.has_streams, self.is_integrated = True, integrated
        return self._exits.enter_context(on_streams(integrated=integrated))

    def close(self) -> None:
        """Check that nothing leaked, and close all models."""
        for model in self._models:
            store = next(model.parameters())._zinf_record.store
            store.check_integrity()
            zinf_compile.close(model)
        self._models.clear()
        self._exits.close()

    def reference(self, workload: Workload, *, captured: bool, loss: Loss = plain_loss) -> Trace:
        """Return the run in plain PyTorch: eager, or captured by torch's ``aot_eager`` backend. It runs once per session."""
        key = (workload, captured, loss)
        if key not in self._cache:
            model, batches = self.make(workload, plain=True)
            self._cache[key] = train(compile_plainly(model) if captured else model, batches, loss=loss)
            torch._dynamo.reset()
        return self._cache[key]

    def resident_run(
        self, workload: Workload, loss: Loss = plain_loss, rounding: float = _ROUNDING, **options: Any
    ) -> Trace:
        """Return the run of compiled segments with all parameters resident; compare its first step with plain PyTorch."""
        key = ("resident", workload, loss, *sorted(options.items()))
        if key not in self._cache:
            torch._dynamo.reset()
            model, batches = self.make(workload)
            ours = train(self.resident(model, **options), batches, loss=loss)
            self._assert_resident(model)
            plain = self.reference(workload, captured=False, loss=loss)
            torch.testing.assert_close(ours.losses[0].cpu(), plain.losses[0].cpu(), rtol=rounding, atol=0.0)
            # Some gradients are sums that cancel, such as that of a bias before batch normalisation: all that is left
            # is rounding. So the tolerance is relative to the largest gradient of the model.
            largest = max(float(each.abs().max()) for each in plain.gradients[0].values() if each is not None)
            for name, gradient in plain.gradients[0].items():
                mine = ours.gradients[0][name]
                if gradient is None or mine is None:
                    assert mine is gradient, name
                    continue
                torch.testing.assert_close(mine.cpu(), gradient.cpu(), rtol=0.0, atol=rounding * largest)
            self._cache[key] = ours
        return cast(Trace, self._cache[key])

    def assert_segments_ran(self, model: nn.Module) -> None:
        """Assert that all graphs of a model compute in compiled segments, without fallbacks."""
        report = zinf_compile.report(model)
        assert not report.fallbacks, report.fallbacks
        assert report.plans
        for plan in report.plans:
            assert any(op.op == "zinf.run_segment.default" for op in plan.request.captured[0].ops), plan.request.name

    def plain_runs(self, workload: Workload, loss: Loss = plain_loss) -> Callable[[bool], Trace]:
        """Return a function that runs a workload in plain PyTorch, captured or not, as ``assert_plain`` takes it."""
        return lambda captured: self.reference(workload, captured=captured, loss=loss)

    def budgets(self, workload: Workload, placement: str, **mode: Any) -> dict[str, Any]:
        """Return budgets that put a workload's parameters on the tiers of a placement."""
        model, _ = workload()
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if placement == "nvme":
            tiers = {"host_memory": _STAGING, "nvme": self._folder}
            return {"device_memory": self.smallest_device_memory(workload, tiers, **mode), **tiers, **_EVERY_BIT}
        if placement == "host":
            device = self.smallest_device_memory(workload, **mode)
            return {"device_memory": device, "host_memory": _STAGING + _PLENTY, **_EVERY_BIT}
        assert placement == "mixed"
        tiers = {"host_memory": _STAGING + nbytes // 2, "nvme": self._folder}
        # An integrated device reads what is in host memory there, but not what is on nvme.
        device = self.smallest_device_memory(workload, tiers if self.is_integrated else None, **mode)
        return {"device_memory": device + nbytes // 4, **tiers, **_EVERY_BIT}

    def smallest_device_memory(
        self,
        workload: Workload,
        tiers: dict[str, Any] | None = None,
        *,
        captured: bool,
        loss: Loss = plain_loss,
        **options: Any,
    ) -> int:
        """Return the least device budget, as the errors of ``optimize`` and of the first call state it, to a tenth of a KiB.

        A captured model needs the same budget for all ``tiers``, but on an integrated device. By default there is plenty of
        host memory and no disk.
        """
        is_of_host = tiers is None or (captured and not self.is_integrated)
        device = self.has_streams, self.is_integrated
        host_memory = None if tiers is None or is_of_host else tiers["host_memory"]
        key = ("device_memory", workload, host_memory, captured, loss, device, *sorted(options.items()))
        if key not in self._cache:
            host = {
                **(tiers if tiers is not None and not is_of_host else {"host_memory": _STAGING + _PLENTY}),
                **_EVERY_BIT,
            }
            with on_cuda() if self.has_streams else nullcontext():  # tests share it, whatever more some of them need
                needs_some = not (is_of_host and self.is_integrated)  # else nothing has to be on the device
                self._cache[key] = self._find_smallest(
                    workload, host, captured=captured, needs_some=needs_some, loss=loss, **options
                )
        return int(self._cache[key])

    def _find_smallest(
        self,
        workload: Workload,
        host: Mapping[str, Any],
        *,
        captured: bool,
        needs_some: bool,
        loss: Loss,
        **options: Any,
    ) -> int:
        model, batches = self.make(workload)
        budgets = {"device_memory": 0, **host}
        if needs_some:
            with pytest.raises(CapacityError) as refused:
                zinf_compile.optimize(model, device_memory=0, **host)
            budgets["device_memory"] = needed_device_memory(refused.value)
        if not captured:
            return int(budgets["device_memory"])
        nbytes = self._try_capture(model, batches[0], loss, budgets, **options)
        while options.get("compute") == "inductor" and nbytes > budgets["device_memory"]:
            budgets["device_memory"] = nbytes  # compiled segments may need more than single ops
            nbytes = self._try_capture(workload()[0], batches[0], loss, budgets, **options)
        return nbytes

    def _try_capture(
        self,
        model: nn.Module,
        batch: Batch,
        loss: Loss,
        budgets: dict[str, Any],
        *,
        backend: str | None = None,
        **options: Any,
    ) -> int:
        if backend is None:
            zinf_compile.optimize(model, **budgets, **options)
            called = model
        else:
            called = torch.compile(model, backend=backend, options=budgets, dynamic=False)
        try:
            loss(called, batch)
            for sentence in zinf_compile.report(model).fallbacks:
                return needed_device_memory(CapacityError(sentence))
        except (CapacityError, BackendCompilerFailed) as error:  # Dynamo wraps what a backend raises
            return needed_device_memory(error)
        finally:
            torch._dynamo.reset()
            zinf_compile.close(model)
        return int(budgets["device_memory"])

    def optimize(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return the optimized model; it is closed when the test ends."""
        zinf_compile.optimize(model, **options)
        self._models.append(model)
        return model

    def optimized(
        self,
        workload: Workload,
        placement: str = "nvme",
        *,
        captured: bool = True,
        loss: Loss = plain_loss,
        **options: Any,
    ) -> tuple[nn.Module, Sequence[Batch]]:
        """Return an optimized workload in a placement."""
        given = {name: option for name, option in options.items() if name not in ("device_memory", "host_memory")}
        budgets = self.budgets(workload, placement, captured=captured, loss=loss, **given)
        model, batches = self.make(workload)
        return self.optimize(model, **{**budgets, "capture": captured, **options}), batches

    def check(
        self,
        workload: Workload,
        placement: str,
        *,
        captured: bool,
        loss: Loss = plain_loss,
        rounding: float = _ROUNDING,
        **options: Any,
    ) -> Report:
        """Train a workload in one placement and mode, and compare it with plain PyTorch; return the report."""
        model, batches = self.optimized(workload, placement, captured=captured, loss=loss, **options)
        ours = train(model, batches, loss=loss)
        if options.get("compute") == "inductor":
            self.assert_segments_ran(model)
            assert_same(ours, self.resident_run(workload, loss, rounding, **options))
        else:
            self.assert_plain(ours, self.plain_runs(workload, loss), captured=captured)
        report = zinf_compile.report(model)
        self.assert_streamed(report, placement, captured=captured)
        return report

    def check_compiled(
        self, compiled: Callable[..., Any], model: nn.Module, batches: Sequence[Batch], plain: Callable[[bool], Trace]
    ) -> Report:
        """Train a model through its ``torch.compile``-d form, compare, and return the report."""
        self._models.append(model)
        ours = train(model, batches, loss=lambda _, batch: plain_loss(compiled, batch))
        self.assert_plain(ours, plain, captured=True)
        return zinf_compile.report(model)

    def check_loop(
        self,
        loop: Callable[[nn.Module, Sequence[Batch], Trace], None],
        workload: Workload,
        placement: str = "nvme",
        *,
        is_streamed: bool = True,
        captured: bool,
        loss: Loss = plain_loss,
        rounding: float = _ROUNDING,
        **options: Any,
    ) -> Report:
        """Run a test's own training loop on an optimized and a plain model, and compare what it recorded.

        ``loss`` is what the loop computes in its first step, by which the budgets are chosen.
        """
        plain = self._loop_reference(loop, workload)
        model, batches = self.optimized(workload, placement, captured=captured, loss=loss, **options)
        ours = Trace()
        torch.manual_seed(0)
        loop(model, batches, ours)
        if options.get("compute") == "inductor":
            self.assert_segments_ran(model)
            assert_same(ours, self._resident_loop(loop, workload, plain(False), rounding, **options))
        else:
            self.assert_plain(ours, plain, captured=captured)
        report = zinf_compile.report(model)
        if is_streamed:
            self.assert_streamed(report, placement, captured=captured)
        return report

    def assert_plain(self, ours: Trace, plain: Callable[[bool], Trace], *, captured: bool) -> None:
        """Assert that a run has the bits of plain PyTorch: ``plain(False)`` is eager, ``plain(True)`` is captured by torch.

        A captured model may match either: torch's own capture rounds some ops differently. Most match both, and an eager run
        is cheap, so it is compared first.
        """
        if not captured or not is_same(ours, plain(False)):
            assert_same(ours, plain(captured))

    def _loop_reference(
        self, loop: Callable[[nn.Module, Sequence[Batch], Trace], None], workload: Workload
    ) -> Callable[[bool], Trace]:
        """Return a function that records a loop in plain PyTorch, captured or not. It runs once for all placements."""
        self._num_loops += 1
        is_of_test = "<locals>" in loop.__qualname__  # a closure is a different function in each test
        name = (self._case, self._num_loops) if is_of_test else loop

        def run(captured: bool) -> Trace:
            key = ("loop", name, workload, captured)
            if key not in self._cache:
                model, batches = self.make(workload, plain=True)
                trace = Trace()
                torch.manual_seed(0)
                loop(compile_plainly(model) if captured else model, batches, trace)
                torch._dynamo.reset()
                self._cache[key] = trace
            return cast(Trace, self._cache[key])

        return run

    def _resident_loop(
        self,
        loop: Callable[[nn.Module, Sequence[Batch], Trace], None],
        workload: Workload,
        plain: Trace,
        rounding: float,
        **options: Any,
    ) -> Trace:
        """Return what a loop records in compiled segments with all parameters resident; its first loss is ``plain``'s."""
        torch._dynamo.reset()
        model, batches = self.make(workload)
        self.resident(model, **options)
        trace = Trace()
        torch.manual_seed(0)
        loop(model, batches, trace)
        self._assert_resident(model)
        torch.testing.assert_close(trace.losses[0], plain.losses[0], rtol=rounding, atol=0.0)
        return trace

    def resident(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return a model optimized in budgets that hold all of it on the device: the reference of compiled segments."""
        budgets = {"device_memory": _PLENTY, "host_memory": _PLENTY, **_EVERY_BIT}
        return self.optimize(model, **{**options, **budgets})

    def _assert_resident(self, model: nn.Module) -> None:
        self.assert_segments_ran(model)
        for plan in zinf_compile.report(model).plans:
            assert {item.compute for item in plan.placements} == {Tier.DEVICE}
            assert not plan.gathers

    def check_loop_within(
        self,
        loop: Callable[[nn.Module, Sequence[Batch], Trace], None],
        workload: Workload,
        budgets: Mapping[str, Any],
    ) -> None:
        """Run a test's own training loop, captured within these budgets, and compare it with plain PyTorch."""
        # With donated buffers, torch's own backend frees what it saved in the first backward, so a second one fails.
        with torch._functorch.config.patch(donated_buffer=False):
            plain = self._loop_reference(loop, workload)
            model, batches = self.make(workload)
            ours = Trace()
            torch.manual_seed(0)
            loop(self.optimize(model, **budgets), batches, ours)
            self.assert_plain(ours, plain, captured=True)

    def assert_streamed(self, report: Report, placement: str, *, captured: bool) -> None:
        """Assert that parameters came from the tiers of the placement at every use."""
        moved = {route.route: route.nbytes for route in report.moved}
        expected = {"nvme": {"nvme"}, "host": {"host"}, "mixed": {"nvme", "host"}}[placement]
        if self.is_integrated:
            assert "nvme" not in expected or moved["nvme -> device"] > 0, moved
            return
        if self.has_streams:  # updated residents are copied from the host again, and no master copy is resident
            assert all(moved.get(f"{tier} -> device", 0) > 0 for tier in expected), f"{placement}: {moved}"
            return
        for tier in ("nvme", "host"):
            assert (moved.get(f"{tier} -> device", 0) > 0) == (tier in expected), f"{placement}: {moved}"
            assert (moved.get(f"device -> {tier}", 0) > 0) or tier not in expected or placement == "mixed", moved
        if "nvme" in expected:
            assert moved["host -> nvme"] > 0, moved  # the streamed step
        if not captured or report.graph_breaks or len(report.plans) > 2:
            return  # each graph between breaks has its own room for resident parameters
        if not report.plans:  # Dynamo captured nothing of the forward
            assert report.num_eager_gathers > 0
            return
        training = [plan for plan in report.plans if plan.schedule.is_training and plan.uses]
        assert training
        assert all(plan.gathers for plan in training)
        for plan in training:
            homes = {tier: sum(p.compute_nbytes for p in plan.placements if p.compute is tier) for tier in Tier}
            if placement == "mixed":
                assert min(homes.values()) > 0, homes
            else:
                assert homes[Tier(placement)] >= 0.9 * sum(homes.values()), homes
