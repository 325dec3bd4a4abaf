"""Blocks that compute micro-batches one after another: the bits of plain PyTorch that does the same, in less memory."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.errors import CapacityError, ConfigError, UnsupportedError
from zinf_compile.ir.glossary import ActivationPolicy, Tier
from zinf_compile.runtime.execute import segments

BATCH, LENGTH, WIDTH, VOCABULARY = 8, 8, 64, 64
LARGE = 16  # a batch that does not fit TIGHT whole
ROOMY = {"device_memory": "8MiB", "host_memory": "8MiB"}
TIGHT = {"device_memory": "900KiB", "host_memory": "32MiB"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.other_norm(x))))


class Net(nn.Module):
    """A GPT that computes its blocks for one micro-batch after another in plain PyTorch."""

    def __init__(self, micro_batches: int = 1, *, width: int = WIDTH, layers: int = 3) -> None:
        super().__init__()
        self.micro_batches = micro_batches
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            parts = x.split(x.shape[0] // self.micro_batches)
            x = layer(x) if self.micro_batches == 1 else torch.cat([layer(part) for part in parts])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(1, 1).flatten())


def make(micro_batches: int = 1, **options: int) -> Net:
    torch.manual_seed(0)
    return Net(micro_batches, **options)


def batches(num: int = 3, batch: int = BATCH) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"tokens": torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)} for _ in range(num)]


def losses_of(model: nn.Module) -> list[Tensor]:
    """Train a model for two steps, with nothing else in memory; return the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batch in batches(2, batch=LARGE):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        del loss
    return losses


def homes(parity, placement: str, *, keeps_all: bool = False) -> dict[str, object]:
    """Return budgets in which not everything can be resident."""
    host = {"nvme": "512KiB", "mixed": "1MiB", "host": "8MiB"}[placement]
    nvme = None if placement == "host" else parity._folder
    return {"device_memory": "1400KiB" if keeps_all else "840KiB", "host_memory": host, "nvme": nvme}


QUICK = {(2, None), (4, True)}


@pytest.mark.needs_more_on_streams(device_memory=1.5)
@pytest.mark.parametrize("placement", ["nvme", "host", "mixed"])
@pytest.mark.parametrize(
    ("micro_batches", "recompute"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.long)
        for each in itertools.product((2, 4, 8), (None, True, False))
    ],
)
def test_bitwise_as_the_same_micro_batches_in_plain_pytorch(parity, placement, micro_batches, recompute):
    expected = parity.train(make(micro_batches), batches())
    budgets = homes(parity, placement, keeps_all=recompute is False)
    model = parity.optimize(
        make(), micro_batches=micro_batches, tiles=False, recompute=recompute, compute="aten", **budgets
    )
    parity.assert_same(parity.train(model, batches()), expected)
    (plan,) = zinf_compile.report(model).plans
    assert plan.gathers or recompute is False
    assert any(f"blocks compute {micro_batches} micro-batches" in note for note in plan.notes)


