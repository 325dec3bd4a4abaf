"""``torch.autocast`` around and inside the forward, and ``GradScaler``: bitwise equal to plain PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zinf_compile
from zinf_compile.driver import session as session_module
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware, Rate, make_route
from zinf_compile.runtime.storage.engine import whole_sectors

STEPS = 5
WIDTH = 64
ROUNDING = 2.0**-7  # of compiled segments, relative: bfloat16 has 8 bits
BLOCKS = [f"layers.{index}.weight" for index in range(4)]


@pytest.fixture(autouse=True)
def _slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a fixed profile on which narrower copies are faster, whatever this machine would measure."""
    routes = {
        (Tier.DEVICE, Tier.HOST): 4e9,
        (Tier.HOST, Tier.DEVICE): 1e8,
        (Tier.DEVICE, Tier.NVME): 1e9,
        (Tier.HOST, Tier.NVME): 1e9,
        (Tier.NVME, Tier.DEVICE): 1e8,
        (Tier.NVME, Tier.HOST): 1e9,
    }
    hardware = Hardware(
        name="slow to read",
        unified=True,
        flops=(Rate(name="float32", per_second=1e12), Rate(name="bfloat16", per_second=1e12)),
        memory_bytes_per_second=1e11,
        routes=tuple(make_route(source, target, rate) for (source, target), rate in routes.items()),
        optimizer_elements_per_second=1e10,
    )
    monkeypatch.setattr(session_module, "find_measured", lambda *_: hardware)


class Net(nn.Module):
    """Tied input and output: autocast casts the matrix product, and leaves the embedding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(self.norm(hidden)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class AutocastInside(Net):
    """Only the blocks compute in bfloat16, and one of them turns autocast off again."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers[:3]:
                hidden = hidden + torch.tanh(layer(hidden))
            with torch.autocast("cpu", enabled=False):
                hidden = hidden.float() + torch.tanh(self.layers[3](hidden.float()))
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def make(cls: type[Net]):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(48, (STEPS, 2, 7), generator=generator)
    return cls(), [{"x": each[:, :-1], "y": each[:, 1:]} for each in tokens]


def net():
    return make(Net)


def net_with_autocast_inside():
    return make(AutocastInside)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def autocast_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**batch)


def host_budget(placement: str) -> dict[str, int]:
    """Return options that put some narrower copies, but not all, on nvme in the mixed placement."""
    return {"host_memory": 532 * 2**10} if placement == "mixed" else {}


def enough_for_both(parity, *, captured: bool, **options: Any) -> int:
    """Return a device budget that fits the graphs with and without autocast."""
    losses = (autocast_loss, parity.plain_loss)
    each = (parity.budgets(net, "nvme", captured=captured, loss=loss, **options) for loss in losses)
    return max(budgets["device_memory"] for budgets in each)


def test_autocast_around_the_forward(parity, placement, way):
    parity.check(net, placement, **way, loss=autocast_loss, rounding=ROUNDING, **host_budget(placement))


def test_autocast_inside_of_the_model(parity, way):
    parity.check(net_with_autocast_inside, "nvme", **way, rounding=ROUNDING)


@pytest.mark.long
def test_autocast_on_and_off(parity, way):
    """Evaluate without autocast between steps, and take one step without it: each has its own graph."""

    def loop(model, batches, trace):
        optimizer = adamw(model)
        for step, batch in enumerate(batches):
            loss = autocast_loss(model, batch) if step != 1 else model(**batch)
            loss.backward()
            with torch.no_grad():
                trace.losses += [loss.clone(), model(**batch).clone()]
            trace.take_step(model, optimizer)

    budget = enough_for_both(parity, **way)
    parity.check_loop(loop, net, **way, device_memory=budget, rounding=ROUNDING)


def test_grad_scaler(parity, placement, way):
    """Scale, unscale and clip. A step with an infinite or NaN gradient is skipped and changes no bit."""

    def loop(model, batches, trace):
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step, batch in enumerate([*batches, *batches]):
            loss = autocast_loss(model, batch)
            scaler.scale(loss).backward()
            if step == 2:
                model.get_parameter("layers.1.weight").grad[0, 0] = float("inf")
            if step == 4:
                model.get_parameter("layers.2.bias").grad[1] = float("nan")
            if step != 5:
                scaler.unscale_(optimizer)
                trace.losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).nan_to_num())
            before = {name: parameter.clone() for name, parameter in model.named_parameters()}
            scaler.step(optimizer)
            scaler.update()
            if step in (2, 4):
                assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
            optimizer.zero_grad()
            trace.losses += [loss.detach().clone(), torch.tensor(scaler.get_scale())]
            trace.record_model(model, optimizer)

    options = {**way, **host_budget(placement)}
    parity.check_loop(loop, net, placement, loss=autocast_loss, rounding=ROUNDING, **options)


def narrowed(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter._zinf_record.copies.are_two]


def moved(model: nn.Module) -> int:
    """Return the bytes of parameters transferred to the device so far."""
    routes = {route.route: route.nbytes for route in zinf_compile.report(model).moved}
    return routes.get("nvme -> device", 0) + routes.get("host -> device", 0)


