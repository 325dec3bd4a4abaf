"""The lifetime of a store: it gives back what it takes, however it ends."""

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.config import make_config
from zinf_compile.ir.copies import Role
from zinf_compile.ir.errors import CapacityError, StoreError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.model.moving import move_homes
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.process.ram import anonymous_rss
from zinf_compile.runtime.store.store import Store

BUDGETS = {"device_memory": "8MiB", "host_memory": "512KiB", "capture": False}


def make_model(width: int = 200) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def train(model: nn.Module, num_steps: int = 1, width: int = 200) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.ones(2, width)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def held() -> tuple[int, int, int]:
    """Return the numbers of threads, of descriptors and of mappings of deleted files of this process."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("(deleted)")
    return threading.active_count(), len(os.listdir("/proc/self/fd")), mappings


def wait_until(is_true: Callable[[], bool], complaint: Callable[[], str]) -> None:
    """Wait for a condition, such as the end of an update of a model that was deleted."""
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def gives_everything_back(tmp_path: Path) -> None:
    train(zinf_compile.optimize(warm := make_model(), nvme=tmp_path, **BUDGETS))  # first uses of torch keep some things
    zinf_compile.close(warm)


def test_close_gives_back_threads_and_descriptors(tmp_path: Path) -> None:
    before = held()
    model = make_model()
    zinf_compile.optimize(model, nvme=tmp_path, **BUDGETS)
    train(model, 2)
    assert held() > before
    zinf_compile.close(model)
    assert held()[0] == before[0], "threads end with the store"
    # Each mapping that a tensor still uses holds a descriptor of the file, until the tensor is gone.
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    del model
    wait_until(lambda: held() == before, lambda: f"{held()} are held, {before} were before")
    assert os.listdir(tmp_path) == [], "the file never has a name"


def test_close_twice(tmp_path: Path) -> None:
    model = make_model()
    zinf_compile.optimize(model, nvme=tmp_path, **BUDGETS)
    train(model)
    zinf_compile.close(model)
    zinf_compile.close(model)


def test_closing_an_idle_store_that_adopted_nothing(tmp_path: Path) -> None:
    store = Store(make_config({"nvme": tmp_path, **BUDGETS}))
    store.check_integrity()
    store.close()
    store.close()


def test_after_close_values_can_be_read_and_not_trained(tmp_path: Path) -> None:
    model = make_model()
    zinf_compile.optimize(model, nvme=tmp_path, **BUDGETS)
    optimizer = train(model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.ones(2, 200)).sum().backward()
    zinf_compile.close(model)
    for call in (lambda: model(torch.ones(2, 200)), optimizer.step):
        with pytest.raises(StoreError, match="the store of this model is closed; build and optimize the model again"):
            call()
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert torch.isfinite(optimizer.state[model[0].weight]["exp_avg"]).all()
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    train(plain)


def test_backward_after_close_is_refused(tmp_path: Path) -> None:
    model = make_model()
    zinf_compile.optimize(model, nvme=tmp_path, **BUDGETS)
    loss = model(torch.ones(2, 200)).sum()
    zinf_compile.close(model)
    with pytest.raises(StoreError, match="the store of this model is closed"):
        loss.backward()


def test_a_model_that_is_gone_gives_everything_back_without_close(tmp_path: Path) -> None:
    before = held()
    model = make_model()
    zinf_compile.optimize(model, nvme=tmp_path, **BUDGETS)
    optimizer = train(model)
    del model, optimizer
    wait_until(lambda: held() == before, lambda: f"{held()} are held, {before} before")


def test_a_captured_model_that_is_gone_gives_everything_back_without_close(tmp_path: Path) -> None:
    model = make_model()
    zinf_compile.optimize(model, nvme=tmp_path, **{**BUDGETS, "capture": True})
    optimizer = train(model)
    torch._dynamo.reset()
    del model, optimizer

    def threads() -> list[str]:
        gc.collect()
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("zinf")]

    wait_until(lambda: not threads(), lambda: f"{threads()} run")
    assert not [name for name in os.listdir("/proc/self/fd") if str(tmp_path) in _target(name)]


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the descriptor that listed them
        return ""


def test_fifty_models_in_one_process_leave_nothing(tmp_path: Path) -> None:
    width = 300  # 360 kB a weight: five copies of two weights, leaked, would be 3.6 MB a model
    before, memory = held(), []
    for index in range(50):
        model = make_model(width)
        zinf_compile.optimize(model, nvme=tmp_path, **{**BUDGETS, "host_memory": "1MiB"})
        train(model, 1, width)
        if index % 2:
            zinf_compile.close(model)
        del model
        if index % 5 == 4:
            gc.collect()
            memory.append(anonymous_rss())
    assert held() == before
    assert max(memory[5:]) - max(memory[1:3]) < 4 * 2**20, memory
    assert os.listdir(tmp_path) == []


def test_it_is_whole_after_every_step(optimize: Callable[..., nn.Module], store_of: Callable[..., Store]) -> None:
    model = optimize(make_model(), tiny=True)
    store = store_of(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss: Tensor = model(torch.ones(2, 200)).pow(2).sum()
        store.check_integrity()
        loss.backward()
        store.check_integrity()
        optimizer.step()
        store.check_integrity()
        optimizer.zero_grad()
    assert store.staging.peak_nbytes <= store.config.staging_memory
    live = sum(slot.nbytes for record in store.records.values() for slot in record.slots if slot.tier is Tier.NVME)
    assert store.held.nbytes_on(Tier.NVME) == live
    assert store.layout.end >= live
    assert store.engine is not None
    assert store.engine.nbytes >= store.layout.end


def test_accounted_bytes_are_those_of_the_slots(
    optimize: Callable[..., nn.Module], store_of: Callable[..., Store]
) -> None:
    for tiny in (True, False):
        model = optimize(make_model(), tiny=tiny)
        store = store_of(model)
        train(model, 2)
        for tier in Tier:
            slots = [slot for record in store.records.values() for slot in record.slots if slot.tier is tier]
            assert store.held.nbytes_on(tier) == sum(slot.nbytes for slot in slots), tier


def test_slots_of_different_tensors_do_not_overlap(
    optimize: Callable[..., nn.Module], store_of: Callable[..., Store]
) -> None:
    model = optimize(make_model(), tiny=True)
    train(model)
    extents = sorted(
        (slot.extent.offset, slot.extent.offset + slot.extent.reserved_nbytes)
        for record in store_of(model).records.values()
        for slot in record.slots
        if slot.extent is not None
    )
    assert len(extents) >= 4
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(extents))


def test_two_models_do_not_meet(optimize: Callable[..., nn.Module], store_of: Callable[..., Store]) -> None:
    one, other = optimize(make_model(), tiny=True), optimize(make_model(), tiny=True)
    assert store_of(one) is not store_of(other)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    train(one, 2)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    zinf_compile.close(one)
    train(other, 2)


def test_a_new_plan_moves_optimizer_state(
    optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store]
) -> None:
    """State from a checkpoint that was loaded before there was a plan: plans move it to their tiers, there and back."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 130)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    plain = nn.Linear(130, 140)
    model = nn.Linear(130, 140)
    model.load_state_dict(plain.state_dict())
    optimize(model, tiny=True)
    plain_optimizer, optimizer = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(model.parameters())
    store = store_of(model)
    for tier in (Tier.HOST, Tier.NVME):
        step(plain, plain_optimizer)
        step(model, optimizer)
        kept = optimizer.state[model.weight]["exp_avg"]
        move_homes(store, [placement.moved({Role.STATE: tier}) for placement in store.placements.values()])
        assert {slot.tier for slot in store.records["weight"].copies.states.values()} == {tier}
        assert optimizer.state[model.weight]["exp_avg"] is not kept
        assert torch.equal(kept, optimizer.state[model.weight]["exp_avg"])
        store.check_integrity()
    step(plain, plain_optimizer)
    step(model, optimizer)
    assert torch.equal(model.weight, plain.weight)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[model.weight][key], plain_optimizer.state[plain.weight][key]), key