def test_bitwise_under_autocast(parity):
    """Captured graphs cast a weight at each read, so gradients of micro-batches are added up in float32."""

    def losses_under_autocast(model: nn.Module) -> list[Tensor]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for batch in batches(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return losses

    expected = losses_under_autocast(make(4))
    model = parity.optimize(make(), micro_batches=4, compute="aten", tiles=False, **ROOMY)
    assert losses_under_autocast(model) == expected


@pytest.mark.long
def test_all_micro_batches_are_one_compiled_block(parity, monkeypatch):
    expected = parity.train(make(4), batches()).losses
    compiled: list[int] = []
    compile_one = segments._compile

    def compile_and_count(number, segment):
        compiled.append(number)
        return compile_one(number, segment)

    monkeypatch.setattr(segments, "_compile", compile_and_count)
    found = []
    for micro_batches in (1, 4, 8):
        torch._dynamo.reset()
        compiled.clear()
        options = {"micro_batches": micro_batches, "compute": "inductor", "recompute": True, **ROOMY}
        model = parity.optimize(make(), **options)
        ours = parity.train(model, batches()).losses
        for theirs, loss in zip(expected, ours, strict=True):
            torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
        parity.assert_segments_ran(model)
        found.append(len(compiled))
    assert found[0] > 0
    assert found == [found[0]] * 3


@pytest.mark.of_own_memory(reason="in its budget a batch fits where parameters are read in place")
@pytest.mark.needs_more_on_streams(device_memory=1.55)
def test_a_batch_that_does_not_fit_otherwise(parity):
    expected = losses_of(make(layers=2))
    model = parity.optimize(make(layers=2), **TIGHT)
    for ours, theirs in zip(losses_of(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    report = zinf_compile.report(model)
    (plan,) = report.plans
    assert any("micro-batches, one after another" in note for note in plan.notes)
    assert plan.activations.policy is ActivationPolicy.RECOMPUTE_BLOCKS
    device = next(tier for tier in report.tiers if tier.tier is Tier.DEVICE)
    assert device.measured_peak <= device.predicted_peak <= device.capacity
    torch._dynamo.reset()
    whole = parity.optimize(make(layers=2), **TIGHT, tiles=False)
    with pytest.raises(CapacityError, match=r"needs .* on device"):
        whole(**batches(1, batch=LARGE)[0])


@pytest.mark.long
def test_one_micro_batch_never_cuts(parity):
    model = parity.optimize(make(layers=2), **TIGHT, micro_batches=1)
    with pytest.raises(CapacityError, match=r"needs .* on device"):
        model(**batches(1, batch=LARGE)[0])


def test_weights_are_read_once_per_phase_for_all_micro_batches():
    with torch.device("meta"):
        model = Net(width=256)
    plan = zinf_compile.plan(
        model,
        torch.zeros(32, 16, dtype=torch.int64),
        hardware="laptop-16g",
        compute="aten",
        device_memory="17MiB",
        host_memory="64MiB",
        nvme_memory="1GiB",
        reserve_memory=0,
        micro_batches=2,
    )
    reads = [name for gather in plan.gathers for name in gather.parameters]
    assert reads
    assert max(map(reads.count, reads)) <= 2  # forward and backward


class Dropped(nn.Module):
    """Returns what its block computes, so that what was dropped out is known."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Scaled()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.5, self.training) * 2


@pytest.mark.parametrize("recompute", [True, False])
def test_backward_drops_out_what_forward_has_dropped_out(parity, recompute):
    torch.manual_seed(0)
    model = parity.optimize(Dropped(), micro_batches=4, recompute=recompute, **ROOMY)
    made = model(torch.ones(BATCH, 256))
    made.sum().backward()
    torch.testing.assert_close(model.layers[0].weight.grad.clone(), made.detach().sum(0))
    kept = made.detach() != 0
    assert 0.4 < kept.float().mean() < 0.6
    assert not any(torch.equal(one, other) for one in kept[:2] for other in kept[2:4])  # each batch draws its own


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(2))
        self.whole = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.whole(x).sum()


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x).relu().sum()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (0, "micro_batches=0 is not a number of micro-batches, 1 or more"),
        (True, "micro_batches=True is not a number"),
        ("4", "micro_batches='4' is not a number"),
    ],
)
def test_an_option_that_is_no_number_of_batches(option, message):
    with pytest.raises(ConfigError, match=message):
        zinf_compile.optimize(make(), micro_batches=option)


def test_without_capture_nothing_can_be_cut():
    with pytest.raises(ConfigError, match="capture=False captures none"):
        zinf_compile.optimize(make(), micro_batches=2, capture=False)


def test_a_number_that_does_not_divide_the_batch(parity):
    model = parity.optimize(make(), micro_batches=3, **ROOMY)
    with pytest.raises(ConfigError, match="micro_batches=3 does not divide the batch, of 8 samples"):
        model(**batches(1)[0])


def test_a_block_that_mixes_samples_is_named(parity):
    model = parity.optimize(Normed(), micro_batches=2, **ROOMY)
    with pytest.raises(UnsupportedError, match=r"layers\.0 is computed for the whole batch, since batch_norm may mix"):
        model(torch.randn(4, 16))


def test_a_model_without_blocks_says_that_nothing_is_cut(parity):
    model = parity.optimize(Flat(), micro_batches=2, **ROOMY)
    model(torch.randn(4, 16)).backward()
    (plan,) = zinf_compile.report(model).plans
    assert any("micro_batches=2 has no effect here: there is no repeated block" in note for note in plan.notes)


@pytest.mark.parametrize("compute", ["aten", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("last", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_smaller_last_batch_is_computed_whole(parity, compute, last):
    given = [*batches(2), *batches(1, batch=last), *batches(1)]
    plain = make()
    model = parity.optimize(make(), micro_batches=2, compute=compute, **ROOMY)
    for batch in given:
        torch.testing.assert_close(model(**batch).detach(), plain(**batch).detach(), rtol=1e-5, atol=1e-6)
    notes = [note for plan in zinf_compile.report(model).plans for note in plan.notes]
    assert any("2 micro-batches, one after another" in note for note in notes)
    assert any(
        re.search("not cut into micro-batches: layers.0|micro_batches=2 has no effect here", note) for note in notes
    )


class AutocastNet(Net):
    """Begins autocast itself, around its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(tokens)


def test_under_autocast_inside_of_forward_blocks_stay_whole(parity):
    model = parity.optimize(AutocastNet(), micro_batches=2, compute="aten", **ROOMY)
    with pytest.raises(UnsupportedError, match=r"layers\.0 is computed for the whole batch, .* as under autocast"):
        model(**batches(1)[0])


def test_a_search_among_blocks_that_cannot_be_cut_ends_in_its_error(parity):
    model = parity.optimize(AutocastNet(layers=2), device_memory="500KiB", host_memory="8MiB", compute="aten")
    with pytest.raises(CapacityError, match=r"needs .* on device, device_memory is 500\.0 KiB"):
        model(**batches(1, batch=16)[0])
