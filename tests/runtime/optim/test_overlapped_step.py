"""A step in the background: every read, of any kind, sees its result, and its errors are raised."""

import copy
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from tests.support.memory_engine import Fault, MemoryEngine
from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.storage.nvme.posix import PosixEngine

WIDTH = 160  # its weights are on nvme, its biases in memory


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), weight_decay=0.1)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    model(torch.linspace(-scale, scale, 2 * WIDTH).view(2, WIDTH)).pow(2).sum().backward()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is cleared, disk writes take 50 ms: long enough for a read to see values that it should not."""
    opened = threading.Event()
    write = PosixEngine.write

    def write_behind_gate(self: PosixEngine, offset: int, buffer: memoryview) -> None:
        opened.wait(0.05)
        write(self, offset, buffer)

    opened.set()
    monkeypatch.setattr(PosixEngine, "write", write_behind_gate)
    yield opened
    opened.set()


def weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]


def loaded(file: io.BytesIO) -> Any:
    file.seek(0)
    return torch.load(file)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return loaded(file)


def double_gradients(model: nn.Module) -> list[Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


Look = Callable[[nn.Module, torch.optim.Optimizer], Any]

LOOKS: dict[str, Look] = {
    "clone": lambda m, o: [p.clone() for p in weights(m, o)],
    "norm": lambda m, o: [p.norm() for p in weights(m, o)],
    "item": lambda m, o: [p[0, 0].item() for p in weights(m, o)],
    "data": lambda m, o: [p.data.clone() for p in weights(m, o)],
    "detach": lambda m, o: [p.detach().clone() for p in weights(m, o)],
    "numpy": lambda m, o: [torch.tensor(p.detach().numpy()) for p in weights(m, o)],
    "tolist": lambda m, o: [p.tolist() for p in weights(m, o)],
    "repr": lambda m, o: [repr(p) for p in weights(m, o)],
    "storage": lambda m, o: [bytes(p.untyped_storage())[:64] for p in weights(m, o)],
    "deepcopy": lambda m, o: [copy.deepcopy(p.data) for p in weights(m, o)],
    "equal": lambda m, o: torch.equal(weights(m, o)[0], weights(m, o)[1]),
    "out argument": lambda m, o: torch.no_grad()(torch.add)(weights(m, o)[0], 1, out=torch.empty(WIDTH, WIDTH)),
    "list": lambda m, o: torch.stack([p.detach() for p in weights(m, o)]),
    "list of parameters": lambda m, o: torch.cat(weights(m, o)),
    "keyword": lambda m, o: torch.add(input=weights(m, o)[0], other=weights(m, o)[1]),
    "foreach": lambda m, o: torch._foreach_norm(weights(m, o)),
    "parameters_to_vector": lambda m, o: nn.utils.parameters_to_vector(m.parameters()),
    "state_dict": lambda m, o: {name: value.clone() for name, value in m.state_dict().items()},
    "torch.save of the model": lambda m, o: saved(m.state_dict()),
    "torch.save of the optimizer": lambda m, o: saved(o.state_dict()),
    "state": lambda m, o: [value.clone() for value in states(m, o)],
    "state norm": lambda m, o: [torch.linalg.vector_norm(value) for value in states(m, o)],
    "state repr": lambda m, o: [repr(value) for value in states(m, o)],
    "state deepcopy": lambda m, o: copy.deepcopy(o.state_dict()),
    "step counts": lambda m, o: [o.state[p]["step"].item() for p in m.parameters()],
    "gradients": lambda m, o: [p.grad.clone() for p in m.parameters() if p.grad is not None],
    "gradients changed": lambda m, o: [grad.clone() for grad in double_gradients(m)],
    "a forward": lambda m, o: m(torch.ones(1, WIDTH)).detach(),
    "no_grad": lambda m, o: torch.no_grad()(lambda: m(torch.ones(1, WIDTH)))(),
    "inference_mode": lambda m, o: torch.inference_mode()(lambda: m(torch.ones(1, WIDTH)).tolist())(),
    "functional_call": lambda m, o: torch.func.functional_call(
        m, {name: p.detach() * 2 for name, p in m.named_parameters()}, torch.ones(1, WIDTH)
    ),
    "another step": lambda m, o: (o.step(), [p.clone() for p in weights(m, o)])[1],
    "load_state_dict": lambda m, o: (m.load_state_dict(make_model().state_dict()), [p.clone() for p in weights(m, o)])[
        1
    ],
    "an update in place": lambda m, o: [torch.no_grad()(p.mul_)(0.5).clone() for p in weights(m, o)],
}


def flatten(value: Any) -> list[Any]:
    """Return the leaves of nested containers, tensors as they are."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in [key, *flatten(value[key])]]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


@pytest.mark.parametrize("capture", [False])
@pytest.mark.parametrize("look", LOOKS, ids=str)
def test_a_look_right_after_step(look: str, capture: bool, tmp_path: Path, gate: threading.Event) -> None:
    plain = make_model()
    model = zinf_compile.optimize(
        make_model(), device_memory="8MiB", host_memory="1MiB", nvme=tmp_path, capture=capture
    )
    plain_optimizer, optimizer = make_optimizer(plain), make_optimizer(model)
    for scale in (1.0, 2.0):
        gate.set()
        for each, its in ((plain, plain_optimizer), (model, optimizer)):
            its.zero_grad()
            backward(each, scale)
        gate.clear()
        plain_optimizer.step()
        optimizer.step()
        for group in (*plain_optimizer.param_groups, *optimizer.param_groups):
            group["lr"].mul_(0.5)  # in place, as schedulers do with a tensor
        record = record_of(weights(model, optimizer)[0])
        assert record is not None
        assert record.update.future is not None, "nothing ran in the background"
        expected, seen = flatten(LOOKS[look](plain, plain_optimizer)), flatten(LOOKS[look](model, optimizer))
        assert len(expected) == len(seen)
        for one, other in zip(expected, seen, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    gate.set()
    zinf_compile.synchronize(model)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), name
    zinf_compile.close(model)


