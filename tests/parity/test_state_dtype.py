"""State in fewer bits: training gives the bits of plain PyTorch whose state is rounded in the same way after each step."""

import copy
import io
import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import zinf_compile
from tests.support.fake_device import FakeDevice, on_fake_device
from zinf_compile.checkpoint.checkpoint_folder import OPTIMIZER, read_manifest
from zinf_compile.ir.copies import LEAST_CODED, Code, Encoding
from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import TierPart
from zinf_compile.ir.plan_io import load_plan
from zinf_compile.runtime.native.compiled import load_compiled
from zinf_compile.runtime.optim import optimizer as optimizer_module
from zinf_compile.runtime.optim.device_chunks import DeviceChunks
from zinf_compile.runtime.optim.optimizer import StreamedStep
from zinf_compile.runtime.optim.step_chunks import Chunk
from zinf_compile.runtime.optim.updates_ahead import UpdatesAhead
from zinf_compile.runtime.params.coded_state import CodedHomeTensor
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.storage.state_codes import Coded, decode, encode
from zinf_compile.runtime.store.store import Store

pytestmark = pytest.mark.needs_more_on_streams(device_memory=2.5)

WIDTH = 400
CODES = [Code.INT8, Code.BFLOAT16]
MOSTLY_INT8 = [Code.INT8, pytest.param(Code.BFLOAT16, marks=pytest.mark.long)]

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "adam amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True),
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, centered=True),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 100))  # of 40,000 elements: the last page is not full


def rounded(code: Code, values: Tensor, seed: int, drawn_from: Tensor | None = None) -> Tensor:
    """Return values as they come back from their codes."""
    flat = values.reshape(-1)
    pages = torch.empty(Encoding(dtype="float32", code=code).nbytes(flat.numel()), dtype=torch.uint8)
    encode(code, flat, pages, seed=seed, drawn_from=None if drawn_from is None else drawn_from.detach().reshape(-1))
    back = torch.empty_like(flat)
    decode(code, pages, back)
    return back.view(values.shape)


