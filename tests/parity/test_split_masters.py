"""Split master copies: of a float32 master copy on the disk, updates write what its bfloat16 compute copy lacks.

Training gives the bits of bfloat16 training written by hand, and every look at a parameter sees all of its float32 value.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.support.races import watching_races
from zinf_compile.ir.copies import LOW_HALVES, CopyKey, Role
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.model.moving import move_homes
from zinf_compile.runtime.optim.updates_ahead import AheadCounts
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.store.store import Store, store_of
from zinf_compile.runtime.transfer.tensor_io import TensorIO

pytestmark = [
    pytest.mark.keeps_captures,
    pytest.mark.of_a_cpu(reason="beside a device with its own memory no master copy is split"),
]

WIDTH = 512
NUM_STEPS = 5
BUDGETS: dict[str, Any] = {"device_memory": "8MiB", "host_memory": "9MiB", "reserve_memory": 0, "remake_plan": False}
WAYS: dict[str, dict[str, Any]] = {
    "ahead of step": {},
    "beside forward": {"speculate": False},
    "at step": {"overlap_step": False},
    "in backward": {"step_in_backward": True, "device_memory": "5MiB"},
    "states in int8": {"state_dtype": "int8", "speculate": False},
}
Look = Callable[[int, nn.Module], object]


class Classifier(nn.Module):
    """An embedding, a few layers of one size, and a head of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 300)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).float(), tokens)


def make_model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(step))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


class ByHand:
    """bfloat16 training with float32 master copies, in plain PyTorch."""

    def __init__(self) -> None:
        self.masters = {
            name: value.detach().clone().requires_grad_() for name, value in make_model().named_parameters()
        }
        self._model = make_model().bfloat16()
        self._optimizer = make_optimizer(self.masters.values())

    def step(self, number: int) -> Tensor:
        with torch.no_grad():
            for copy, master in zip(self._model.parameters(), self.masters.values(), strict=True):
                copy.copy_(master)
        loss = self._model(tokens_of(number))
        loss.backward()
        for copy, master in zip(self._model.parameters(), self.masters.values(), strict=True):
            assert copy.grad is not None
            master.grad, copy.grad = copy.grad.float(), None
        self._optimizer.step()
        return loss.detach()

    @property
    def values(self) -> list[Tensor]:
        return [master.detach().clone() for master in self.masters.values()]


class Ours:
    """The same with an optimized model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, make_optimizer(model.parameters())

    def step(self, number: int) -> Tensor:
        loss: Tensor = self.model(tokens_of(number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @property
    def store(self) -> Store:
        return store_of(self.records[0])

    @property
    def records(self) -> list[StoredParameter]:
        return [record for each in self.model.parameters() if (record := record_of(each)) is not None]

    @property
    def split(self) -> list[StoredParameter]:
        """Return the parameters whose master copies are split now."""
        zinf_compile.synchronize(self.model)
        return [record for record in self.records if record.copies.master.upper is not None]


Make = Callable[..., Ours]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a model whose masters are split; afterwards each store is checked and closed."""
    made: list[Ours] = []

    def call(**options: Any) -> Ours:
        given = {"compute_dtype": torch.bfloat16, "compute": "aten", "nvme": tmp_path, **BUDGETS, **options}
        made.append(Ours(zinf_compile.optimize(make_model(), **given)))
        return made[-1]

    yield call
    for each in made:
        each.store.check_integrity()
        zinf_compile.close(each.model)


def only_plan(model: nn.Module) -> zinf_compile.Plan:
    (plan,) = zinf_compile.report(model).plans
    return plan


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


