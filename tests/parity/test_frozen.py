"""Changes of what is trained: parameters frozen and unfrozen, groups added later, several optimizers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.params.records import record_of

STEPS = 4
WIDTH = 32
ENOUGH = 42 * 2**10  # fits the activations of training the whole model, but not all of its parameters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 48, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def batches_of(num_steps: int):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(48, (num_steps, 2, 7), generator=generator)
    return [{"x": each[:, :-1], "y": each[:, 1:]} for each in tokens]


def net():
    torch.manual_seed(0)
    return Net(), batches_of(STEPS)


def net_with_frozen_layers():
    model, batches = net()
    model.layers.requires_grad_(False)
    model.embed.requires_grad_(False)
    return model, batches


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def take_step(model, batch, optimizer, trace):
    loss = model(**batch)
    loss.backward()
    trace.losses.append(loss.detach().clone())
    trace.take_step(model, optimizer)


@pytest.mark.needs_more_on_streams(device_memory=4.5)
def test_unfrozen_later(parity, placement, way):
    """Parameters frozen at ``optimize`` are trained from the step after unfreezing: layer by layer, then all."""

    def loop(model, batches, trace):
        optimizer = adamw(model.parameters())
        for step, batch in enumerate(batches):
            if step == 1:
                model.layers[3].requires_grad_(True)
            if step == 2:
                model.requires_grad_(True)
            take_step(model, batch, optimizer, trace)

    parity.check_loop(loop, net_with_frozen_layers, placement, **way, device_memory=ENOUGH)


@pytest.mark.needs_more_on_streams(device_memory=4.5)
def test_frozen_again_after_unfreezing(parity, way):
    def loop(model, batches, trace):
        optimizer = adamw(model.parameters())
        for step, batch in enumerate(batches):
            model.layers[2].weight.requires_grad = step % 2 == 1
            with torch.no_grad():
                trace.losses.append(model(**batch).clone())
            take_step(model, batch, optimizer, trace)

    parity.check_loop(loop, net_with_frozen_layers, **way, device_memory=ENOUGH)


def test_frozen_between_forward_and_backward(parity, way):
    """A parameter frozen between forward and backward gets no gradient, and the others get theirs."""

    def loop(model, batches, trace):
        optimizer = adamw(model.parameters())
        for batch in batches:
            loss = model(**batch)
            model.layers[1].requires_grad_(False)
            loss.backward()
            model.layers[1].requires_grad_(True)
            trace.losses.append(loss.detach().clone())
            trace.take_step(model, optimizer)

    parity.check_loop(loop, net, **way)


@pytest.mark.parametrize("captured", [pytest.param(True, marks=pytest.mark.long), False])
def test_unfrozen_with_a_compute_copy(parity, captured):
    """Its master copy starts as the widened compute copy; from then on it trains as if it had never been frozen."""

    def workload():
        model, batches = net()
        with torch.no_grad():
            model.layers[0].weight.copy_(model.layers[0].weight.bfloat16())  # so that freezing loses nothing
        return model, batches

    def frozen():
        model, batches = workload()
        model.layers[0].weight.requires_grad_(False)
        return model, batches

    traces = []
    for make in (workload, frozen):
        model, batches = parity.optimized(make, captured=captured, device_memory=ENOUGH, compute_dtype=torch.bfloat16)
        weight, trace = model.layers[0].weight, parity.trace()
        weight = model.get_parameter("layers.0.weight")
        assert weight.dtype == (torch.float32 if make is workload else torch.bfloat16)
        optimizer = adamw(model.parameters())
        if make is frozen:
            weight.requires_grad_(True)
        for batch in batches:
            take_step(model, batch, optimizer, trace)
        assert weight.dtype == torch.float32
        traces.append(trace)
        torch._dynamo.reset()
    parity.assert_same(traces[1], traces[0])


def test_unfreezing_that_does_not_fit_changes_nothing(parity):
    model, _ = parity.optimized(net_with_frozen_layers, captured=False)
    store = record_of(model.get_parameter("layers.0.weight")).store
    before = {tier: store.held.nbytes_on(tier) for tier in Tier}
    store.config = replace(store.config, nvme_memory=2**10)
    with pytest.raises(CapacityError, match="nvme_memory is 1"):
        model.layers[0].weight.requires_grad_(True)
    assert not model.get_parameter("layers.0.weight").requires_grad
    assert {tier: store.held.nbytes_on(tier) for tier in Tier} == before


def test_groups_added_later(parity, way):
    """``add_param_group`` in the middle of training; a parameter in no optimizer keeps its value and its gradient."""

    def loop(model, batches, trace):
        optimizer = adamw(model.head.parameters())
        for step, batch in enumerate(batches):
            if step == 1:
                optimizer.add_param_group({"params": list(model.layers[0].parameters()), "lr": 3e-3})
            if step == 2:
                optimizer.add_param_group({"params": [model.get_parameter("norm.weight")], "betas": (0.5, 0.9)})
            take_step(model, batch, optimizer, trace)
            if step % 2:
                model.zero_grad()

    parity.check_loop(loop, net, **way)


@pytest.mark.parametrize("overlapping", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_optimizers(parity, way, overlapping):
    """Two optimizers on disjoint parameters, or sharing some: each has its own state for them."""

    def loop(model, batches, trace):
        own, shared = list(model.layers.parameters()), [model.get_parameter("head.weight")]
        first = adamw(own + (shared if overlapping else []))
        second = torch.optim.SGD([*shared, model.get_parameter("embed.weight")], lr=0.05, momentum=0.9)
        for step, batch in enumerate(batches):
            loss = model(**batch)
            loss.backward()
            first.step()
            if step % 2:
                second.step()
            trace.losses.append(loss.detach().clone())
            trace.record_gradients(model)
            model.zero_grad()
            trace.record_model(model, first)
            trace.losses += [state["momentum_buffer"].clone() for state in second.state.values()]

    parity.check_loop(loop, net, **way)
