"""Home gradients: clipping is deferred without disk traffic, and never shows; a gradient that is held is not overwritten."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import zinf_compile
from tests.support.fake_device import FakeDevice, on_fake_device
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.optim.step_chunks import Chunk
from zinf_compile.runtime.params import home_gradient
from zinf_compile.runtime.params.home import HomeTensor, looks_at_values
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.storage.engine import whole_sectors
from zinf_compile.runtime.store.store import Store
from zinf_compile.runtime.transfer import tensor_io

WIDTH = 160


def make_model(width: int = WIDTH, num_layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def backward(model: nn.Module, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
    x = torch.linspace(-scale, scale, 2 * WIDTH).view(2, WIDTH)
    model(x.to(dtype)).float().pow(2).sum().backward()


@pytest.fixture(params=["nvme", "beside a device"])
def pair(optimize: Callable[..., nn.Module], request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Return a plain model and its optimized copy with gradients on nvme, or in host memory beside a device."""
    if request.param == "nvme":
        model = optimize(make_model(), tiny=True)
        assert all(weight_record(model).store.placements[f"{index}.weight"].gradient is Tier.NVME for index in (0, 2))
        yield make_model(), model
        return
    torch._dynamo.reset()
    with on_fake_device():
        options = {"device_memory": "64MiB", "host_memory": "64MiB", "compute": "aten", "tiles": False}
        model = zinf_compile.optimize(make_model(), device="cuda", **options)
        assert weight_record(model).gradient.slot.tier is Tier.HOST
        yield make_model(), model
        zinf_compile.close(model)


def weight_record(model: nn.Module) -> Any:
    return record_of(dict(model.named_parameters())["0.weight"])


def disk_bytes(store: Store) -> int:
    if store.engine is None:
        return 0
    return store.engine.bytes_read + store.engine.bytes_written


def assert_same(plain: nn.Module, model: nn.Module) -> None:
    zinf_compile.synchronize(model)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            assert torch.equal(one.grad, other.grad), f"gradient of {name}"


CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "norm inf": lambda model: clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")),
    "norm 1": lambda model: clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0),
    "norm foreach": lambda model: clip_grad_norm_(model.parameters(), 0.1, foreach=True),
    "value": lambda model: clip_grad_value_(model.parameters(), 0.01),
    "value foreach": lambda model: clip_grad_value_(model.parameters(), 0.01, foreach=True),
    "by hand": lambda model: [parameter.grad.mul_(0.3).div_(torch.tensor(7.0)) for parameter in model.parameters()],
}


@pytest.mark.parametrize("num_backwards", [1, 3])
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping(clip: str, num_backwards: int, pair: tuple[nn.Module, nn.Module]) -> None:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair]
    for step in range(3):
        seen = []
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            for index in range(num_backwards):
                backward(model, 1.0 + step + index)
            seen.append(CLIPS[clip](model))
            optimizer.step()
        if isinstance(seen[0], Tensor):
            assert torch.equal(*seen)
        assert_same(*pair)


