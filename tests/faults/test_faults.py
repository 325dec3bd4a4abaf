"""A disk that fails at any operation: the error says what and where, no torn value is readable, a checkpoint repairs all."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zinf_compile
from tests.support.memory_engine import Fault, MemoryEngine, Operation
from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.store import store as store_module
from zinf_compile.runtime.store.store import Store

NUM_STEPS = 2
WHERE = (
    r"^\d\.\w+( \([\w ]+\))?: (read|write) of the store file in memory .* at offset \d+ failed after \d+ of \d+ bytes"
)
TORN = (
    r"parameter '\d\.\w+' was being updated when an error came( \(.*\))?, and holds neither its old nor its new value"
)
STOPPED = r"^an earlier error stopped this model: \d\.\w+.* at offset \d+.*; load a checkpoint with zinf_compile\.load"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(261, 263), nn.Tanh(), nn.Linear(263, 261))


@dataclass(kw_only=True)
class Run:
    """One training run over a disk in memory: how far it came, and the error that ended it."""

    engine: MemoryEngine
    model: nn.Module
    phase: str = "nothing"
    num_steps: int = 0
    error: StoreError | None = None
    optimizer: Optimizer | None = None
    stores: tuple[Store, ...] = ()
    # The values of all parameters, before training and after each step.
    values: list[dict[str, Tensor]] | None = None


def run_training(
    monkeypatch: pytest.MonkeyPatch, engine: MemoryEngine, *, capture: bool, overlap_step: bool = False
) -> Run:
    stores: list[Store] = []
    made = store_module.Store.__init__

    def note(self: Store, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)  # type: ignore[arg-type]
        stores.append(self)

    monkeypatch.setattr(store_module.Store, "__init__", note)
    monkeypatch.setattr(store_module, "PosixEngine", lambda directory: engine)
    run = Run(engine=engine, model=make_model(), values=[])
    x = torch.ones(2, 261)
    try:
        run.phase = "placement"
        zinf_compile.optimize(
            run.model,
            device_memory="1MiB",
            host_memory="512KiB",
            nvme="/tmp",  # a folder that exists; the engine does not use it
            capture=capture,
            overlap_step=overlap_step,
        )
        run.optimizer = torch.optim.AdamW(run.model.parameters())
        for _ in range(NUM_STEPS):
            run.phase = "forward"
            loss = run.model(x).pow(2).sum()
            run.phase = "backward"
            loss.backward()
            run.phase = "step"
            run.optimizer.step()
            run.num_steps += 1
            run.optimizer.zero_grad()
        run.phase = "the end"
    except StoreError as error:
        run.error = error.with_traceback(None)
    run.stores = tuple(stores)
    return run


def plain_values() -> list[dict[str, Tensor]]:
    """Return the values of all parameters in a run without faults, before training and after each step."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    values = [{name: value.clone() for name, value in model.state_dict().items()}]
    for _ in range(NUM_STEPS):
        model(torch.ones(2, 261)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append({name: value.clone() for name, value in model.state_dict().items()})
    return values


def check_closed(run: Run) -> None:
    """The store is closed cleanly: nothing is leased, taken or running."""
    (store,) = run.stores
    store.check_integrity()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("zinf-transfer")]
    with pytest.raises(StoreError, match="the store is closed"):
        run.engine.reserve(2**23)


def check_stopped(run: Run) -> None:
    """The store refuses compute and steps, nothing is in flight, and a checkpoint can be loaded into its file."""
    (store,) = run.stores
    store.check_integrity()
    run.engine.reserve(2**23)
    with pytest.raises(StoreError, match=STOPPED):
        store.check_usable()
    assert run.error is not None
    (note,) = run.error.__notes__
    torn = [record.name for record in store.records.values() if record.update.is_torn]
    assert not torn or all(f"'{name}'" in note.partition("half updated: ")[2] for name in torn), note
    assert "load a checkpoint with zinf_compile.load(folder, model, optimizer)" in note


def check_updated(run: Run, values: list[dict[str, Tensor]]) -> None:
    """Parameters that the error calls updated hold the values after that step; all others hold those before it."""
    assert run.error is not None
    (note,) = run.error.__notes__
    found = re.search(r"already updated: (.*); half updated: (.*?); the others", note)
    if found is None:
        assert "no parameter had changed" in note
        return
    updated, torn = (set(re.findall(r"'([\w.]+)'", group)) for group in found.groups())
    for name, parameter in run.model.named_parameters():
        if name not in torn:
            step = run.num_steps + (name in updated)
            assert torch.equal(parameter.detach(), values[step][name]), (name, step)