def round_state(code: Code, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Do to the state of a plain optimizer what storing it does."""
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None and value.dim() and value.numel() >= LEAST_CODED:
                before = float(step if "step" in optimizer.state[parameter] else 0)
                value.copy_(rounded(code, value, zlib.crc32(f"{name}/{key}/{before}".encode()), parameter))


@dataclass(kw_only=True)
class Loop:
    """A training loop over either model."""

    make_optimizer: Optimizers = field(default=OPTIMIZERS["adamw"])
    num_backwards: int = 1
    clip: float | None = None
    num_steps: int = 4

    def run(
        self,
        model: nn.Module,
        after_step: Callable[[torch.optim.Optimizer, int], None] | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        optimizer = self.make_optimizer(model)
        generator = torch.Generator().manual_seed(5)
        seen = []
        for step in range(self.num_steps):
            for _ in range(self.num_backwards):
                model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
            if self.clip is not None:
                clip_grad_norm_(model.parameters(), self.clip)
            before_step()
            optimizer.step()
            optimizer.zero_grad()
            if after_step is not None:
                after_step(optimizer, step)
        for parameter in model.parameters():
            seen.append(parameter.detach().clone())
            seen += [value.clone() for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
        return seen


BUDGETS: dict[str, dict[str, Any]] = {
    "on disk": {"device_memory": "2600KiB", "host_memory": "2816KiB"},
    "in host memory": {"device_memory": "2600KiB", "host_memory": "64MiB"},
}
TIMINGS: dict[str, dict[str, Any]] = {
    "beside forward": {"speculate": False},
    "ahead of step": {"speculate": True},
    "at step": {"overlap_step": False},
    "in backward": {"step_in_backward": True},
    "eager": {"capture": False},
}


@pytest.fixture
def optimize(tmp_path: Path) -> Iterator[Callable[..., nn.Sequential]]:
    """Return a function that optimizes the model; afterwards each store is checked and closed."""
    models: list[nn.Module] = []

    def call(code: Code | None, budgets: str = "on disk", **options: Any) -> nn.Sequential:
        given = {"nvme": tmp_path, "compute": "aten", "reserve_memory": 0, "tiles": False, "remake_plan": False}
        model = zinf_compile.optimize(make_model(), **{**given, **BUDGETS[budgets], "state_dtype": code, **options})
        models.append(model)
        assert isinstance(model, nn.Sequential)
        return model

    yield call
    for model in models:
        store_of(model).check_integrity()
        zinf_compile.close(model)


def store_of(model: nn.Module) -> Store:
    record = record_of(next(model.parameters()))
    assert record is not None
    assert isinstance(record.store, Store)
    return record.store


def check(loop: Loop, model: nn.Module, code: Code, *, before_step: Callable[[], None] = lambda: None) -> None:
    plain = make_model()
    expected = loop.run(plain, lambda optimizer, step: round_state(code, plain, optimizer, step))
    got = loop.run(model, before_step=before_step)
    assert len(got) == len(expected)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), index


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("code", MOSTLY_INT8)
def test_every_budget_and_timing(code: Code, budgets: str, timing: str, optimize: Callable[..., nn.Sequential]) -> None:
    model = optimize(code, budgets, **TIMINGS[timing])
    check(Loop(), model, code)
    slots = [
        slot for name in range(0, 10, 2) for slot in store_of(model).records[f"{name}.weight"].copies.states.values()
    ]
    assert {slot.code for slot in slots} == {code}
    assert (Tier.NVME in {slot.tier for slot in slots}) is (budgets == "on disk")
    if timing == "ahead of step" and budgets == "on disk":
        ahead = store_of(model).updates_ahead
        assert isinstance(ahead, UpdatesAhead)
        assert ahead.counts.num_taken > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("code", MOSTLY_INT8)
def test_every_optimizer(code: Code, name: str, optimize: Callable[..., nn.Sequential]) -> None:
    check(Loop(make_optimizer=OPTIMIZERS[name]), optimize(code), code)


@pytest.mark.of_a_cpu(reason="updates on a device decode there")
@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("code", Code)
def test_adam_takes_one_pass(
    code: Code, budgets: str, optimize: Callable[..., nn.Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel decodes and encodes, at the first step and later: what does so for other optimizers is not called."""
    if load_compiled("fused_adamw.cpp") is None:
        pytest.skip("this machine has no C++ compiler")
    monkeypatch.setattr(optimizer_module, "decoding", lambda *args, **options: pytest.fail("decoded apart"))
    check(Loop(), optimize(code, budgets), code)


@pytest.mark.parametrize("code", MOSTLY_INT8)
def test_accumulation_and_clipping(code: Code, optimize: Callable[..., nn.Sequential]) -> None:
    model = optimize(code)
    loop = Loop(num_backwards=2, clip=0.01)
    plain = make_model()
    expected = loop.run(plain, lambda optimizer, step: round_state(code, plain, optimizer, step))
    for one, other in zip(loop.run(model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # norms are added up in another order


def test_compute_copies_and_the_default_way_to_compute(optimize: Callable[..., nn.Sequential]) -> None:
    """A step reads and writes what the plan says, a compute copy beside the master copy included."""
    model = optimize(Code.INT8, compute="inductor", compute_dtype=torch.bfloat16, speculate=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    store = store_of(model)
    engine = store.engine
    assert engine is not None
    for _ in range(3):
        model(torch.randn(8, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        zinf_compile.synchronize(model)
        before = engine.bytes_read, engine.bytes_written
        optimizer.step()
        zinf_compile.synchronize(model)
        moved = engine.bytes_read - before[0], engine.bytes_written - before[1]
        optimizer.zero_grad()
    placed = [placement for placement in store.placements.values() if placement.update_nbytes_written]
    planned = sum(each.update_nbytes_read for each in placed), sum(each.update_nbytes_written for each in placed)
    assert moved == pytest.approx(planned, rel=0.02)  # whole sectors
    exact = sum(8 * store.records[each.parameter].shape.numel() for each in placed)
    assert sum(each.optimizer_state_nbytes for each in placed) < 0.3 * exact


# What users see


@pytest.mark.parametrize("code", CODES)
def test_state_shows_plain_values_and_takes_writes(code: Code, optimize: Callable[..., nn.Sequential]) -> None:
    model = optimize(code)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    shown = optimizer.state[model[0].weight]["exp_avg"]
    assert isinstance(shown, CodedHomeTensor)
    assert (shown.dtype, shown.shape, shown.device.type) == (torch.float32, (WIDTH, WIDTH), "cpu")
    value = shown.clone()
    assert type(value) is Tensor
    assert value.abs().sum() > 0
    assert torch.equal(shown, value)
    assert torch.equal(shown + 1, value + 1)
    assert torch.equal(torch.stack([shown, shown])[1], value)
    assert shown.norm() == value.norm()
    assert (shown.numpy() == value.numpy()).all()
    assert shown.tolist() == value.tolist()
    assert shown[3, 4].item() == value[3, 4].item()
    assert repr(shown) == repr(value)
    assert torch.equal(shown.to(torch.float64), value.double())
    assert type(copy.deepcopy(shown)) is Tensor
    assert torch.equal(copy.deepcopy(shown), value)
    assert torch.equal(torch.zeros(WIDTH, WIDTH).copy_(shown), value)

    assert shown.mul_(2) is shown
    assert torch.equal(shown, value * 2)  # a power of two changes scales only
    shown[0] = 7.0
    assert torch.equal(shown[0], torch.full((WIDTH,), 7.0))
    torch._foreach_zero_([shown])
    assert not shown.any()
    shown.copy_(value)
    assert torch.equal(shown, value)
    with torch.no_grad():
        shown.fill_(1.0)
    assert torch.equal(shown, torch.ones(WIDTH, WIDTH))


@pytest.fixture
def defaults() -> Iterator[None]:
    """A default dtype and device of the user's, which are restored afterwards."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
    torch.set_default_device(None)


def test_defaults_of_the_user(optimize: Callable[..., nn.Sequential], defaults: None) -> None:
    model, plain, inputs = optimize(Code.INT8), make_model(), torch.randn(8, WIDTH)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9)
        for step in range(2):
            each(inputs).square().mean().backward()
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            optimizer.step()
            optimizer.zero_grad()
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
            if each is plain:
                round_state(Code.INT8, plain, optimizer, step)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_looks_in_inference_mode(optimize: Callable[..., nn.Sequential]) -> None:
    model = optimize(Code.INT8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    shown = optimizer.state[model[0].weight]["exp_avg"]
    value = shown.clone()
    with torch.inference_mode():
        assert torch.equal(shown, value)
        shown.mul_(2)
    assert torch.equal(shown, 2 * value)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "row": lambda state: state[0].zero_(),
    "rows": lambda state: [row.zero_() for row in state],
    "view": lambda state: state.view(-1).zero_(),
    "transposed": lambda state: state.T[3:7].zero_(),
    "detached": lambda state: state.detach().zero_(),
    "data": lambda state: state.data[5].zero_(),
    "other data": lambda state: setattr(state, "data", torch.zeros(WIDTH, WIDTH)),
    "numpy": lambda state: state.numpy().__setitem__((slice(0, 9), 2), 0.0),
    "strided in place": lambda state: state[:, ::2].mul_(0),
    "item": lambda state: state.__setitem__((3, 4), 0.0),
    "out": lambda state: torch.zeros(WIDTH, WIDTH, out=state),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_through_views(write: str, optimize: Callable[..., nn.Sequential]) -> None:
    model = optimize(Code.INT8, capture=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    shown = optimizer.state[model[0].weight]["exp_avg"]
    expected = shown.clone()
    WRITES[write](shown)
    WRITES[write](expected)
    assert (expected == 0).any()
    assert torch.equal(shown == 0, (expected == 0) | (shown == 0) & (expected.abs() < 1e-6))
    assert ((shown - expected).abs() <= 0.02 * expected.abs().amax()).all()


def test_views_that_are_held(optimize: Callable[..., nn.Sequential]) -> None:
    """What is written into them shows at the next look, and counts in the next step; after that they are of the past."""
    model, plain = optimize(Code.INT8), make_model()
    inputs, seen = torch.randn(8, WIDTH), []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9)
        each(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if each is plain:
            round_state(Code.INT8, plain, optimizer, 0)
        shown = optimizer.state[each[0].weight]["momentum_buffer"]
        view = shown.view(-1)
        each(inputs).square().mean().backward()
        view.mul_(2)
        assert torch.equal(shown.view(-1), view)
        view.mul_(2)
        optimizer.step()
        view.zero_()
        del view
        if each is plain:
            continue
        assert shown.any()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        seen.append(torch.equal(one, other))
    assert all(seen)


@pytest.mark.parametrize("use", [Tensor.data_ptr, lambda state: state.t_(), lambda state: state.resize_(2)])
def test_what_needs_memory_is_refused(use: Callable[[Tensor], object], optimize: Callable[..., nn.Sequential]) -> None:
    model = optimize(Code.INT8, capture=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    with pytest.raises(UnsupportedError, match="state that is stored as int8 has no memory for"):
        use(optimizer.state[model[0].weight]["momentum_buffer"])


class WithSign(torch.optim.Optimizer):
    """Element-wise, with a state of one byte beside a coded one, and one called ``step`` that is no number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["step"] = "one"
                        state["mean"] = torch.zeros_like(parameter)
                        state["sign"] = torch.zeros_like(parameter, dtype=torch.int8)
                    state["mean"].mul_(0.9).add_(parameter.grad)
                    state["sign"].copy_(state["mean"].sign())
                    parameter.add_(state["sign"] * state["mean"], alpha=-group["lr"])


@pytest.mark.parametrize("code", CODES)
def test_a_state_of_one_byte_beside_it(code: Code, optimize: Callable[..., nn.Sequential]) -> None:
    loop = Loop(make_optimizer=lambda model: WithSign(model.parameters()), num_steps=2)
    model, plain = optimize(code, host_memory="8MiB"), make_model()
    optimizer_of: list[torch.optim.Optimizer] = []
    loop.run(model, lambda optimizer, step: optimizer_of.append(optimizer))

    def round_both(optimizer: torch.optim.Optimizer, step: int) -> None:
        for name, parameter in plain.named_parameters():
            if (value := optimizer.state[parameter]["mean"]).numel() >= LEAST_CODED:
                value.copy_(rounded(code, value, zlib.crc32(f"{name}/mean/0.0".encode()), parameter))

    loop.run(plain, round_both)
    assert record_of(model[0].weight).copies.states["sign"].code is None  # type: ignore[union-attr]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("make_optimizer", [OPTIMIZERS["sgd momentum"], OPTIMIZERS["rmsprop"]])
def test_more_elements_than_a_chunk_in_host_memory(
    make_optimizer: Optimizers, optimize: Callable[..., nn.Sequential]
) -> None:
    """Chunks are cut where pages begin, also where nothing passes through staging and no kernel takes whole parameters."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 2900))

    plain, results = make(), []
    model = zinf_compile.optimize(
        make(), device_memory="64MiB", host_memory="64MiB", compute="aten", reserve_memory=0, state_dtype="int8"
    )
    for each in (plain, model):
        optimizer = make_optimizer(each)
        for step in range(2):
            each(torch.full((2, WIDTH), 0.5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if each is plain:
                round_state(Code.INT8, plain, optimizer, step)
        results.append([parameter.detach().clone() for parameter in each.parameters()])
    zinf_compile.close(model)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_bfloat16_of_an_optimizer_that_counts_no_steps(optimize: Callable[..., nn.Sequential]) -> None:
    """Each step rounds anew: with the same gradient in each step, the mean of the momentum stays near the exact one."""
    buffers = []
    for each in (optimize(Code.BFLOAT16, capture=False), make_model()):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-4, momentum=0.99)
        for _ in range(60):
            for parameter in each.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            optimizer.step()
        buffers.append(optimizer.state[each[0].weight]["momentum_buffer"].clone())
    ratios = buffers[0] / buffers[1]
    assert ratios.mean() == pytest.approx(1, abs=0.002)
    assert (ratios - 1).abs().max() < 0.05


def test_what_is_written_counts_in_the_next_step(optimize: Callable[..., nn.Sequential]) -> None:
    def run(model: nn.Sequential) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        for _ in range(2):
            model(torch.ones(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()
        return model[0].weight.detach().clone()

    assert torch.equal(run(optimize(Code.INT8)), run(make_model()))  # each step starts from zeros


@pytest.mark.parametrize("code", MOSTLY_INT8)
@pytest.mark.parametrize("way", ["save", "state_dict"])
def test_training_goes_on_from_what_was_saved(
    code: Code, way: str, optimize: Callable[..., nn.Sequential], tmp_path: Path
) -> None:
    first = optimize(code)
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    buffer = io.BytesIO()
    for step in range(4):
        if step == 2 and way == "save":
            zinf_compile.save(tmp_path / "saved", first, optimizer)
        elif step == 2:
            torch.save((first.state_dict(), optimizer.state_dict()), buffer)
        first(torch.full((8, WIDTH), step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [*first.parameters(), *(state["exp_avg_sq"] for state in optimizer.state.values())]
    second = optimize(code, "in host memory")
    again = torch.optim.AdamW(second.parameters(), lr=1e-2)
    if way == "save":
        zinf_compile.load(tmp_path / "saved", second, again)
    else:
        values, states = torch.load(io.BytesIO(buffer.getbuffer()))
        assert all(type(value) is Tensor for state in states["state"].values() for value in state.values())
        second.load_state_dict(values)
        again.load_state_dict(states)
    for step in range(2, 4):
        second(torch.full((8, WIDTH), step + 1.0)).square().mean().backward()
        again.step()
        again.zero_grad()
    got = [*second.parameters(), *(state["exp_avg_sq"] for state in again.state.values())]
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


CONVERSIONS = [
    (Code.INT8, None, "int8 and are float32 here"),
    (None, Code.INT8, "float32 and are int8 here"),
    (Code.INT8, Code.BFLOAT16, "int8 and are bfloat16 here"),
    (Code.BFLOAT16, Code.INT8, "bfloat16 and are int8 here"),
]


@pytest.mark.parametrize(("saved_as", "loaded_as", "said"), CONVERSIONS)
def test_a_checkpoint_can_be_loaded_with_another_state_dtype(
    saved_as: Code | None,
    loaded_as: Code | None,
    said: str,
    optimize: Callable[..., nn.Sequential],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = optimize(saved_as)
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    first(torch.ones(8, WIDTH)).square().mean().backward()
    optimizer.step()
    zinf_compile.save(tmp_path / "saved", first, optimizer)
    saved = {name: optimizer.state[parameter]["exp_avg"].clone() for name, parameter in first.named_parameters()}
    second = optimize(loaded_as)
    again = torch.optim.AdamW(second.parameters(), lr=1e-2)
    with caplog.at_level(logging.INFO):
        zinf_compile.load(tmp_path / "saved", second, again)
    num_coded = 2 * sum(parameter.numel() >= LEAST_CODED for parameter in second.parameters())
    assert f"{num_coded} tensors of optimizer state were saved as {said}: converted" in caplog.messages
    for name, parameter in second.named_parameters():
        expected = saved[name]
        if loaded_as is not None and expected.numel() >= LEAST_CODED:
            expected = rounded(loaded_as, expected, seed=0)
        assert torch.equal(again.state[parameter]["exp_avg"], expected), name
    plain = make_model()
    in_memory = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    zinf_compile.load(tmp_path / "saved", plain, in_memory)
    assert torch.equal(in_memory.state[plain[0].weight]["exp_avg"], saved["0.weight"])


@pytest.mark.parametrize("code", MOSTLY_INT8)
def test_a_checkpoint_has_the_codes_as_they_are(
    code: Code, optimize: Callable[..., nn.Sequential], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> dict[str, Tensor]:
        zinf_compile.save(tmp_path / name, model, optimizer)
        manifest = read_manifest(tmp_path / name)
        assert manifest is not None
        return load_file(tmp_path / name / manifest.data_folder / OPTIMIZER)

    first = optimize(code)
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    first(torch.ones(8, WIDTH)).square().mean().backward()
    optimizer.step()
    saved = save(first, optimizer, "saved")
    for name, value in saved.items():
        parameter, key = name.split("/")
        exact = optimizer.state[first.get_parameter(parameter)][key]
        if exact.numel() < LEAST_CODED:
            assert torch.equal(value, exact), name
            continue
        assert (value.dtype, tuple(value.shape)) == (torch.uint8, code.pages_shape(exact.numel())), name
        values = torch.empty(exact.numel())
        decode(code, value.view(-1), values)
        assert torch.equal(values, exact.reshape(-1)), name
    second = optimize(code, "in host memory")
    again = torch.optim.AdamW(second.parameters(), lr=1e-2)
    with caplog.at_level(logging.INFO):
        zinf_compile.load(tmp_path / "saved", second, again)
    assert "converted" not in caplog.text
    found = save(second, again, "again")
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], value) for name, value in saved.items())


def test_small_and_other_states_stay_exact(optimize: Callable[..., nn.Sequential]) -> None:
    model = optimize(Code.INT8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(8, WIDTH)).square().mean().backward()
    optimizer.step()
    assert not isinstance(optimizer.state[model[0].bias]["exp_avg"], CodedHomeTensor)
    optimizer.state[model[0].weight]["exp_avg"] = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
    zinf_compile.synchronize(model)
    assert record_of(model[0].weight).copies.states["exp_avg"].code is Code.INT8  # type: ignore[union-attr]


def test_state_of_named_parameters_stays_exact(optimize: Callable[..., nn.Sequential]) -> None:
    model = optimize(Code.INT8, exact_state=["0.*", "8.weight"])
    plain = make_model()
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        each(torch.ones(8, WIDTH)).square().mean().backward()
        optimizer.step()
        if each is model:
            kept = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    coded = {name for name, moment in kept.items() if isinstance(moment, CodedHomeTensor)}
    assert coded == {"2.weight", "4.weight", "6.weight"}
    assert torch.equal(kept["0.weight"], optimizer.state[plain[0].weight]["exp_avg"])
    placed = {each.parameter: each for each in zinf_compile.report(model).plans[0].plan.placements}
    assert placed["0.weight"].optimizer_state_nbytes == 2 * 4 * WIDTH**2
    assert placed["2.weight"].optimizer_state_nbytes == 2 * 42 * 4096


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"exact_state": "0.weigth", "state_dtype": "int8"},
            r"exact_state='0.weigth' matches no .*; did you mean '0.weight'",
        ),
        ({"exact_state": ["*embed*"], "state_dtype": "int8"}, r"exact_state='\*embed\*' matches no parameter"),
        ({"exact_state": "0.weight"}, r"exact_state='0.weight' without state_dtype: all state is exact"),
        ({"exact_state": [3], "state_dtype": "int8"}, r"exact_state=\[3\] is no name of a parameter"),
        ({"exact_state": {"0.weight": True}, "state_dtype": "int8"}, "is no name of a parameter"),
    ],
)
def test_exact_state_that_cannot_be(wrong: dict[str, Any], said: str) -> None:
    model = make_model()
    before = [type(parameter) for parameter in model.parameters()]
    for refuse in (
        lambda: zinf_compile.optimize(model, device_memory="8MiB", host_memory="8MiB", **wrong),
        lambda: zinf_compile.plan(model, torch.randn(8, WIDTH), device_memory="8MiB", host_memory="8MiB", **wrong),
    ):
        with pytest.raises(ConfigError, match=said):
            refuse()
    assert [type(parameter) for parameter in model.parameters()] == before
    assert all(record_of(parameter) is None for parameter in model.parameters())


def test_a_state_that_is_not_finite_spoils_its_block_only(optimize: Callable[..., nn.Sequential]) -> None:
    model = optimize(Code.INT8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model(torch.ones(8, WIDTH)).square().mean().backward()
    optimizer.step()
    buffer = optimizer.state[model[0].weight]["momentum_buffer"]
    buffer[0, 0] = torch.inf
    assert buffer.view(-1)[:256].isnan().all()
    assert buffer.view(-1)[256:].isfinite().all()


BESIDE_A_DEVICE: dict[str, dict[str, Any]] = {
    "on disk": {"device_memory": "6MiB", "host_memory": "4MiB"},
    "in host memory": {"device_memory": "6MiB", "host_memory": "64MiB"},
    "on the device": {"device_memory": "24MiB", "host_memory": "5MiB"},
}


@pytest.mark.parametrize("budgets", BESIDE_A_DEVICE)
@pytest.mark.parametrize("timing", ["beside forward", "ahead of step", "at step", "in backward"])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("code", CODES)
def test_a_device_with_memory_of_its_own(
    code: Code, where: str, timing: str, budgets: str, optimize: Callable[..., nn.Sequential]
) -> None:
    """Pages of codes cross the link, and are decoded where updates run. Pages may live on the device, too."""
    with on_fake_device():
        given = {**BESIDE_A_DEVICE[budgets], **TIMINGS[timing], "update_on": where}
        model = optimize(code, "in host memory", device="cuda", **given)
        check(Loop(), model, code)
        store = store_of(model)
        assert (store.device_updates.nbytes > 0) == (where == "device")
        tiers = {place.optimizer_state for place in store.placements.values()}
        wanted = {"on disk": Tier.NVME, "in host memory": Tier.HOST, "on the device": Tier.DEVICE}[budgets]
        assert wanted in tiers or (wanted is Tier.DEVICE and where == "host")
        assert Tier.DEVICE not in tiers or where == "device"
        zinf_compile.close(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("code", CODES)
def test_every_optimizer_beside_a_device(code: Code, name: str, optimize: Callable[..., nn.Sequential]) -> None:
    with on_fake_device():
        given = {**BESIDE_A_DEVICE["in host memory"], "speculate": False}
        model = optimize(code, "in host memory", device="cuda", **given)
        check(Loop(make_optimizer=OPTIMIZERS[name], num_backwards=2, clip=0.1), model, code)
        zinf_compile.close(model)


@pytest.mark.parametrize("code", CODES)
def test_updates_on_both_give_the_same_bits(
    code: Code, optimize: Callable[..., nn.Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: set[str] = set()
    for owner, kind in ((StreamedStep, "_compute"), (DeviceChunks, "update")):
        original = getattr(owner, kind)

        def run(self: object, chunk: Chunk, kind: str = kind, original: Callable[..., Any] = original) -> object:
            ran.add(kind)
            return original(self, chunk)

        monkeypatch.setattr(owner, kind, run)
    with on_fake_device():
        model = optimize(code, "in host memory", device="cuda", speculate=False, device_memory="6MiB")
        store = store_of(model)
        check(Loop(), model, code, before_step=lambda: setattr(store, "device_share", 0.5))
        assert ran == {"_compute", "update"}
        zinf_compile.close(model)


@pytest.mark.parametrize("code", CODES)
def test_state_on_the_device_is_seen_changed_saved_and_loaded(
    code: Code, optimize: Callable[..., nn.Sequential], tmp_path: Path
) -> None:
    def trained(*, is_loaded: bool, num_steps: int, budgets: str) -> list[Tensor]:
        model = optimize(code, "in host memory", device="cuda", **BESIDE_A_DEVICE[budgets])
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_loaded:
            zinf_compile.load(tmp_path / "saved", model, adamw)
        for _ in range(num_steps):
            model(torch.ones(8, WIDTH)).square().mean().backward()
            adamw.step()
            adamw.zero_grad()
            for parameter in model.parameters():
                moment = adamw.state[parameter]["exp_avg"]
                before = moment.clone()
                moment.mul_(0.5)  # scales alone change
                assert torch.equal(moment, 0.5 * before)
        if not is_loaded:
            zinf_compile.save(tmp_path / "saved", model, adamw)
        zinf_compile.synchronize(model)
        tiers = {place.optimizer_state for place in store_of(model).placements.values()}
        assert (tiers == {Tier.DEVICE}) == (budgets == "on the device")
        states = [adamw.state[parameter] for parameter in model.parameters()]
        seen = [*model.parameters(), *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))]
        seen = [value.detach().clone() for value in seen]
        zinf_compile.close(model)
        return seen

    with on_fake_device():
        trained(is_loaded=False, num_steps=2, budgets="on the device")
        for budgets in ("on the device", "in host memory"):
            resumed = trained(is_loaded=True, num_steps=2, budgets=budgets)
            whole = trained(is_loaded=False, num_steps=4, budgets="in host memory")
            trained(is_loaded=False, num_steps=2, budgets="on the device")
            for one, other in zip(resumed, whole, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("budgets", ["on disk", "in host memory"])
@pytest.mark.parametrize("code", CODES)
def test_an_integrated_device_updates_pages_where_they_are(
    code: Code, budgets: str, optimize: Callable[..., nn.Sequential]
) -> None:
    """In host memory, or in staging."""
    with on_fake_device(FakeDevice(integrated=True)) as device:
        given = {**BESIDE_A_DEVICE[budgets], "update_on": "device", "speculate": False}
        model = optimize(code, "in host memory", device="cuda", **given)
        check(Loop(), model, code)
        assert device.update.num_waits > 0
        assert device.update_copies.to_device.num_copied == device.update_copies.to_host.num_copied == 0
        assert store_of(model).device_updates.nbytes == 0
        zinf_compile.close(model)


def test_pages_cross_the_link(optimize: Callable[..., nn.Sequential], monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of values, and the plan counts them; buffers and decoded values are no larger than planned."""
    moved: dict[Code | None, dict[str, int]] = {}
    decoded: list[int] = []
    room = Coded.room

    def make_room(coded: Coded, num_elements: int, device: torch.device) -> Tensor:
        decoded.append(num_elements)
        return room(coded, num_elements, device)

    monkeypatch.setattr(Coded, "room", make_room)
    for code in (None, Code.INT8):
        with on_fake_device():
            model = optimize(code, "in host memory", device="cuda", speculate=False, device_memory="6MiB")
            store, optimizer = store_of(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                before = dict(store.meter.moved)
                model(torch.ones(8, WIDTH)).square().mean().backward()
                optimizer.step()
                zinf_compile.synchronize(model)
            moved[code] = {route: nbytes - before[route] for route, nbytes in store.meter.moved}
            plan = zinf_compile.report(model).plans[0].plan
            assert plan.step.device_share == 1.0
            leaving = sum(sink.nbytes for sink in plan.sinks)
            assert moved[code]["device -> host"] == plan.device_updates.nbytes_out + leaving
            held = store.device_updates.nbytes + 2 * 4 * max(decoded, default=0)
            assert held <= plan.tier(Tier.DEVICE).nbytes_of(TierPart.UPDATES)
            if code is not None:
                assert max(decoded) == plan.step.chunk_elements < 40_000
                assert {place.optimizer_state for place in store.placements.values()} == {Tier.HOST}
            zinf_compile.close(model)
    assert moved[Code.INT8]["device -> host"] < moved[None]["device -> host"]


def test_plans_for_other_hardware() -> None:
    exact, coded = (
        zinf_compile.plan(
            make_model(),
            torch.randn(8, WIDTH),
            hardware="h200",
            device_memory="6MiB",
            compute="inductor",
            speculate=False,
            state_dtype=code,
        ).plan
        for code in (None, "int8")
    )
    assert coded.step.device_share > exact.step.device_share  # less crosses the link, and the host has more to do
    assert coded.hardware.optimizer_elements_per_second == exact.hardware.optimizer_elements_per_second / 2
    assert (
        coded.tier(Tier.HOST).predicted_peak
        < exact.tier(Tier.HOST).predicted_peak + exact.tier(Tier.DEVICE).predicted_peak
    )


@pytest.mark.long
def test_a_plan_knows_it(tmp_path: Path) -> None:
    exact, coded = (
        zinf_compile.plan(
            make_model(), torch.randn(8, WIDTH), nvme=tmp_path, compute="aten", state_dtype=code, **BUDGETS["on disk"]
        )
        for code in (None, "int8")
    )
    of_exact, of_coded = (
        next(place for place in plan.plan.placements if place.parameter == "0.weight") for plan in (exact, coded)
    )
    assert of_exact.optimizer_state_nbytes == 8 * WIDTH * WIDTH
    assert of_coded.optimizer_state_nbytes == 2 * 42 * 4096  # of 3840 elements each
    assert coded.plan.step.nbytes_written < exact.plan.step.nbytes_written
    assert "optimizer state as int8: 336.0 KiB, exactly 1.2 MiB" in coded.explain("0.weight")
    assert "optimizer state as int8: 1.4 MiB, exactly 5.2 MiB" in str(coded)
    assert "optimizer state as" not in str(exact)
    path = tmp_path / "plan.json"
    coded.save(path)
    assert load_plan(path) == coded.plan


# Bad input


@pytest.mark.parametrize("overlap", [True, False])
def test_an_optimizer_of_whole_tensors_is_refused(overlap: bool, optimize: Callable[..., nn.Sequential]) -> None:
    model = optimize(Code.INT8, overlap_step=overlap)
    optimizer = torch.optim.Muon([parameter for parameter in model.parameters() if parameter.dim() == 2], lr=1e-2)
    model(torch.ones(8, WIDTH)).square().mean().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(UnsupportedError, match=r"state_dtype='int8' encodes the state of .* Muon gets whole tensors"):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()


@pytest.mark.parametrize("wrong", ["int4", "float16", torch.float64, 8, True])
def test_no_encoding(wrong: object) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="is no encoding of optimizer state; say 'int8' or 'bfloat16'"):
        zinf_compile.optimize(model, device_memory="8MiB", state_dtype=wrong)
    assert type(model[0].weight) is nn.Parameter


@pytest.mark.of_a_cpu(reason="the number in its error is that of one memory")
def test_staging_that_is_too_small_for_a_page_of_each(tmp_path: Path) -> None:
    with pytest.raises(
        zinf_compile.CapacityError, match=r"the streamed optimizer step needs staging of 660\.0 KiB on host"
    ):
        zinf_compile.optimize(
            make_model(),
            device_memory="900KiB",
            host_memory="1MiB",
            nvme=tmp_path,
            reserve_memory=0,
            state_dtype="int8",
        )
