"""Predicted peaks, measured in forks of their own: measured peaks stay within them, even in the smallest budgets named.

Two models run op by op, and one compiled. Each trains in memory, and then in the smallest budget of device, host and
nvme that a CapacityError names. A thread samples memory all the time, as the report does. On a busy machine it may miss,
for some steps, the milliseconds inside of a kernel at the peak: more steps run before a prediction is called too high.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long("all variants")]

MODELS = ("mlp", "compiled gpt", "conv")
TIERS = ("device", "host", "nvme")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLOSE = 1.10  # largest ratio of predicted to measured peak of the device
MORE_STEPS = 30  # to run if a peak seems lower than that

SCRIPT = """
import re


def gpt():
    from gpt import GPT, GPTConfig

    tokens = torch.randint(0, 1024, (2, 129))
    model = GPT(GPTConfig(vocab_size=1024, layers=2, hidden=256, heads=4, seq=128))
    return model, lambda: model(tokens[:, :-1], tokens[:, 1:])


def conv():
    images = torch.randn(8, 3, 32, 32)
    layers = [torch.nn.Conv2d(3, 128, 3, padding=1)]
    for _ in range(3):
        layers += [torch.nn.Conv2d(128, 128, 3, padding=1), torch.nn.GroupNorm(8, 128), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers)
    return model, lambda: model(images).square().mean()


def mlp():
    x = torch.randn(256, 1024)
    model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())))
    return model, lambda: model(x).square().mean()


def train(name, budgets, close=None, more_steps=0):
    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled, _, kind = name.rpartition(" ")
    model, loss = {"gpt": gpt, "conv": conv, "mlp": mlp}[kind]()
    zinf_compile.optimize(model, compute="inductor" if compiled else "aten", **budgets)
    store = next(model.parameters())._zinf_record.store
    try:
        with sampled(store):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses = []
            for step in range(4 + more_steps):
                if step == 4:
                    with store.held.planning():  # what a report takes is not the device's either
                        predicted = zinf_compile.report(model).tiers[0].predicted_peak
                if step >= 4 and predicted <= close * store.ram.peak:
                    break
                value = loss()
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(value.item())
            zinf_compile.synchronize(model)
            tiers = zinf_compile.report(model).tiers
            return losses[:4], {tier.tier: [tier.predicted_peak, tier.measured_peak] for tier in tiers}
    finally:
        zinf_compile.close(model)


def measure(case):
    name = case["model"]
    sys.path.insert(0, case["examples"])
    ample = {"device_memory": "1GiB", "host_memory": "1GiB", "nvme": case["nvme"], "tiles": False}  # the same losses in all
    runs = {}
    losses, tiers = train(name, ample, case["close"], case["more_steps"])
    device_peak = tiers["device"][0]
    runs["memory"] = {"losses": losses, "tiers": tiers, "messages": []}
    for tier in ("device", "host", "nvme"):
        option = f"{tier}_memory"
        budgets = {**ample, "device_memory": device_peak // 2, "host_memory": "8MiB", option: "64KiB"}
        if tier == "host":
            budgets["nvme"] = None
        messages = []
        while True:
            try:
                losses, measured = train(name, budgets)
                break
            except zinf_compile.CapacityError as error:
                messages.append(str(error))
                if len(messages) > 4:
                    raise
                named, size = re.findall(r"(\\w+_memory) to (\\d+MiB)", str(error))[0]
                budgets[named] = size
        runs[tier] = {"losses": losses, "tiers": measured, "messages": messages, "budget": budgets[option]}
    # The first forward of a forked process with two threads may round differently from all later ones, in plain PyTorch
    # too. So the losses are those of a second run in memory.
    runs["memory"]["losses"], _ = train(name, ample)
    return runs
"""


@pytest.fixture(scope="module", params=MODELS)
def runs(
    request: pytest.FixtureRequest, measure: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    found: dict[str, Any] = measure(
        SCRIPT,
        {
            "model": request.param,
            "nvme": str(tmp_path_factory.mktemp("store")),
            "examples": str(EXAMPLES),
            "close": CLOSE,
            "more_steps": MORE_STEPS,
        },
    )
    return found


@pytest.mark.parametrize("run", ["memory", *TIERS])
def test_no_peak_is_above_its_prediction(runs: dict[str, Any], run: str) -> None:
    for tier, (predicted, measured) in runs[run]["tiers"].items():
        assert measured <= predicted, f"{tier}: {measured - predicted} bytes over"


def test_predictions_are_close(runs: dict[str, Any]) -> None:
    predicted, measured = runs["memory"]["tiers"]["device"]
    assert predicted <= CLOSE * measured


@pytest.mark.parametrize("tier", TIERS)
def test_the_smallest_budget_that_is_named_works(
    runs: dict[str, Any], tier: str, request: pytest.FixtureRequest
) -> None:
    run, losses = runs[tier], runs["memory"]["losses"]
    is_compiled = "compiled" in request.node.callspec.id  # other budgets give other segments, which round differently
    assert run["messages"], "no CapacityError: the first budget was not too small"
    assert run["losses"] == (pytest.approx(losses, rel=1e-5) if is_compiled else losses)
    assert run["tiers"][tier][1] <= int(run["budget"].removesuffix("MiB")) * 2**20
