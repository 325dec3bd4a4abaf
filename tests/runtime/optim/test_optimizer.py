"""The streamed step is the user's own optimizer: bit for bit what it does to a model in memory."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.support.optimizer_twins import (
    NEED_WHOLE_TENSORS,
    OPTIMIZERS,
    MakeOptimizer,
    MyAdam,
    SignDescent,
    assert_same,
    assert_same_training,
    make_batches,
    make_model,
    train_step,
)
from zinf_compile.ir.errors import CapacityError, UnsupportedError
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.store.store import Store


@pytest.mark.parametrize("where", ["nvme", "host"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_bitwise_the_plain_one(
    name: str, where: str, optimize: Callable[..., nn.Module], store_of: Callable[[nn.Module], Store]
) -> None:
    whole = name in NEED_WHOLE_TENSORS
    budgets = {"host_memory": "2MiB"} if whole else {}
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=where == "nvme", **(budgets if where == "nvme" else {}))
    plain_optimizer, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    for batch in make_batches():
        loss = train_step(plain, plain_optimizer, batch)
        assert torch.equal(train_step(model, optimizer, batch), loss)
    assert_same_training(plain, plain_optimizer, model, optimizer)
    store = store_of(model)
    masters = [record.copies.master.tier for record in store.records.values()]
    if where == "nvme" and not whole:
        assert masters.count(Tier.NVME) >= 2
    else:
        assert where == "nvme" or Tier.NVME not in masters
    store.check_integrity()


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "NAdam"])
def test_threads_cut_whole_tensors_elsewhere_and_nothing_changes(name: str, optimize: Callable[..., nn.Module]) -> None:
    torch.set_num_threads(2)
    plain = make_model()
    model = optimize(copy.deepcopy(plain), tiny=True)
    plain_optimizer, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    for batch in make_batches()[:2]:
        train_step(plain, plain_optimizer, batch)
        train_step(model, optimizer, batch)
    assert_same_training(plain, plain_optimizer, model, optimizer)


def test_muon_takes_whole_matrices(optimize: Callable[..., nn.Module]) -> None:
    plain = make_model(bias=False)
    model = optimize(copy.deepcopy(plain), tiny=True, host_memory="2MiB")
    plain_optimizer, optimizer = torch.optim.Muon(plain.parameters()), torch.optim.Muon(model.parameters())
    for batch in make_batches():
        train_step(plain, plain_optimizer, batch)
        train_step(model, optimizer, batch)
    assert_same_training(plain, plain_optimizer, model, optimizer)


def test_every_optimizer_of_torch_is_tested_or_refused() -> None:
    classes = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    assert classes == {name.split()[0] for name in OPTIMIZERS} - {"third", "subclass"} | {"Muon", "LBFGS", "SparseAdam"}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            torch.optim.LBFGS,
            "LBFGS is not supported .*: it needs all parameters at once and keeps a history of them; use AdamW",
        ),
        (
            torch.optim.SparseAdam,
            "SparseAdam is not supported .*: it needs sparse gradients, which a store does not hold",
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    make: MakeOptimizer, reason: str, optimize: Callable[..., nn.Module]
) -> None:
    model = optimize(make_model())
    optimizer = make(model.parameters())
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(UnsupportedError, match=reason):
        optimizer.step(lambda: model(make_batches()[0]).sum())  # type: ignore[arg-type,return-value]
    assert_same("model", before, dict(model.state_dict()))
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batches()[0])


def test_whole_tensors_that_do_not_fit_staging_are_refused_before_anything_changes(
    optimize: Callable[..., nn.Module],
) -> None:
    model = optimize(make_model(), tiny=True)
    optimizer = SignDescent(model.parameters())
    model(make_batches()[0]).sum().backward()
    before = copy.deepcopy(dict(model.state_dict()))
    message = (
        r"updating '\d\.weight' needs .* of staging at once, because SignDescent needs whole tensors; .* raise host"
    )
    with pytest.raises(CapacityError, match=message):
        optimizer.step()
    assert_same("model", before, dict(model.state_dict()))
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batches()[0])


def test_the_log_says_once_why_an_optimizer_gets_whole_tensors(
    optimize: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="zinf_compile")
    model = optimize(make_model())
    optimizers = [SignDescent(model.parameters()), MyAdam(model.parameters())]
    for batch in make_batches():
        for optimizer in optimizers:
            train_step(model, optimizer, batch)
    (record,) = [record for record in caplog.records if "whole tensors" in record.getMessage()]
    assert record.getMessage() == "SignDescent gets whole tensors: it calls aten.linalg_vector_norm.default"