def check_values(run: Run, values: list[dict[str, Tensor]]) -> None:
    """Each parameter reads as a whole value that it has had, or refuses to be read."""
    num_readable = 0
    for name, parameter in run.model.named_parameters():
        try:
            value = parameter.detach().clone()
        except StoreError as error:
            assert str(error).startswith(f"parameter '{name}' was being updated when an error came")  # noqa: PT017
            with pytest.raises(StoreError, match=TORN):
                parameter.norm()
            with pytest.raises(StoreError, match=TORN):
                repr(parameter)
        else:
            num_readable += 1
            assert any(torch.equal(value, known[name]) for known in values), f"{name} is torn, but readable"
    assert num_readable > 0, "no parameter is readable"


def check_no_way_out(run: Run, folder: Path) -> None:
    """Each way to get all parameters, or their gradients or optimizer state, is refused."""
    assert run.optimizer is not None
    states = [value for state in run.optimizer.state.values() for value in state.values() if value.dim() > 0]
    ways: list[Callable[[], object]] = [
        lambda: zinf_compile.export(run.model, folder / "exported"),
        lambda: zinf_compile.save(folder / "saved", run.model, run.optimizer),
        run.model.state_dict,
        lambda: run.model.get_submodule("2").state_dict(),
        lambda: zinf_compile.full_parameters(run.model).__enter__(),
        *(partial(torch.clone, value) for value in states),
        *(partial(torch.clone, parameter.grad) for parameter in run.model.parameters() if parameter.grad is not None),
    ]
    for way in ways:
        with pytest.raises(StoreError, match=f"{STOPPED}|^{TORN}"):
            way()
    assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a plain model after its first step."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 261)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    zinf_compile.save(folder, model, optimizer)
    return folder


def check_recovered(run: Run, checkpoint: Path, values: list[dict[str, Tensor]]) -> None:
    """A checkpoint repairs the model: it trains on from there, bit by bit."""
    assert run.optimizer is not None
    zinf_compile.load(checkpoint, run.model, run.optimizer)
    for step in range(1, NUM_STEPS):
        run.model(torch.ones(2, 261)).pow(2).sum().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        for name, parameter in run.model.named_parameters():
            assert torch.equal(parameter.detach(), values[step + 1][name]), (step, name)


@pytest.fixture(scope="module")
def known_values() -> list[dict[str, Tensor]]:
    return plain_values()


def count_operations(operation: Operation) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        run = run_training(monkeypatch, MemoryEngine(max_nbytes=2**23), capture=False)
        assert run.error is None
        zinf_compile.close(run.model)
    return run.engine._num_started[operation]


# Fixed, so that test names are the same everywhere; one test checks that they reach the last operation.
NUM_READS, NUM_WRITES = 90, 90


def test_the_range_of_faults_covers_all_operations() -> None:
    assert count_operations("read") <= NUM_READS
    assert count_operations("write") <= NUM_WRITES


