"""Small models in every placement and mode: five AdamW steps are bitwise equal to plain PyTorch."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig

from zinf_compile.runtime.native.compiled import find_compiler

STEPS = 5
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")


def token_batches(vocab_size: int, *, batch: int = 2, seq: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(vocab_size, (batch, seq + 1), generator=generator) for _ in range(STEPS)]
    return [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in tokens]


def vector_batches(width: int, num_classes: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(4, width, generator=generator), "y": torch.randint(num_classes, (4,), generator=generator)}
        for _ in range(STEPS)
    ]


def gpt():
    return GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=2, seq=8)), token_batches(64)


def gpt_tied():
    model = GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=2, seq=8), tied=True)
    assert model.embed.weight is model.head.weight
    return model, token_batches(64)


class MLP(nn.Module):
    """Wide enough that the optimizer step cuts a parameter into chunks, with a short last chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 210)
        self.middle = nn.Linear(210, 50)
        self.down = nn.Linear(50, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(torch.tanh(self.middle(F.gelu(self.up(x))))), y)


def mlp():
    torch.manual_seed(0)
    return MLP(), vector_batches(24, 5)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 12, 3, stride=2, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
        )
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(x).mean(dim=(2, 3))), y)


def conv_net():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"x": torch.randn(4, 3, 8, 8, generator=generator), "y": torch.randint(5, (4,), generator=generator)}
        for _ in range(STEPS)
    ]
    return ConvNet(), batches


class UsedTwice(nn.Module):
    """One module that is called twice in the forward, and once more under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 64)
        self.shared = nn.Linear(64, 64)
        self.again = nn.Sequential(nn.LayerNorm(64), self.shared)
        self.last = nn.Linear(64, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return F.cross_entropy(self.last(self.again(torch.tanh(self.shared(x)))), y)


def used_twice():
    torch.manual_seed(0)
    return UsedTwice(), vector_batches(24, 5)


class EarlyViews(nn.Module):
    """Views of a weight are created early and read much later: nothing would read a gather for the views alone."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(64, 64, bias=False)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = self.early.weight.t().chunk(2, dim=1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = torch.cat((x @ left, torch.tanh(x @ right)), dim=1)
        return F.cross_entropy(self.layers[0](x), y)


def early_views():
    torch.manual_seed(0)
    return EarlyViews(), vector_batches(64, 5)


@pytest.mark.parametrize("workload", [gpt, gpt_tied, mlp, conv_net, used_twice, early_views])
def test_bitwise(parity, workload, placement, way):
    parity.check(workload, placement, **way)


def loss_with_l2(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Read every parameter outside of the forward, as a hand-written weight decay does."""
    return model(**batch) + 1e-3 * sum(parameter.pow(2).sum() for parameter in model.parameters())


def loss_with_head(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Read one parameter through its module, outside of the forward."""
    return model(**batch) + 1e-2 * model.down.weight.abs().mean()


@pytest.mark.parametrize("loss", [loss_with_l2, loss_with_head])
def test_parameter_used_outside_of_forward(parity, placement, way, loss):
    parity.check(mlp, placement, **way, loss=loss)


def test_batch_norm_buffers_move(parity):
    """Buffers change during training, so that comparing them tests something."""
    first, *_, last = parity.reference(conv_net, captured=False).buffers
    assert not torch.equal(first["features.1.running_mean"], last["features.1.running_mean"])


def test_step_is_cut_into_chunks(parity):
    """The MLP's widest parameters take several chunks, the last of them short."""
    (plan,) = parity.check(mlp, "nvme", captured=True).plans
    sizes = [p.compute_nbytes // 4 for p in plan.placements]
    assert any(size > plan.step.chunk_elements and size % plan.step.chunk_elements for size in sizes)


@pytest.mark.parametrize("kind", ["losses", "gradients", "parameters", "buffers", "states"])
def test_comparison_notices_the_last_bit(parity, kind):
    """Flip one bit of one element of any kind in the last step: the comparison fails and says where."""
    workload = conv_net
    plain = parity.reference(workload, captured=False)
    model, batches = workload()
    ours = parity.train(model, batches)
    parity.assert_same(ours, plain)
    last = getattr(ours, kind)[-1]
    name, changed = (
        ("loss", last) if kind == "losses" else next((n, t) for n, t in last.items() if t.is_floating_point())
    )
    changed.view(-1)[-1:] = torch.nextafter(changed.view(-1)[-1:], torch.tensor(torch.inf))
    with pytest.raises(AssertionError, match=f"record {STEPS - 1}: .*{name}.*differ"):
        parity.assert_same(ours, plain)


def test_training_notices_one_changed_weight(parity, captured):
    """A weight that differs by one bit before the third step, with parameters on nvme, changes everything after it."""
    model, batches = parity.optimized(mlp, "nvme", captured=captured)
    seen = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch)
        if len(seen) == 3:
            with torch.no_grad():
                model.down.bias[0] = torch.nextafter(model.down.bias[0], torch.tensor(torch.inf))
        return model(**batch)

    ours = parity.train(model, batches, loss=loss)
    with pytest.raises(AssertionError, match="record 2"):
        parity.assert_plain(ours, parity.plain_runs(mlp), captured=captured)
