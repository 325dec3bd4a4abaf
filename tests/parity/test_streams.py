"""Bitwise parity on a device with streams. `make test-streams` runs all tests of this folder on one."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.support.fake_device import FakeStream
from tests.support.small_models import MLP, gpt, gpt_tied, mlp, vector_batches
from tests.support.swapping import swapping
from zinf_compile.ir.errors import CapacityError, ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.storage.slots import Slot
from zinf_compile.runtime.store.store import Store


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("placement", ["nvme", "host", "mixed"])
def test_gpt(parity, placement: str, captured: bool) -> None:
    device = parity.on_streams()
    parity.check(gpt, placement, captured=captured)
    if captured:  # eager code waits for each gather anyway
        assert device.copies.to_device.num_copied > 0
        assert device.copies.to_host.num_copied > 0


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize(
    ("workload", "update_on"), [(gpt_tied, "host"), pytest.param(gpt_tied, "device", marks=pytest.mark.long)]
)
def test_an_integrated_device_reads_host_memory_in_place(parity, workload, update_on: str, captured: bool) -> None:
    """Gathers from host memory copy nothing: ops read the homes, which are not written before these ops are done."""
    parity.on_streams(integrated=True)
    report = parity.check(workload, "host", captured=captured, update_on=update_on)
    moved = {route.route: route.nbytes for route in report.moved}
    assert (moved.get("device -> host", 0) > 0) == captured, "gradients; those of eager code are on the host"
    assert "host -> device" not in moved
    assert not any(plan.gathers for plan in report.plans)


@contextmanager
def _counted_copies() -> Iterator[Counter[str]]:
    """Count the bytes that streams copy inside the block, by their names."""
    counted: Counter[str] = Counter()
    copy = FakeStream._copy

    def count(stream: FakeStream, source: Tensor, destination: Tensor) -> None:
        counted[stream.name] += source.numel() * source.itemsize
        copy(stream, source, destination)

    with mock.patch.object(FakeStream, "_copy", count):
        yield counted


@pytest.mark.parametrize(
    ("num_backwards", "is_clipped", "offloads"),
    [(1, False, False), (1, True, False), (2, False, False), (1, False, True)],
    ids=["plain", "clipped", "accumulated", "offloaded"],
)
def test_a_step_of_an_integrated_device_copies_only_results_of_compute(
    parity, num_backwards: int, is_clipped: bool, offloads: bool
) -> None:
    """Each gradient once, one that clipping scales once more for its update, and activations on their way out."""
    device = parity.on_streams(integrated=True)
    swaps = swapping(lambda number, value: Tier.HOST, at_least=1) if offloads else nullcontext([])
    with swaps as plans:
        model, batches = parity.optimized(gpt, "host", update_on="device")
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch in batches:
            zinf_compile.synchronize(model)
            before = {route.route: route.nbytes for route in zinf_compile.report(model).moved}
            with _counted_copies() as copied:
                for _ in range(num_backwards):
                    model(**batch).backward()
                if is_clipped:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                adamw.step()
                adamw.zero_grad()
                zinf_compile.synchronize(model)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    offloaded = sum(swap.nbytes for plan in plans[-1:] for swap in plan.swaps)
    assert (offloaded > 0) == offloads
    # Activations are planned in whole sectors.
    assert gradients <= copied.pop("to-host") <= gradients + offloaded
    assert copied == ({"update-to-device": gradients} if is_clipped else {})
    moved = {route.route: route.nbytes - before.get(route.route, 0) for route in zinf_compile.report(model).moved}
    assert moved.get("host -> device", 0) == (gradients if is_clipped else 0)
    assert device.memory.integrated


@pytest.mark.parametrize(
    ("workload", "update_on"),
    [
        (mlp, "host"),
        (gpt_tied, "device"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((mlp, "device"), (gpt_tied, "host"))),
    ],
)
def test_updates(parity, workload, update_on: str) -> None:
    device = parity.on_streams()
    parity.check(workload, "nvme", captured=True, update_on=update_on)
    assert (device.update.num_waits > 0) == (update_on == "device")


def test_no_limit_on_memory_outlives_a_run(parity, monkeypatch) -> None:
    """Memory of user code between runs is not limited: after eager gathers, and after a run that could not begin."""
    device = parity.on_streams()
    model, batches = mlp()
    parity.optimize(model, capture=False, device_memory="64MiB", host_memory="64MiB")
    model(**batches[0])
    assert len(device.limits) > 1
    assert device.limits[-1] is None
    model, batches = mlp()
    parity.optimize(model, device_memory="64MiB", host_memory="64MiB", compute="aten")
    model(**batches[0]).backward()
    assert device.limits[-1] is None
    number = len(device.limits)
    store = next(model.parameters())._zinf_record.store
    monkeypatch.setattr(store.arena, "reserve", mock.Mock(side_effect=CapacityError("no room for the arena")))
    with pytest.raises(CapacityError, match="no room for the arena"):
        model(**batches[1])
    assert len(device.limits) > number
    assert device.limits[-1] is None


def test_what_is_updated_on_the_device_is_not_written_again(parity, monkeypatch) -> None:
    """What comes back is the value of a step: it does not make the compute copy stale, which the update has written too."""
    parity.on_streams()
    with torch.device("meta"):
        model = MLP()
    options = {"device_memory": "64MiB", "host_memory": "64MiB", "update_on": "device"}
    parity.optimize(model, init="reset", compute="aten", **options)
    stale: list[str] = []
    sync = Store._sync

    def note(store: Store, record) -> None:
        if not record.copies.is_synced(record.version):
            stale.append(record.name)
        sync(store, record)

    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in vector_batches(24, 5):
        model(**batch).backward()
        monkeypatch.setattr(Store, "_sync", note)
        adamw.step()
        adamw.zero_grad()
    assert not stale


def _on_device(store: Store) -> list[Slot]:
    return [slot for record in store.records.values() for slot in record.copies.states.values() if slot.on_device]


def _steps(model: nn.Module, batches, trace) -> None:
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for batch in batches:
        loss = parity_loss(model, batch)
        loss.backward()
        trace.losses.append(loss.detach().clone())
        adamw.step()
        adamw.zero_grad()
    trace.record_model(model, adamw)


@pytest.mark.parametrize("timing", [{}, {"overlap_step": False}, {"step_in_backward": True}], ids=str)
@pytest.mark.parametrize("workload", [mlp, pytest.param(gpt_tied, marks=pytest.mark.long)])
def test_state_lives_on_the_device_where_it_has_room(parity, workload, timing: dict[str, bool]) -> None:
    """State on the device is updated in place: only gradients and master copies cross the link."""
    parity.on_streams()
    stores: list[Store] = []

    def loop(model: nn.Module, batches, trace) -> None:
        if (record := record_of(next(model.parameters()))) is not None:
            stores.append(record.store)
        _steps(model, batches, trace)

    parity.check_loop(loop, workload, "host", captured=True, is_streamed=False, device_memory="64MiB", **timing)
    (store,) = stores
    assert len(_on_device(store)) == 2 * len(store.records)
    there = dict(store.meter.moved)["host -> device"]
    num_steps = len(workload()[1])
    masters = sum(record.copies.master.nbytes for record in store.records.values())
    # A gradient and a master copy per step, and once the compute copies that become resident.
    assert there <= (2 * num_steps + 1) * masters


def test_state_on_the_device_is_seen_changed_saved_and_loaded(parity, tmp_path) -> None:
    parity.on_streams()

    def trained(*, save: bool) -> tuple[nn.Module, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = parity.optimize(MLP(), device_memory="64MiB", host_memory="8MiB", tiles=False)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if not save:
            zinf_compile.load(tmp_path / "saved", model, adamw)
        for batch in vector_batches(24, 5)[2 * (not save) : 2 + 2 * (not save)]:
            model(**batch).backward()
            adamw.step()
            adamw.zero_grad()
            for parameter in model.parameters():
                adamw.state[parameter]["exp_avg"].mul_(0.5)
        if save:
            zinf_compile.save(tmp_path / "saved", model, adamw)
        return model, adamw

    trained(save=True)
    model, adamw = trained(save=False)
    assert _on_device(next(model.parameters())._zinf_record.store)
    torch.manual_seed(0)
    plain = MLP()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in vector_batches(24, 5)[:4]:
        plain(**batch).backward()
        reference.step()
        reference.zero_grad()
        for parameter in plain.parameters():
            reference.state[parameter]["exp_avg"].mul_(0.5)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        parity.assert_equal(one, other, "parameter")
        for key in ("exp_avg", "exp_avg_sq", "step"):
            parity.assert_equal(adamw.state[one][key], reference.state[other][key], key)


def test_whole_tensor_optimizers_update_state_of_the_device_on_the_host(parity) -> None:
    parity.on_streams()

    def loop(model: nn.Module, batches, trace) -> None:
        adafactor = torch.optim.Adafactor(model.parameters(), lr=1e-2)
        rmsprop = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
        for batch in batches[:3]:
            loss = parity_loss(model, batch)
            loss.backward()
            adafactor.step()
            rmsprop.step()
            model.zero_grad()
            trace.losses.append(loss.detach().clone())
            trace.record_model(model, rmsprop)

    parity.check_loop(loop, mlp, "host", captured=True, is_streamed=False, device_memory="64MiB")


def _micro_steps(model: nn.Module, batches, trace) -> None:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for batch in batches[:4]:
            loss = parity_loss(model, batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        trace.take_step(model, sgd)


def parity_loss(model: nn.Module, batch) -> Tensor:
    return model(**batch)


@pytest.mark.parametrize("placement", ["nvme", "host"])
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_accumulation_and_clipping(parity, placement: str, captured: bool) -> None:
    parity.on_streams()
    parity.check_loop(_micro_steps, mlp, placement, captured=captured, is_streamed=False)


def test_a_split_step_updates_everything_once(parity) -> None:
    """Some parameters are updated on the device and some on the host; both give the same bits here."""
    parity.on_streams()
    model, batches = parity.optimized(mlp, "nvme", captured=True)
    store = next(model.parameters())._zinf_record.store
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    trace = parity.trace()
    for batch in batches:
        store.device_share = 0.5
        loss = model(**batch)
        loss.backward()
        trace.losses.append(loss.detach().clone())
        trace.take_step(model, optimizer)
    parity.assert_plain(trace, parity.plain_runs(mlp), captured=True)


class _WithBuffer(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((5,), 0.5))


def test_a_checkpoint_of_one_device_is_loaded_on_another(parity, tmp_path) -> None:
    def trained(folder, *, load: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = parity.optimize(_WithBuffer(), device_memory="2MiB", host_memory="700KiB", nvme=tmp_path, tiles=False)
        adamw = torch.optim.AdamW(model.parameters())
        if load:
            zinf_compile.load(folder, model, adamw)
        for batch in vector_batches(24, 5)[2 * load : 2 + 2 * load]:
            model(**batch).backward()
            adamw.step()
            adamw.zero_grad()
        if not load:
            zinf_compile.save(folder, model, adamw)
        return [parameter.detach().clone() for parameter in model.parameters()]

    trained(tmp_path / "cpu", load=False)
    on_cpu = trained(tmp_path / "cpu", load=True)
    parity.on_streams()
    trained(tmp_path / "streams", load=False)
    for folder in ("cpu", "streams"):
        for one, other in zip(trained(tmp_path / folder, load=True), on_cpu, strict=True):
            parity.assert_equal(one, other, folder)


def test_inputs_on_another_device(parity) -> None:
    parity.on_streams()
    model = parity.optimize(MLP(), device_memory="2MiB", host_memory="8MiB")
    x, y = torch.randn(4, 24, device="meta"), torch.randint(5, (4,))
    with pytest.raises(ConfigError, match=r"x of MLP is on meta, and the model computes on cpu; move it there"):
        model(x=x, y=y)


def test_channels_last(parity) -> None:
    """Parameters are kept contiguous; inputs, and so gradients of convolutions, are not."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(4, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(288, 5)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    parity.on_streams()
    plain, losses = make(), []
    model = parity.optimize(make(), device_memory="64MiB", host_memory="64MiB", compute="aten")
    for each in (plain, model):
        sgd, found = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9), []
        for seed in range(3):
            x = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(seed))
            loss = each(x.to(memory_format=torch.channels_last)).square().mean()
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.detach(), theirs.detach().contiguous(), rtol=1e-4, atol=1e-6)


def _autocast_loss(model: nn.Module, batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch)


def test_what_is_cast_moves_narrow_though_two_copies_were_there(parity) -> None:
    parity.on_streams()
    report = parity.check(gpt, "nvme", captured=True, loss=_autocast_loss)
    assert any(placement.is_narrowed for placement in report.plans[0].placements)
