"""torchao's optimizers, which keep their state in codes: chunk by chunk at multiples of their blocks, bit for bit."""

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zinf_compile
from zinf_compile.ir.copies import BlockKind, Blocks, code_of_name
from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.slices import Slice
from zinf_compile.runtime.optim.supported import check_supported
from zinf_compile.runtime.params.records import StoredParameter, record_of
from zinf_compile.runtime.storage.state_blocks import Blocked, blocks_of
from zinf_compile.runtime.store.store import store_of

optim = pytest.importorskip("torchao.optim")
pytestmark = pytest.mark.of_a_cpu(reason="torchao's optimizers are refused beside a device with memory of its own")

NAMES = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
MOSTLY_8BIT = [NAMES[0], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:])]
MOSTLY_4BIT = [NAMES[1], *(pytest.param(name, marks=pytest.mark.long) for name in (NAMES[0], NAMES[2]))]
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("Adam8bit", "Adam4bit", "AdamFp8")]
BUDGETS = {
    "device": {"device_memory": "64MiB", "host_memory": "64MiB"},
    "host": {"device_memory": "3MiB", "host_memory": "64MiB"},
    "nvme": {"device_memory": "1MiB", "host_memory": "1MiB"},
}
WIDTH = 192  # 36,864 elements: two chunks of 15,360 and a rest, where staging is small
NUM_STEPS = 3
NUM_GRAPHS = 1  # of the model itself, which Dynamo captures


def op_by_op(is_compiled: bool) -> AbstractContextManager[object]:
    """Return a context in which torchao does not compile its update, which takes seconds for each size."""
    return nullcontext() if is_compiled else torch.compiler.set_stance("force_eager")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return layers with state in codes, and with plain state: it is small, or no number of whole blocks."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(32, WIDTH)]
    for _ in range(4):
        layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    layers += [nn.Tanh(), nn.Linear(WIDTH, 41, bias=False), nn.LayerNorm(41)]  # 7,872 elements
    model = nn.Sequential(*layers).to(dtype)
    model[4].weight.requires_grad_(False)
    return model


def make_optimizer(name: str, model: nn.Module, **options: Any) -> Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:], "lr": 3e-3}]
    made: Optimizer = getattr(optim, name)(groups, lr=1e-2, **options)
    return made


