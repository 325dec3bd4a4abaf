"""Updates ahead of ``step()`` give the bits of plain PyTorch, whatever happens between backward and step."""

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.support.parity import on_streams
from zinf_compile.ir.copies import MASTER, CopyKey
from zinf_compile.ir.errors import CapacityError, StoreError, UnsupportedError
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.device.host_mapping import map_memory
from zinf_compile.runtime.optim.optimizer import StreamedStep
from zinf_compile.runtime.optim.updates_ahead import AheadCounts, UpdatesAhead
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.slots import Slot
from zinf_compile.runtime.store.store import Store, store_of
from zinf_compile.runtime.transfer.device_updates import DeviceUpdates
from zinf_compile.runtime.transfer.tensor_io import TensorIO

pytestmark = pytest.mark.keeps_captures

WIDTH = 160
NUM_LAYERS = 6
NUM_STEPS = 7


class Tied(nn.Module):
    """A weight that is used at the beginning and at the end, and some that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + torch.tanh(self.inner(self.norm(x)))
        x = torch.tanh(self.inner(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.cross_entropy(x @ self.embedding.weight.t(), tokens)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


INITIAL = {name: value.clone() for name, value in make_model().state_dict().items()}


@dataclass(kw_only=True)
class Loop:
    """A training loop; each hook may be replaced."""

    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(
        model.parameters(), lr=1e-2, weight_decay=0.1
    )
    num_backwards: Callable[[int], int] = lambda step: 1
    num_forwards: Callable[[int], int] = lambda number: 1  # whose losses are added up for one of them
    before_step: Callable[[int, nn.Module, torch.optim.Optimizer], object] = lambda step, model, optimizer: None
    after_step: Callable[[int, nn.Module, torch.optim.Optimizer], object] = lambda step, model, optimizer: None
    takes_step: Callable[[int], bool] = lambda step: True
    set_to_none: bool = True

    def run(self, model: nn.Module, *, waits: bool) -> list[Tensor]:
        """Train; return the losses, and parameters and states at the end.

        ``waits``: before each step, until the updates ahead of it have ended.
        """
        optimizer = self.make_optimizer(model)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for step in range(NUM_STEPS):
            for number in range(self.num_backwards(step)):
                batches = [torch.randint(0, 200, (50,), generator=generator) for _ in range(self.num_forwards(number))]
                loss = sum(model(batch) for batch in batches)
                loss.backward()
            if waits:
                zinf_compile.synchronize(model)
            self.before_step(step, model, optimizer)
            if self.takes_step(step):
                optimizer.step()
            self.after_step(step, model, optimizer)
            optimizer.zero_grad(set_to_none=self.set_to_none)
            losses.append(loss.detach().clone())
        states = [value.clone() for p in model.parameters() for value in optimizer.state.get(p, {}).values()]
        return [*losses, *(p.detach().clone() for p in model.parameters()), *states]


def store_and_ahead(model: nn.Module) -> tuple[Store, UpdatesAhead]:
    record = record_of(next(model.parameters()))
    assert record is not None
    store = store_of(record)
    assert isinstance(store.updates_ahead, UpdatesAhead)
    return store, store.updates_ahead


# Compute dtype and device memory: in the first, a part of the copies is resident, or in host memory. In the last ones a
# (fake) GPU updates what lives in host memory: compute copies are streamed, or live on the GPU.
CASES: dict[str, tuple[torch.dtype | None, str]] = {
    "mixed": (None, "1600KiB"),
    "disk": (None, "1152KiB"),
    "bfloat16": (torch.bfloat16, "480KiB"),
    "gpu, streamed": (None, "1800KiB"),
    "gpu, resident": (None, "2300KiB"),
}
PARAMS = [name if name == "mixed" else pytest.param(name, marks=pytest.mark.long) for name in CASES]
# For tests that show the most of a GPU.
WITH_GPU = pytest.mark.parametrize(
    "optimized",
    [name if name in ("mixed", "gpu, resident") else pytest.param(name, marks=pytest.mark.long) for name in CASES],
    indirect=True,
)


def make_optimized(case: str, folder: Path, *, speculate: bool | str = True) -> nn.Module:
    dtype, device_memory = CASES[case]
    is_on_gpu = case.startswith("gpu")
    return zinf_compile.optimize(
        make_model(),
        device="cuda" if is_on_gpu else "cpu",
        device_memory=device_memory,
        host_memory="64MiB" if is_on_gpu else "528KiB",
        nvme=folder,
        compute="aten",
        compute_dtype=dtype,
        reserve_memory=0,
        remake_plan=False,
        tiles=False,
        speculate=speculate,
    )


@pytest.fixture(scope="module", params=PARAMS)
def optimized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[nn.Module]:
    """One captured model for all loops, on disk but for what is tiny; beside a GPU in host memory."""
    with on_streams() if request.param.startswith("gpu") else nullcontext():
        model = make_optimized(request.param, tmp_path_factory.mktemp("nvme"))
        model(torch.arange(50)).backward()
        model.zero_grad()
        yield model
        zinf_compile.close(model)
        torch._dynamo.reset()


@pytest.fixture
def model(optimized: nn.Module) -> Iterator[nn.Module]:
    """The captured model with its first values, and nothing known of earlier loops."""
    _, ahead = store_and_ahead(optimized)
    ahead.drop("the next test begins")
    gc.collect()  # optimizers of earlier loops
    optimized.load_state_dict(INITIAL)
    ahead.counts = AheadCounts()
    yield optimized
    store, _ = store_and_ahead(optimized)
    optimized.zero_grad()
    store.check_integrity()


def check(loop: Loop, model: nn.Module, *, waits: bool, with_plain: bool = True) -> AheadCounts:
    """Compare a loop with plain PyTorch; where parameters have a compute copy, with steps that do not begin ahead."""
    _, ahead = store_and_ahead(model)
    if record_of_first(model).copies.are_two or not with_plain:
        ahead.take = lambda record: None  # type: ignore[method-assign]
        expected = loop.run(model, waits=False)
        del ahead.take
        model.load_state_dict(INITIAL)
        assert ahead.counts == AheadCounts()
    else:
        expected = loop.run(make_model(), waits=False)
    got = loop.run(model, waits=waits)
    assert len(got) == len(expected)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), index
    return ahead.counts


def record_of_first(model: nn.Module) -> StoredParameter:
    record = record_of(next(model.parameters()))
    assert record is not None
    return record


BOTH = pytest.mark.parametrize("waits", [True, False], ids=["ended", "racing"])
ONE = pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.long)], ids=["ended", "racing"])


WRITTEN = ("parameter", "state", "data", "load")


def planned_names(model: nn.Module) -> frozenset[str]:
    """Return the parameters that are updated ahead of a step: the others are tiny, or have a copy in memory."""
    _, ahead = store_and_ahead(model)
    return frozenset().union(*ahead._planned.values())


def num_planned(model: nn.Module) -> int:
    return len(planned_names(model))


def a_weight(model: nn.Module) -> nn.Parameter:
    """Return one of them."""
    return model.get_parameter("layers.4.weight")


def let_updates_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let updates without a kernel run beside compute, for which these budgets leave no room."""
    monkeypatch.setattr(StreamedStep, "fits_beside_compute", True)


