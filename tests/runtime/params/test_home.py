"""Home parameters are parameters: users read, write and save them as before."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.parametrizations
from torch import Tensor, nn
from torch.nn import Parameter

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params.records import record_of

DTYPES = [None, torch.bfloat16]
PLACES = [True, False]  # on nvme, in host memory


class Net(nn.Module):
    """Weights too large to be kept in memory, a small bias, a frozen weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(129, 257)
        self.down = nn.Linear(257, 129, bias=False)
        self.frozen = nn.Linear(129, 300, bias=False).requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(self.down(self.up(x).tanh())) * self.scale.to(x.dtype)
        return result


def batch() -> Tensor:
    return torch.randn(3, 129, generator=torch.Generator().manual_seed(1))


def expected(plain: nn.Module, dtype: torch.dtype | None) -> Tensor:
    """Return the plain model's output with its parameters in the compute dtype."""
    if dtype is None:
        return plain(batch())  # type: ignore[no-any-return]
    rounded = {name: parameter.to(dtype) for name, parameter in plain.named_parameters()}
    return torch.func.functional_call(plain, rounded, (batch().to(dtype),))  # type: ignore[no-any-return]


def output(model: nn.Module, dtype: torch.dtype | None) -> Tensor:
    return model(batch() if dtype is None else batch().to(dtype))  # type: ignore[no-any-return]


@pytest.fixture(params=PLACES, ids=["nvme", "host"])
def model(request: pytest.FixtureRequest, optimize: Callable[..., nn.Module]) -> nn.Module:
    return optimize(Net(), tiny=request.param)


def test_it_is_still_a_parameter(model: nn.Module) -> None:
    for (name, parameter), (plain_name, plain) in zip(model.named_parameters(), Net().named_parameters(), strict=True):
        assert name == plain_name
        assert isinstance(parameter, Parameter)
        assert isinstance(parameter, Tensor)
        assert parameter.is_leaf
        assert parameter.requires_grad == plain.requires_grad
        assert (parameter.shape, parameter.dtype, parameter.device) == (plain.shape, plain.dtype, plain.device)
        assert parameter.numel() == plain.numel()
        assert torch.equal(parameter, plain)
        assert repr(parameter).splitlines()[1:] == repr(plain).splitlines()[1:]
        assert torch.equal(parameter.norm(), plain.norm())
        assert torch.equal(parameter.detach().sum(), plain.detach().sum())
        assert not isinstance(parameter + 1, Parameter)
        assert parameter.tolist() == plain.tolist()


def test_the_model_looks_as_before(model: nn.Module) -> None:
    plain = Net()
    assert type(model).__name__ == "Net"
    assert type(model).__qualname__ == "Net"
    assert type(model).__module__ == Net.__module__
    assert isinstance(model, Net)
    assert isinstance(model.up, nn.Linear)
    assert repr(model) == repr(plain)
    assert list(dict(model.named_modules())) == list(dict(plain.named_modules()))
    assert model.get_parameter("up.weight") is model.up.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(p.numel() for p in plain.parameters())
    assert model.train(False).training is False
    assert model.float() is model


