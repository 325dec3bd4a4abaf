"""Frozen weights in rows of int8: training has the bits of a plain model whose frozen weights were encoded and decoded."""

import copy
import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module

import zinf_compile
from tests.support.fake_device import FakeDevice, on_fake_device
from tests.support.races import watching_races
from zinf_compile.ir.copies import RowCode
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.storage.nvme.posix import PosixEngine
from zinf_compile.runtime.storage.row_codes import encode_rows, round_to_rows
from zinf_compile.runtime.transfer.transfers import Transfers

WIDTH = 192
BUDGETS: dict[str, dict[str, Any]] = {
    "resident": {"device_memory": "64MiB", "host_memory": "64MiB"},
    "host": {"device_memory": "640KiB", "host_memory": "16MiB"},
    "nvme": {"device_memory": "640KiB", "host_memory": "512KiB"},
}


class LoRA(Module):
    """A frozen linear layer and a trained product of two thin ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        self.up = torch.nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + x @ self.down.t() @ self.up.t())


def make_model(dtype: torch.dtype = torch.float32, num_layers: int = 8) -> Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(LoRA() for _ in range(num_layers)), torch.nn.Linear(WIDTH, 8)).to(dtype)
    with torch.no_grad():
        model[1].base.weight[:, 3] *= 40  # outliers
    return model


def frozen_weights(model: Module) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if name.endswith("base.weight")}


def rounded(model: Module, exact: Collection[str] = ()) -> Module:
    """Return a plain copy whose frozen weights, but for those named, were encoded and decoded."""
    plain = copy.deepcopy(model)
    for name, weight in frozen_weights(plain).items():
        if name not in exact:
            round_to_rows(RowCode(columns=weight.shape[1]), weight.data.view(-1))
    return plain


def train(model: Module, steps: int = 3, sizes: tuple[int, ...] = (16,)) -> list[Tensor]:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(sizes[step % len(sizes)], WIDTH).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def check_same(model: Module, plain: Module) -> None:
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture
def optimize(tmp_path: Path) -> Callable[..., Module]:
    def run(model: Module, budgets: str = "host", **options: Any) -> Module:
        given = {**BUDGETS[budgets], "tiles": False, "reserve_memory": 0, "frozen_dtype": "int8", **options}
        if budgets == "nvme":
            given["nvme"] = tmp_path
        return zinf_compile.optimize(model, **given)

    return run


@pytest.mark.parametrize("capture", [pytest.param(True, marks=pytest.mark.long), False])
@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_that_of_rounded_weights(
    optimize: Callable[..., Module], budgets: str, dtype: torch.dtype, capture: bool
) -> None:
    model, plain = make_model(dtype), rounded(make_model(dtype))
    small = {} if budgets == "resident" or dtype == torch.float32 else {"device_memory": "320KiB"}
    model = optimize(model, budgets, capture=capture, **small)
    assert all(torch.equal(a, b) for a, b in zip(train(model), train(plain), strict=True))
    homes = {record_of(weight).copies.compute.tier for weight in frozen_weights(model).values()}  # type: ignore[union-attr]
    if not capture and budgets == "resident":
        budgets = "host"  # without a plan only small parameters are resident
    assert {"resident": Tier.DEVICE, "host": Tier.HOST, "nvme": Tier.NVME}[budgets] in homes
    check_same(model, plain)
    assert all(torch.equal(a, b) for a, b in zip(train(model), train(plain), strict=True))
    zinf_compile.close(model)


@pytest.mark.parametrize("integrated", [False, True])
@pytest.mark.parametrize("budgets", ["host", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_decodes_what_arrives(
    optimize: Callable[..., Module], budgets: str, dtype: torch.dtype, integrated: bool
) -> None:
    """On the stream of its copies, in the arena bytes of the values: peaks are as predicted, and nothing races."""
    num_layers = 24 if budgets == "nvme" else 8
    model, plain = make_model(dtype, num_layers), rounded(make_model(dtype, num_layers))
    given = {"device": "cuda", "compute": "aten"}
    given |= {"host_memory": "1MiB"} if budgets == "nvme" else {}
    given |= {"device_memory": "480KiB" if dtype == torch.bfloat16 else "768KiB"}
    with on_fake_device(FakeDevice(integrated=integrated)), watching_races() as races:
        model = optimize(model, budgets, **given)
        assert all(torch.equal(a, b) for a, b in zip(train(model), train(plain), strict=True))
        slots = [record_of(weight).copies.compute for weight in frozen_weights(model).values()]  # type: ignore[union-attr]
        assert (Tier.NVME if budgets == "nvme" else Tier.HOST) in {slot.tier for slot in slots}
        report = zinf_compile.report(model)
        gathers = [each for plan in report.plans for each in plan.plan.gathers if each.decoded.nbytes]
        needed = RowCode(columns=WIDTH).scratch_nbytes(dtype.itemsize)
        assert all(gather.scratch_nbytes >= needed for gather in gathers)
        for tier in report.tiers:
            if tier.measured_peak is not None and tier.tier is not Tier.NVME:
                assert tier.measured_peak <= tier.predicted_peak, tier
        check_same(model, plain)
        zinf_compile.close(model)
    assert races.found == []
    assert races.num_accesses["what rows are decoded to"] > 0


@pytest.mark.long
@pytest.mark.parametrize("budgets", ["host", "nvme"])
def test_tiles_are_decoded_by_themselves(optimize: Callable[..., Module], budgets: str) -> None:
    """Rows of one tile begin anywhere in the file. Tiles change rounding, so the other model has them too."""
    tiles = {"0.base.weight": 5, "5.base.weight": 3}
    model = optimize(make_model(), budgets, tiles=tiles)
    other = optimize(
        rounded(make_model()), budgets, tiles=tiles, frozen_dtype=None, device_memory="8MiB", host_memory="8MiB"
    )
    assert all(torch.equal(a, b) for a, b in zip(train(model), train(other), strict=True))
    assert any("tile" in name for plan in zinf_compile.report(model).plans for name in map(str, plan.plan.uses))
    check_same(model, other)
    zinf_compile.close(model)
    zinf_compile.close(other)


@pytest.mark.long
@pytest.mark.parametrize(("device", "budget"), [("cpu", "192KiB"), ("cuda", "320KiB")])
def test_a_tile_in_two_sectors(
    optimize: Callable[..., Module], device: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values take one sector, so its rows do not fit into the same memory."""
    begun: list[object] = []
    original = Transfers._start_decoding_here

    def count(transfers: Transfers, slot: object, *args: Any) -> None:
        begun.append(slot)
        original(transfers, slot, *args)

    def make() -> Module:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(64, 64).requires_grad_(False) for _ in range(110)]
        return torch.nn.Sequential(torch.nn.Linear(192, 64), *layers, torch.nn.Linear(64, 8)).to(torch.bfloat16)

    plain = make()
    for layer in plain[1:-1]:
        round_to_rows(RowCode(columns=64), layer.weight.data.view(-1))
    monkeypatch.setattr(Transfers, "_start_decoding_here", count)
    tiles = {f"{index}.weight": 2 for index in range(1, 111)}
    given = {"tiles": tiles, "device": device, "compute": "aten", "recompute": False}
    with on_fake_device() if device == "cuda" else nullcontext():
        model = optimize(make(), "nvme", device_memory=budget, host_memory="640KiB", **given)
        ample = {"frozen_dtype": None, "host_memory": "8MiB", "device_memory": "8MiB"}
        other = optimize(plain, "nvme", **{**given, **ample})
        assert all(torch.equal(a, b) for a, b in zip(train(model), train(other), strict=True))
        homes = {record_of(layer.weight).copies.compute.tier for layer in model[1:-1]}  # type: ignore[union-attr]
        assert Tier.NVME in homes
        check_same(model, other)
        zinf_compile.close(model)
        zinf_compile.close(other)
    assert bool(begun) == (device == "cuda")


