"""What ranks keep and exchange, counted: each keeps its share of all bytes, and as many pass between them as planned."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zinf_compile
from tests.distributed.workloads import optimize
from tests.support.rank_pool import RankPool
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.ranks.ranks import Collective, Ranks
from zinf_compile.runtime.store.store import store_of

MIB = 2**20
WIDTH, VOCABULARY, DEPTH = 256, 512, 3
NUM_STEPS = 3
COMPUTED = 2  # bytes of an element in bfloat16
STATES = 4 + 4 + 4 + 2 * COMPUTED  # of an element: fp32 master copy and two moments, compute copy and gradient


class Layer(nn.Module):
    """Attention and an MLP, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states after the layer."""
        query, key, value = self.attend(self.norm(hidden)).chunk(3, dim=-1)
        hidden = hidden + self.project(functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return hidden + self.down(functional.gelu(self.up(self.second(hidden))))


class GPT(nn.Module):
    """A GPT whose matrices are read once in forward and once in backward, but for the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting the next token."""
        hidden = self.embed(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True, kw_only=True)
class TierBytes:
    """A tier of one rank: its budget, and what was promised and measured."""

    tier: Tier
    budget: int | None
    predicted: int
    measured: int


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What one rank counted."""

    num_elements: int  # of the whole model
    kept: int  # bytes of all slots
    planned: int  # bytes of all copies in the plan
    whole: int  # of these: residents, which every rank has whole
    streamed: Mapping[str, tuple[int, int]]  # by parameter: whole bytes, and how often the plan gathers it
    tiers: Sequence[TierBytes]
    metered: Mapping[str, int]  # full bytes of one step
    passed: Mapping[str, int]  # the same, counted where torch.distributed is called


def train(options: Mapping[str, Any]) -> Numbers:
    """Train some steps on this rank, and count."""
    passed: Counter[str] = Counter()
    all_gather, exchange_rows = Ranks.all_gather, Ranks.exchange_rows

    def counted_gather(
        ranks: Ranks, name: str, shards: Sequence[Tensor], wholes: Sequence[Tensor], **given: Any
    ) -> Collective:
        passed["all-gather"] += sum(each.nbytes for each in wholes)
        return all_gather(ranks, name, shards, wholes, **given)

    def counted_exchange(ranks: Ranks, name: str, value: Tensor, *rest: Any, **given: Any) -> Collective:
        passed["reduction"] += value.nbytes
        return exchange_rows(ranks, name, value, *rest, **given)

    with mock.patch.multiple(Ranks, all_gather=counted_gather, exchange_rows=counted_exchange):
        torch.manual_seed(0)
        model = optimize(GPT(), options)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        store = store_of(record_of(next(model.parameters())))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        seen: list[tuple[Counter[str], Counter[str]]] = []
        for step in range(NUM_STEPS):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randint(VOCABULARY, (1, 9), generator=generator)).backward()
            seen.append((Counter(store.meter.collectives), Counter(passed)))
            optimizer.step()
            optimizer.zero_grad()
        zinf_compile.synchronize(model)
    report = zinf_compile.report(model)
    (plan,) = report.plans
    gathers = Counter(name for gather in plan.gathers for name in gather.parameters)
    whole = {item.parameter: item.compute_nbytes for item in plan.placements if item.compute is Tier.DEVICE}
    numbers = Numbers(
        num_elements=sum(sizes.values()),
        kept=sum(slot.nbytes for record in store.records.values() for slot in record.slots),
        planned=sum(item.nbytes_on(tier) for item in plan.placements for tier in Tier),
        whole=sum(whole.values()),
        streamed={name: (COMPUTED * sizes[name], count) for name, count in gathers.items()},
        tiers=[
            TierBytes(tier=each.tier, budget=each.capacity, predicted=each.predicted_peak, measured=each.measured_peak)
            for each in report.tiers
        ],
        metered=seen[-1][0] - seen[-2][0],
        passed=seen[-1][1] - seen[-2][1],
    )
    zinf_compile.close(model)
    return numbers


def placements(folder: str) -> dict[str, Mapping[str, Any]]:
    """Return budgets in which matrices are streamed from disk or host memory, or are resident."""
    common = {"compute_dtype": torch.bfloat16, "compute": "aten", "reserve_memory": 0, "nvme": folder}
    return {
        "nvme": {**common, "device_memory": 4 * MIB, "host_memory": 4 * MIB},
        "host": {**common, "device_memory": 4 * MIB, "host_memory": 64 * MIB},
        "resident": {**common, "device_memory": 24 * MIB, "host_memory": 64 * MIB},
    }


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_a_rank_keeps_its_share(placement: str, size: int, pool_of: Callable[[int], RankPool], tmp_path: Path) -> None:
    options = placements(str(tmp_path))[placement]
    (alone,) = pool_of(1).run(train, options)
    assert alone.kept == STATES * alone.num_elements
    for numbers in pool_of(size).run(train, options):
        assert bool(numbers.streamed) == (placement != "resident")
        assert numbers.kept == pytest.approx(numbers.whole + (alone.kept - numbers.whole) / size, rel=0.05)
        assert numbers.planned == pytest.approx(numbers.kept, rel=0.01)
        for tier in numbers.tiers:
            assert tier.budget is None or max(tier.measured, tier.predicted) <= tier.budget
            if tier.tier is not Tier.DEVICE:  # whose bytes are counted, and not sampled
                assert tier.measured <= tier.predicted


@pytest.mark.parametrize("placement", ["nvme", pytest.param("host", marks=pytest.mark.long), "resident"])
def test_what_passes_between_ranks_is_what_the_formula_says(placement: str, two: RankPool, tmp_path: Path) -> None:
    for numbers in two.run(train, placements(str(tmp_path))[placement]):
        matrices = {name: count for name, (_, count) in numbers.streamed.items() if "embed" not in name}
        assert set(matrices.values()) <= {2}
        assert bool(matrices) == (placement != "resident")
        gathered = sum(nbytes * count for nbytes, count in numbers.streamed.values()) + numbers.whole
        expected = {"all-gather": gathered, "reduction": COMPUTED * numbers.num_elements}
        assert numbers.metered == pytest.approx(expected, rel=0.01)
        assert numbers.passed == pytest.approx(expected, rel=0.01)
