"""Offloaded activations: training is bitwise equal to plain PyTorch, whatever is done with the graph."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zinf_compile
from examples.gpt import GPT, GPTConfig
from tests.support.fixed_rates import with_fixed_rates
from tests.support.swapping import swapping
from zinf_compile.driver import session
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.search import planner

transformers = pytest.importorskip("transformers")

STEPS = 2
VOCAB, SEQ = 64, 32
# With these sizes a block saves inner values of 64 KiB, the least that is offloaded here.
SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
CHOICES = {
    "host": lambda number, value: Tier.HOST,
    "nvme": lambda number, value: Tier.NVME,
    "mixed": lambda number, value: (Tier.HOST, Tier.NVME, None)[number % 3],
}


def token_batches(names=("tokens", "targets")):
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(4, VOCAB, (4, SEQ + 1), generator=generator) for _ in range(STEPS)]
    return [dict(zip(names, (each[:, :-1], each[:, 1:]), strict=True)) for each in tokens]


def gpt():
    return GPT(GPTConfig(vocab_size=VOCAB, layers=2, hidden=128, heads=2, seq=SEQ)), token_batches()


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCAB, **SHAPE, num_key_value_heads=1, use_cache=False)
    return transformers.LlamaForCausalLM(config), token_batches(("input_ids", "labels"))


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **SHAPE, image_size=24, patch_size=4, num_labels=5, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0
    )
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(4, 3, 24, 24, generator=generator) for _ in range(STEPS)]
    return transformers.ViTForImageClassification(config), [
        {"pixel_values": image, "labels": torch.randint(5, (4,), generator=generator)} for image in images
    ]


@contextlib.contextmanager
def swapped(choice: str, *, at_least: int = 64 * 2**10) -> Iterator[list[Plan]]:
    """Offload saved values of at least this many bytes inside; check afterwards that every plan has swaps."""
    with swapping(CHOICES[choice], at_least=at_least) as plans:
        yield plans
    assert plans
    for plan in plans:
        tiers = {swap.rests_on for swap in plan.swaps}
        assert tiers == ({Tier.HOST, Tier.NVME} if choice == "mixed" else {Tier(choice)})


def budgets(folder: Path) -> dict[str, object]:
    return {"device_memory": "24MiB", "host_memory": "64MiB", "nvme": folder}


@pytest.mark.parametrize(
    ("workload", "choice", "recompute"),
    [
        *((gpt, choice, False) for choice in CHOICES),
        (llama, "mixed", True),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((llama, "mixed", False), (vit, "mixed", True), (vit, "mixed", False))
        ),
    ],
)
def test_bitwise(parity, tmp_path, workload, choice, recompute):
    with swapped(choice, at_least=16 * 2**10 if recompute else 64 * 2**10):
        model, batches = workload()
        parity.optimize(model, recompute=recompute, **budgets(tmp_path))
        ours = parity.train(model, batches)
    parity.assert_plain(ours, parity.plain_runs(workload), captured=True)
    report = zinf_compile.report(model)
    moved = {route.route: route.nbytes for route in report.moved}
    for tier in (Tier.HOST, Tier.NVME):
        # Offloaded and reloaded in each step, which may have its own graph. Plans count whole sectors, transfers may not.
        swaps = [swap for plan in report.plans for swap in plan.swaps if swap.rests_on is tier]
        at_least = STEPS // len(report.plans) * sum(swap.nbytes - 4095 for swap in swaps)
        assert bool(swaps) == (choice in (tier, "mixed"))
        is_read_there = parity.is_integrated and tier is Tier.HOST
        assert all(swap.reload.stays == is_read_there for swap in swaps)
        routes = [f"device -> {tier}", *([] if is_read_there else [f"{tier} -> device"])]
        assert min(moved.get(route, 0) for route in routes) >= at_least


@pytest.mark.of_a_cpu(reason="its budget makes a plan gather and swap where there is one memory")
def test_streamed_parameters_share_the_arena_with_what_comes_back(parity, tmp_path):
    with swapped("mixed") as plans:
        model, batches = gpt()
        parity.optimize(model, device_memory="4608KiB", host_memory="64MiB", nvme=tmp_path, recompute=False)
        ours = parity.train(model, batches)
    parity.assert_plain(ours, parity.plain_runs(gpt), captured=True)
    assert all(plan.gathers and plan.swaps for plan in plans), [
        (plan.activations.policy, len(plan.gathers), len(plan.swaps)) for plan in plans
    ]


class Products(torch.nn.Module):
    """Products of activations, which backward reads through views; they take far more bytes than the weights."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)

    def forward(self, x):
        x = self.first(x).tanh()
        for _ in range(12):
            x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        return self.last(x).square().mean()


