"""Uses beside the plain loop: input gradients, swapped parameters, threads. They give the same numbers, or are refused."""

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zinf_compile
from zinf_compile.ir.errors import UnsupportedError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(256, 300)
        self.down = nn.Linear(300, 256)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.up(x))) * self.scale).square().sum()


class Clamping(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def optimized(folder: Path, model: nn.Module | None = None, **options: Any) -> nn.Module:
    budgets = {"device_memory": "8MiB", "host_memory": "1MiB", "nvme": folder}
    return zinf_compile.optimize(Net() if model is None else model, **{**budgets, **options})


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"compute": "aten"}, torch.no_grad),
        *(({"capture": False}, mode) for mode in (torch.no_grad, torch.inference_mode)),
        pytest.param({"compute": "aten"}, torch.inference_mode, marks=pytest.mark.long),
        *(
            pytest.param({"compute": "inductor"}, mode, marks=pytest.mark.long("all variants"))
            for mode in (torch.no_grad, torch.inference_mode)
        ),
    ],
    ids=str,
)
@pytest.mark.needs_more_on_streams(device_memory=2, host_memory=2)
def test_the_first_call_of_all_may_be_one_without_gradients(tmp_path: Path, options: dict[str, Any], mode: Any) -> None:
    """Training follows it, on an unmeasured machine, with parameters that stream."""
    plain, model = Net().double(), optimized(tmp_path, Net().double(), **{"device_memory": "3MiB", **options})
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-4) for net in (plain, model)]
    x, results = batch().double(), []
    for net, optimizer in zip((plain, model), optimizers, strict=True):
        seen = []
        for _ in range(3):
            with mode():
                seen.append(net(x).clone())
            loss = net(x)
            loss.backward()
            optimizer.step()
            seen += [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]
            optimizer.zero_grad()
        results.append(seen)
    rounding = 1e-10 if options.get("compute") == "inductor" else 0.0
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)
    zinf_compile.close(model)


@pytest.mark.parametrize("capture", [True, False])
def test_the_gradient_of_an_input_leaves_parameters_alone(tmp_path: Path, capture: bool) -> None:
    plain, model = Net(), optimized(tmp_path, capture=capture)
    results = []
    for net in (plain, model):
        x = batch().requires_grad_()
        loss = net(x)
        (by_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert grads(net) == [None] * 5
        loss.backward()
        results.append([by_input, *grads(net)])
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(*results, strict=True))
    zinf_compile.close(model)


@pytest.mark.parametrize("capture", [True, False])
def test_functional_call_uses_the_tensors_it_is_given(tmp_path: Path, capture: bool) -> None:
    model = optimized(tmp_path, capture=capture)
    before = model(batch())
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    assert torch.func.functional_call(model, zeros, batch()).item() == 0
    assert torch.equal(model(batch()), before)
    zinf_compile.close(model)


def by_parameters(model: nn.Module) -> Any:
    taken = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return torch.func.grad(lambda given: torch.func.functional_call(model, given, (batch(),)))(taken)


def by_sample(model: nn.Module) -> Any:
    """Return the gradients of each sample's output by its inputs, and the gradients of those by the parameters."""
    slopes = torch.func.vmap(torch.func.grad(model))(batch().unsqueeze(1))
    slopes.square().sum().backward()
    return slopes.detach(), *grads(model)


TRANSFORMS = {
    "grad by parameters": by_parameters,
    "vmap of grad": by_sample,
    "jacrev": lambda model: torch.func.jacrev(model)(batch()),
    "jvp": lambda model: torch.func.jvp(model, (batch(),), (batch(2),)),
    "hessian": lambda model: torch.func.hessian(lambda x: model.up(x)[:3].square().sum())(batch()[0]),
}


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func(tmp_path: Path, transform: Callable[[nn.Module], Any], capture: bool) -> None:
    """Transforms run the model's own forward, even where it would be captured."""
    expected = transform(Net())
    model = optimized(tmp_path, capture=capture)
    ours = tree_leaves(transform(model))
    assert all(torch.equal(a, b) for a, b in zip(ours, tree_leaves(expected), strict=True))
    assert torch.equal(model(batch()), Net()(batch()))
    zinf_compile.close(model)


