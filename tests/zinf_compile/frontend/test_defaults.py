"""What a person gets who states two budgets and nothing else, in a process of its own that no test has patched."""

import json
import os
import subprocess
import sys

import pytest

from zinf_compile.runtime.native.compiled import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on the PATH")

SCRIPT = """
import json, torch, zinf_compile
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import TierPart

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)))

def train(model):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(4):
        loss = model(torch.ones(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

plain = train(make())
model = zinf_compile.optimize(make(), device_memory="224MiB", host_memory="64MiB")
losses, report = train(model), zinf_compile.report(model)
(plan,) = report.plans
print(json.dumps({
    "plain": plain, "losses": losses, "fallbacks": report.fallbacks, "text": str(report),
    "ops": [op.op for op in plan.request.captured[0].ops], "budget": report.process.budget,
    "peak": report.process.measured_peak, "reserved": plan.tier(Tier.DEVICE).nbytes_of(TierPart.RESERVE),
}))
"""


def test_two_budgets_and_nothing_else() -> None:
    """Compute is compiled, and the memory of the process is measured and within both budgets."""
    env = {name: value for name, value in os.environ.items() if name != "ZINF_QUIET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["losses"] == pytest.approx(found["plain"], rel=1e-5)
    assert not found["fallbacks"]
    assert "zinf.run_segment.default" in found["ops"]
    assert 16 * 2**20 <= found["reserved"] < 224 * 2**20
    assert 0 < found["peak"] <= found["budget"] == 288 * 2**20
    assert "within both budgets, 288.0 MiB" in found["text"]
    assert "zinf: first call of Sequential done in" in done.stderr