@pytest.mark.of_a_cpu(reason="its numbers are those of a plan for one memory")
@pytest.mark.parametrize("home", ["nvme", pytest.param("host", marks=pytest.mark.long)])
def test_what_is_cast_moves_half_the_bytes(parity, home):
    """A weight that is always cast moves in bfloat16, half the bytes; elsewhere it moves in its own dtype."""
    budget = enough_for_both(parity, captured=True)
    model, batches = parity.optimized(net, home, loss=autocast_loss, device_memory=budget)
    seen: list[dict[str, int]] = []
    for loss in (autocast_loss, parity.plain_loss):
        loss(model, batches[0]).backward()
        before = moved(model)
        loss(model, batches[0]).backward()
        plan = zinf_compile.report(model).plans[-1]
        dtypes = {use.parameter: getattr(torch, use.dtype) for use in plan.uses}
        sizes = {name: model.get_parameter(name).numel() * dtype.itemsize for name, dtype in dtypes.items()}
        moves = [name for transfer in plan.gathers for name in transfer.parameters]
        sector = 4096 if home == "nvme" else 1
        assert moved(model) - before == sum(-(-sizes[name] // sector) * sector for name in moves)
        seen.append({name: sizes[name] for name in moves})
    cast, plain = seen
    halved = {name for name in cast.keys() & plain.keys() if 2 * cast[name] == plain[name]}
    assert halved == set(narrowed(model)) & cast.keys()
    assert len(halved) >= 2
    assert "embed.weight" not in narrowed(model)  # the embedding reads it without a cast


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_accumulation_and_clipping(parity, placement, cache_enabled):
    """Gradients, their sums and their norms stay in the dtype of the parameters."""

    def loss_of(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
            return model(**batch)

    def loop(model, batches, trace):
        optimizer = adamw(model)
        for batch in batches:
            for micro in (batch, batches[0]):
                (loss_of(model, micro) / 2).backward()
            trace.losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            trace.record_gradients(model)
            assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
            optimizer.step()
            optimizer.zero_grad()
            trace.record_model(model, optimizer)
        if hasattr(next(model.parameters()), "_zinf_record"):
            assert narrowed(model)

    parity.check_loop(loop, net, placement, captured=True, loss=autocast_loss, **host_budget(placement))


def test_a_plain_evaluation_between_forward_and_backward(parity):
    """Create narrower copies of parameters while a graph that reads the wide ones still awaits its backward."""

    def loop(model, batches, trace):
        optimizer = adamw(model)
        for batch in batches:
            loss = model(**batch)
            with torch.no_grad():
                trace.losses.append(autocast_loss(model, batch))
            loss.backward()
            trace.record_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.get_parameter("layers.1.weight").mul_(1.01)  # makes its narrower copy stale
                trace.losses.append(autocast_loss(model, batch))
            trace.record_model(model, optimizer)
        if hasattr(next(model.parameters()), "_zinf_record"):
            assert narrowed(model)

    parity.check_loop(loop, net, captured=True, device_memory=enough_for_both(parity, captured=True))


def frozen_blocks():
    """Freeze the weights of the blocks, as adapters do; the biases are trained."""
    model, batches = net()
    for name in BLOCKS:
        model.get_parameter(name).requires_grad_(False)
    return model, batches


@pytest.mark.long
def test_frozen_weights_keep_both_copies_and_unfreeze(parity):
    def loop(model, batches, trace):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step, batch in enumerate(batches):
            if step == 3:
                model.get_parameter("layers.2.weight").requires_grad_(True)
            loss = autocast_loss(model, batch)
            loss.backward()
            with torch.no_grad():
                trace.losses += [loss.detach(), model(**batch)]
            trace.record_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            trace.record_model(model, None)
        if hasattr(next(model.parameters()), "_zinf_record"):
            frozen = (set(narrowed(model)) & set(BLOCKS)) - {"layers.2.weight"}  # narrowed biases are trained
            assert frozen
            placements = {item.parameter: item for item in zinf_compile.report(model).plans[-1].placements}
            for name in frozen:
                sizes = (
                    placements[name].compute_nbytes,
                    placements[name].master_nbytes,
                    placements[name].gradient_nbytes,
                )
                assert sizes == (2 * WIDTH**2, 4 * WIDTH**2, 0)

    budget = enough_for_both(parity, captured=True)
    parity.check_loop(loop, frozen_blocks, captured=True, loss=autocast_loss, device_memory=budget)


def test_resume(parity, tmp_path):
    """Save with narrower copies; load into a model that has them and into one that has none yet."""
    plain = parity.plain_runs(net, autocast_loss)(False)
    model, batches = parity.optimized(net, loss=autocast_loss)
    optimizer = adamw(model)

    def train_steps(model, optimizer, steps):
        losses = []
        for step in steps:
            loss = autocast_loss(model, batches[step])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return losses

    losses = train_steps(model, optimizer, range(2))
    assert narrowed(model)
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    train_steps(model, optimizer, range(2, 3))
    zinf_compile.load(tmp_path / "saved", model, optimizer)
    losses += train_steps(model, optimizer, range(2, STEPS))
    torch._dynamo.reset()
    other, _ = parity.optimized(net, loss=autocast_loss)
    optimizer = adamw(other)
    zinf_compile.load(tmp_path / "saved", other, optimizer)
    for ours, expected in (
        (losses, plain.losses),
        (train_steps(other, optimizer, range(2, STEPS)), plain.losses[2:]),
    ):
        for one, another in zip(ours, expected, strict=True):
            parity.assert_equal(one, another, "loss")


@pytest.mark.of_a_cpu(reason="elsewhere a compute copy has a home of its own, in any dtype")
def test_no_room_for_narrower_copies(parity):
    """No cast is folded into a gather, the numbers are the same, and the report says so."""
    model, _ = net()
    nbytes = sum(whole_sectors(parameter.nbytes) for parameter in model.parameters())  # each home takes whole sectors
    budgets = {"device_memory": enough_for_both(parity, captured=True), "nvme_memory": 4 * nbytes}
    report = parity.check(net, "nvme", captured=True, loss=autocast_loss, **budgets)
    assert {use.dtype for use in report.plans[0].uses} == {"float32"}
    assert "there is no room for" in str(report)