@pytest.mark.long
def test_several_shapes(optimize: Callable[..., Module]) -> None:
    model, plain = optimize(make_model(), "nvme"), rounded(make_model())
    sizes = (16, 8, 12)
    assert all(torch.equal(a, b) for a, b in zip(train(model, sizes=sizes), train(plain, sizes=sizes), strict=True))
    zinf_compile.close(model)


def check_values(model: Module, expected: Tensor, name: str = "2.base.weight") -> None:
    """Check that users and gathers see these values, which rows can have."""
    weight = frozen_weights(model)[name]
    assert torch.equal(weight, expected)
    assert torch.equal(model.state_dict()[name], expected)
    with torch.no_grad():
        x = torch.randn(4, WIDTH).to(weight.dtype)
        assert torch.equal(
            model[2].base(x), torch.nn.functional.linear(x, expected, model[2].base.bias.detach().clone())
        )


def as_rounded(weight: Tensor) -> Tensor:
    made = weight.detach().clone()
    round_to_rows(RowCode(columns=made.shape[1]), made.view(-1))
    return made


@pytest.mark.parametrize("budgets", BUDGETS)
def test_what_users_write_is_encoded(optimize: Callable[..., Module], budgets: str) -> None:
    model = optimize(make_model(), budgets, capture=False)
    weight = frozen_weights(model)["2.base.weight"]
    first = as_rounded(make_model()[2].base.weight)
    check_values(model, first)
    with torch.no_grad():
        weight.mul_(1.1)
    check_values(model, second := as_rounded(first * 1.1))
    held = weight.data
    assert torch.equal(held, second)
    held[3] += 1  # nobody notices, but the next forward finds it
    expected = second.clone()
    expected[3] += 1
    model(torch.zeros(1, WIDTH))
    check_values(model, expected := as_rounded(expected))
    assert torch.equal(held, expected)
    del held
    other = torch.randn(WIDTH, WIDTH)
    model.load_state_dict(model.state_dict() | {"2.base.weight": other})
    check_values(model, as_rounded(other))
    weight.data = other * 2
    check_values(model, as_rounded(other * 2))
    with torch.no_grad():
        weight[0, 0] = 5.0
        expected = as_rounded(other * 2)
        expected[0, 0] = 5.0
    check_values(model, as_rounded(expected))
    with zinf_compile.full_parameters(model[2]):
        model[2].base.weight.data.zero_()
    check_values(model, torch.zeros(WIDTH, WIDTH))
    zinf_compile.close(model)


