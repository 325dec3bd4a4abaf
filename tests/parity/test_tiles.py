"""Parameters gathered by tiles: the same numbers as the same tiles in plain PyTorch, with less memory."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.config import parse_size
from zinf_compile.ir.errors import CapacityError, ConfigError, UnsupportedError
from zinf_compile.ir.glossary import Tier

STEPS = 3
VOCABULARY, WIDTH, HIDDEN = 256, 64, 128
TILES = {"embed.weight": 4, "up.weight": 4, "down.weight": 1, "head.weight": 8}
KiB = 2**10


def by_tiles(x: Tensor, layer: nn.Linear, count: int) -> Tensor:
    """Return the output of a layer, computed by tiles of its rows in plain PyTorch."""
    sizes = [layer.weight.shape[0] // count] * count
    biases = [None] * count if layer.bias is None else layer.bias.split(sizes)
    return torch.cat([F.linear(x, *tile) for tile in zip(layer.weight.split(sizes), biases, strict=True)], -1)


class Net(nn.Module):
    def __init__(self, tiles: dict[str, int]) -> None:
        super().__init__()
        self.tiles = tiles
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def linear(self, x: Tensor, name: str) -> Tensor:
        layer = getattr(self, name)
        count = self.tiles.get(f"{name}.weight", 1)
        return layer(x) if count == 1 else by_tiles(x, layer, count)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.linear(F.gelu(self.linear(x, "up")), "down")
        return F.cross_entropy(self.linear(x, "head").flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def make(tiles: dict[str, int] | None = None, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(tiles or {}).to(dtype)


def batches(num: int = STEPS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"tokens": torch.randint(VOCABULARY, (2, 8), generator=generator)} for _ in range(num)]


def homes(parity, placement: str, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    """Return budgets in which not everything can be resident."""
    budgets: dict[str, object] = {"device_memory": (100 + 15 * dtype.itemsize) * KiB, "host_memory": "2MiB"}
    return budgets | ({"nvme": parity._folder, "host_memory": 512 * KiB} if placement == "nvme" else {})


@pytest.mark.parametrize(
    "placement", ["nvme", pytest.param("host", marks=pytest.mark.of_own_memory(reason="it gathers from host memory"))]
)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=pytest.mark.needs_more_on_streams(device_memory=3.5)),
        pytest.param(torch.bfloat16, marks=pytest.mark.needs_more_on_streams(device_memory=2.3)),
    ],
    ids=str,
)
def test_bitwise_as_the_same_tiles_in_plain_pytorch(parity, placement, dtype):
    plain = make(TILES, dtype)
    expected = parity.train(plain, batches())
    model = parity.optimize(make(dtype=dtype), tiles=TILES, **homes(parity, placement, dtype))
    parity.assert_same(parity.train(model, batches()), expected)
    (plan,) = zinf_compile.report(model).plans
    assert plan.gathers
    assert {placement.parameter for placement in plan.placements} >= {
        f"{name}.tile_{number}" for name, count in TILES.items() if count > 1 for number in range(count)
    }
    names = [sink.name for sink in plan.sinks]
    assert sum(name.startswith("head.weight.tile_") for name in names) == TILES["head.weight"]


def _micro_steps(model: nn.Module, given: list[dict[str, Tensor]], trace) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, batch in enumerate(given):
        loss = model(**batch)
        loss.backward()
        trace.losses.append(loss.detach().clone())
        if number % 2:
            trace.record_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            trace.record_model(model, optimizer)


def _with_hooks(model: nn.Module, given: list[dict[str, Tensor]], trace) -> None:
    hooked = dict(model.named_parameters())["head.weight"]
    hooked.register_hook(lambda grad: 2 * grad)
    _micro_steps(model, given, trace)


def _with_own_gradients(model: nn.Module, given: list[dict[str, Tensor]], trace) -> None:
    for name, parameter in model.named_parameters():
        if name == "head.weight":
            parameter.grad = torch.ones(parameter.shape)
    _micro_steps(model, given, trace)


@pytest.mark.needs_more_on_streams(device_memory=3.5)
@pytest.mark.parametrize("placement", ["nvme", "host"])
@pytest.mark.parametrize("loop", [_micro_steps, _with_hooks, _with_own_gradients])
def test_gradients_add_up_as_in_plain_pytorch(parity, placement, loop):
    plain, ours = parity.trace(), parity.trace()
    model = make(TILES)
    loop(model, batches(4), plain)
    loop(parity.optimize(make(), tiles=TILES, **homes(parity, placement)), batches(4), ours)
    parity.assert_same(ours, plain)


@pytest.mark.parametrize("loop", [_with_hooks, _with_own_gradients])
def test_gradients_that_users_see_come_over_the_link(parity, loop):
    """On a device with streams. Autograd, and gradients that the user has set, are on the host."""
    plain, ours = parity.trace(), parity.trace()
    loop(make(TILES), batches(4), plain)
    parity.on_streams()
    loop(parity.optimize(make(), tiles=TILES, device_memory="560KiB", host_memory="2MiB"), batches(4), ours)
    parity.assert_same(ours, plain)


@pytest.mark.needs_more_on_streams(device_memory=2)
def test_updates_inside_backward(parity):
    plain = make(TILES)
    expected = [loss.item() for loss in parity.train(plain, batches()).losses]
    budgets = {**homes(parity, "nvme"), "device_memory": "288KiB"}  # updates take memory beside backward
    model = parity.optimize(make(), tiles=TILES, step_in_backward=True, **budgets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for batch in batches():
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == expected


class Tied(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.roll(1, 1).flatten())


@pytest.mark.needs_more_on_streams(host_memory=1.25)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"device_memory": "1MiB", "host_memory": 512 * KiB},
            marks=pytest.mark.of_a_cpu(reason="streams want more than 1 MiB, with which sums are tiled otherwise"),
        ),
        pytest.param(
            {"device_memory": "1500KiB", "host_memory": "32MiB", "step_in_backward": True},
            marks=pytest.mark.of_own_memory(
                reason="what is read in place is not cut into tiles, and its gradient is whole"
            ),
        ),
    ],
    ids=["nvme", "step_in_backward"],
)
def test_a_parameter_larger_than_the_device_trains(parity, options):
    """In float64, where reordered sums hardly differ; the loss is fused with its layer."""

    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(STEPS):
            loss = model(torch.randint(4096, (2, 8), generator=generator))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]

    torch.manual_seed(0)
    plain = Tied(4096, 64).double()
    expected = train(plain)
    torch.manual_seed(0)
    model = parity.optimize(Tied(4096, 64).double(), nvme=parity._folder, **options)
    (weight,) = model.parameters()
    assert weight.numel() * weight.itemsize == 2 * 2**20
    for ours, theirs in zip(train(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    report = zinf_compile.report(model)
    (plan,) = report.plans
    assert len(plan.placements) > 4
    device = next(tier for tier in report.tiers if tier.tier is Tier.DEVICE)
    assert device.measured_peak <= device.predicted_peak <= parse_size(options["device_memory"], option="device_memory")


@pytest.mark.of_own_memory(reason="what is read in place is not cut into tiles, and its gradient is whole")
def test_as_few_tiles_as_will_do(parity):
    """More memory gives fewer tiles, and none where everything fits."""
    counts = []
    for device_memory in ("1MiB", "3MiB", "32MiB"):
        torch.manual_seed(0)
        model = parity.optimize(Tied(4096, 64), device_memory=device_memory, host_memory="32MiB")
        model(torch.zeros(1, 8, dtype=torch.int64))
        (plan,) = zinf_compile.report(model).plans
        counts.append(len(plan.placements))
        torch._dynamo.reset()
    assert counts[0] > counts[1] > counts[2] == 1


def test_tiles_of_another_number_than_the_checkpoint_had(parity, tmp_path, caplog):
    """Continuing from a checkpoint with other tiles, or without tiles, warns that bits differ."""

    def begin(
        tiles: dict[str, int] | None, *, load: bool = False
    ) -> tuple[nn.Module, torch.optim.Optimizer, list[str]]:
        torch.manual_seed(0)
        model = parity.optimize(Tied(4096, 64), device_memory="32MiB", host_memory="32MiB", tiles=tiles)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        caplog.clear()
        if load:
            zinf_compile.load(tmp_path / "x", model, optimizer)
        assert not caplog.messages, "load has nothing to compare before the first capture"
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        warnings = [message for message in caplog.messages if "not bit by bit" in message]
        torch._dynamo.reset()
        return model, optimizer, warnings

    model, optimizer, _ = begin(None)
    zinf_compile.save(tmp_path / "x", model, optimizer)
    assert begin(None, load=True)[2] == []
    model, optimizer, (warning,) = begin({"embed.weight": 4}, load=True)
    assert "computes everything whole, and this one computes in tiles (" in warning
    assert "embed.weight is gathered in" in warning
    zinf_compile.load(tmp_path / "x", model, optimizer)
    assert "not bit by bit" in caplog.messages[-1], "load warns if the model is captured already"
    zinf_compile.save(tmp_path / "x", model, optimizer)
    assert begin({"embed.weight": 4}, load=True)[2] == []
    assert "and this one computes everything whole" in begin(None, load=True)[2][0]


@pytest.mark.of_a_cpu(reason="its numbers are those of a plan for one memory")
def test_tile_memory_is_a_limit(parity):
    model = parity.optimize(Tied(4096, 64), device_memory="32MiB", host_memory="32MiB", tile_memory="256KiB")
    model(torch.zeros(1, 8, dtype=torch.int64))
    (plan,) = zinf_compile.report(model).plans
    assert [placement.compute_nbytes for placement in plan.placements] == [256 * KiB] * 4
    assert re.search(r"embed.weight.tile_\{0..3\} +4 +4.0 MiB", str(plan))  # weight, gradient, two of state


@pytest.mark.needs_more_on_streams(device_memory=3.5)
def test_tiles_of_one_op_are_one_line_of_the_dump(parity):
    model = parity.optimize(make(), tiles=TILES, **homes(parity, "nvme"))
    model(**batches()[0])
    (plan,) = zinf_compile.report(model).plans
    lines = [line for line in str(plan).splitlines() if "-> device" in line and "tiles" in line]
    assert sum("8 tiles" in line and "64.0 KiB" in line for line in lines) == 2  # forward and backward


class Mlps(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def losses_of(model: nn.Module, num_rows: int, width: int) -> list[Tensor]:
    """Train a model that returns its loss for some steps, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.randn(num_rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), []
    for _ in range(STEPS):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_activations_wider_than_the_device_are_made_by_tiles_of_rows(parity):
    def train(model: nn.Module) -> list[Tensor]:
        losses = losses_of(model, 2048, 32)
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]

    torch.manual_seed(0)
    expected = train(Mlps().double())
    torch.manual_seed(0)
    model = parity.optimize(Mlps().double(), device_memory="5MiB", host_memory="32MiB", micro_batches=1)
    for ours, theirs in zip(train(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)
    report = zinf_compile.report(model)
    assert any("tiles of rows" in note for note in report.plans[0].notes)
    device = next(tier for tier in report.tiers if tier.tier is Tier.DEVICE)
    assert device.measured_peak <= device.predicted_peak <= 5 * 2**20
    torch._dynamo.reset()
    whole = parity.optimize(Mlps().double(), device_memory="5MiB", host_memory="32MiB", tiles=False)
    with pytest.raises(CapacityError, match=r"needs .* on device"):
        whole(torch.zeros(2048, 32, dtype=torch.float64))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="host", marks=pytest.mark.long),
        pytest.param({"host_memory": "6MiB", "step_in_backward": True}, id="nvme", marks=pytest.mark.long),
    ],
)
def test_gradients_of_a_chain_by_tiles_do_not_wait_for_each_other(parity, options):
    """Neither weights nor activations fit: each tile of a weight gets a gradient from every tile of the activations."""

    def make_wide() -> nn.Module:
        torch.manual_seed(0)
        return Mlps(width=256).double()

    plain = make_wide()
    losses = losses_of(plain, 1024, 256)
    budgets = {"device_memory": "20MiB", "host_memory": "128MiB", "nvme": parity._folder, "micro_batches": 1, **options}
    model = parity.optimize(make_wide(), **budgets)
    for ours, theirs in zip(losses_of(model, 1024, 256), losses, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)
    report = zinf_compile.report(model)  # before the test's own tensors below take memory
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().clone(), theirs.detach(), rtol=1e-11, atol=1e-14)
    assert any("tiles of rows" in note and "weight is gathered in" in note for note in report.plans[0].notes)
    device = next(tier for tier in report.tiers if tier.tier is Tier.DEVICE)
    assert device.measured_peak <= device.predicted_peak <= 20 * 2**20


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tiles": {"embed.wieght": 2}}, ConfigError, "names no parameter of the model; did you mean 'embed.weight'"),
        ({"tiles": {"up.weight": (1, 2)}}, ConfigError, "along dimension 1; .* its dimension 0"),
        ({"tiles": {"up.weight": 0}}, ConfigError, "is not a number of tiles, 1 or more"),
        (
            {"tiles": {"up.weight": 999}},
            ConfigError,
            r"asks for 999 tiles of its rows, and it has the shape \[128, 64\]",
        ),
        ({"tiles": {"up.bias": 2}}, ConfigError, r"it has the shape \[128\]"),
        ({"tiles": 3}, ConfigError, "is neither a dictionary nor False"),
        ({"tile_memory": "1KiB"}, ConfigError, "is less than the 65536 bytes"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        zinf_compile.optimize(make(), device_memory="1MiB", host_memory="2MiB", **options)


class Penalised(Tied):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.embed.weight.sum()  # the line that reads all of it


def test_a_parameter_that_some_op_reads_whole_is_named_with_the_line(parity):
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if "# the line that reads all of it" in text)
    where = f"'embed.weight' .* cannot be tiled: sum reads all of it at .*test_tiles.py:{line}"
    model = parity.optimize(Penalised(4096, 64), device_memory="4MiB", host_memory="32MiB", tiles={"embed.weight": 2})
    with pytest.raises(UnsupportedError, match=where):
        model(torch.zeros(1, 8, dtype=torch.int64))
    torch._dynamo.reset()
    model = parity.optimize(Penalised(4096, 64), device_memory="1MiB", host_memory="32MiB")
    with pytest.raises(CapacityError, match=r"needs .* on device") as refused:
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert where.split(" .* ")[1].split(" at ")[0] in "".join(refused.value.__notes__)
    smallest = refused.value.args[0].split("raise device_memory to ")[1].split(" ")[0]
    torch._dynamo.reset()
    model = parity.optimize(Penalised(4096, 64), device_memory=smallest, host_memory="32MiB")
    model(torch.zeros(1, 8, dtype=torch.int64)).backward()
