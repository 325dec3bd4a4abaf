"""Record all numbers of a training run, and compare two runs bit by bit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
Workload = Callable[[], tuple[nn.Module, Sequence[Batch]]]
Loss = Callable[[nn.Module, Batch], Tensor]


def plain_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Return the loss that the model's own forward computes."""
    output = model(**batch)
    return output if isinstance(output, Tensor) else output.loss


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of most tests: a large learning rate, so that a wrong gradient shows soon."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@dataclass
class Trace:
    """All numbers of a training run, per step if they change with steps. They are copies, not the live tensors."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)  # just before the optimizer step
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)

    def record_gradients(self, model: nn.Module) -> None:
        """Record the current ``p.grad`` of all parameters."""
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.gradients.append({name: None if grad is None else grad.clone() for name, grad in grads.items()})

    def record_model(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Record parameters, buffers and optimizer state: by ``clone``, so that recording refreshes nothing."""
        with torch.no_grad():
            self.parameters.append({name: parameter.clone() for name, parameter in model.named_parameters()})
        self.buffers.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        if optimizer is not None:
            states = optimizer.state_dict()["state"]
            self.states.append(
                {f"{index} {key}": value.clone() for index, state in states.items() for key, value in state.items()}
            )

    def take_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer step; record the gradients before it, and the model after they are zeroed."""
        self.record_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        self.record_model(model, optimizer)


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Loss = plain_loss,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_adamw,
    seed: int = 0,
) -> Trace:
    """Take one optimizer step per batch and return all numbers."""
    trace, optimizer = Trace(), make_optimizer(model)
    torch.manual_seed(seed)
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        trace.losses.append(value.detach().clone())
        trace.take_step(model, optimizer)
    return trace


def assert_same(ours: Trace, plain: Trace) -> None:
    """Assert that two runs agree in every bit; the message names the first record, kind and name that does not."""
    assert len(plain.losses) > 0
    num_records = {each.name: len(getattr(plain, each.name)) for each in fields(Trace)}
    assert {kind: len(getattr(ours, kind)) for kind in num_records} == num_records
    for index in range(max(num_records.values())):
        for kind in [kind for kind, length in num_records.items() if index < length]:
            a, b = getattr(ours, kind)[index], getattr(plain, kind)[index]
            if kind == "losses":
                assert_equal(a, b, f"record {index}: loss")
                continue
            assert a.keys() == b.keys(), f"record {index}: {kind} of other names: {a.keys() ^ b.keys()}"
            for name in b:
                assert_equal(a[name], b[name], f"record {index}: {kind} {name}")


def is_same(ours: Trace, plain: Trace) -> bool:
    """Return whether two runs agree in every bit."""
    try:
        assert_same(ours, plain)
    except AssertionError:
        return False
    return True


def assert_equal(ours: Tensor | None, plain: Tensor | None, what: str) -> None:
    """Assert that two tensors have the same shape, dtype and bits, or are both None."""
    if ours is None or plain is None:
        assert ours is plain, (
            f"{what}: {'a gradient' if plain is None else 'no gradient'} where plain PyTorch has the other"
        )
        return
    assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype), f"{what}: {ours.shape} {ours.dtype}"
    ours, plain = ours.cpu(), plain.cpu()
    if not torch.equal(ours, plain):
        apart = (ours.double() - plain.double()).abs()
        raise AssertionError(
            f"{what}: {int((apart != 0).sum())} of {apart.numel()} elements differ, by {apart.max():.3g} at most"
        )


def compile_plainly(model: nn.Module) -> nn.Module:
    """Compile a model with torch's own backend that runs the captured ATen graphs as they are."""
    model.compile(backend="aot_eager", dynamic=False)
    return model