def test_aliases_that_are_held_make_step_wait(optimize: Callable[..., nn.Module], gate: threading.Event) -> None:
    """A plain tensor over the same bytes cannot wait for an update, so ``step`` itself waits."""
    plain, model = make_model(), optimize(make_model(), tiny=True)
    plain_optimizer, optimizer = make_optimizer(plain), make_optimizer(model)
    held = {}
    for name, each, its in (("plain", plain, plain_optimizer), ("home", model, optimizer)):
        backward(each)
        its.step()
        first, second = weights(each, its)
        held[name] = [first.data, second.detach().numpy(), states(each, its)[0].detach()[3]]
        its.zero_grad()
        backward(each)
    gate.clear()
    plain_optimizer.step()
    optimizer.step()
    for one, other in zip(held["plain"], held["home"], strict=True):
        assert (torch.as_tensor(one) == torch.as_tensor(other)).all()


def test_gradients_of_the_user_may_be_changed_after_step(
    optimize: Callable[..., nn.Module], gate: threading.Event
) -> None:
    plain, model = make_model(), optimize(make_model(), tiny=True)
    plain_optimizer, optimizer = make_optimizer(plain), make_optimizer(model)
    gate.clear()
    for each, its in ((plain, plain_optimizer), (model, optimizer)):
        grads = [torch.full_like(parameter, 0.5) for parameter in each.parameters()]
        for parameter, grad in zip(each.parameters(), grads, strict=True):
            parameter.grad = grad
        its.step()
        for grad in grads:
            grad.zero_()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_forked_process_does_not_wait_for_a_thread_it_has_not(
    optimize: Callable[..., nn.Module], gate: threading.Event
) -> None:
    model = optimize(make_model(), tiny=True)
    optimizer = make_optimizer(model)
    backward(model)
    gate.clear()
    optimizer.step()
    child = os.fork()
    if child == 0:
        try:
            weights(model, optimizer)[0].sum()
        except StoreError:
            os._exit(7)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_overlap_can_be_turned_off(optimize: Callable[..., nn.Module], gate: threading.Event) -> None:
    model = optimize(make_model(), tiny=True, overlap_step=False)
    optimizer = make_optimizer(model)
    backward(model)
    gate.clear()
    optimizer.step()
    for parameter in model.parameters():
        record = record_of(parameter)
        assert record is not None
        assert record.update.future is not None
        assert record.update.future.done()


@pytest.mark.parametrize("hook", ["pre", "post"])
def test_step_hooks_of_the_user_are_outside_of_ours(optimize: Callable[..., nn.Module], hook: str) -> None:
    """A pre-hook may change gradients, and a post-hook sees the new values."""
    seen: list[list[Tensor]] = []
    for each in (make_model(), optimize(make_model(), tiny=True)):
        optimizer = make_optimizer(each)

        def call(optimizer: torch.optim.Optimizer, *args: Any) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                if hook == "pre":
                    parameter.grad.clamp_(-0.01, 0.01)
                else:
                    seen.append([parameter.clone()])

        getattr(optimizer, f"register_step_{hook}_hook")(call)
        for scale in (1.0, 2.0):
            optimizer.zero_grad()
            backward(each, scale)
            optimizer.step()
        seen.append([parameter.clone() for parameter in each.parameters()])
    half = len(seen) // 2
    for one, other in zip(flatten(seen[:half]), flatten(seen[half:]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("then", ["synchronize", "forward", "step", "look"])
def test_an_error_in_the_background_comes_out(
    then: str, operation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = MemoryEngine(max_nbytes=2**23)
    monkeypatch.setattr("zinf_compile.runtime.store.store.PosixEngine", lambda folder: engine)
    model = zinf_compile.optimize(make_model(), device_memory="8MiB", host_memory="1MiB", nvme=tmp_path, capture=False)
    optimizer = make_optimizer(model)
    backward(model)
    optimizer.step()
    zinf_compile.synchronize(model)
    count = engine._num_started[operation]
    engine._faults[operation, count] = Fault(operation=operation, nth=count, kind="error")
    optimizer.step()
    calls = {
        "synchronize": lambda: zinf_compile.synchronize(model),
        "forward": lambda: [model(torch.ones(1, WIDTH)) for _ in range(2)],
        "step": optimizer.step,
        "look": lambda: [parameter.sum() for parameter in model.parameters()],
    }
    if (then, operation) == ("look", "read"):
        calls[then]()  # no update had begun: every parameter has its old value
    else:
        with pytest.raises(StoreError, match=r"failed after|updated when an error came"):
            calls[then]()
    with pytest.raises(StoreError, match=r"an earlier error stopped this model.*load a checkpoint"):
        zinf_compile.synchronize(model)
    zinf_compile.close(model)
