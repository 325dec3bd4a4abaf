"""Peaks of a step in which single values are made again stay within what its plan promises, measured in a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SCRIPT = """
import json, sys, threading
from dataclasses import replace

sys.path.insert(0, sys.argv[1])
import torch, zinf_compile
from gpt import GPT, GPTConfig
from zinf_compile import program
from zinf_compile.passes.planning import policies
from zinf_compile.terms import ActivationPolicy

torch.set_num_threads(2)
planner = program.make_plan


def make_plan(request):
    again = tuple(graph for graph in request.candidates if graph.policy is ActivationPolicy.RECOMPUTE_VALUES)
    return planner(replace(request, candidates=again or request.candidates, captured=()))


def train(recompute):
    torch.manual_seed(0)
    torch._dynamo.reset()
    tokens = torch.randint(0, 1024, (4, 129))
    model = GPT(GPTConfig(vocab_size=1024, layers=4, hidden=256, heads=4, seq=128))
    zinf_compile.optimize(model, device_memory="1GiB", host_memory="1GiB", recompute=recompute)
    store = next(model.parameters())._zinf_record.store
    stop = threading.Event()

    def sample():
        while not stop.wait(0.001):
            store.sample_memory()

    thread = threading.Thread(target=sample)
    thread.start()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zinf_compile.synchronize(model)
    stop.set()
    thread.join()
    report = zinf_compile.report(model)
    (plan,) = report.plans
    zinf_compile.close(model)
    return {
        "policy": plan.activations.policy,
        "saved": plan.activations.saved_nbytes,
        "losses": losses,
        "tiers": {tier.tier: [tier.predicted_peak, tier.measured_peak] for tier in report.tiers},
    }


runs = {"save": train(False)}
program.make_plan, policies.may_be_faster = make_plan, lambda *_: True
runs["again"] = train(None)
print(json.dumps(runs))
"""


def test_no_peak_is_above_its_prediction() -> None:
    command = [sys.executable, "-c", SCRIPT, str(EXAMPLES)]
    done = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    runs = json.loads(done.stdout.splitlines()[-1])
    save, again = runs["save"], runs["again"]
    assert (save["policy"], again["policy"]) == ("save", "recompute_values")
    assert again["losses"] == save["losses"]
    for tier, (predicted, measured) in again["tiers"].items():
        assert measured <= predicted, f"{tier}: {measured - predicted} bytes over"
    # What need not rest is gone from the promise, and from what was measured.
    assert again["saved"] < save["saved"]
    predicted, measured = (save["tiers"]["device"][index] - again["tiers"]["device"][index] for index in range(2))
    assert predicted > 0.5 * (save["saved"] - again["saved"])
    assert measured > 0.5 * (save["saved"] - again["saved"])