@pytest.mark.parametrize("num_backwards", [1, 3])
def test_clipping_by_norm_reads_and_writes_nothing(num_backwards: int, optimize: Callable[..., nn.Module]) -> None:
    """From the second clip on: backward then keeps norms. In eager mode autograd adds gradients up itself, without norms."""
    sizes = {"device_memory": "4608KiB", "host_memory": "4MiB"}
    model = optimize(make_model(512, 3), tiny=True, capture=num_backwards > 1, **sizes)
    store = weight_record(model).store
    for step in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        for _ in range(num_backwards):
            model(torch.ones(2, 512)).sum().backward()
        before = disk_bytes(store)
        clip_grad_norm_(model.parameters(), 0.1)
        moved = disk_bytes(store) - before
        slots = [r.gradient.slot for r in store.records.values()]
        on_disk = [whole_sectors(slot.nbytes) for slot in slots if not slot.in_memory]
        assert on_disk
        assert moved == (sum(on_disk) if step == 0 else 0)


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "clone": lambda grad: grad.clone(),
    "norm": lambda grad: torch.linalg.vector_norm(grad),
    "sum": lambda grad: grad.sum(),
    "data": lambda grad: grad.data.clone(),
    "numpy": lambda grad: torch.tensor(grad.numpy()),
    "repr": lambda grad: repr(grad),
    "add_": lambda grad: grad.add_(1).clone(),
    "copy from": lambda grad: torch.zeros(WIDTH, WIDTH).copy_(grad),
    "list": lambda grad: torch.stack([grad, grad]),
    "mul_ by a matrix": lambda grad: grad.mul_(torch.eye(WIDTH)).clone(),
    "imul": lambda grad: grad.__imul__(2).clone(),
    "item": lambda grad: grad[3, 4].item(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_is_put_off_shows(look: str, pair: tuple[nn.Module, nn.Module]) -> None:
    seen = []
    for model in pair:
        backward(model)
        grad = dict(model.named_parameters())["0.weight"].grad
        assert grad is not None
        torch.linalg.vector_norm(grad)
        grad.mul_(0.1)
        grad.clamp_(max=torch.tensor(0.001))
        seen.append(LOOKS[look](grad))
    assert weight_record(pair[1]).gradient.deferred == []
    assert torch.equal(*seen) if isinstance(seen[0], Tensor) else seen[0] == seen[1]
    assert_same(*pair)


@pytest.fixture
def beside_a_device() -> Iterator[nn.Module]:
    """Return a model whose gradients go from a device to host memory, after a step that has asked for their norms."""
    torch._dynamo.reset()
    with on_fake_device():
        options = {"device_memory": "64MiB", "host_memory": "64MiB", "compute": "aten", "tiles": False}
        model = zinf_compile.optimize(make_model(), device="cuda", **options)
        assert weight_record(model).gradient.slot.tier is Tier.HOST
        backward(model)
        clip_grad_norm_(model.parameters(), 1e9)
        model.zero_grad()
        yield model
        zinf_compile.close(model)


def test_beside_a_device_norms_are_taken_before_gradients_leave(
    beside_a_device: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_model()
    for model in (plain, beside_a_device):
        backward(model)
    monkeypatch.setattr(HomeTensor, "_run", staticmethod(lambda *args: pytest.fail("it is read from host memory")))
    norms = [torch.linalg.vector_norm(parameter.grad) for parameter in beside_a_device.parameters()]
    monkeypatch.undo()
    expected = [torch.linalg.vector_norm(parameter.grad) for parameter in plain.parameters()]
    assert all(map(torch.equal, norms, expected))


def test_beside_a_device_gradients_and_their_norms_add_up_there(
    beside_a_device: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_model()
    monkeypatch.setattr(HomeTensor, "_run", staticmethod(lambda *args: pytest.fail("it is read from host memory")))
    monkeypatch.setattr(tensor_io, "_add", lambda *args: pytest.fail("it is added on the host"))
    backward(beside_a_device)
    held = [parameter.grad for parameter in beside_a_device.parameters()]
    for scale in (2.0, -0.5):
        backward(beside_a_device, scale)
    norms = [torch.linalg.vector_norm(each) for each in held]
    monkeypatch.undo()
    for scale in (1.0, 2.0, -0.5):
        backward(plain, scale)
    assert all(map(torch.equal, held, [parameter.grad for parameter in plain.parameters()]))
    assert all(map(torch.equal, norms, [torch.linalg.vector_norm(parameter.grad) for parameter in plain.parameters()]))


def test_beside_a_device_nothing_is_freed_under_a_copy_if_adding_fails(
    beside_a_device: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward(beside_a_device)
    with monkeypatch.context() as patch:
        patch.setattr(home_gradient, "_note_norms", lambda *args: 1 / 0)
        synchronize, waited = FakeDevice.synchronize, []
        patch.setattr(FakeDevice, "synchronize", lambda device: (waited.append(device), synchronize(device)))
        with pytest.raises(ZeroDivisionError):
            backward(beside_a_device)
    assert waited


def test_beside_a_device_unscaling_waits_for_the_scale(
    beside_a_device: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from the device by an asynchronous copy."""
    backward(beside_a_device)
    gradients = [parameter.grad for parameter in beside_a_device.parameters()]
    waited: list[bool] = []
    await_compute = Store.await_compute
    monkeypatch.setattr(Store, "await_compute", lambda store: (waited.append(True), await_compute(store)))
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(()), torch.tensor(0.5))
    assert waited


CHANGES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "nothing": lambda model, grad: None,
    "a factor": lambda model, grad: grad.mul_(0.5),
    "a list": lambda model, grad: torch._foreach_mul_([grad], 0.5),
    "a row": lambda model, grad: grad[0].fill_(7.0),
    "an array": lambda model, grad: grad.numpy().fill(7.0),
    "data": lambda model, grad: grad.data.fill_(7.0),
    "another gradient": lambda model, grad: backward(model, 2.0),
    "one of autograd": lambda model, grad: sum(each.pow(2).sum() for each in model.parameters()).backward(),
    "unscaling": lambda model, grad: torch._amp_foreach_non_finite_check_and_unscale_(
        [grad], torch.zeros(()), torch.tensor(0.5)
    ),
    "zeros": lambda model, grad: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_beside_a_device_a_norm_holds_until_the_gradient_changes(change: str, beside_a_device: nn.Module) -> None:
    found = []
    for model in (make_model(), beside_a_device):
        backward(model)
        grad = dict(model.named_parameters())["0.weight"].grad
        assert grad is not None
        torch.linalg.vector_norm(grad)
        CHANGES[change](model, grad)
        found.append([torch.linalg.vector_norm(grad), torch.linalg.vector_norm(grad, 1.0), grad.clone()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_it_is_put_off_until_the_step(pair: tuple[nn.Module, nn.Module]) -> None:
    _, model = pair
    backward(model)
    grad = dict(model.named_parameters())["0.weight"].grad
    assert grad is not None
    record = weight_record(model)
    before, home = disk_bytes(record.store), record.gradient.slot.tensor
    version = home._version
    grad.mul_(0.1)
    assert disk_bytes(record.store) == before
    assert home._version == version, "the gradient in memory is not multiplied yet"
    assert len(record.gradient.deferred) == 1


@pytest.mark.parametrize("update_on", ["host", "device"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adafactor])
def test_beside_a_device_the_update_applies_what_was_put_off(
    optimizer: type[torch.optim.Optimizer], update_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a copy of each chunk: the gradient at home stays, and later looks at it apply the rest once."""
    torch._dynamo.reset()
    sizes: list[int] = []
    gradient, is_whole = Chunk.gradient, optimizer is torch.optim.Adafactor

    def note(chunk: Chunk) -> Tensor:
        made = gradient(chunk)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(Chunk, "gradient", note)
    with on_fake_device():
        options = {"device_memory": "64MiB", "host_memory": "64MiB", "compute": "aten", "tiles": False}
        models = [make_model(), zinf_compile.optimize(make_model(), device="cuda", update_on=update_on, **options)]
        store = weight_record(models[1]).store
        optimizers = [optimizer(model.parameters(), lr=1e-2) for model in models]
        for step in range(3):
            for model, each in zip(models, optimizers, strict=True):
                each.zero_grad()
                backward(model, 1.0 + step)
                clip_grad_norm_(model.parameters(), 0.1)
                store.chunk_elements = 4096
                each.step()
                each.step()  # by the same gradients
            zinf_compile.synchronize(models[1])
            deferred = [len(record.gradient.deferred) for record in store.records.values()]
            assert deferred == [0 if is_whole else 1] * len(deferred)
        assert_same(*models)
        zinf_compile.close(models[1])
    if is_whole or update_on == "host":
        assert max(sizes) == (WIDTH**2 if is_whole else 4096)


def test_the_factor_may_change_afterwards(pair: tuple[nn.Module, nn.Module]) -> None:
    for model in pair:
        backward(model)
        factor = torch.tensor(0.1)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        factor.fill_(7.0)
    assert_same(*pair)


def test_backward_adds_to_what_was_put_off(pair: tuple[nn.Module, nn.Module]) -> None:
    for model in pair:
        backward(model)
        clip_grad_norm_(model.parameters(), 0.1)
        backward(model, 2.0)
        clip_grad_norm_(model.parameters(), 0.1)
        sum(parameter.pow(2).sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        clip_grad_norm_(model.parameters(), 0.1)
    assert_same(*pair)


def test_a_gradient_that_is_held_keeps_its_values(pair: tuple[nn.Module, nn.Module]) -> None:
    held: list[list[Tensor]] = []
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []
        for step in range(4):
            optimizer.zero_grad()
            backward(model, 1.0 + step)
            clip_grad_norm_(model.parameters(), 0.1)
            kept += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            kept += [parameter.grad.detach()[0] for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
        held.append(kept)
    for one, other in zip(*held, strict=True):
        assert torch.equal(one, other)


def test_what_was_put_off_stays_with_a_gradient_that_is_held(optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model(), tiny=True, capture=True)
    loss = model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).pow(2).sum()
    loss.backward(retain_graph=True)
    held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    before = [grad.clone() for grad in held]
    for grad in held:
        grad.mul_(0.5)
    model.zero_grad()
    loss.backward()
    for grad, full in zip(held, before, strict=True):
        assert torch.equal(grad, full * 0.5)


def test_a_plain_view_shows_what_is_done_to_the_gradient(pair: tuple[nn.Module, nn.Module]) -> None:
    seen: list[list[Tensor]] = []
    for model in pair:
        backward(model)
        views = [parameter.grad.view(-1) for parameter in model.parameters() if parameter.grad is not None]
        norms = [clip_grad_norm_(model.parameters(), 0.1)]
        for view in views:
            view.mul_(3)
        norms.append(clip_grad_norm_(model.parameters(), 0.1))
        seen.append([*norms, *views])
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "wrong", [lambda grad: grad.mul_(2, 3), lambda grad: grad.mul_(torch.tensor(1j)), lambda grad: grad.clamp_()]
)
def test_arguments_that_the_operation_does_not_take(
    wrong: Callable[[Tensor], Any], pair: tuple[nn.Module, nn.Module]
) -> None:
    for model in pair:
        backward(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            with pytest.raises((TypeError, RuntimeError), match=r"argument|cast|min"):
                wrong(parameter.grad)  # type: ignore[arg-type]
        optimizer.step()
    assert_same(*pair)


def test_slots_are_used_again_once_gradients_are_let_go(optimize: Callable[..., nn.Module]) -> None:
    model = optimize(make_model(), tiny=True)
    optimizer = torch.optim.AdamW(model.parameters())
    store = weight_record(model).store
    ends = []
    for _ in range(6):
        held = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        ends.append(store.layout.end)
    assert held
    assert ends[2] == ends[-1], "two slots alternate"


@pytest.mark.parametrize("bad", [False, True])
def test_grad_scaler(bad: bool, pair: tuple[nn.Module, nn.Module]) -> None:
    """A step with an infinite gradient is skipped; state and parameters stay."""
    scales = []
    for model in pair:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
            loss = model(x).pow(2).sum() * (float("inf") if bad and step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    if not bad:
        assert_same(*pair)
    for one, other in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        assert torch.equal(one, other)


SCALES = {"powers of two": (2.0**10, 2.0), "others": (1000.0, 3.0)}  # the first scale of a GradScaler, and how it grows


def train_scaled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scale: str = "powers of two",
    *,
    num_backwards: int = 1,
    num_steps: int = 6,
    look: Callable[[nn.Module], Any] = lambda model: None,
) -> list[Any]:
    """Train with a GradScaler and clipping; return norms, scales, and what each step has looked at after unscaling.

    In step 2 the gradients of the weights overflow, and not those of the biases. The scale changes after every two steps.
    """
    first, growth = SCALES[scale]
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_factor=growth, growth_interval=2)
    dtype = next(model.parameters()).dtype
    seen: list[Any] = []
    for step in range(num_steps):
        for index in range(num_backwards):
            size = 1e38 if step == 2 and index == 0 else 1.0 + step + index
            x = torch.linspace(-size, size, 2 * WIDTH).view(2, WIDTH)
            scaler.scale(model(x.to(dtype)).float().sum()).backward()
        scaler.unscale_(optimizer)
        seen += [look(model), clip_grad_norm_(model.parameters(), 0.1)]
        scaler.step(optimizer)
        scaler.update()
        seen.append(torch.tensor(scaler.get_scale()))
        if step < num_steps - 1:
            optimizer.zero_grad()
    return seen


def assert_seen(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        assert one is None or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.fixture(params=["nvme", "beside a device"])
def linear_pair(
    optimize: Callable[..., nn.Module], request: pytest.FixtureRequest
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Return what ``pair`` does, of a model without activations, so that large inputs give large gradients."""

    def make() -> nn.Module:
        return nn.Sequential(*(layer for layer in make_model() if isinstance(layer, nn.Linear)))

    if request.param == "nvme":
        model = optimize(make(), tiny=True)
        assert weight_record(model).store.placements["0.weight"].gradient is Tier.NVME
        yield make(), model
        return
    torch._dynamo.reset()
    with on_fake_device():
        options = {"device_memory": "64MiB", "host_memory": "64MiB", "compute": "aten", "tiles": False}
        model = zinf_compile.optimize(make(), device="cuda", **options)
        yield make(), model
        zinf_compile.close(model)


SCALED_LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: None,
    "gradient": lambda model: next(model.parameters()).grad.clone(),  # type: ignore[union-attr]
    "norm": lambda model: torch.linalg.vector_norm(next(model.parameters()).grad, 1.0),  # type: ignore[arg-type]
    "clip by value": lambda model: clip_grad_value_(model.parameters(), 0.01),
}


@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("look", SCALED_LOOKS)
def test_unscaling(look: str, scale: str, num_backwards: int, linear_pair: tuple[nn.Module, nn.Module]) -> None:
    seen = []
    for model in linear_pair:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen.append(train_scaled(model, optimizer, scale, num_backwards=num_backwards, look=SCALED_LOOKS[look]))
    scales = [each.item() for each in seen[0][2::3]]
    assert scales[2] == scales[1] / 2, "the step that overflows is skipped"
    assert_seen(*seen)
    assert_same(*linear_pair)


@pytest.mark.parametrize("update_on", ["host", "device"])
@pytest.mark.parametrize("kind", ["AdamW", "fused AdamW", "RMSprop", "Adafactor"])
def test_beside_a_device_the_update_unscales(kind: str, update_on: str) -> None:
    """Gradients in bfloat16 are rounded after unscaling, and again after clipping."""
    torch._dynamo.reset()
    name, fused = kind.removeprefix("fused "), {"fused": True} if kind.startswith("fused") else {}
    with on_fake_device():
        options = {"device_memory": "64MiB", "host_memory": "64MiB", "compute": "aten", "tiles": False}
        models = [make_model().bfloat16() for _ in range(2)]
        zinf_compile.optimize(models[1], device="cuda", update_on=update_on, **options)
        seen = []
        for model in models:
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **fused)
            seen.append(train_scaled(model, optimizer, "others", num_steps=4))
        assert_seen(*seen)
        assert_same(*models)
        zinf_compile.close(models[1])


def unscale(model: nn.Module, found_inf: Tensor, factor: float = 0.3) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, torch.tensor(factor))


@pytest.mark.parametrize("bad", ["none", "nan at home", "inf of the user's"])
def test_unscaling_beside_gradients_of_the_user(bad: str, pair: tuple[nn.Module, nn.Module]) -> None:
    found = []
    for model in pair:
        backward(model)
        weight, bias, *_ = model.parameters()
        bias.grad = torch.linspace(-1, 1, WIDTH)
        if bad == "nan at home":
            assert weight.grad is not None
            weight.grad[3, 4] = float("nan")
        elif bad == "inf of the user's":
            bias.grad[5] = float("-inf")
        found.append(torch.zeros(1))
        unscale(model, found[-1])
    assert torch.equal(*found)
    assert found[0].item() == (bad != "none")
    for one, other in zip(*(model.parameters() for model in pair), strict=True):
        assert torch.equal(one.grad.nan_to_num(7.0), other.grad.nan_to_num(7.0))  # type: ignore[union-attr]


def test_a_view_shows_unscaling(pair: tuple[nn.Module, nn.Module]) -> None:
    seen: list[list[Tensor]] = []
    for model in pair:
        backward(model)
        views = [parameter.grad.view(-1) for parameter in model.parameters() if parameter.grad is not None]
        unscale(model, torch.zeros(()))
        seen.append([each.clone() for each in views])
        for view in views:
            view.mul_(3)
        seen[-1].append(clip_grad_norm_(model.parameters(), 0.1))
    assert all(map(torch.equal, *seen))
    assert_same(*pair)


@pytest.mark.parametrize("found_inf", [torch.zeros((), dtype=torch.float64), torch.zeros(2)], ids=["dtype", "size"])
def test_unscaling_takes_no_other_arguments_than_torch(found_inf: Tensor, pair: tuple[nn.Module, nn.Module]) -> None:
    for model in pair:
        backward(model)
        with pytest.raises(RuntimeError, match="found_inf"):
            unscale(model, found_inf)
    assert_same(*pair)


def run_without_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert not looks_at_values(func), "the host reads a gradient"
    return func(*args, **kwargs)


@pytest.mark.parametrize("num_backwards", [1, 3])
def test_beside_a_device_the_host_reads_no_gradient_to_unscale_and_clip(
    num_backwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on: the first one shows that gradients are unscaled, and which norms of them are asked for."""
    torch._dynamo.reset()
    seen: list[list[Tensor]] = []
    with on_fake_device():
        options = {"device_memory": "64MiB", "host_memory": "64MiB", "compute": "aten", "tiles": False}
        models = [make_model(), zinf_compile.optimize(make_model(), device="cuda", **options)]
        for model in models:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
            seen.append([])
            for step in range(3):
                optimizer.zero_grad()
                for index in range(num_backwards):
                    x = torch.linspace(-1.0 - index, 1.0 + step, 2 * WIDTH).view(2, WIDTH)
                    scaler.scale(model(x).pow(2).sum()).backward()
                with monkeypatch.context() as patch:
                    if step > 0:
                        patch.setattr(HomeTensor, "_run", staticmethod(run_without_values))
                        patch.setattr(home_gradient, "_rewrite", lambda *args: pytest.fail("the host multiplies"))
                        patch.setattr(tensor_io.TensorIO, "read_pieces", lambda *args: pytest.fail("the host reads"))
                    scaler.unscale_(optimizer)
                    seen[-1].append(clip_grad_norm_(model.parameters(), 0.1))
                scaler.step(optimizer)
                scaler.update()
        assert_seen(*seen)
        assert_same(*models)
        zinf_compile.close(models[1])


def test_unscaling_on_nvme_moves_nothing(optimize: Callable[..., nn.Module]) -> None:
    """From the second step on. Clipping then reads each gradient once: its norm is that of rounded products."""
    model = optimize(make_model(512, 3), tiny=True, device_memory="4608KiB", host_memory="4MiB")
    store = weight_record(model).store
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 512)).sum()).backward()
        on_disk = [each.gradient.slot.nbytes for each in store.records.values() if not each.gradient.slot.in_memory]
        assert on_disk
        before = disk_bytes(store)
        scaler.unscale_(optimizer)
        assert disk_bytes(store) - before == (0 if step else sum(map(whole_sectors, on_disk)))
        clip_grad_norm_(model.parameters(), 0.1)
        assert disk_bytes(store) - before == (1 if step else 2) * sum(map(whole_sectors, on_disk))
        scaler.step(optimizer)
        scaler.update()
