"""A model with a fused linear loss, which has no logits, trains out of core as in memory, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zinf_compile
from zinf_compile.passes.transforms.tiling.linear_loss import linear_cross_entropy
from zinf_compile.runtime.execute.op_bodies import register

CLASSES, WIDTH = 3000, 64
DEVICE_MEMORY = "6MiB"  # less than parameters and activations need together


class Model(nn.Module):
    """An embedding, a few layers, and a head whose weight and bias go to the loss."""

    def __init__(self, *, one_pass: bool) -> None:
        super().__init__()
        self.one_pass = one_pass
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 16 * WIDTH) for _ in range(6))
        self.downs = nn.ModuleList(nn.Linear(16 * WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for up, down in zip(self.ups, self.downs, strict=True):
            hidden = hidden + down(F.gelu(up(hidden)))
        head = (self.head.weight, target.view(-1), self.head.bias)
        return linear_cross_entropy(hidden.view(-1, WIDTH), *head, tile_rows=24, one_pass=self.one_pass)


@pytest.mark.of_own_memory(reason="it gathers")
@pytest.mark.needs_more_on_streams(device_memory=1.5)
@pytest.mark.parametrize("one_pass", [True, pytest.param(False, marks=pytest.mark.long)])
def test_training_out_of_core_is_training_in_memory(one_pass: bool) -> None:
    register()
    torch.manual_seed(0)
    plain = Model(one_pass=one_pass)
    model = copy.deepcopy(plain)
    zinf_compile.optimize(model, device_memory=DEVICE_MEMORY, host_memory="64MiB")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (plain, model)]
    for _ in range(3):
        tokens, target = (torch.randint(0, CLASSES, (4, 16)) for _ in range(2))
        losses = [each(tokens, target) for each in (plain, model)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(losses[0], losses[1])
    for (name, expected), (_, measured) in zip(plain.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(expected, measured), name
    assert zinf_compile.report(model).plans[-1].gathers
