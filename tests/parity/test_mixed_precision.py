"""``compute_dtype=torch.bfloat16`` matches the usual recipe: a bfloat16 model, and AdamW on float32 masters."""

import pytest
import torch
from torch import Tensor

from examples.gpt import GPT, GPTConfig

STEPS = 3
MICRO_STEPS = 2


def gpt():
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(64, (2, 9), generator=generator) for _ in range(STEPS * MICRO_STEPS)]
    batches = [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in tokens]
    return GPT(GPTConfig(vocab_size=64, layers=1, hidden=32, heads=2, seq=8)), batches


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def train_by_hand(parity, batches):
    """Train by the recipe in plain PyTorch; record masters under the parameters' names."""
    trace = parity.trace()
    model, _ = gpt()
    masters = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    model = model.to(torch.bfloat16)
    optimizer = adamw(masters.values())
    for step in range(STEPS):
        if step == 1:
            write_some(masters["head.weight"], masters["norm.weight"])
            copy_back(model, masters)
        for batch in batches[step * MICRO_STEPS :][:MICRO_STEPS]:
            loss = model(**batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
        trace.record_gradients(model)
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.float()
        optimizer.step()
        model.zero_grad()
        copy_back(model, masters)
        trace.parameters.append({name: master.detach().clone() for name, master in masters.items()})
        trace.states.append(copy_state(optimizer))
    return trace


@torch.no_grad()
def copy_back(model: torch.nn.Module, masters: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(masters[name])


def write_some(head: Tensor, norm: Tensor) -> None:
    """Change two parameters between steps: one through ``.data``, one in place."""
    head.data.mul_(0.75)
    with torch.no_grad():
        norm.add_(0.1)


def copy_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {f"{index} {key}": value.clone() for index, state in states.items() for key, value in state.items()}


def train(parity, model, batches):
    trace, optimizer = parity.trace(), adamw(model.parameters())
    for step in range(STEPS):
        if step == 1:
            write_some(model.head.weight, model.norm.weight)
        for batch in batches[step * MICRO_STEPS :][:MICRO_STEPS]:
            loss = model(**batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
        trace.record_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            trace.parameters.append({name: parameter.clone() for name, parameter in model.named_parameters()})
        trace.states.append(copy_state(optimizer))
    return trace


@pytest.mark.parametrize("way", ["captured", "eager", pytest.param("inductor", marks=pytest.mark.long)], indirect=True)
def test_bfloat16(parity, placement, way):
    options = {"compute_dtype": torch.bfloat16, **{name: option for name, option in way.items() if name != "captured"}}
    model, batches = parity.optimized(gpt, placement, captured=way["captured"], **options)
    plain, ours = train_by_hand(parity, batches), train(parity, model, batches)
    if "compute" in way:
        parity.assert_segments_ran(model)
        first = plain.losses[0]
        plain = train(parity, parity.resident(gpt()[0], **options), batches)
        torch.testing.assert_close(plain.losses[0], first, rtol=2.0**-7, atol=0.0)  # bfloat16 has 8 bits
    parity.assert_same(ours, plain)
    assert {value.dtype for value in ours.parameters[-1].values()} == {torch.float32}
    assert {value.dtype for value in ours.gradients[-1].values()} == {torch.bfloat16}