def products():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    return Products(), [{"x": torch.randn(64, 64, 32, generator=generator)} for _ in range(STEPS)]


@pytest.mark.of_a_cpu(reason="elsewhere activations go to host memory, over a link of its own rate")
def test_a_disk_far_slower_than_compute(parity, tmp_path, monkeypatch):
    """Then values leave one at a time, and compute waits: on their way all at once they would fill the device."""

    def slow(store, dtypes):
        hardware = with_fixed_rates(store, dtypes)
        routes = [
            replace(each, bytes_per_second=each.bytes_per_second / 100) if "nvme" in each.name else each
            for each in hardware.routes
        ]
        return replace(hardware, routes=tuple(routes))

    monkeypatch.setattr(session, "measure_hardware", slow)
    model, batches = products()
    parity.optimize(model, recompute=False, device_memory="8MiB", host_memory="4MiB", nvme=tmp_path)
    parity.assert_plain(parity.train(model, batches), parity.plain_runs(products), captured=True)
    report = zinf_compile.report(model)
    (plan,) = report.plans
    assert any("compute waits for them" in note for note in plan.notes)
    assert plan.swapped_nbytes(Tier.NVME) > 2 * 8 * 2**20
    (device,) = (tier for tier in report.tiers if tier.tier is Tier.DEVICE)
    assert device.measured_peak <= device.predicted_peak
    monkeypatch.setattr(planner, "waiting_level", lambda *_, **__: ())
    model, batches = products()
    parity.optimize(model, recompute=False, device_memory="8MiB", host_memory="4MiB", nvme=tmp_path)
    with pytest.raises(CapacityError, match=r"needs 2\d.* on device"):
        model(**batches[0])


def loop_of(backward):
    """Return a training loop that leaves forward and backward of a step to ``backward(model, batches)``."""

    def loop(model, batches, trace):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            trace.losses += [loss.detach().clone() for loss in backward(model, batches)]
            trace.take_step(model, optimizer)

    return loop


def forwards_first(model, batches):
    losses = [model(**batch) for batch in batches]
    for loss in losses:
        loss.backward()
    return losses


def one_after_the_other(model, batches):
    losses = []
    for batch in batches:
        losses.append(model(**batch))
        losses[-1].backward()
    return losses


def twice(model, batches):
    loss = model(**batches[0])
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return [loss]


def one_dropped(model, batches):
    model(**batches[0])  # its graph is freed without a backward
    loss = model(**batches[1])
    loss.backward()
    return [loss]


def by_autograd_grad(model, batches):
    loss = model(**batches[0])
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    return [loss]


@pytest.mark.parametrize(
    "backward",
    [
        forwards_first,
        twice,
        by_autograd_grad,
        *(pytest.param(call, marks=pytest.mark.long, id=call.__name__) for call in (one_after_the_other, one_dropped)),
    ],
    ids=lambda call: call.__name__,
)
def test_whatever_is_done_with_the_graph(parity, tmp_path, backward):
    with swapped("mixed"):
        parity.check_loop_within(loop_of(backward), gpt, budgets(tmp_path))


@pytest.mark.long
def test_plans_that_let_other_values_leave(parity, tmp_path):
    """A forward offloads what its own plan says, even if its backward runs under a later plan."""
    with swapped("mixed"):
        model, batches = gpt()
        parity.optimize(model, **budgets(tmp_path))
        losses = [model(**batches[0])]
    store = next(model.parameters())._zinf_record.store
    (program,) = store.session.programs
    for choice in (lambda number, value: Tier.NVME if number % 3 else None, lambda number, value: None):
        with swapping(choice):
            program._adopt(program._plan_for(program._shapes.facts))
            losses.append(model(**batches[0]))
    reference, _ = gpt()
    for loss in losses:
        loss.backward()
        reference(**batches[0]).backward()
    plain = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        parity.assert_equal(parameter.grad.clone(), plain[name].grad, name)


def test_more_forwards_than_the_budget_holds(parity, tmp_path):
    with swapped("host"):
        model, batches = gpt()
        parity.optimize(model, device_memory="24MiB", host_memory="12MiB", nvme=tmp_path)
        losses = [model(**batches[0])]
        with pytest.raises(
            CapacityError, match=r"on host, where activations may take .* run backward after each forward"
        ):
            losses += [model(**batches[0]) for _ in range(40)]
        for loss in losses:
            loss.backward()
    reference, _ = gpt()
    losses_there = [reference(**batches[0]) for _ in losses]
    assert torch.equal(losses[-1].detach(), losses_there[-1].detach())
