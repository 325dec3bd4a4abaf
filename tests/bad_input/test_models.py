"""Models and calls that cannot be used: each is refused by name, and nothing changes."""

import gc
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.ir.errors import ConfigError, DeviceCapacityError, PlanFileError, StoreError, UnsupportedError

StaysPlain = Callable[[nn.Module], AbstractContextManager[None]]
BUDGETS = {"device_memory": "8MiB", "host_memory": "8MiB", "capture": False}


@pytest.mark.parametrize("thing", [None, 3, "model", torch.ones(3), [nn.Linear(2, 2)], nn.Linear])
def test_what_is_not_a_module(thing: object) -> None:
    with pytest.raises(ConfigError, match=r"optimize takes a torch\.nn\.Module, not \w+"):
        zinf_compile.optimize(thing, **BUDGETS)  # type: ignore[arg-type]


def test_parameters_on_two_devices(model: nn.Module, stays_plain: StaysPlain) -> None:
    model[2].to("meta")
    message = (
        r"parameters are on 2 devices \('0\.weight' on cpu, '2\.weight' on meta\); move the model to one device first"
    )
    with stays_plain(model), pytest.raises(ConfigError, match=message):
        zinf_compile.optimize(model, **BUDGETS)


def test_a_model_on_the_meta_device(model: nn.Module, stays_plain: StaysPlain) -> None:
    model.to("meta")
    with (
        stays_plain(model),
        pytest.raises(ConfigError, match="the model is on the meta device, so it has no values"),
    ):
        zinf_compile.optimize(model, **BUDGETS)


def test_a_lightning_module_that_would_run_eagerly(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    class LightningModule(nn.Module):  # has the name of Lightning's, which need not be installed
        pass

    class Mine(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

    zinf_compile.optimize(module := Mine(), **{**BUDGETS, "capture": True})
    (warning,) = (record.message for record in caplog.records if "LightningModule" in record.message)
    assert warning.startswith("Mine is a LightningModule, whose training_step Lightning calls")
    zinf_compile.close(module)


def test_an_optimized_model(model: nn.Module) -> None:
    zinf_compile.optimize(model, **BUDGETS)
    with pytest.raises(
        ConfigError, match=r"Sequential was optimized already; call zinf_compile\.optimize once per model"
    ):
        zinf_compile.optimize(model, **BUDGETS)
    with pytest.raises(ConfigError, match=r"Linear was optimized already"):
        zinf_compile.optimize(model[0], **BUDGETS)
    with pytest.raises(ConfigError, match=r"0 was optimized already"):
        zinf_compile.optimize(nn.Sequential(model), **BUDGETS)
    model(torch.ones(2, 200)).sum().backward()
    zinf_compile.close(model)


def test_a_module_that_shares_a_parameter_with_an_optimized_one(model: nn.Module) -> None:
    other = nn.Linear(200, 200)
    other.weight = model[0].weight
    zinf_compile.optimize(model, **BUDGETS)
    with pytest.raises(
        ConfigError, match=r"parameter 'weight' is already in the store of another model, as '0\.weight'"
    ):
        zinf_compile.optimize(other, **BUDGETS)
    zinf_compile.close(model)


def test_a_module_whose_part_was_optimized(model: nn.Module) -> None:
    zinf_compile.optimize(model[0], **BUDGETS)
    with pytest.raises(ConfigError, match="0 was optimized already"):
        zinf_compile.optimize(model, **BUDGETS)
    zinf_compile.close(model[0])


def test_assigning_to_a_parameter(model: nn.Module) -> None:
    zinf_compile.optimize(model, **BUDGETS)
    weight = model[0].weight
    with pytest.raises(UnsupportedError, match=r"cannot assign to '0\.weight': it lives in a store since optimize\(\)"):
        model[0].weight = nn.Parameter(torch.zeros(200, 200))
    assert model[0].weight is weight
    model(torch.ones(2, 200)).sum().backward()
    zinf_compile.close(model)


@pytest.mark.parametrize("ask", [zinf_compile.report, zinf_compile.close])
def test_asking_about_a_plain_model(
    ask: Callable[[nn.Module], object], model: nn.Module, stays_plain: StaysPlain
) -> None:
    with (
        stays_plain(model),
        pytest.raises(ConfigError, match=r"Sequential has no parameter in a store; call zinf_compile\."),
    ):
        ask(model)


def test_training_after_close(model: nn.Module) -> None:
    zinf_compile.optimize(model, **BUDGETS)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 200)).sum().backward()
    loss = model(torch.ones(2, 200)).sum()
    zinf_compile.close(model)
    message = "the store of this model is closed; build and optimize the model again to train it"
    for call in (loss.backward, optimizer.step, lambda: model(torch.ones(2, 200))):
        with pytest.raises(StoreError, match=message):
            call()
    assert str(zinf_compile.report(model))