@pytest.mark.parametrize("budgets", BUDGETS)
def test_a_view_takes_no_memory_after_the_next_forward(optimize: Callable[..., Module], budgets: str) -> None:
    model = optimize(make_model(), budgets, capture=False)
    record = record_of(frozen_weights(model)["2.base.weight"])
    assert record is not None
    rows = record.copies.compute.rows
    assert rows is not None
    assert not rows.is_shown
    float(record.parameter.sum())
    assert rows.is_shown
    model(torch.zeros(1, WIDTH))
    assert not rows.is_shown
    assert not rows.view.any()  # its pages are gone
    zinf_compile.close(model)


@pytest.mark.parametrize("capture", [pytest.param(True, marks=pytest.mark.long), False])
@pytest.mark.parametrize("budgets", BUDGETS)
def test_unfreezing_makes_the_home_exact(optimize: Callable[..., Module], budgets: str, capture: bool) -> None:
    """It keeps the values that it has, and is trained from there as any parameter."""
    model = optimize(make_model(), budgets, capture=capture, host_memory="16MiB", device_memory="16MiB")
    plain = rounded(make_model())
    train(model, steps=1)
    train(plain, steps=1)
    for each in (model, plain):
        each[2].base.weight.requires_grad_(True)
    assert all(torch.equal(a, b) for a, b in zip(train(model), train(plain), strict=True))
    check_same(model, plain)
    zinf_compile.close(model)


