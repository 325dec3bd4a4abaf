"""Single values made again in backward: training is bitwise that of plain PyTorch, however many of them there are."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zinf_compile import program
from zinf_compile.facts import OpFact
from zinf_compile.hardware import Hardware
from zinf_compile.passes.planning import policies, recompute
from zinf_compile.passes.planning.planner import Request
from zinf_compile.plans import Plan
from zinf_compile.terms import ActivationPolicy

STEPS = 2
VOCAB, SEQ, WIDTH = 48, 16, 32


def token_batches(names=("tokens", "targets")):
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(4, VOCAB, (2, SEQ + 1), generator=generator) for _ in range(STEPS)]
    return [dict(zip(names, (each[:, :-1], each[:, 1:]), strict=True)) for each in tokens]


class Block(nn.Module):
    """With random numbers inside: after the matrix products and, as masks, within attention."""

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
    """Blocks of which the user has said that the second is to be recomputed."""

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
    """A plain sequence whose norms keep running statistics, which the step writes to."""

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
    """Return what an op costs; at rates that are measured anew, other values would be cheap in each run."""
    return 1e-6 + op.num_flops / 1e10 + op.nbytes_accessed / 1e10


@contextlib.contextmanager
def made_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """Inside, all values that may be made again are; gives the plans."""
    plans: list[Plan] = []
    planner = program.make_plan

    def make_plan(request: Request) -> Plan:
        by_value = tuple(graph for graph in request.candidates if graph.policy is ActivationPolicy.RECOMPUTE_VALUES)
        plan = planner(replace(request, candidates=by_value, captured=()) if by_value else request)
        if by_value:
            plans.append(plan)
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(program, "make_plan", make_plan)
        patch.setattr(recompute, "_SHARES", {ActivationPolicy.RECOMPUTE_VALUES: 1.0})
        patch.setattr(recompute, "MIN_BOUND_NBYTES", 1)  # these models are tiny
        patch.setattr(recompute, "op_seconds", _seconds)
        patch.setattr(policies, "may_be_faster", lambda *_: True)
        yield plans


@pytest.mark.parametrize("workload", [checkpointed, llama, normed])
def test_parity(parity, monkeypatch, workload):
    with made_again(monkeypatch) as plans:
        report = parity.check(functools.partial(workload), "nvme", captured=True)  # the smallest budget is another
    assert plans
    assert all(plan.activations.policy is ActivationPolicy.RECOMPUTE_VALUES for plan in report.plans)
    assert all(plan.activations.recomputed for plan in report.plans)