def test_training_a_captured_model_after_close(model: nn.Module) -> None:
    zinf_compile.optimize(model, **{**BUDGETS, "capture": True})
    model(torch.ones(2, 200)).sum().backward()
    zinf_compile.close(model)
    for rows in (2, 3):  # a captured graph, and one that would have to be captured
        with pytest.raises(StoreError, match="the store of this model is closed"):
            model(torch.ones(rows, 200))


@pytest.mark.parametrize("capture", [True, False])
def test_a_model_without_parameters(capture: bool) -> None:
    model = nn.Sequential(nn.Tanh(), nn.Flatten())
    zinf_compile.optimize(model, **{**BUDGETS, "capture": capture})
    gc.collect()
    x = torch.ones(2, 3, requires_grad=True)
    result = model(x)
    assert torch.equal(result, x.tanh())
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (result, x.tanh())))
    assert zinf_compile.report(model).model == "Sequential"
    with zinf_compile.full_parameters(model):
        model(x)
    zinf_compile.synchronize(model)
    zinf_compile.close(model)
    with pytest.raises(ConfigError, match="Sequential was optimized already"):
        zinf_compile.optimize(model, **BUDGETS)


def test_an_empty_and_a_scalar_parameter() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.scalar = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scalar + self.empty.sum()

    plain, model = Odd(), zinf_compile.optimize(Odd(), **BUDGETS)
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters())
        each(torch.ones(2)).sum().backward()
        optimizer.step()
    assert torch.equal(plain.scalar, model.get_parameter("scalar"))
    assert model.get_parameter("empty").shape == (0, 3)
    zinf_compile.close(model)


def write_plan(path: Path, model: nn.Module) -> None:
    zinf_compile.optimize(model, **{**BUDGETS, "capture": True})
    model(torch.ones(2, 200)).sum().backward()
    (plan,) = zinf_compile.report(model).plans
    plan.save(path)
    zinf_compile.close(model)


def test_plan_files_that_cannot_be_read(tmp_path: Path, model: nn.Module) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, model)
    good = path.read_text()
    zinf_compile.Plan.load(path)
    for text, message in (
        (good[: len(good) // 2], r"plan\.json"),
        ("", r"plan\.json"),
        ("[]", "plan"),
        (json.dumps({**json.loads(good), "version": 999}), "version"),
        (json.dumps({**json.loads(good), "surprise": 1}), "surprise"),
    ):
        path.write_text(text)
        with pytest.raises(PlanFileError, match=message):
            zinf_compile.Plan.load(path)


def test_a_plan_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises((PlanFileError, ConfigError), match=r"nowhere\.json"):
        zinf_compile.Plan.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("capture", [False, True])
def test_a_sparse_gradient(capture: bool) -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True))
    zinf_compile.optimize(model, **{**BUDGETS, "capture": capture})
    before = model[0].weight.clone()
    with pytest.raises(UnsupportedError, match=r"gradient of '0\.weight' is a torch\.sparse_coo tensor.*sparse=False"):
        model(torch.arange(4)).sum().backward()
    assert model[0].weight.grad is None
    assert torch.equal(model[0].weight, before)
    zinf_compile.close(model)


class InTwoParts(nn.Module):
    """A forward that Dynamo captures in two graphs; the second needs more memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().sum()


def test_the_budget_that_one_of_several_graphs_needs() -> None:
    """The second graph is captured only after the first has run, so the first error is about the first graph alone."""
    x, budget, refused = torch.ones(2048, 64), 300 * 2**10, []
    for _ in range(2):
        model = zinf_compile.optimize(InTwoParts(), device_memory=budget, host_memory="4MiB", tiles=False)
        with pytest.raises(DeviceCapacityError) as error:
            model(x)
        zinf_compile.close(model)
        torch._dynamo.reset()
        refused.append(str(error.value))
        budget = error.value.needed_nbytes
    model = zinf_compile.optimize(InTwoParts(), device_memory=budget, host_memory="4MiB", tiles=False)
    model(x).backward()
    zinf_compile.close(model)
    first, last = refused
    assert re.search(
        r"; that is for InTwoParts graph 0 alone, which ends at .*test_models\.py:\d+: .*: what the model computes after "
        r"it is not captured yet, and may need more$",
        first,
    )
    assert last.startswith("InTwoParts graph 1 needs")
    assert "not captured yet" not in last
