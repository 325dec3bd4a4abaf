"""On a device with streams every bit is as in plain PyTorch too. With ZINF_STREAMS=1 all tests of this folder run on one."""

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.parity.test_models import MLP, gpt, gpt_tied, mlp, vector_batches
from zinf_compile.errors import ConfigError


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("placement", ["nvme", "host", "mixed"])
def test_gpt(parity, placement: str, captured: bool) -> None:
    device = parity.on_streams()
    parity.check(gpt, placement, captured=captured)
    if captured:  # eager code waits for what it gathers anyhow
        assert device.to_device.num_copied > 0
        assert device.to_host.num_copied > 0


@pytest.mark.parametrize("update_on", ["host", "device"])
@pytest.mark.parametrize("workload", [mlp, gpt_tied])
def test_updates(parity, workload, update_on: str) -> None:
    device = parity.on_streams()
    parity.check(workload, "nvme", captured=True, update_on=update_on)
    assert (device.update.num_waits > 0) == (update_on == "device")


def _micro_steps(model: nn.Module, batches, trace) -> None:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for batch in batches[:4]:
            loss = parity_loss(model, batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        trace.record_gradients(model)
        sgd.step()
        sgd.zero_grad()
        trace.record_model(model, sgd)


def parity_loss(model: nn.Module, batch) -> Tensor:
    return model(**batch)


@pytest.mark.parametrize("placement", ["nvme", "host"])
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_accumulation_and_clipping(parity, placement: str, captured: bool) -> None:
    parity.on_streams()
    parity.check_loop(_micro_steps, mlp, placement, captured=captured, is_streamed=False)


def test_a_split_step_updates_everything_once(parity) -> None:
    """Some parameters on the device and some on the host: here both give the same bits."""
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
        trace.record_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        trace.record_model(model, optimizer)
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


def _autocast_loss(model: nn.Module, batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch)


def test_what_is_cast_moves_narrow_though_two_copies_were_there(parity) -> None:
    parity.on_streams()
    report = parity.check(gpt, "nvme", captured=True, loss=_autocast_loss)
    assert any(placement.is_narrowed for placement in report.plans[0].placements)