def test_state_dict_has_the_same_keys_and_values_and_can_be_saved(model: nn.Module) -> None:
    plain = Net()
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved)
    assert list(loaded) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(loaded[name], value), name
    plain.load_state_dict(loaded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiny", PLACES)
def test_load_state_dict_is_seen_by_the_next_forward(
    tiny: bool, dtype: torch.dtype | None, optimize: Callable[..., nn.Module]
) -> None:
    plain = Net()
    model = optimize(Net(), tiny=tiny, host_memory="4MiB", compute_dtype=dtype)
    assert torch.equal(output(model, dtype), expected(plain, dtype))
    other = {name: value.flip(0) * 1.5 for name, value in plain.state_dict().items()}
    assert model.load_state_dict(other) == plain.load_state_dict(other)
    assert torch.equal(output(model, dtype), expected(plain, dtype))


def fill_out(weight: Tensor) -> None:
    torch.mul(weight.detach().clone(), 3, out=weight)


def set_item(weight: Tensor) -> None:
    weight[0, :] = 0.25


def through_a_kept_alias(weight: Tensor) -> None:
    alias = weight.data
    alias.add_(1)
    alias.view(-1)[5:50].mul_(3)


def through_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[:] = 0.5


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data.mul_": lambda weight: weight.data.mul_(2),
    "mul_": lambda weight: weight.mul_(2),
    "init": lambda weight: nn.init.constant_(weight, 0.125),
    "trunc_normal_": lambda weight: nn.init.trunc_normal_(weight, generator=torch.Generator().manual_seed(5)),
    "copy_": lambda weight: weight.copy_(weight.flip(0)),
    "setitem": set_item,
    "out": fill_out,
    "data alias": through_a_kept_alias,
    "numpy": through_numpy,
    "view": lambda weight: weight.view(-1)[3:7].zero_(),
    "transposed view": lambda weight: weight.t()[0].zero_(),
    "foreach": lambda weight: torch._foreach_mul_([weight], 2.0),
    "data setter": lambda weight: setattr(weight, "data", weight.data * 2),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiny", PLACES)
@pytest.mark.parametrize(
    ("name", "write"),
    [
        *(("up.weight", write) for write in WRITES),
        *(("up.bias", write) for write in WRITES if write not in ("setitem", "trunc_normal_", "transposed view")),
    ],
)
def test_what_a_person_writes_is_seen_by_the_next_forward(
    write: str, name: str, tiny: bool, dtype: torch.dtype | None, optimize: Callable[..., nn.Module]
) -> None:
    plain = Net()
    model = optimize(Net(), tiny=tiny, host_memory="4MiB", compute_dtype=dtype)
    output(model, dtype)
    with torch.no_grad():
        WRITES[write](plain.get_parameter(name))
        WRITES[write](model.get_parameter(name))
    assert torch.equal(output(model, dtype), expected(plain, dtype))
    assert torch.equal(model.get_parameter(name), plain.get_parameter(name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiny", PLACES)
@pytest.mark.parametrize("write", ["data.mul_", "mul_", "init", "copy_", "setitem", "data alias", "data setter"])
def test_what_a_person_writes_to_a_frozen_parameter_is_seen_by_the_next_forward(
    write: str, tiny: bool, dtype: torch.dtype | None, optimize: Callable[..., nn.Module]
) -> None:
    plain = Net()
    model = optimize(Net(), tiny=tiny, host_memory="4MiB", compute_dtype=dtype)
    weight = model.get_parameter("frozen.weight")
    record = record_of(weight)
    assert record is not None
    assert weight.data_ptr() == record.copies.compute.tensor.data_ptr(), "there is no second copy in memory"
    plain.frozen.to(dtype)
    output(model, dtype)
    with torch.no_grad():
        WRITES[write](plain.get_parameter("frozen.weight"))
        WRITES[write](weight)
    assert torch.equal(output(model, dtype), expected(plain, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_person_writes_is_updated_by_the_next_step(
    dtype: torch.dtype | None, optimize: Callable[..., nn.Module]
) -> None:
    plain = Net()
    model = optimize(Net(), tiny=True, host_memory="4MiB", compute_dtype=dtype)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (plain, model)]
    for _ in range(3):
        expected(plain, dtype).sum().backward()
        output(model, dtype).sum().backward()
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each.get_parameter("up.weight").data.mul_(1.5)
            optimizer.step()
            each.get_parameter("down.weight").data.add_(0.125)
            optimizer.zero_grad()
    plain.frozen.to(dtype)  # a frozen parameter has only a compute copy
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(output(model, dtype), expected(plain, dtype))


def test_gradients_are_home_tensors_and_plain_values(model: nn.Module) -> None:
    plain = Net()
    for each in (plain, model):
        each(batch()).sum().backward()
    for name, parameter in plain.named_parameters():
        other = model.get_parameter(name)
        if parameter.grad is None:
            assert other.grad is None
            continue
        assert other.grad is not None
        assert torch.equal(other.grad, parameter.grad)
        record = record_of(other)
        assert record is not None
        assert record.gradient.slot is not None
        assert other.grad.data_ptr() == record.gradient.slot.tensor.data_ptr()
    assert torch.equal(
        nn.utils.clip_grad_norm_(model.parameters(), 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    )


def test_freezing_and_unfreezing(model: nn.Module) -> None:
    plain = Net()
    for each in (plain, model):
        each.get_parameter("up.weight").requires_grad_(False)
        each(batch()).sum().backward()
    assert model.get_parameter("up.weight").grad is None
    for each in (plain, model):
        each.get_parameter("up.weight").requires_grad_(True)
        each(batch()).sum().backward()
    for name, parameter in plain.named_parameters():
        other = model.get_parameter(name).grad
        assert (other is None) == (parameter.grad is None)
        assert parameter.grad is None or torch.equal(other, parameter.grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "unfreeze",
    [
        lambda weight: weight.requires_grad_(),
        lambda weight: weight.requires_grad_(True),
        lambda weight: weight.requires_grad_(requires_grad=True),
        lambda weight: setattr(weight, "requires_grad", True),
    ],
)
def test_unfreezing_what_was_frozen_at_optimize(unfreeze: Callable[[Tensor], object], model: nn.Module) -> None:
    plain = Net()
    for each in (plain, model):
        unfreeze(each.get_parameter("frozen.weight"))
        each(batch()).sum().backward()
    ours, expected = model.get_parameter("frozen.weight").grad, plain.get_parameter("frozen.weight").grad
    assert ours is not None
    assert expected is not None
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("value", [Parameter(torch.zeros(257, 129)), None, 1])
def test_assigning_to_it_is_refused_and_changes_nothing(value: object, model: nn.Module) -> None:
    before = output(model, None)
    with pytest.raises(UnsupportedError, match=r"cannot assign to 'up\.weight': it lives in a store .*; write into it"):
        model.up.weight = value
    assert torch.equal(output(model, None), before)
    assert torch.equal(model.up.weight, Net().up.weight)


def test_assigning_it_to_itself_and_other_attributes_is_fine(model: nn.Module) -> None:
    model.up.weight = model.up.weight
    model.scale = torch.full((1,), 2.0)
    model.note = "mine"
    assert torch.equal(output(model, None), Net()(batch()) * 2)


def test_deleting_it_is_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"up\.weight"):
        del model.up.weight
    assert torch.equal(output(model, None), Net()(batch()))


def test_deepcopy_is_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match="an optimized Net cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match="an optimized Linear cannot be copied"):
        copy.deepcopy(model.up)


def test_deepcopy_of_its_state_dict_is_a_plain_copy(model: nn.Module) -> None:
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.get_parameter("up.weight").zero_()
    assert torch.equal(saved["up.weight"], Net().up.weight)


@pytest.mark.parametrize("dump", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_pickling_a_whole_model_is_refused(dump: Callable[[nn.Module], object], model: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"an optimized \w+ cannot be (copied|saved|pickled)"):
        dump(model)


@pytest.mark.parametrize("move", [lambda model: model.half(), lambda model: model.to(torch.float64)])
def test_changing_the_dtype_is_refused_and_changes_nothing(
    move: Callable[[nn.Module], nn.Module], model: nn.Module
) -> None:
    with pytest.raises(
        UnsupportedError, match=r"cannot make 'up\.weight', .* it lives in a store .* say compute_dtype"
    ):
        move(model)
    assert torch.equal(output(model, None), Net()(batch()))


@pytest.mark.parametrize("tiny", PLACES)
def test_tied_weights_are_one(tiny: bool, optimize: Callable[..., nn.Module]) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 200))
        model[2].weight = model[0].weight
        return model

    plain, model = make(), optimize(make(), tiny=tiny)
    assert model[0].weight is model[2].weight
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (plain, model)]
    for _ in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(torch.ones(2, 200)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_without_gradients_a_forward_keeps_nothing(model: nn.Module) -> None:
    with torch.no_grad():
        assert torch.equal(output(model, None), Net()(batch()))
    with torch.inference_mode():
        assert torch.equal(output(model, None), Net()(batch()))


def test_a_step_between_forward_and_backward_is_refused(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output(model, None).sum().backward()
    loss = output(model, None).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an optimizer step between its forward and its backward"):
        loss.backward()