def test_a_state_dict_taken_before_the_first_call_is_never_overwritten(tmp_path: Path) -> None:
    model = optimized(tmp_path)
    taken = model.state_dict()
    expected = Net().state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(batch()).backward()
    optimizer.step()
    assert all(torch.equal(taken[name], expected[name]) for name in expected)
    moments = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
    for value in taken.values():
        value.zero_()
    now = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(moments, now, strict=True))
    zinf_compile.close(model)


def test_a_forward_that_writes_to_its_parameters_is_refused(tmp_path: Path) -> None:
    model = optimized(tmp_path, Clamping())
    with pytest.raises(
        UnsupportedError,
        match=r"writes to one of its parameters in its own forward \(clamp_ at .*test_unusual_use\.py:\d+\)",
    ):
        model(batch())
    zinf_compile.close(model)


def test_the_state_of_a_parameter_without_dimensions_is_resumed(tmp_path: Path) -> None:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(2):
            net(batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()

    results = []
    for net, other in ((Net(), Net()), (optimized(tmp_path, capture=False), optimized(tmp_path, capture=False))):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        train(net, optimizer)
        saved = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        saved.seek(0)
        loaded = torch.load(saved)
        resumed = torch.optim.AdamW(other.parameters(), lr=0.1)
        other.load_state_dict(loaded["model"])
        resumed.load_state_dict(loaded["optimizer"])
        train(other, resumed)
        results.append([parameter.detach().clone() for parameter in other.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_named_parameters_can_be_saved(tmp_path: Path) -> None:
    model = optimized(tmp_path)
    saved = io.BytesIO()
    torch.save(dict(model.named_parameters()), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert all(torch.equal(loaded[name], value) for name, value in Net().state_dict().items())
    zinf_compile.close(model)


@pytest.mark.parametrize("capture", [True, False])
def test_a_hook_on_a_module_counts_once_the_model_is_captured_with_it(tmp_path: Path, capture: bool) -> None:
    """With capture, a new hook takes effect at the next capture, as under torch.compile; without, at once."""
    model = zinf_compile.optimize(Net(), device_memory="8MiB", host_memory="8MiB", capture=capture)
    seen = []
    model(torch.ones(2, 256))
    handle = model.up.register_forward_hook(lambda module, inputs, output: seen.append(1))
    model(torch.ones(2, 256))
    assert len(seen) == (0 if capture else 1)
    torch.compiler.reset()
    model(torch.ones(2, 256))
    assert len(seen) == (1 if capture else 2)
    handle.remove()
    zinf_compile.close(model)


def test_threads_take_turns(tmp_path: Path) -> None:
    model = optimized(tmp_path)
    expected = {seed: model(batch(seed)).item() for seed in range(2)}
    wrong: list[int] = []

    def run(seed: int) -> None:
        wrong.extend(seed for _ in range(20) if model(batch(seed)).item() != expected[seed])

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    zinf_compile.close(model)


class Gated(Net):
    """The gradient of a softplus has other strides than its input: torch's fake kernel takes these, and the CPU those."""

    def forward(self, x: Tensor) -> Tensor:
        gates = nn.functional.softplus(self.up(x.unflatten(0, (2, 2))))
        return super().forward(x) + gates.transpose(1, 2).contiguous().cumsum(-1).square().mean()


@pytest.mark.parametrize("capture", [True, False])
def test_a_gradient_with_other_strides_than_its_fake_one(tmp_path: Path, capture: bool) -> None:
    plain, model = Gated(), optimized(tmp_path, Gated(), capture=capture)
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters())
        for step in range(2):
            each(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