@pytest.mark.parametrize("budgets", ["host", "nvme"])
def test_a_checkpoint_has_values_and_loads_to_the_same_bits(
    optimize: Callable[..., Module], budgets: str, tmp_path: Path
) -> None:
    model, folder = optimize(make_model(), budgets, capture=False), tmp_path / "saved"
    train(model)
    zinf_compile.save(folder, model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    zinf_compile.close(model)
    for other_budgets, options in (
        (budgets, {}),
        ("resident", {}),
        ("host", {"frozen_dtype": None, "host_memory": "64MiB"}),
    ):
        other = make_model()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        other = optimize(other, other_budgets, capture=False, **options)
        zinf_compile.load(folder, other)
        for name, value in other.state_dict().items():
            assert torch.equal(value, state[name]), (other_budgets, name)
        zinf_compile.close(other)
    exact = optimize(make_model(), "resident", capture=False, frozen_dtype=None)
    zinf_compile.save(tmp_path / "exact", exact)
    zinf_compile.close(exact)
    for other_budgets in ("resident", "nvme"):
        other = optimize(make_model(), other_budgets, capture=False)
        zinf_compile.load(tmp_path / "exact", other)
        check_same(other, rounded(make_model()))
        zinf_compile.close(other)


@pytest.mark.parametrize("budgets", BUDGETS)
def test_first_values_from_files(optimize: Callable[..., Module], budgets: str, tmp_path: Path) -> None:
    """Values arrive in pieces that end inside of a row."""
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(make_model().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = make_model()
    model = optimize(model, budgets, capture=False, init=tmp_path / "model.safetensors")
    check_same(model, rounded(make_model()))
    zinf_compile.close(model)


@pytest.mark.needs_more_on_streams(host_memory=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_weights_in_files_exact_ones_stay_there_and_others_are_encoded(
    optimize: Callable[..., Module], dtype: torch.dtype, tmp_path: Path
) -> None:
    """What is encoded is never in place: the file has values, and rows are stored."""
    safetensors = pytest.importorskip("safetensors.torch")
    source = make_model(dtype, num_layers=24)
    safetensors.save_file(source.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = make_model(dtype, num_layers=24)
    exact = [f"{index}.base.weight" for index in range(1, 24, 2)]
    options = {"init": tmp_path / "model.safetensors", "exact_frozen": exact, "capture": False}
    model = optimize(model, "nvme", **options)
    store = record_of(model[0].base.weight).store
    engine = store.engine
    assert isinstance(engine, PosixEngine)
    in_place, in_file = [], []
    for name, weight in frozen_weights(model).items():
        slot, placement = store.records[name].copies.compute, store.placements[name]
        if name in exact:
            assert slot.row_code is None
            assert (slot.weights is not None) == (slot.tier is Tier.NVME) == (placement.in_place_nbytes > 0), name
            in_place += [name] * (slot.weights is not None)
            continue
        assert slot.row_code == RowCode(columns=WIDTH)
        assert slot.weights is None
        assert store.records[name].copies.weights is None
        assert store.facts[name].file_dtype is None
        assert placement.in_place_nbytes == 0
        if slot.tier is Tier.NVME:
            rows = torch.empty(slot.row_code.nbytes(weight.numel()), dtype=torch.uint8)
            encode_rows(slot.row_code, source.get_parameter(name).detach().view(-1), rows)
            with open(engine.path, "rb") as file:
                assert os.pread(file.fileno(), rows.numel(), slot.extent.offset) == rows.numpy().tobytes()
            in_file.append(name)
    assert in_place
    assert in_file
    plain = rounded(source, exact=exact)
    assert all(torch.equal(a, b) for a, b in zip(train(model), train(plain), strict=True))
    check_same(model, plain)
    model.get_parameter(in_file[0]).requires_grad_(True)  # an exact home, with the values that it has
    check_same(model, plain)
    assert store.records[in_file[0]].copies.in_place is None
    zinf_compile.close(model)


def test_what_stays_exact(optimize: Callable[..., Module]) -> None:
    class Mixed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(64, 128)
            self.tied = torch.nn.Linear(128, 64, bias=False)
            self.tied.weight = self.embedding.weight
            self.encoded, self.named = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)
            self.small, self.trained = torch.nn.Linear(16, 16), torch.nn.Linear(128, 128)
            self.conv = torch.nn.Conv1d(64, 64, 3)
            self.requires_grad_(False)
            self.trained.requires_grad_(True)

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = optimize(Mixed(), "host", exact_frozen="named*", host_memory="64MiB")
    records = {name: record_of(parameter) for name, parameter in model.named_parameters()}
    encoded = [name for name, record in records.items() if record is not None and record.copies.compute.row_code]
    assert encoded == ["encoded.weight"]
    zinf_compile.close(model)


@pytest.mark.of_a_cpu(reason="beside a device with memory of its own the tensors of quantised weights are not stored")
def test_tensors_of_quantised_weights_stay_as_they_are(optimize: Callable[..., Module]) -> None:
    """A weight of torchao is the weight of a linear layer and says it has a floating dtype; its codes are not encoded."""
    quantization = pytest.importorskip("torchao.quantization")
    models = [make_model() for _ in range(2)]
    for model in models:
        quantization.quantize_(model[0].base, quantization.Int8WeightOnlyConfig())
    optimized, plain = optimize(models[0], "host", host_memory="64MiB"), models[1]
    for name, weight in frozen_weights(plain).items():
        if name != "0.base.weight":
            round_to_rows(RowCode(columns=WIDTH), weight.data.view(-1))
    records = record_of(optimized[1].base.weight).store.records
    encoded = {name for name, record in records.items() if record.copies.compute.row_code}
    assert encoded == set(frozen_weights(plain)) - {"0.base.weight"}
    assert any(name.startswith("0.base.weight") for name in records)
    assert all(torch.equal(a, b) for a, b in zip(train(optimized), train(plain), strict=True))
    zinf_compile.close(optimized)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"frozen_dtype": "int4"},
            r"frozen_dtype='int4' is no encoding of frozen weights; say 'int8', or leave it out",
        ),
        ({"frozen_dtype": torch.bfloat16}, "is no encoding of frozen weights"),
        ({"frozen_dtype": 8}, "is no encoding of frozen weights"),
        ({"exact_frozen": "0.*"}, r"exact_frozen='0.\*' without frozen_dtype: all weights are exact"),
        (
            {"frozen_dtype": "int8", "exact_frozen": "0.bsae.weight"},
            "matches no parameter .* did you mean '0.base.weight'",
        ),
        ({"frozen_dtype": "int8", "exact_frozen": 3}, "exact_frozen=3 is no name of a parameter"),
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any], said: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=said):
        zinf_compile.optimize(model, **{"device_memory": "8MiB", "host_memory": "8MiB", **wrong})
    assert not any(record_of(parameter) for parameter in model.parameters())