def train(
    model: nn.Module,
    optimizer: Optimizer,
    steps: range = range(NUM_STEPS),
    *,
    dtype: torch.dtype = torch.float32,
    is_compiled: bool = False,
) -> Tensor:
    losses = []
    for step in steps:
        batch = torch.randn(5, 32, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = model(batch).square().mean()
        with op_by_op(is_compiled):
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def inner_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state, and in the place of one in codes those that are in it."""
    tensors = {}
    for key, value in state.items():
        for name in getattr(value, "tensor_attrs", [None]):
            inner = value if name is None else getattr(value, name)
            tensors[f"{key}.{name}"] = inner.view(torch.uint8) if inner.dtype is torch.float8_e4m3fn else inner
    return tensors


def assert_same(model: nn.Module, optimizer: Optimizer, plain: nn.Module, plain_optimizer: Optimizer) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.detach(), theirs.detach()), name
        assert (ours in optimizer.state) == (theirs in plain_optimizer.state), name
        if ours in optimizer.state:
            mine, others = (inner_tensors(o.state[p]) for o, p in ((optimizer, ours), (plain_optimizer, theirs)))
            assert mine.keys() == others.keys()
            for key in mine:
                assert mine[key].dtype == others[key].dtype
                assert mine[key].shape == others[key].shape, (name, key)
                assert torch.equal(mine[key], others[key]), (name, key)


@pytest.fixture
def optimize(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    models = []

    def make(place: str = "nvme", *, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
        budgets = {**BUDGETS[place], "nvme": tmp_path, **options}
        models.append(zinf_compile.optimize(make_model(dtype), **budgets))
        return models[-1]

    yield make
    for model in models:
        zinf_compile.close(model)


def record(parameter: object) -> StoredParameter:
    found = record_of(parameter)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "place", ["nvme", *(pytest.param(place, marks=pytest.mark.long) for place in ("device", "host"))]
)
@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_training_is_that_of_torchao(optimize: Callable[..., nn.Module], name: str, place: str) -> None:
    model, plain = optimize(place), make_model()
    optimizer, plain_optimizer = (make_optimizer(name, each) for each in (model, plain))
    assert torch.equal(train(model, optimizer), train(plain, plain_optimizer))
    assert_same(model, optimizer, plain, plain_optimizer)
    states = record(model[2].weight).copies.states
    assert all(isinstance(slot.code, Blocks) for slot in states.values())
    assert len(states) == 2
    if place == "nvme":
        assert {slot.tier for slot in states.values()} == {Tier.NVME}
        assert store_of(record(model[2].weight)).chunk_elements < 15_360


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_compiled_chunks_have_the_bits_of_compiled_tensors(tmp_path: Path, name: str) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 41, bias=False),
        ]
        return nn.Sequential(nn.Linear(32, WIDTH, bias=False), *layers)

    plain, model = make(), zinf_compile.optimize(make(), device_memory="700KiB", host_memory="700KiB", nvme=tmp_path)
    optimizer, plain_optimizer = (make_optimizer(name, each) for each in (model, plain))
    before = count_compilations()
    expected = train(plain, plain_optimizer, is_compiled=True)
    in_memory, before = count_compilations() - before, count_compilations()
    step = functools.partial(train, model, optimizer, is_compiled=True)
    assert torch.equal(step(), expected)
    assert_same(model, optimizer, plain, plain_optimizer)
    # Of both layers of 36,864 elements the chunks of 15,360, and the rest of 6,144, which 192 by 32 are too: one more.
    assert record(model[1].weight).copies.states["exp_avg"].tier is Tier.NVME
    assert count_compilations() - before <= in_memory + NUM_GRAPHS + 1
    before = count_compilations()
    step()
    assert count_compilations() == before
    zinf_compile.close(model)


def count_compilations() -> int:
    """Return how many graphs Dynamo has captured so far."""
    counted: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return counted


@pytest.mark.parametrize("name", MOSTLY_8BIT)
def test_options_that_change_are_followed(optimize: Callable[..., nn.Module], name: str) -> None:
    model, plain = optimize(), make_model()
    optimizers = [make_optimizer(name, each) for each in (model, plain)]
    losses = []
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(NUM_STEPS):
            losses.append(train(each, optimizer, range(step, step + 1)))
            scheduler.step()
            optimizer.param_groups[1]["weight_decay"] = 0.3 * step
    assert torch.equal(torch.stack(losses[:NUM_STEPS]), torch.stack(losses[NUM_STEPS:]))
    assert_same(model, optimizers[0], plain, optimizers[1])


@pytest.mark.parametrize("name", MOSTLY_8BIT)
def test_a_master_copy_in_bfloat16_and_one_in_float32(optimize: Callable[..., nn.Module], name: str) -> None:
    model, plain = optimize(dtype=torch.bfloat16), make_model(torch.bfloat16)
    optimizer, plain_optimizer = (make_optimizer(name, each) for each in (model, plain))
    ours, theirs = (train(*each, dtype=torch.bfloat16) for each in ((model, optimizer), (plain, plain_optimizer)))
    assert torch.equal(ours, theirs)
    assert_same(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("place", [pytest.param("host", marks=pytest.mark.long), "nvme"])
def test_stochastic_rounding_gets_whole_tensors_and_says_so(
    optimize: Callable[..., nn.Module], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, plain = optimize(place, dtype=torch.bfloat16), make_model(torch.bfloat16)
    pairs = [(each, make_optimizer("AdamW8bit", each, bf16_stochastic_round=True)) for each in (model, plain)]
    losses = []
    for pair in pairs:
        torch.manual_seed(3)
        losses.append(train(*pair, dtype=torch.bfloat16))
    assert torch.equal(*losses)
    assert_same(*pairs[0], *pairs[1])
    assert "AdamW8bit gets whole tensors: it draws random numbers" in caplog.text


@pytest.mark.parametrize("name", MOSTLY_8BIT)
def test_updates_in_backward(optimize: Callable[..., nn.Module], name: str) -> None:
    model, plain = optimize(step_in_backward=True), make_model()
    optimizer, plain_optimizer = (make_optimizer(name, each) for each in (model, plain))
    assert torch.equal(train(model, optimizer), train(plain, plain_optimizer))
    assert_same(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("name", MOSTLY_4BIT)
@pytest.mark.parametrize("is_plain_there", [True, False])
def test_checkpoints_load_into_plain_models_and_back(
    optimize: Callable[..., nn.Module], tmp_path: Path, name: str, is_plain_there: bool
) -> None:
    plain = make_model()
    plain_optimizer = make_optimizer(name, plain)
    train(plain, plain_optimizer)
    model = optimize()
    optimizer = make_optimizer(name, model)
    train(model, optimizer)
    saved = (plain, plain_optimizer) if is_plain_there else (model, optimizer)
    zinf_compile.save(tmp_path / "saved", *saved)
    for other in (make_model(), optimize("host"), optimize()):
        other_optimizer = make_optimizer(name, other)
        zinf_compile.load(tmp_path / "saved", other, other_optimizer)
        assert_same(other, other_optimizer, plain, plain_optimizer)
        again = make_model()
        again.load_state_dict(plain.state_dict())
        again_optimizer = make_optimizer(name, again)
        torch.save(plain_optimizer.state_dict(), tmp_path / "state.pt")  # torchao's tensors cannot be copied otherwise
        again_optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert torch.equal(train(other, other_optimizer, range(5, 7)), train(again, again_optimizer, range(5, 7)))
        assert_same(other, other_optimizer, again, again_optimizer)


@pytest.mark.parametrize("name", MOSTLY_4BIT)
def test_state_dicts_are_torchaos_both_ways(optimize: Callable[..., nn.Module], tmp_path: Path, name: str) -> None:
    model, plain = optimize(), make_model()
    optimizer, plain_optimizer = (make_optimizer(name, each) for each in (model, plain))
    train(model, optimizer)
    train(plain, plain_optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    shown, theirs = optimizer.state_dict(), plain_optimizer.state_dict()
    assert shown["param_groups"] == theirs["param_groups"] == read["param_groups"]
    for number, state in theirs["state"].items():
        assert [type(value) for value in read["state"][number].values()] == [type(value) for value in state.values()]
        for other in (shown, read, copy.deepcopy(shown)):
            mine, expected = inner_tensors(other["state"][number]), inner_tensors(state)
            assert mine.keys() == expected.keys()
            assert all(torch.equal(mine[key], expected[key]) for key in expected)
    for state_dict in (shown, theirs, read):
        others = [optimize("host"), optimize(), make_model()]
        for other in others:
            other.load_state_dict(plain.state_dict())
            other_optimizer = make_optimizer(name, other)
            other_optimizer.load_state_dict(state_dict)
            train(other, other_optimizer, range(7, 8))
            if other is others[0]:
                first = other, other_optimizer
            assert_same(other, other_optimizer, *first)


def test_what_is_written_into_codes_counts(optimize: Callable[..., nn.Module]) -> None:
    model, plain = optimize(), make_model()
    pairs = [(each, make_optimizer("AdamW8bit", each)) for each in (model, plain)]
    for each, optimizer in pairs:
        train(each, optimizer)
        state = optimizer.state[each[2].weight]
        state["exp_avg"].scale.mul_(2)
        held = state["exp_avg_sq"].codes
        held[3:5] = 7
    assert_same(*pairs[0], *pairs[1])
    for each, optimizer in pairs:
        optimizer.state[each[6].weight]["exp_avg_sq"].copy_(torch.ones(WIDTH, WIDTH))
    assert_same(*pairs[0], *pairs[1])
    assert torch.equal(*(train(*pair) for pair in pairs))
    assert_same(*pairs[0], *pairs[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 8192}, r"a block of block_size=8192 elements is 8192 bytes .*; choose a smaller block_size"),
        ({"block_size": 0}, r"block_size=0 is no whole number"),
        ({"amsgrad": True}, r"amsgrad=True takes a maximum, for which torchao's OptimState8bit has no code"),
    ],
)
def test_options_that_do_not_work_are_refused_at_once(
    optimize: Callable[..., nn.Module], options: dict[str, Any], words: str
) -> None:
    model = optimize("device")
    optimizer = make_optimizer("AdamW8bit", model, **options)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(UnsupportedError, match=words):
        train(model, optimizer, range(1))
    assert all(torch.equal(old, new.detach()) for old, new in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


def test_other_optimizers_of_torchao_are_refused_by_name(optimize: Callable[..., nn.Module]) -> None:
    model = optimize("device")

    class Mine(optim.AdamW8bit):  # type: ignore[misc, name-defined]
        pass

    for optimizer in (Mine(model.parameters()), optim._AdamW(model.parameters())):
        with pytest.raises(
            UnsupportedError, match=rf"{type(optimizer).__name__}, which is torchao's or derived .* use AdamW8bit"
        ):
            train(model, optimizer, range(1))


def test_the_offloading_optimizer_of_torchao_is_refused_by_name() -> None:
    """Its constructor needs a GPU."""
    with pytest.raises(UnsupportedError, match="CPUOffloadOptimizer, which is torchao's"):
        check_supported(object.__new__(optim.CPUOffloadOptimizer))


def test_codes_are_not_encoded_again(optimize: Callable[..., nn.Module]) -> None:
    model = optimize("device", state_dtype="int8")
    with pytest.raises(UnsupportedError, match=r"AdamW8bit does so itself; leave state_dtype out"):
        train(model, make_optimizer("AdamW8bit", model), range(1))


def test_a_checkpoint_in_codes_of_torchao_is_refused_for_another_class_of_that_name(
    optimize: Callable[..., nn.Module], tmp_path: Path
) -> None:
    model = optimize("host")
    optimizer = make_optimizer("AdamW8bit", model)
    train(model, optimizer)
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    other = make_model()
    named = type("AdamW8bit", (torch.optim.AdamW,), {})(other.parameters())
    with pytest.raises(ConfigError, match="is not torchao's"):
        zinf_compile.load(tmp_path / "saved", other, named)


def test_a_checkpoint_of_bitsandbytes_is_refused_for_the_class_of_torchao_with_that_name(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = make_model()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    train(model, optimizer)
    zinf_compile.save(tmp_path / "saved", model, optimizer)
    other = make_model()
    before = [parameter.detach().clone() for parameter in other.parameters()]
    with pytest.raises(ConfigError, match=r"state of bitsandbytes in the checkpoint, such as .* here is torchao's"):
        zinf_compile.load(tmp_path / "saved", other, make_optimizer("AdamW8bit", other))
    assert all(torch.equal(old, new.detach()) for old, new in zip(before, other.parameters(), strict=True))


def test_offline_plans_do_not_count_codes_of_torchao() -> None:
    with pytest.raises(
        UnsupportedError, match=r"torchao's AdamW8bit .*; plan with torch.optim.AdamW and state_dtype='int8'"
    ):
        zinf_compile.plan(make_model(), torch.zeros(5, 32), device_memory="64MiB", optimizer=optim.AdamW8bit)


@pytest.mark.parametrize("kind", BlockKind)
@pytest.mark.parametrize("num_blocks", [1, 15, 16, 60, 200])
def test_pages_hold_what_is_in_the_tensors_of_torchao(kind: BlockKind, num_blocks: int) -> None:
    code = Blocks(kind=kind, block=256, signed=True)
    assert code_of_name(str(code)) == code
    whole = Slice.of_whole("w", (num_blocks, 256))
    blocked = Blocked(code=code, slice=whole, dtype=torch.bfloat16)
    tensor = blocked.shaped(blocked.room(whole.num_elements, torch.device("cpu")), torch.Size(whole.sizes))
    tensor.copy_(torch.randn(num_blocks, 256))
    assert blocks_of(tensor) == code
    pages = torch.full((code.nbytes(whole.num_elements),), 255, dtype=torch.uint8)
    blocked.encode(tensor, pages)
    back = blocked.value(pages)
    assert (type(back), back.shape, back.dtype) == (type(tensor), tensor.shape, torch.bfloat16)
    for key, value in inner_tensors({"": tensor}).items():
        assert torch.equal(inner_tensors({"": back})[key], value)
    part = whole.flat.part(0, 256 * -(-num_blocks // 2))
    first, nbytes = blocked.pages_of(part)
    half = blocked.decode(pages[first : first + nbytes], blocked.room(part.num_elements, torch.device("cpu")))
    assert torch.equal(half.dequantize().view(-1), tensor.dequantize().view(-1)[: part.num_elements])


@pytest.mark.parametrize(
    "name", ["torchao.OptimState8bit/0/signed", "torchao.OptimState8bit/08/signed", "torchao.x/256/signed"]
)
def test_names_of_no_code_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        code_of_name(name)


def test_codes_of_another_version_of_torchao_are_refused() -> None:
    state = optim.AdamW8bit._subclass_zeros(torch.zeros(4096), True, 256)
    state.qmap[3] = 0.5
    with pytest.raises(UnsupportedError, match="has codes for other values"):
        blocks_of(state)