@pytest.mark.parametrize(
    ("operation", "nth", "kind"),
    [
        pytest.param(operation, nth, kind, marks=[pytest.mark.long] if nth % 4 != turn else [])
        for operation, num in (("read", NUM_READS), ("write", NUM_WRITES))
        for nth in range(num)
        for turn, kind in enumerate(("error", "short"))  # others are for make test-long
    ],
)
def test_a_fault_at_any_operation(
    operation: Operation,
    nth: int,
    kind: Literal["error", "short"],
    known_values: list[dict[str, Tensor]],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = MemoryEngine(max_nbytes=2**23, faults=[Fault(operation=operation, nth=nth, kind=kind)])
    run = run_training(monkeypatch, engine, capture=False)
    if run.error is None:
        assert engine._num_started[operation] <= nth, "the fault was swallowed"
        assert run.phase == "the end"
        zinf_compile.close(run.model)
        return
    with pytest.raises(StoreError, match=WHERE):
        raise run.error
    check_values(run, known_values)
    if run.phase == "placement":
        check_closed(run)
        return
    check_stopped(run)
    check_updated(run, known_values)
    with pytest.raises(StoreError, match=f"{STOPPED}|^{TORN}"):
        run.model(torch.ones(2, 261))
    assert run.optimizer is not None
    with pytest.raises(StoreError, match=STOPPED):
        run.optimizer.step()
    check_no_way_out(run, tmp_path)
    check_recovered(run, checkpoint, known_values)
    zinf_compile.close(run.model)
    check_closed(run)


@pytest.mark.parametrize(
    ("operation", "nth"),
    [
        pytest.param(operation, nth, marks=[pytest.mark.long] if nth % 8 == 6 else [])
        for operation in ("read", "write")
        for nth in range(10, 70, 4)
    ],
)
def test_a_fault_while_steps_run_in_the_background(
    operation: Operation,
    nth: int,
    known_values: list[dict[str, Tensor]],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next use of the model, or ``synchronize``, raises the error, and a checkpoint repairs everything."""
    engine = MemoryEngine(max_nbytes=2**23, faults=[Fault(operation=operation, nth=nth, kind="error")])
    run = run_training(monkeypatch, engine, capture=False, overlap_step=True)
    if run.phase == "placement":
        check_closed(run)
        return
    run.stores[0].updates.wait()
    if engine._num_started[operation] > nth:
        with pytest.raises(StoreError, match=STOPPED):
            run.model.state_dict()
        with pytest.raises(StoreError, match=STOPPED):
            zinf_compile.synchronize(run.model)
        check_recovered(run, checkpoint, known_values)
        zinf_compile.synchronize(run.model)
    zinf_compile.close(run.model)
    check_closed(run)


PHASES = {"read": {"forward", "backward", "step"}, "write": {"placement", "backward", "step"}}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_fault_in_each_phase_is_met(
    operation: Operation,
    capture: bool,
    checkpoint: Path,
    known_values: list[dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Count where each phase's operations begin in a run without faults; then let each phase fail in its middle."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}

    class CountingEngine(MemoryEngine):
        def _transfer(self, kind: Operation, offset: int, buffer: memoryview) -> None:
            if kind == operation:
                phase = current_phase()
                first.setdefault(phase, self._num_started[kind])
                last[phase] = self._num_started[kind]
            super()._transfer(kind, offset, buffer)

    frames: list[Run] = []

    def current_phase() -> str:
        return frames[0].phase if frames else "placement"

    made = Run.__init__

    def note(self: Run, **kwargs: object) -> None:
        made(self, **kwargs)  # type: ignore[arg-type]
        frames.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "__init__", note)
        run = run_training(patch, CountingEngine(max_nbytes=2**24), capture=capture)
        assert run.error is None
        zinf_compile.close(run.model)
    assert set(last) >= PHASES[operation], last
    for phase, nth in last.items():
        engine = MemoryEngine(max_nbytes=2**24, faults=[Fault(operation=operation, nth=nth, kind="error")])
        with pytest.MonkeyPatch.context() as patch:
            run = run_training(patch, engine, capture=capture)
        assert run.error is not None, (phase, nth)
        assert "at offset" in str(run.error)
        if phase != "placement":
            check_recovered(run, checkpoint, known_values)
            zinf_compile.close(run.model)
        check_closed(run)


def test_a_load_that_fails_says_what_it_has_left(
    checkpoint: Path, known_values: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note is about the failed load, not about the earlier error, after which no parameter had changed."""
    engine = MemoryEngine(max_nbytes=2**23, faults=[Fault(operation="read", nth=4, kind="error")])
    run = run_training(monkeypatch, engine, capture=False)
    assert run.error is not None
    assert "no parameter had changed" in run.error.__notes__[0]
    nth = engine._num_started["write"] + 3
    engine._faults["write", nth] = Fault(operation="write", nth=nth, kind="error")
    with pytest.raises(StoreError, match=r"^0\.weight.*: write of the store file"):
        zinf_compile.load(checkpoint, run.model, run.optimizer)
    everything = "half updated: '0.weight', '0.bias', '2.weight', '2.bias'"
    with pytest.raises(StoreError, match=rf"{STOPPED}") as caught:
        run.model(torch.ones(2, 261))
    assert everything in str(caught.value)
    assert "no parameter had changed" not in str(caught.value)
    for parameter in run.model.parameters():
        with pytest.raises(StoreError, match=TORN):
            parameter.norm()
    check_recovered(run, checkpoint, known_values)
    zinf_compile.close(run.model)


def test_an_error_of_the_users_optimizer_leaves_nothing_in_flight(
    optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store], tmp_path: Path
) -> None:
    refused: list[str] = []

    class Fussy(torch.optim.Optimizer):
        """Updates the first weight, and raises once at the second."""

        def __init__(self, params: object) -> None:
            super().__init__(params, {})  # type: ignore[arg-type]

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.shape == (261, 263) and not (refused or parameter.is_meta):
                        refused.append("2.weight")
                        raise ValueError("not this one")
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad)

    model = optimize(make_model(), tiny=True, host_memory="2MiB")
    model(torch.ones(2, 261)).sum().backward()
    optimizer = Fussy(model.parameters())
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match="not this one") as caught:
        optimizer.step()
    assert caught.value.__notes__ == [
        "zinf_compile: already updated: '0.weight', '0.bias'; half updated: '2.weight'; the others hold their old values; "
        "load a checkpoint with zinf_compile.load(folder, model, optimizer), which puts it in order (load_state_dict() "
        "does not; models that share budgets need one each), or close it"
    ]
    store_of(model).check_integrity()
    with pytest.raises(StoreError, match=TORN):
        model.get_parameter("2.weight").norm()
    for name in ("0.weight", "0.bias", "2.bias"):
        assert model.get_parameter(name).isfinite().all()
    stopped = (
        "^an earlier error stopped this model: ValueError: not this one; already updated: '0.weight', '0.bias'; half"
    )
    with pytest.raises(StoreError, match=stopped):
        store_of(model).check_usable()
    with pytest.raises(StoreError, match=stopped):
        optimizer.step()
    zinf_compile.load(tmp_path / "saved", model, optimizer)
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert grads.keys() == start.keys(), "pending gradients are part of a checkpoint"
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), start[name] - grads[name]), name
