"""Single values recomputed in backward: training is bitwise equal to plain PyTorch, however many values there are."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zinf_compile.driver import planning
from zinf_compile.ir.facts import OpFact
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.memory import policies, recompute
from zinf_compile.passes.planner.search.planner import Request, Searches

STEPS = 2
VOCAB, SEQ, WIDTH = 48, 16, 32


def token_batches(names=("tokens", "targets")):
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(4, VOCAB, (2, SEQ + 1), generator=generator) for _ in range(STEPS)]
    return [dict(zip(names, (each[:, :-1], each[:, 1:]), strict=True)) for each in tokens]


class Block(nn.Module):
    """A block with dropout: after the matrix products and, as masks, within attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({"attention": nn.LayerNorm(WIDTH), "mlp": nn.LayerNorm(WIDTH)})
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms["attention"](x)).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=0.1, is_causal=True)
        x = x + self.dropout(self.out(y[:, 0]))
        return x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norms["mlp"](x))))))


class Dropping(nn.Module):
    """Three blocks, the second of which the user checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number == 1 else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def checkpointed():
    torch.manual_seed(0)
    return Dropping(), token_batches()


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), token_batches(("input_ids", "labels"))


class Normed(nn.Module):
    """A sequential model whose norms update running statistics in the forward."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 16, 3)]
        for _ in range(2):
            layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).square().mean()


def normed():
    torch.manual_seed(0)
    return Normed(), [{"images": torch.randn(2, 3, 8, 8)} for _ in range(STEPS)]


def _seconds(op: OpFact, hardware: Hardware) -> float:
    """Return the cost of an op at fixed rates: with measured rates, other values would be cheap in each run."""
    return 1e-6 + op.num_flops / 1e10 + op.nbytes_accessed / 1e10


@contextlib.contextmanager
def recompute_all_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """Recompute all values that may be recomputed by models inside; yield the list of their plans."""
    plans: list[Plan] = []
    planner = planning.make_plan

    def make_plan(request: Request, _: Searches | None = None) -> Plan:
        by_value = tuple(graph for graph in request.candidates if graph.policy is ActivationPolicy.RECOMPUTE_VALUES)
        plan = planner(replace(request, candidates=by_value, captured=()) if by_value else request)
        if by_value:
            plans.append(plan)
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(planning, "make_plan", make_plan)
        patch.setattr(recompute, "_SHARES", {ActivationPolicy.RECOMPUTE_VALUES: 1.0})
        patch.setattr(recompute, "MIN_BOUND_NBYTES", 1)  # these models are tiny
        patch.setattr(recompute, "op_seconds", _seconds)
        patch.setattr(policies, "may_be_faster", lambda *_: True)
        yield plans


@pytest.mark.parametrize("workload", [checkpointed, pytest.param(llama, marks=pytest.mark.long), normed])
def test_parity(parity, monkeypatch, workload):
    with recompute_all_values(monkeypatch) as plans:
        report = parity.check(functools.partial(workload), "nvme", captured=True)  # a new key: budgets are cached
    assert plans
    assert all(plan.activations.policy is ActivationPolicy.RECOMPUTE_VALUES for plan in report.plans)
    assert all(plan.activations.recomputed for plan in report.plans)