@pytest.mark.long
def test_plans_count_encoded_bytes_at_home_and_on_their_way(optimize: Callable[..., Module]) -> None:
    model = optimize(make_model(), "host")
    train(model)
    report = zinf_compile.report(model)
    view = report.plans[0]
    placed = {item.parameter: item for item in view.plan.placements}["0.base.weight"]
    nbytes = RowCode(columns=WIDTH).nbytes(WIDTH * WIDTH)
    assert placed.nbytes_on(Tier.HOST) == nbytes
    assert placed.compute_nbytes == 4 * WIDTH * WIDTH
    gather = next(each for each in view.plan.gathers if "0.base.weight" in each.parameters)
    assert gather.moved_nbytes < gather.nbytes - 2 * WIDTH * WIDTH
    for tier in report.tiers:
        if tier.measured_peak is not None and tier.tier is not Tier.NVME:
            assert tier.measured_peak <= tier.predicted_peak, tier
    assert f"frozen weight as int8: {nbytes / 1024:.1f} KiB, exactly 144.0 KiB" in view.explain("0.base.weight")
    zinf_compile.close(model)


@pytest.mark.long
def test_a_plan_ahead_of_the_machine_says_what_is_saved() -> None:
    model = make_model()
    options: dict[str, Any] = {
        "device_memory": "640KiB",
        "host_memory": "16MiB",
        "reserve_memory": 0,
        "compute": "aten",
    }
    views = [
        zinf_compile.plan(model, torch.zeros(16, WIDTH), frozen_dtype=dtype, **options) for dtype in (None, "int8")
    ]
    exact, encoded = (view.plan for view in views)
    host = [plan.tier(Tier.HOST).predicted_peak for plan in (exact, encoded)]
    assert host[1] < host[0] / 2
    moved = [sum(gather.moved_nbytes for gather in plan.gathers) for plan in (exact, encoded)]
    assert moved[1] < moved[0] / 2
    assert encoded.hardware.decoded_bytes_per_second > 0
    assert "frozen weights as int8: " in str(views[1])