LOOKS: dict[str, Look] = {
    "none": lambda step, model: None,
    "each step": lambda step, model: [parameter.norm() for parameter in model.parameters()],
    "some steps": lambda step, model: step % 2 or [parameter.norm() for parameter in model.parameters()],
    "at one": lambda step, model: next(model.parameters()).norm(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
@pytest.mark.parametrize("way", [way for way in WAYS if way != "states in int8"])
def test_parity(make: Make, way: str, look: Look) -> None:
    ours, plain = make(**WAYS[way]), ByHand()
    for step in range(NUM_STEPS):
        assert_same([ours.step(step)], [plain.step(step)])
        assert step > 0 or ours.split  # what a look before would have joined
        look(step, ours.model)
    assert_same(ours.values, plain.values)
    assert not ours.split


def test_states_in_fewer_bits_beside_split_masters(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are pages of different numbers of elements. What comes out is what whole masters give."""
    split, losses = make(**WAYS["states in int8"]), list[list[Tensor]]()
    losses.append([split.step(step) for step in range(NUM_STEPS)])
    assert split.split
    whole = make(**WAYS["states in int8"])
    with monkeypatch.context() as patch:
        patch.setattr("zinf_compile.runtime.params.copies.Copies.may_split", lambda self, count: False)
        losses.append([whole.step(step) for step in range(NUM_STEPS)])
        assert not whole.split
    assert_same(*losses)
    assert_same(split.values, whole.values)


def test_an_optimizer_without_a_kernel(make: Make) -> None:
    """A step of torch's own code, on elements that were joined a piece at a time."""
    ours, plain = make(speculate=False), ByHand()
    ours.optimizer = torch.optim.NAdam(ours.model.parameters(), lr=1e-2)
    plain._optimizer = torch.optim.NAdam(plain.masters.values(), lr=1e-2)
    for step in range(NUM_STEPS):
        assert_same([ours.step(step)], [plain.step(step)])
    assert ours.split
    assert_same(ours.values, plain.values)


def test_the_plan_counts_the_bytes_that_move(make: Make) -> None:
    ours = make(speculate=False)
    ours.step(0)
    plan = only_plan(ours.model)
    splitting = [item for item in plan.placements if item.splits_master]
    assert splitting
    for placement in splitting:
        elements = placement.master_nbytes // 4
        low = -(-elements // LOW_HALVES) * 4096
        compute = placement.compute_nbytes if placement.compute is Tier.NVME else 0
        states = placement.optimizer_state_nbytes if placement.optimizer_state is Tier.NVME else 0
        gradient = placement.gradient_nbytes if placement.gradient is Tier.NVME else 0
        assert placement.update_nbytes_written == low + compute + states
        assert placement.update_nbytes_read == low + compute + states + gradient
    ours.step(1)
    zinf_compile.synchronize(ours.model)
    engine = ours.store.engine
    assert engine is not None
    gathered = 2 * sum(item.compute_nbytes for item in plan.placements if item.compute is Tier.NVME)
    gradients = sum(item.gradient_nbytes for item in plan.placements if item.gradient is Tier.NVME)
    before = engine.bytes_read, engine.bytes_written
    ours.step(2)
    zinf_compile.synchronize(ours.model)
    read, written = engine.bytes_read - before[0], engine.bytes_written - before[1]
    assert written == pytest.approx(plan.step.nbytes_written + gradients, rel=0.01)
    assert read == pytest.approx(plan.step.nbytes_read + gathered, rel=0.01)


def test_who_holds_an_alias_sees_every_update(make: Make) -> None:
    """A plain tensor over the bytes of a master copy: nothing else may ever be stored there."""
    ours, plain = make(), ByHand()
    ours.step(0), plain.step(0)
    name = next(record.name for record in ours.split)
    alias = ours.model.get_parameter(name).data
    for step in range(1, NUM_STEPS):
        ours.step(step), plain.step(step)
        zinf_compile.synchronize(ours.model)
        assert torch.equal(alias, plain.masters[name])
    assert name not in [record.name for record in ours.split]
    del alias
    for step in range(NUM_STEPS, NUM_STEPS + 3):
        ours.step(step), plain.step(step)
    assert name in [record.name for record in ours.split]
    assert_same(ours.values, plain.values)


def test_what_users_write_counts(make: Make) -> None:
    ours, plain = make(), ByHand()
    for step in range(NUM_STEPS):
        ours.step(step), plain.step(step)
        if step == 1:
            assert ours.split
            with torch.no_grad():
                for parameter in (*ours.model.parameters(), *plain.masters.values()):
                    parameter.mul_(0.5)
        if step == 2:
            for parameter in (*ours.model.parameters(), *plain.masters.values()):
                parameter.data.add_(2.0**-12)
        if step == 3:
            state = {name: value + 0.25 for name, value in ours.model.state_dict().items()}
            ours.model.load_state_dict(state)
            with torch.no_grad():
                for parameter in plain.masters.values():
                    parameter.add_(0.25)
    assert_same(ours.values, plain.values)


def test_not_a_number_stays_one(make: Make) -> None:
    ours, plain = make(), ByHand()
    for step in range(3):
        ours.step(step), plain.step(step)
    for parameter in (ours.model.layers[2].weight, plain.masters["layers.2.weight"]):
        with torch.no_grad():
            parameter[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    ours.step(3), plain.step(3)
    for one, other in zip(ours.values, plain.values, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_save_leaves_them_split(make: Make, tmp_path: Path) -> None:
    """A checkpoint has float32 values, which were joined on their way; what is at home stays as it is."""
    ours, plain = make(), ByHand()
    for step in range(3):
        ours.step(step), plain.step(step)
    were_split = ours.split
    assert were_split
    zinf_compile.save(tmp_path / "saved", ours.model, ours.optimizer)
    assert ours.split == were_split
    other = make()
    zinf_compile.load(tmp_path / "saved", other.model, other.optimizer)
    assert_same(other.values, plain.values)
    ours.step(3), other.step(3), plain.step(3)
    zinf_compile.load(tmp_path / "saved", ours.model, ours.optimizer)  # over what is split
    assert not ours.split
    ours.step(3)
    for each in (ours, other):
        assert_same(each.values, plain.values)


@pytest.mark.parametrize(("role", "tier"), [(Role.COMPUTE, Tier.NVME), (Role.MASTER, Tier.HOST)])
def test_a_new_plan_moves_one_of_both_halves(make: Make, role: Role, tier: Tier) -> None:
    """A master copy stays split when its compute copy moves, and is whole where it moves itself."""
    ours, plain = make(speculate=False), ByHand()
    for step in range(3):
        ours.step(step), plain.step(step)
    records = ours.split
    assert records
    assert all(record.copies.slot_of(CopyKey(role)).tier is not tier for record in records)
    move_homes(ours.store, [ours.store.placements[record.name].moved({role: tier}) for record in records])
    for record in records:
        assert record.copies.slot_of(CopyKey(role)).tier is tier
        assert record.copies.joined_at is None
        assert record.copies.master.upper is (record.copies.compute if role is Role.COMPUTE else None)
    for step in range(3, NUM_STEPS):
        assert_same([ours.step(step)], [plain.step(step)])
    assert_same(ours.values, plain.values)


def test_export_and_whole_values(make: Make) -> None:
    ours, plain = make(), ByHand()
    for step in range(3):
        ours.step(step), plain.step(step)
    assert ours.split
    with zinf_compile.full_parameters(ours.model.head):
        assert torch.equal(ours.model.head.weight, plain.masters["head.weight"])
    named = pickle.loads(pickle.dumps(ours.model.layers[0].weight))
    assert torch.equal(named, plain.masters["layers.0.weight"])
    assert_same([value.float() for value in ours.model.state_dict().values()], plain.values)


def test_a_model_that_is_closed_shows_its_values(make: Make) -> None:
    ours, plain = make(), ByHand()
    for step in range(3):
        ours.step(step), plain.step(step)
    assert ours.split
    zinf_compile.close(ours.model)
    assert_same(ours.values, plain.values)


def test_a_forked_child_joins_its_own_copy(make: Make) -> None:
    ours, plain = make(), ByHand()
    for step in range(3):
        ours.step(step), plain.step(step)
    were_split = ours.split
    assert were_split
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            is_same = all(torch.equal(one, other) for one, other in zip(ours.values, plain.values, strict=True))
            os.write(writing, b"same" if is_same else b"else")
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 4) == b"same"
    os.close(reading)
    os.waitpid(child, 0)
    assert ours.split == were_split
    assert_same([ours.step(3)], [plain.step(3)])
    assert_same(ours.values, plain.values)


def test_damage_on_the_disk_is_checked(make: Make) -> None:
    ours, plain = make(verify_store=True), ByHand()
    for step in range(3):
        ours.step(step), plain.step(step)
    assert ours.split
    assert_same(ours.values, plain.values)
    for parameter in (*ours.model.parameters(), *plain.masters.values()):
        parameter.data.mul_(2)  # by the mapping, after bytes that were checked
    ours.step(3), plain.step(3)
    assert_same(ours.values, plain.values)


def test_a_failed_join_leaves_no_half_value(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make()
    ours.step(0)
    record = ours.split[0]
    with monkeypatch.context() as patch:

        def fail(self: TensorIO, slot: object) -> None:
            raise zinf_compile.StoreError("the disk is gone")

        patch.setattr(TensorIO, "join", fail)
        with pytest.raises(zinf_compile.StoreError, match="the disk is gone"):
            record.parameter.norm()
    with pytest.raises(zinf_compile.StoreError, match="holds neither its old nor its new value"):
        record.parameter.norm()
    with pytest.raises(zinf_compile.StoreError, match="an earlier error stopped this model"):
        ours.step(1)


def test_updates_ahead_see_a_look_in_between(make: Make) -> None:
    """A look between backward and step joins what an update ahead may be reading: it is dropped, and made again."""
    ours, plain = make(speculate=True), ByHand()
    for step in range(NUM_STEPS):
        plain.step(step)
        ours.model(tokens_of(step)).backward()
        if step == 3:
            assert sum(parameter.norm() for parameter in ours.model.parameters()) > 0
        ours.optimizer.step()
        ours.optimizer.zero_grad()
    ahead = ours.store.updates_ahead
    assert ahead is not None
    counts = getattr(ahead, "counts", None)
    assert isinstance(counts, AheadCounts)
    assert counts.num_taken > 0
    assert sum(counts.dropped.values()) > 0
    assert_same(ours.values, plain.values)


@pytest.mark.parametrize("way", ["ahead of step", "beside forward", "in backward"])
def test_no_race(make: Make, way: str) -> None:
    with watching_races() as races:
        ours = make(**WAYS[way])
        for step in range(3):
            ours.step(step)
        assert ours.split
        assert len(ours.values) > 0
        ours.step(3)
        zinf_compile.synchronize(ours.model)
    assert races.found == []
    assert races.num_accesses["the update, at its split master copy"] > 0


def test_small_masters_and_little_staging_stay_whole(make: Make) -> None:
    ours = make(host_memory="8MiB")
    ours.step(0)
    plan = only_plan(ours.model)
    assert not any(item.splits_master for item in plan.placements)
    assert not ours.split
    roomy = make()
    roomy.step(0)
    plan = only_plan(roomy.model)
    assert not any(item.splits_master for item in plan.placements if item.parameter.endswith("bias"))
