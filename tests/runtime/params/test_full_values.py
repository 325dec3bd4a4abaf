"""Full values: held for the user and written back, and loaded without going through the mapping."""

import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.errors import CapacityError, ConfigError, StoreError, UnsupportedError
from zinf_compile.runtime.params.home import HomeParameter
from zinf_compile.runtime.store.store import Store

Optimize = Callable[..., nn.Module]
StoreOf = Callable[[nn.Module], Store]
X = torch.linspace(-1, 1, 400).view(2, 200)
# Beside staging, RAM has room for the first weight only.
SMALL = {"device_memory": "8MiB", "host_memory": "1MiB"}
homes = pytest.mark.parametrize("tiny", [True, False], ids=["nvme", "host"])
dtypes = pytest.mark.parametrize("dtype", [None, torch.bfloat16])


class Net(nn.Module):
    """Two weights of 160 KB, the second of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(200, 200), nn.Linear(200, 200), nn.Linear(200, 200)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.first.bias.dtype)
        return self.third(self.second(self.first(x).tanh()).tanh())


@homes
@dtypes
def test_what_is_written_inside_is_what_trains_on(optimize: Optimize, tiny: bool, dtype: torch.dtype | None) -> None:
    plain, model = Net(), optimize(Net(), tiny=tiny, compute_dtype=dtype, **(SMALL if tiny else {}))
    registered = list(model.parameters())
    with zinf_compile.full_parameters(model):
        assert not any(isinstance(parameter, HomeParameter) for parameter in model.parameters())
        assert model.second.weight is model.third.weight
        for each in (plain, model):
            torch.manual_seed(1)
            nn.init.orthogonal_(each.second.weight)
            each.first.weight.data = each.first.weight.data.flip(0)
            each.first.bias.data.numpy()[:] = 3.0
    assert all(now is was for now, was in zip(model.parameters(), registered, strict=True))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    expected = plain.to(dtype)(X) if dtype is not None else plain(X)
    assert torch.equal(model(X), expected)


@homes
@pytest.mark.parametrize("with_gradient", [False, True])
def test_forward_and_backward_inside(optimize: Optimize, tiny: bool, with_gradient: bool) -> None:
    plain, model = Net(), optimize(Net(), tiny=tiny)
    for each in (plain, model):
        if with_gradient:
            each(X).square().sum().backward()
    for _ in range(2):
        plain(X).sum().backward()
    with zinf_compile.full_parameters(model):
        for _ in range(2):
            model(X).sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        optimizer.step()
    assert torch.equal(model(X), plain(X))
    with zinf_compile.full_parameters(model.second):
        model.second.weight.grad = None
    assert model.second.weight.grad is None


def test_a_part_of_a_captured_model(optimize: Optimize) -> None:
    """A tied parameter is one tensor everywhere, and the captured graph reads the new values afterwards."""
    plain, model = Net(), optimize(Net(), tiny=True, capture=True)
    model(X)
    with zinf_compile.full_parameters(model.second), torch.no_grad():
        assert isinstance(model.first.weight, HomeParameter)
        assert model.third.weight is model.second.weight
        model.second.weight.mul_(2)
        inside = model(X)
    with torch.no_grad():
        plain.second.weight.mul_(2)
    assert torch.equal(inside, plain(X))
    assert torch.equal(model(X), torch.compile(plain, backend="aot_eager")(X))
    torch._dynamo.reset()


@homes
def test_values_are_written_home_when_the_block_raises(optimize: Optimize, store_of: StoreOf, tiny: bool) -> None:
    model = optimize(Net(), tiny=tiny)

    def write_and_raise() -> None:
        with zinf_compile.full_parameters(model), torch.no_grad():
            model.first.weight.fill_(2.0)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        write_and_raise()
    assert (model.first.weight == 2.0).all()
    assert isinstance(model.first.weight, HomeParameter)
    store_of(model).check_integrity()


def test_what_cannot_be_done_inside(optimize: Optimize) -> None:
    model = optimize(Net(), tiny=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    kept = model.second.weight
    with zinf_compile.full_parameters(model):
        with pytest.raises(UnsupportedError, match=r"'first\.weight' is held by full_parameters\(\)"):
            optimizer.step()
        with pytest.raises(UnsupportedError, match=r"'second\.weight' is held"), torch.no_grad():
            kept.copy_(torch.zeros(200, 200))
        with pytest.raises(UnsupportedError, match=r"cannot assign to 'first\.weight'"):
            model.first.weight = nn.Parameter(torch.zeros(200, 200))
    optimizer.step()


@homes
def test_another_shape_is_refused_and_the_rest_is_taken(optimize: Optimize, tiny: bool) -> None:
    model = optimize(Net(), tiny=tiny)
    before = model.first.weight.clone()

    def write() -> None:
        with zinf_compile.full_parameters(model):
            model.first.weight.data = torch.zeros(3)
            model.first.bias.data.fill_(7.0)

    with pytest.raises(UnsupportedError, match=r"first\.weight got another shape, dtype or device"):
        write()
    assert torch.equal(model.first.weight, before)
    assert (model.first.bias == 7.0).all()


def test_blocks_within_blocks(optimize: Optimize) -> None:
    """The outer block holds the parameters until it ends."""
    model = optimize(Net(), tiny=True)
    with zinf_compile.full_parameters(model), torch.no_grad():
        weight = model.second.weight
        with zinf_compile.full_parameters(model.second):
            assert model.second.weight is weight
            weight.fill_(1.0)
        assert model.second.weight is weight
        weight.add_(1.0)
        assert "Net" in str(zinf_compile.report(model))
    assert (model.second.weight == 2.0).all()
    with zinf_compile.full_parameters(model.second):
        with zinf_compile.full_parameters(model), torch.no_grad():
            model.first.weight.fill_(3.0)
        assert isinstance(model.first.weight, HomeParameter)
        assert not isinstance(model.second.weight, HomeParameter)
    assert (model.first.weight == 3.0).all()


def test_the_arena_makes_room(optimize: Optimize, store_of: StoreOf) -> None:
    """The arena frees its memory between two calls, and the next call allocates it again."""
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(6)))
    plain = nn.Sequential(*(nn.Linear(600, 600) for _ in range(6)))
    plain.load_state_dict(model.state_dict())
    x = torch.linspace(-1, 1, 1200).view(2, 600)
    optimize(model, tiny=True, capture=True, device_memory="5MiB")
    compiled = torch.compile(plain, backend="aot_eager")
    for each in (model, compiled):
        each(x).sum().backward()
    store = store_of(model)
    assert store.arena.nbytes > 2 * 2**20
    with zinf_compile.full_parameters(model[:2]):
        assert store.arena.nbytes == 0
    for each in (model, compiled):
        each(x).sum().backward()
    assert store.arena.nbytes > 2 * 2**20
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name
    torch._dynamo.reset()


def test_who_is_refused(optimize: Optimize) -> None:
    with pytest.raises(ConfigError, match="Net has no parameter in a store"), zinf_compile.full_parameters(Net()):
        pass
    model = optimize(nn.Sequential(*(nn.Linear(600, 600) for _ in range(4))), tiny=True, device_memory="4MiB")
    message = r"full_parameters\(Sequential\) takes 5\.5 MiB of parameters .* raise device_memory to 6MiB"
    with pytest.raises(CapacityError, match=message), zinf_compile.full_parameters(model):
        pass
    with zinf_compile.full_parameters(model[1]):
        assert model[1].weight.sum() != 0


def test_compiled_by_name_only(optimize: Optimize) -> None:
    model = nn.Linear(200, 200)
    torch.compile(model, backend="zinf", options={"device_memory": "8MiB", "host_memory": "8MiB"})(X)
    message = r"that zinf_compile\.optimize\(model\) has returned"
    with pytest.raises(ConfigError, match=message), zinf_compile.full_parameters(model):
        pass
    zinf_compile.close(model)
    torch._dynamo.reset()


@pytest.mark.parametrize("what", ["hold", "export", "copy", "load", "gradient"])
def test_an_update_in_the_background_is_waited_for(optimize: Optimize, tmp_path: Path, what: str) -> None:
    """Each action comes right after a step whose update has only begun; the next step starts from its result."""
    plain, model = (nn.Sequential(*(nn.Linear(300, 300) for _ in range(6))) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimize(model, tiny=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    x = torch.linspace(-1, 1, 300)
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(x).square().sum().backward()
            optimizer.step()
            if what == "hold":
                with zinf_compile.full_parameters(model) if each is model else nullcontext(), torch.no_grad():
                    for parameter in each.parameters():
                        parameter.mul_(0.5)
            elif what == "copy":
                with torch.no_grad():
                    each[5].weight.copy_(each[0].weight)
            elif what == "load":
                each.load_state_dict({name: value / 2 for name, value in each.state_dict().items()})
            elif what == "gradient" and each is model:
                with zinf_compile.full_parameters(model):
                    for name, parameter in plain.named_parameters():
                        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name
            elif what == "export" and each is model:
                zinf_compile.export(model, tmp_path / str(step))
                for name, value in load_file(tmp_path / str(step) / "model.safetensors").items():
                    assert torch.equal(value, plain.state_dict()[name]), name
        for optimizer in optimizers:
            optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


# Loading


@homes
@dtypes
def test_loading_a_state_dict(optimize: Optimize, tiny: bool, dtype: torch.dtype | None) -> None:
    """From other dtypes too; loaded values are computed with, saved and trained on."""
    plain, model = Net(), optimize(Net(), tiny=tiny, compute_dtype=dtype, **(SMALL if tiny else {}))
    model(X)
    for wanted in (torch.float32, torch.float64, torch.bfloat16):
        state = {name: torch.randn(value.shape).to(wanted) for name, value in plain.state_dict().items()}
        state["third.weight"] = state["second.weight"]
        for each in (plain, model):
            assert str(each.load_state_dict(state)) == "<All keys matched successfully>"
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        reference = Net()
        reference.load_state_dict(state)
        assert torch.equal(model(X), reference.to(dtype or torch.float32)(X))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    again = Net()
    again.load_state_dict(torch.load(buffer))
    assert torch.equal(again.second.weight, plain.second.weight)


def test_partial_and_wrong_state_dicts(optimize: Optimize) -> None:
    plain, model = Net(), optimize(Net(), tiny=True)
    state = {"first.weight": torch.ones(200, 200), "second.bias": torch.ones(3), "x": torch.ones(1)}
    messages = []
    for each in (plain, model):
        with pytest.raises(RuntimeError) as error:
            each.load_state_dict(state)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    del state["second.bias"]
    messages = [str(each.load_state_dict(state, strict=False)) for each in (plain, model)]
    assert messages[0] == messages[1]
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_assigning_is_refused_before_anything_changes(optimize: Optimize) -> None:
    model = optimize(Net(), tiny=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: torch.ones_like(value) for name, value in before.items()}
    for part, values in ((model, state), (model.first, {"weight": torch.ones(200, 200), "bias": torch.ones(200)})):
        with pytest.raises(UnsupportedError, match=r"load_state_dict\(assign=True\) would replace parameters of"):
            part.load_state_dict(values, assign=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_copying_in_place_is_that_of_a_plain_parameter(optimize: Optimize) -> None:
    plain, model = Net(), optimize(Net(), tiny=True)
    for each in (plain, model):
        weight = each.first.weight
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            weight.copy_(torch.zeros(200, 200))
        with pytest.raises(RuntimeError, match="must match the size"), torch.no_grad():
            weight.copy_(torch.zeros(3, 7))
        version = weight._version
        with torch.no_grad():
            assert weight.copy_(torch.arange(40000.0).view(200, 200)) is weight
            assert weight._version > version
            weight.copy_(torch.arange(40000.0).view(200, 200).T)
            weight[3].copy_(torch.arange(200))
            each.second.weight.copy_(torch.arange(200))
        stale = each(X).square().sum()
        with torch.no_grad():
            each.second.weight.copy_(torch.zeros(200, 200))
        assert stale.isfinite()
    assert torch.equal(model.first.weight, plain.first.weight)
    assert torch.equal(model(X), plain(X))


def test_copying_after_close(optimize: Optimize) -> None:
    model = optimize(Net(), tiny=True)
    zinf_compile.close(model)
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert (model.first.weight == 1).all()
    with pytest.raises(StoreError, match="closed"):
        model(X)