def test_planning_between_runs_waits_for_updates_and_nobody_samples_meanwhile(tmp_path: Path) -> None:
    model = make_model()
    train(zinf_compile.optimize(model, nvme=tmp_path, **BUDGETS), num_steps=2)
    record = record_of(model[0].weight)
    assert record is not None
    store, done = record.store, threading.Event()
    store.updates.submit(lambda: (time.sleep(0.05), done.set()))
    before = store.ram.peak
    with store.held.planning():
        assert done.is_set(), "an update is still running"
        sampler = threading.Thread(target=store.held.sample)
        sampler.start()
        sampler.join(0.05)
        assert sampler.is_alive()
        held = torch.ones(32 * 2**20, dtype=torch.uint8)
        del held
    sampler.join()
    assert store.ram.peak < before + 16 * 2**20
    zinf_compile.close(model)


def test_a_slot_for_which_the_disk_has_no_room_takes_none(
    optimize: Callable[..., nn.Module], store_of: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(optimize(make_model(), tiny=True))
    assert store.engine is not None
    end = store.layout.end

    def reserve(nbytes: int) -> None:
        raise CapacityError(f"no room for {nbytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(store.engine, "reserve", reserve)
        with pytest.raises(CapacityError, match="no room for"):
            store.new_slot("anything", torch.Size([10_000]), torch.float32, Tier.NVME)
    assert store.layout.end == end
    store.check_integrity()
