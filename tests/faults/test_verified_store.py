"""``verify_store``: bytes that a disk changes, loses or misplaces under a running model are found, and never trained on."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zinf_compile
from tests.support.memory_engine import MemoryEngine
from zinf_compile.ir.errors import ConfigError, DamageError, StoreError
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.storage.engine import ALIGN
from zinf_compile.runtime.storage.slots import Slot
from zinf_compile.runtime.store import store as store_module
from zinf_compile.runtime.store.store import Store

DAMAGED = (
    r"'?[02]\.weight.*: the store file in memory .* is damaged: bytes \d+ to \d+ are not those that were written there"
)
STOPPED = rf"^an earlier error stopped this model: {DAMAGED}.*load a checkpoint with zinf_compile\.load"


class LyingEngine(MemoryEngine):
    """A disk that drops or misplaces chosen writes, and reports success."""

    def __init__(self) -> None:
        super().__init__(max_nbytes=2**24)
        self.moved: dict[int, int | None] = {}  # where writes to an offset go; None: nowhere

    def write(self, offset: int, buffer: memoryview) -> None:
        where = self.moved.get(offset, offset)
        if where is not None:
            super().write(where, buffer)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(261, 263), nn.Tanh(), nn.Linear(263, 261))


def forward(model: nn.Module) -> Tensor:
    record = record_of(model.get_parameter("0.weight"))
    result: Tensor = model(torch.ones(2, 261, dtype=torch.float32 if record is None else record.dtype))
    return result


def train(model: nn.Module, optimizer: Optimizer, *, step: bool = True) -> None:
    forward(model).pow(2).sum().backward()
    if step:
        optimizer.step()
        optimizer.zero_grad()


def train_to_the_end(model: nn.Module, optimizer: Optimizer) -> None:
    train(model, optimizer)
    zinf_compile.synchronize(model)


def lie_in_one_step(model: nn.Module, optimizer: Optimizer, engine: LyingEngine) -> None:
    try:
        optimizer.step()
    finally:
        engine.moved.clear()
    optimizer.zero_grad()
    train(model, optimizer)


Make = Callable[..., tuple[nn.Module, Optimizer, Store, LyingEngine]]


@pytest.fixture
def make(
    optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store], monkeypatch: pytest.MonkeyPatch
) -> Make:
    """Return a model after two steps, its optimizer, its store and its disk."""

    def call(**options: object) -> tuple[nn.Module, Optimizer, Store, LyingEngine]:
        engine = LyingEngine()
        monkeypatch.setattr(store_module, "PosixEngine", lambda directory: engine)
        budgets = {"device_memory": "1MiB", "host_memory": "512KiB"}  # when captured, nothing large is resident
        model = optimize(make_model(), tiny=True, verify_store=True, **(budgets | options))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            train(model, optimizer)
        zinf_compile.synchronize(model)
        return model, optimizer, store_of(model), engine

    return call


def slots_of(model: nn.Module, name: str) -> dict[str, Slot]:
    record = record_of(model.get_parameter(name))
    assert record is not None
    assert record.gradient.slot is not None
    slots = {
        "compute": record.copies.compute,
        "master": record.copies.master,
        "gradient": record.gradient.slot,
        **record.copies.states,
    }
    return {role: slot for role, slot in slots.items() if slot.extent is not None}


def flip(engine: MemoryEngine, slot: Slot, at: int = 1000) -> None:
    assert slot.extent is not None
    engine._slice(slot.extent.offset + at, 1)[0] ^= 0x10


RUNS = {
    "eager": {"overlap_step": False},
    "captured": {"capture": True, "overlap_step": False},
    "overlapped": {"capture": True},
    "in backward": {"capture": True, "step_in_backward": True, "device_memory": "1400KiB"},
    "two copies": {"compute_dtype": torch.bfloat16, "capture": True},
}


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.long) if run == "two copies" else run for run in RUNS]
)
def test_what_is_not_damaged_trains_as_ever(make: Make, run: str, tmp_path: Path) -> None:
    """Bit by bit, with reads and writes by the user, and through checkpoints and exports."""

    def go_on(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        with torch.no_grad():
            model.get_parameter("0.weight").mul_(0.5)
            model.get_parameter("2.weight").data.add_(0.25)
        alias = model.get_parameter("0.weight").data  # later writes to it are not observed
        train(model, optimizer)
        if record_of(model.get_parameter("0.weight")) is not None:
            zinf_compile.synchronize(model)
        alias.mul_(0.5)
        del alias
        train(model, optimizer)
        model.load_state_dict({name: value * 0.75 for name, value in model.state_dict().items()})
        train(model, optimizer)
        if run != "in backward":
            train(model, optimizer, step=False)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(1.0)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        optimizer.state[model.get_parameter("0.weight")]["exp_avg"].mul_(0.5)
        optimizer.zero_grad()
        train(model, optimizer)
        return [parameter.detach().clone() for parameter in model.parameters()]

    model, optimizer, store, _ = make(**RUNS[run])
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    found = go_on(model, optimizer)
    if run != "two copies":  # these compute in bfloat16, and see an alias's writes until the next forward
        plain = make_model()
        plain_optimizer = torch.optim.AdamW(plain.parameters())
        for _ in range(2):
            train(plain, plain_optimizer)
        assert all(map(torch.equal, go_on(plain, plain_optimizer), found))
    zinf_compile.export(model, tmp_path / "exported")
    zinf_compile.load(tmp_path / "saved", model, optimizer)
    assert all(map(torch.equal, go_on(model, optimizer), found))
    assert store._verified is not None
    assert len(store._verified._pieces) > 8
    store.check_usable()


@pytest.mark.parametrize("run", RUNS)
def test_a_flipped_bit_in_any_copy_is_found_before_it_counts(make: Make, run: str, tmp_path: Path) -> None:
    """The next step that reads it raises, and a checkpoint repairs the model."""
    model, optimizer, store, engine = make(**RUNS[run])
    zinf_compile.save(tmp_path / "good", model, optimizer)
    names = {role: name for name in ("0.weight", "2.weight") for role in slots_of(model, name) if role != "gradient"}
    assert set(names) >= {"master", "exp_avg", "exp_avg_sq"}
    for role, name in names.items():
        flip(engine, slots_of(model, name)[role])
        with pytest.raises(StoreError, match=DAMAGED):
            train_to_the_end(model, optimizer)
        with pytest.raises(StoreError, match=STOPPED):
            forward(model)
        for way in (model.state_dict, lambda: zinf_compile.save(tmp_path / "bad", model, optimizer)):
            with pytest.raises(StoreError, match=STOPPED):
                way()
        zinf_compile.load(tmp_path / "good", model, optimizer)
        train(model, optimizer)
        zinf_compile.load(tmp_path / "good", model, optimizer)
    store.check_usable()


WAYS: dict[str, Callable[[nn.Module, Optimizer, Path], object]] = {
    "save": lambda model, optimizer, folder: zinf_compile.save(folder / "out", model, optimizer),
    "export": lambda model, _, folder: zinf_compile.export(model, folder / "out"),
    "state_dict": lambda model, *_: model.state_dict(),
    "norm": lambda model, *_: model.get_parameter("0.weight").norm(),
    "full_parameters": lambda model, *_: zinf_compile.full_parameters(model).__enter__(),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_out_launders_it(make: Make, way: str, tmp_path: Path) -> None:
    model, optimizer, _, engine = make(capture=False)
    flip(engine, slots_of(model, "0.weight")["master"])
    for _ in range(2):
        with pytest.raises(StoreError, match=DAMAGED):
            WAYS[way](model, optimizer, tmp_path)
    with pytest.raises(StoreError, match=STOPPED):
        forward(model)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_damaged_gradient_or_state_is_found_by_who_looks_at_it(make: Make) -> None:
    model, optimizer, _, engine = make(capture=False, overlap_step=False)
    train(model, optimizer, step=False)
    flip(engine, slots_of(model, "0.weight")["gradient"])
    with pytest.raises(DamageError, match=r"^0\.weight \(gradient\): the store file"):
        optimizer.step()


def test_lost_and_misplaced_writes_of_a_step_are_found(make: Make, tmp_path: Path) -> None:
    model, optimizer, _, engine = make(overlap_step=False, capture=False)
    zinf_compile.save(tmp_path / "good", model, optimizer)
    for role, is_lost in itertools.product(("master", "exp_avg"), (True, False)):
        extent = slots_of(model, "0.weight")[role].extent
        other = slots_of(model, "2.weight")["exp_avg_sq"].extent
        assert extent is not None
        assert other is not None
        train(model, optimizer, step=False)
        elsewhere = other.offset + ALIGN
        engine.moved[extent.offset] = None if is_lost else elsewhere
        with pytest.raises(StoreError, match=r"the store file in memory .* is damaged"):
            lie_in_one_step(model, optimizer, engine)
        zinf_compile.load(tmp_path / "good", model, optimizer)


def test_messages_name_the_copy(make: Make) -> None:
    """A read may cover several parameters, and the damaged one need not be the first."""
    model, _, store, _ = make(capture=False)
    name_at = store_module.weak_name_at(store)
    assert name_at(2**23) is None
    assert {
        name_at(slot.extent.offset) for slot in slots_of(model, "0.weight").values() if slot.extent is not None
    } == {
        "0.weight",
        "0.weight (gradient)",
        "0.weight (exp_avg)",
        "0.weight (exp_avg_sq)",
    }


def test_it_is_refused_where_nobody_would_tell_of_writes() -> None:
    model = torch.compile(make_model(), backend="zinf", options={"verify_store": True})
    with pytest.raises(Exception, match="verify_store=True needs parameters that observe writes") as caught:
        model(torch.ones(2, 261))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), ConfigError)