def clip(limit: float) -> Callable[[int, nn.Module, torch.optim.Optimizer], object]:
    return lambda step, model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), limit)


@WITH_GPU
@BOTH
def test_an_ordinary_loop_takes_every_update(model: nn.Module, waits: bool) -> None:
    counts = check(Loop(), model, waits=waits)
    assert not counts.dropped
    assert counts.num_taken + counts.num_late == num_planned(model) * (NUM_STEPS - 1)
    assert not waits or counts.num_late == 0


@pytest.mark.parametrize("optimized", ["mixed", pytest.param("bfloat16", marks=pytest.mark.long)], indirect=True)
def test_gradients_that_staging_still_holds_are_not_read(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = store_and_ahead(model)
    found: Counter[bool] = Counter()
    copy_landed = TensorIO.copy_landed

    def compare(self: TensorIO, slot: Slot, part: Slice, buffer: memoryview) -> bool:
        found[is_there := copy_landed(self, slot, part, buffer)] += 1
        if is_there:
            offset, nbytes = slot.byte_range(part)
            on_disk = memoryview(map_memory(nbytes)).cast("B")
            self.pool.wait(self.pool.read(slot, offset, on_disk), "a test")
            num = part.num_elements * slot.tensor.dtype.itemsize
            assert on_disk[:num] == buffer[:num]
        return is_there

    monkeypatch.setattr(TensorIO, "copy_landed", compare)
    check(Loop(num_backwards=lambda step: 2), model, waits=True)
    assert store.tensor_io.keeps_gradients
    assert found[True] > NUM_STEPS


@pytest.mark.parametrize("optimized", ["mixed"], indirect=True)
def test_gradients_that_autograd_has_added_to_in_place(model: nn.Module) -> None:
    """Those of a backward over several forwards: what staging still holds is what was there before.

    Compared with ordinary steps: in plain PyTorch a weight that two forwards use twice each differs in the last bit.
    """
    loop = Loop(num_backwards=lambda step: 2, num_forwards=lambda number: 1 + number)
    counts = check(loop, model, waits=True, with_plain=False)
    assert counts.num_taken > 0


@ONE
def test_clipping_that_never_bites_costs_nothing(model: nn.Module, waits: bool) -> None:
    counts = check(Loop(before_step=clip(1e6)), model, waits=waits)
    assert not counts.dropped
    assert not waits or counts.num_taken == num_planned(model) * (NUM_STEPS - 1)


@ONE
def test_clipping_that_always_bites_pauses(model: nn.Module, waits: bool) -> None:
    counts = check(Loop(before_step=clip(1e-3)), model, waits=waits)
    assert counts.num_taken == 0
    assert not waits or counts.dropped == {"the gradient was changed": num_planned(model)}  # of the second step only


@WITH_GPU
@ONE
def test_clipping_that_bites_at_times(model: nn.Module, waits: bool) -> None:
    loop = Loop(before_step=lambda step, *of: clip(1e-3 if step in (2, 3) else 1e6)(step, *of))
    counts = check(loop, model, waits=waits)
    if (
        waits
    ):  # the third step drops, the fourth does not begin and sees that clipping bites, the fifth that it does not
        assert counts.dropped == {"the gradient was changed": num_planned(model)}
        assert counts.num_taken == num_planned(model) * (NUM_STEPS - 1 - 3)


@BOTH
def test_a_changing_number_of_micro_steps(model: nn.Module, waits: bool) -> None:
    counts = check(Loop(num_backwards=lambda step: (1, 1, 2, 2, 3, 1, 1)[step]), model, waits=waits)
    if waits:
        assert set(counts.dropped) == {"more gradients came than in the step before"}
        assert counts.num_taken > 0


@ONE
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(model: nn.Module, waits: bool, set_to_none: bool) -> None:
    counts = check(Loop(num_backwards=lambda step: 2, set_to_none=set_to_none), model, waits=waits)
    assert not counts.dropped
    assert not waits or counts.num_taken == num_planned(model) * (NUM_STEPS - 1)


@ONE
def test_a_scheduler_changes_nothing_that_was_assumed(model: nn.Module, waits: bool) -> None:
    def advance(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.7

    counts = check(Loop(after_step=advance), model, waits=waits)
    assert not counts.dropped


@ONE
def test_options_that_change_between_backward_and_step(model: nn.Module, waits: bool) -> None:
    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)

    counts = check(Loop(before_step=change), model, waits=waits)
    assert counts.num_taken == 0
    assert not waits or set(counts.dropped) == {"options of its group were changed"}


def _scale(grad: Tensor) -> None:
    grad.mul_(0.5)


def _scale_data(grad: Tensor) -> None:
    grad.data.mul_(0.5)


def _scale_array(grad: Tensor) -> None:
    if grad.dtype == torch.float32:
        grad.detach().numpy()[:] *= 0.5
    else:
        grad.detach().mul_(0.5)


def _scale_all(grad: Tensor) -> None:
    torch._foreach_mul_([grad], 0.5)


def _scale_a_view(grad: Tensor) -> None:
    grad.view(-1)[:7].mul_(0.5)


def _unscale(grad: Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(1), torch.full((1,), 0.5))


EDITS = [
    *(_scale, _scale_array, _unscale),
    *(pytest.param(edit, marks=pytest.mark.long) for edit in (_scale_data, _scale_all, _scale_a_view)),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_a_gradient_that_was_edited(model: nn.Module, edit: Callable[[Tensor], None]) -> None:
    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 3:
            grad = a_weight(model).grad
            assert grad is not None
            edit(grad)

    counts = check(Loop(before_step=change), model, waits=True)
    assert counts.dropped == {"the gradient was changed": 1}


@ONE
@pytest.mark.parametrize("to", ["zero", "none", "other"])
def test_a_gradient_that_was_replaced(model: nn.Module, to: str, waits: bool) -> None:
    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parameter = a_weight(model)
        if step == 3:
            grad = parameter.grad
            assert grad is not None
            if to == "zero":
                grad.zero_()
            else:
                parameter.grad = None if to == "none" else torch.full_like(grad.detach(), 0.01)

    counts = check(Loop(before_step=change), model, waits=waits)
    assert not waits or sum(counts.dropped.values()) == 1


@ONE
def test_steps_that_are_skipped(model: nn.Module, waits: bool) -> None:
    counts = check(Loop(takes_step=lambda step: step not in (2, 5, 6)), model, waits=waits)
    assert not waits or counts.num_taken > 0


@ONE
def test_two_optimizers(model: nn.Module, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    let_updates_allocate(monkeypatch)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        second = torch.optim.SGD([named.pop("layers.3.weight"), named.pop("norm.weight")], lr=0.1, momentum=0.9)
        first = torch.optim.AdamW(named.values(), lr=1e-2)
        first.__dict__["others"] = [second]
        return first

    def step_other(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for other in optimizer.__dict__["others"]:
            other.step()
            other.zero_grad()

    counts = check(Loop(make_optimizer=make, after_step=step_other), model, waits=waits)
    assert not counts.dropped
    assert not waits or counts.num_taken == num_planned(model) * (NUM_STEPS - 1)


@pytest.mark.parametrize("what", WRITTEN)
def test_what_an_update_reads_was_written(model: nn.Module, what: str) -> None:
    check_what_is_written(model, what)


@pytest.mark.parametrize("optimized", ["gpu, resident"], indirect=True)
def test_what_an_update_on_a_gpu_reads_was_written(model: nn.Module) -> None:
    check_what_is_written(model, "data")


def check_what_is_written(model: nn.Module, what: str) -> None:
    def change(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step != 3:
            return
        parameter = a_weight(model)
        if what == "parameter":
            with torch.no_grad():
                parameter.mul_(0.5)
        elif what == "data":
            parameter.data.mul_(0.5)
        elif what == "state":
            optimizer.state[parameter]["exp_avg"].mul_(0.5)
        else:
            optimizer.load_state_dict(optimizer.state_dict())

    counts = check(Loop(before_step=change), model, waits=True)
    assert sum(counts.dropped.values()) == (num_planned(model) if what == "load" else 1)


@BOTH
def test_until_step_everybody_sees_the_old_values(model: nn.Module, waits: bool) -> None:
    tokens = torch.arange(50)

    def look(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            seen.append(model(tokens).clone())

    seen: list[Tensor] = []
    loop = Loop(before_step=look)
    check(loop, model, waits=waits)
    half = len(seen) // 2
    assert len(seen) == 2 * NUM_STEPS
    assert all(torch.equal(one, other) for one, other in zip(seen[:half], seen[half:], strict=True))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True),
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True),
    "groups": lambda model: torch.optim.NAdam(
        [{"params": [p], "lr": 0.01 * (index + 1)} for index, p in enumerate(model.parameters())]
    ),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True),
}


@ONE
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(model: nn.Module, name: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    let_updates_allocate(monkeypatch)
    counts = check(Loop(make_optimizer=OPTIMIZERS[name]), model, waits=waits)
    assert not counts.dropped
    assert not waits or counts.num_taken == num_planned(model) * (NUM_STEPS - 1)


def test_saved_between_backward_and_step(model: nn.Module, tmp_path: Path) -> None:
    """A checkpoint then has the old values, whether updates ahead have ended or not."""
    before: dict[str, Tensor] = {}

    def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 3:
            zinf_compile.save(tmp_path / "saved", model, optimizer)
            before.update({name: value.clone() for name, value in model.state_dict().items()})

    counts = check(Loop(before_step=save), model, waits=False)
    assert counts.num_taken + counts.num_late > 0
    zinf_compile.load(tmp_path / "saved", model, torch.optim.AdamW(model.parameters()))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


class _FailingDisk:
    """An engine whose writes to some shadows fail, once they are let go."""

    def __init__(self, engine: Engine, offsets: Callable[[], set[int]]) -> None:
        self._engine, self._offsets = engine, offsets
        self.may_go, self.is_writing = threading.Event(), threading.Event()
        self.num_failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def write(self, offset: int, buffer: memoryview) -> None:
        if offset in self._offsets():
            self.is_writing.set()
            self.may_go.wait(60)
            self.num_failed += 1
            raise StoreError(f"write at offset {offset} failed")
        self._engine.write(offset, buffer)


def let_disk_fail(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> _FailingDisk:
    """Return a disk that fails to write the shadows of one parameter, put in the place of the model's."""
    store, ahead = store_and_ahead(model)
    record = record_of(a_weight(model))
    assert record is not None
    assert store.engine is not None

    def offsets() -> set[int]:
        return {slot.extent.offset for slot in ahead._shadows.get(record.param, {}).values() if slot.extent is not None}

    disk = _FailingDisk(store.engine, offsets)
    monkeypatch.setattr(store.io_pool, "_engine", disk)
    return disk


class _FailingGpu:
    """Updates on a GPU, of which those of one parameter fail if they are ahead of their step."""

    def __init__(self, updates: DeviceUpdates) -> None:
        self._run = updates.run
        self.num_failed = 0

    def run(
        self,
        name: str,
        host: Mapping[CopyKey, Tensor],
        form: Any,
        written: Mapping[CopyKey, Tensor],
        *of: Any,
        **by: Any,
    ) -> Any:
        if name == "layers.4.weight" and host[MASTER].data_ptr() != written[MASTER].data_ptr():
            self.num_failed += 1
            raise CapacityError("the GPU has no memory left")
        return self._run(name, host, form, written, *of, **by)


@WITH_GPU
def test_an_update_ahead_that_fails_is_made_again(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    failing: _FailingGpu | _FailingDisk
    store, _ = store_and_ahead(model)
    if store.device.memory.unified:
        failing = let_disk_fail(model, monkeypatch)
        failing.may_go.set()
    else:
        failing = _FailingGpu(store.device_updates)
        monkeypatch.setattr(store.device_updates, "run", failing.run)
    loop = Loop(before_step=lambda step, *of: store_and_ahead(model)[0].updates.wait())
    counts = check(loop, model, waits=False)
    assert failing.num_failed > 0
    assert counts.dropped["it failed"] > 0
    assert counts.num_taken > 0


def test_an_update_that_fails_after_the_step_has_taken_it_stops_the_model(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = make_optimized("mixed", tmp_path)
    try:
        loop, tokens = Loop(), torch.arange(50)
        optimizer = loop.make_optimizer(model)
        loop.make_optimizer = lambda model: optimizer
        loop.run(model, waits=True)
        with pytest.MonkeyPatch.context() as patch:
            disk = let_disk_fail(model, patch)
            model(tokens).backward()
            assert disk.is_writing.wait(30)  # to a shadow: step() exchanges it
            optimizer.step()
            disk.may_go.set()
            with pytest.raises(StoreError, match=r"when an error came \(.*write at offset \d+ failed\), and holds"):
                a_weight(model).norm()
            with pytest.raises(StoreError, match=r"failed|being updated when an error came"):
                zinf_compile.synchronize(model)
        with pytest.raises(StoreError, match=r"an earlier error stopped this model: .*load a checkpoint"):
            model(tokens)
        store, _ = store_and_ahead(model)
        store.check_integrity()
    finally:
        zinf_compile.close(model)
        torch._dynamo.reset()


@pytest.mark.parametrize("case", [pytest.param("mixed", marks=pytest.mark.long), "gpu, resident"])
def test_a_model_that_is_dropped_before_its_step_is_freed(case: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    with on_streams() if case.startswith("gpu") else nullcontext():
        model = make_optimized(case, tmp_path)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.arange(50)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model(torch.arange(50)).backward()
        store, ahead = store_and_ahead(model)
        assert ahead._begun
        was = weakref.ref(store)
        del model, optimizer, store, ahead
        torch._dynamo.reset()
        for _ in range(100):  # until threads have let go
            gc.collect()
            if was() is None:
                return
            time.sleep(0.05)
    pytest.fail("the store is still there")


def test_an_optimizer_that_needs_whole_tensors_is_refused_if_it_is_asked_for(model: nn.Module) -> None:
    optimizer = torch.optim.Adafactor(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.arange(50)).backward()
    with pytest.raises(UnsupportedError, match=r"Adafactor is not one of .* which speculate=True needs; leave out"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.long
def test_other_optimizers_take_ordinary_steps_where_the_planner_decides(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = make_optimized("mixed", tmp_path, speculate="auto")
    try:
        loop = Loop(make_optimizer=lambda model: torch.optim.Adafactor(model.parameters()))
        got = loop.run(model, waits=False)
        expected = loop.run(make_model(), waits=False)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    finally:
        zinf_compile.close(model)
        torch._dynamo.reset()
