"""The harness of the parity tests: train the same workload in plain PyTorch and under zinf_compile, compare every bit.

A workload is a function without arguments that returns a model and the batches to train it on, the same at every call;
``model(**batch)`` gives the loss, or an output that has it as ``.loss``. A placement says where parameters live:

    nvme    parameters, gradients and optimizer state on disk; host memory only stages, the device holds what it must
    host    all of it in host memory
    mixed   some parameters resident on the device, some in host memory, some on disk
"""

import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import zinf_compile
from tests.fake_device import FakeDevice, on_fake_device
from tests.parity.traces import (
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
from zinf_compile import session as session_module
from zinf_compile.config import Config, make_config, parse_size
from zinf_compile.errors import CapacityError
from zinf_compile.hardware import Hardware
from zinf_compile.passes.planning import placement as placement_module
from zinf_compile.reports import Report
from zinf_compile.runtime.calibrate import measure_hardware
from zinf_compile.runtime.store import Store
from zinf_compile.terms import Tier

_STAGING = 512 * 2**10  # the least a streamed AdamW step needs, with a margin for a separate compute copy
_PLENTY = 64 * 2**20
_EVERY_BIT = {"tiles": False}  # within so little memory a loss would be fused with its layer
NEEDS = re.compile(r"needs (\d+(?:\.\d+)? \w+)")


def needed_device_memory(error: Exception) -> int:
    """Return the device budget that a CapacityError asks for; any other error is raised again."""
    if not isinstance(getattr(error, "inner_exception", error), CapacityError):
        raise error
    found = NEEDS.search(str(error))
    assert found is not None, str(error)
    needed = parse_size(found[1], option="device_memory")
    assert needed < 2**20, f"tests of tiny models need {found[1]}, and budgets can be read to a tenth of it"
    return needed + 103  # the message rounds to a tenth of a KiB


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Kernels split work by the number of threads, so it is the same for all runs; tensors this small want one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    """Let all of these tests compute on a device with streams, if the environment asks for that."""
    if "ZINF_STREAMS" not in os.environ:
        yield
        return
    with on_streams():
        yield


@contextmanager
def on_streams() -> Iterator[FakeDevice]:
    """Let models that are optimized inside compute on a device with streams, which only tests have."""

    def make(options: Mapping[str, object], **given: Any) -> Config:
        return make_config({"device": "cuda", **options}, **given)

    with on_fake_device() as device, mock.patch("zinf_compile.api.make_config", make):
        yield device


@pytest.fixture(scope="session")
def session_cache() -> dict[Any, Any]:
    """What several tests share: the runs of plain PyTorch, and the smallest budgets."""
    return {}


class Parity:
    """Runs workloads and compares them; one per test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, cache: dict[Any, Any], case: Hashable) -> None:
        """``case`` is what the plain runs of this test have in common with others of its kind: all but placements."""
        self._folder = folder
        self._case = case
        self._num_loops = 0
        self._monkeypatch = monkeypatch
        self._cache = cache
        self._models: list[nn.Module] = []
        self.has_streams = "ZINF_STREAMS" in os.environ
        self._exits = ExitStack()
        # These models are tiny: without this all they have would be resident, and half of host memory a home.
        monkeypatch.setattr(placement_module, "RESIDENT_THRESHOLD", 0)
        monkeypatch.setattr(Config, "staging_memory", property(lambda config: min(config.host_memory, _STAGING)))
        monkeypatch.setattr(session_module, "measure_hardware", self._measure_once)

    def _measure_once(self, store: Store, dtypes: frozenset[torch.dtype]) -> Hardware:
        """Measure the machine for the first of all models alone: it takes as long as a small model's whole test."""
        key = ("hardware", store.engine is not None, store.device is not None, dtypes)
        if key not in self._cache:
            self._cache[key] = measure_hardware(store, dtypes)
        return cast(Hardware, self._cache[key])

    trace = Trace
    train = staticmethod(train)
    plain_loss = staticmethod(plain_loss)
    assert_same = staticmethod(assert_same)
    assert_equal = staticmethod(assert_equal)

    def on_streams(self) -> FakeDevice:
        """Let what is optimized from now on compute on a device with streams; return it."""
        self.has_streams = True
        return self._exits.enter_context(on_streams())

    def close(self) -> None:
        """Check that nothing leaked, and give back files and threads."""
        for model in self._models:
            store = next(model.parameters())._zinf_record.store
            store.check_integrity()
            zinf_compile.close(model)
        self._models.clear()
        self._exits.close()

    def reference(self, workload: Workload, *, captured: bool, loss: Loss = plain_loss) -> Trace:
        """Return the run in plain PyTorch: under torch's own ``aot_eager`` backend, or eager. Runs once a session."""
        key = (workload, captured, loss)
        if key not in self._cache:
            model, batches = workload()
            self._cache[key] = train(compile_plainly(model) if captured else model, batches, loss=loss)
            torch._dynamo.reset()
        return self._cache[key]

    def plain_runs(self, workload: Workload, loss: Loss = plain_loss) -> Callable[[bool], Trace]:
        """Return how to run a workload in plain PyTorch, captured or not, as ``assert_plain`` takes it."""
        return lambda captured: self.reference(workload, captured=captured, loss=loss)

    def budgets(self, workload: Workload, placement: str, **mode: Any) -> dict[str, Any]:
        """Return the budgets with which a workload's parameters have the homes that a placement says."""
        model, _ = workload()
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if placement == "nvme":
            tiers = {"host_memory": _STAGING, "nvme": self._folder}
            return {"device_memory": self.smallest_device_memory(workload, tiers, **mode), **tiers, **_EVERY_BIT}
        device = self.smallest_device_memory(workload, **mode)
        if placement == "host":
            return {"device_memory": device, "host_memory": _STAGING + _PLENTY, **_EVERY_BIT}
        assert placement == "mixed"
        return {
            **_EVERY_BIT,
            "device_memory": device + nbytes // 4,
            "host_memory": _STAGING + nbytes // 2,
            "nvme": self._folder,
        }

    def smallest_device_memory(
        self,
        workload: Workload,
        tiers: dict[str, Any] | None = None,
        *,
        captured: bool,
        loss: Loss = plain_loss,
        **options: Any,
    ) -> int:
        """Return the device budget that the errors of ``optimize`` and of the first call ask for, to a tenth of a KiB.

        Of a captured model it is the same for all other ``tiers``. They are a host with plenty of room unless given.
        """
        is_of_host = tiers is None or captured
        key = ("device_memory", workload, is_of_host, captured, loss, self.has_streams, *sorted(options.items()))
        if key not in self._cache:
            host = {
                **(tiers if tiers is not None and not is_of_host else {"host_memory": _STAGING + _PLENTY}),
                **_EVERY_BIT,
            }
            model, batches = workload()
            with pytest.raises(CapacityError) as refused:
                zinf_compile.optimize(model, device_memory=0, **host)
            budgets = {"device_memory": needed_device_memory(refused.value), **host}
            if captured:
                self._cache[key] = self._try_capture(model, batches[0], loss, budgets, **options)
            else:
                self._cache[key] = budgets["device_memory"]
        return int(self._cache[key])

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
        model, batches = workload()
        return self.optimize(model, **{**budgets, "capture": captured, **options}), batches

    def check(
        self, workload: Workload, placement: str, *, captured: bool, loss: Loss = plain_loss, **options: Any
    ) -> Report:
        """Train a workload in one placement and mode, and compare it with plain PyTorch; return the report."""
        model, batches = self.optimized(workload, placement, captured=captured, loss=loss, **options)
        ours = train(model, batches, loss=loss)
        self.assert_plain(ours, self.plain_runs(workload, loss), captured=captured)
        report = zinf_compile.report(model)
        self.assert_streamed(report, placement, captured=captured)
        return report

    def check_compiled(
        self, compiled: Callable[..., Any], model: nn.Module, batches: Sequence[Batch], plain: Callable[[bool], Trace]
    ) -> Report:
        """Train a model through what ``torch.compile`` made of it, and compare; return the report."""
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
        **options: Any,
    ) -> Report:
        """Run a training loop of the test's own on an optimized and a plain model, and compare what it recorded."""
        plain = self._loop_reference(loop, workload)
        model, batches = self.optimized(workload, placement, captured=captured, **options)
        ours = Trace()
        torch.manual_seed(0)
        loop(model, batches, ours)
        self.assert_plain(ours, plain, captured=captured)
        report = zinf_compile.report(model)
        if is_streamed:
            self.assert_streamed(report, placement, captured=captured)
        return report

    def assert_plain(self, ours: Trace, plain: Callable[[bool], Trace], *, captured: bool) -> None:
        """Assert that a run has the bits of plain PyTorch, whose run ``plain(False)`` is eager.

        A captured model may have those of ``plain(True)`` instead, under torch's own capture: it rounds some ops otherwise.
        Most have both, and an eager run takes no time.
        """
        if not captured or not is_same(ours, plain(False)):
            assert_same(ours, plain(captured))

    def _loop_reference(
        self, loop: Callable[[nn.Module, Sequence[Batch], Trace], None], workload: Workload
    ) -> Callable[[bool], Trace]:
        """Return what a loop records in plain PyTorch, captured or not. It runs once for all placements."""
        self._num_loops += 1
        is_of_test = "<locals>" in loop.__qualname__  # another function in every test
        name = (self._case, self._num_loops) if is_of_test else loop

        def run(captured: bool) -> Trace:
            key = ("loop", name, workload, captured)
            if key not in self._cache:
                model, batches = workload()
                trace = Trace()
                torch.manual_seed(0)
                loop(compile_plainly(model) if captured else model, batches, trace)
                torch._dynamo.reset()
                self._cache[key] = trace
            return cast(Trace, self._cache[key])

        return run

    def check_loop_within(
        self,
        loop: Callable[[nn.Module, Sequence[Batch], Trace], None],
        workload: Workload,
        budgets: Mapping[str, Any],
    ) -> None:
        """Run a training loop of the test's own, captured within these budgets, and compare with plain PyTorch."""
        # torch's own backend frees what it saved in the first backward, unless it is told to keep it for another.
        with torch._functorch.config.patch(donated_buffer=False):
            plain = self._loop_reference(loop, workload)
            model, batches = workload()
            ours = Trace()
            torch.manual_seed(0)
            loop(self.optimize(model, **budgets), batches, ours)
            self.assert_plain(ours, plain, captured=True)

    def assert_streamed(self, report: Report, placement: str, *, captured: bool) -> None:
        """Assert that parameters did come from where the placement says, at every use."""
        moved = {route.route: route.nbytes for route in report.moved}
        expected = {"nvme": {"nvme"}, "host": {"host"}, "mixed": {"nvme", "host"}}[placement]
        if (
            self.has_streams
        ):  # where residents come from the host when they have been updated, and no master is resident
            assert all(moved.get(f"{tier} -> device", 0) > 0 for tier in expected), f"{placement}: {moved}"
            return
        for tier in ("nvme", "host"):
            assert (moved.get(f"{tier} -> device", 0) > 0) == (tier in expected), f"{placement}: {moved}"
            assert (moved.get(f"device -> {tier}", 0) > 0) or tier not in expected or placement == "mixed", moved
        if "nvme" in expected:
            assert moved["host -> nvme"] > 0, moved  # the streamed step
        if not captured or report.graph_breaks or len(report.plans) > 2:
            return  # of the graphs between breaks, each has room of its own for what it reads
        if not report.plans:  # Dynamo left the whole forward alone
            assert report.num_eager_gathers > 0
            return
        training = [plan for plan in report.plans if plan.num_forward_ticks < plan.num_ticks and plan.uses]
        assert training
        assert all(plan.transfers for plan in training)
        for plan in training:
            homes = {tier: sum(p.compute_nbytes for p in plan.placements if p.compute is tier) for tier in Tier}
            if placement == "mixed":
                assert min(homes.values()) > 0, homes
            else:
                assert homes[Tier(placement)] >= 0.9 * sum(homes.values()), homes


@pytest.fixture
def parity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session_cache: dict[Any, Any], request: pytest.FixtureRequest
) -> Iterator[Parity]:
    """The harness."""
    node = request.node
    given = getattr(node, "callspec", None)
    others = {} if given is None else {name: repr(each) for name, each in given.params.items() if name != "placement"}
    case = (node.path, node.originalname, *sorted(others.items()))
    harness = Parity(tmp_path, monkeypatch, session_cache, case)
    yield harness
    harness.close()


@pytest.fixture(params=["nvme", "host", "mixed"])
def placement(request: pytest.FixtureRequest) -> str:
    """Where parameters live."""
    return str(request.param)


@pytest.fixture(params=["captured", "eager"])
def captured(request: pytest.FixtureRequest) -> bool:
    """Whether the model is captured, or its own forward runs eagerly."""
    return request.param == "captured"
