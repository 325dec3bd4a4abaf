"""Optimizer steps of ranks that work in rounds: each updates its own stages, and all have to do so equally often."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import zinf_compile
from tests.distributed.test_rounds import build_deep
from tests.distributed.test_rounds_errors import OPTIONS, ending_at_once, make, train
from tests.distributed.workloads import batch_of, optimize
from tests.support.rank_pool import Raised, RankPool
from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params.remote import RemoteParameter


def forward(model: nn.Module, number: int) -> Tensor:
    """Return the loss of a batch of this rank."""
    loss: Tensor = model(**batch_of(number, dist.get_rank()))
    return loss


def is_second() -> bool:
    """Return whether this is rank 1."""
    return dist.get_rank() == 1


def in_two(model: nn.Module) -> tuple[Optimizer, Optimizer]:
    """Return two optimizers of a model: of one block, which is on one rank, and of everything else."""
    block = list(model.deep.blocks[1].parameters())  # type: ignore
    others = [each for each in model.parameters() if not any(each is of_block for of_block in block)]
    return SGD(block, lr=0.1), AdamW(others, lr=1e-2)


# What a rank leaves out, in the second of several steps. Called on each rank.


def one_step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Skip the step on rank 1."""
    forward(model, number).backward()
    if not (number == 1 and is_second()):
        optimizer.step()
    optimizer.zero_grad()


def one_of_a_single_rank(model: nn.Module, optimizers: tuple[Optimizer, Optimizer], number: int) -> None:
    """Skip the step of parameters of one rank there."""
    forward(model, number).backward()
    for optimizer in optimizers:
        if not (number == 1 and is_second() and isinstance(optimizer, SGD)):
            optimizer.step()
        optimizer.zero_grad()


def one_of_two_each(model: nn.Module, optimizers: tuple[Optimizer, Optimizer], number: int) -> None:
    """Skip the step of another optimizer on each rank."""
    forward(model, number).backward()
    for optimizer, is_left_out in zip(optimizers, (is_second(), not is_second()), strict=True):
        if number != 1 or not is_left_out:
            optimizer.step()
        optimizer.zero_grad()


def one_with_a_closure(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Compute without a step on rank 1."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = forward(model, number)
        loss.backward()
        return loss

    closure() if number == 1 and is_second() else optimizer.step(closure)


def one_of_accumulation(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Accumulate a batch more on rank 1."""
    for micro in range(2):
        forward(model, 2 * number + micro).backward()
    if not (number == 1 and is_second()):
        optimizer.step()
        optimizer.zero_grad()


def one_before_clipping(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Skip the step on rank 1, before norms are exchanged again."""
    forward(model, number).backward()
    if not (number == 1 and is_second()):
        optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()


def one_of_a_late_optimizer(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Go on with an optimizer that was made between steps, and not on rank 1."""
    forward(model, number).backward()
    if number == 1 and not is_second():
        optimizer = AdamW(model.parameters(), lr=1e-3)
    if number == 0 or not is_second():
        optimizer.step()
    optimizer.zero_grad()


Skips = Callable[[nn.Module, Any, int], None]
OF_TWO = (one_of_a_single_rank, one_of_two_each)
OF_ONE = (one_step, one_with_a_closure, one_of_accumulation, one_before_clipping, one_of_a_late_optimizer)
SKIPS: dict[str, Skips] = {each.__name__: each for each in (*OF_ONE, *OF_TWO)}
ALL = "AdamW of 64 parameters from 'deep.embed.weight' on"
FOUND = dict.fromkeys(SKIPS, f"steps of {ALL}: 2 on rank 0, 1 on rank 1") | {
    "one_of_a_single_rank": "steps of SGD of parameters of one rank: 2 on rank 0, 1 on rank 1",
    "one_of_two_each": (
        "steps of SGD of parameters of one rank: 2 on rank 0, 1 on rank 1; "
        "steps of AdamW of 52 parameters from 'deep.embed.weight' on: 1 on rank 0, 2 on rank 1"
    ),
}


def skip(name: str) -> None:
    """Skip a step on a rank, and go on training."""
    model, optimizer = make()
    optimizers = optimizer if SKIPS[name] in OF_ONE else in_two(model)
    with ending_at_once(model):
        for number in range(4):
            SKIPS[name](model, optimizers, number)


@pytest.mark.parametrize("name", ["one_step", *(pytest.param(each, marks=pytest.mark.long) for each in [*SKIPS][1:])])
def test_a_skipped_step_is_an_error_on_every_rank(name: str, two: RankPool) -> None:
    for each in two.outcomes(skip, name):
        assert isinstance(each, Raised)
        assert each.kind == "RankError", each.trace
        assert f"ranks have made different numbers of optimizer steps ({FOUND[name]}), so" in each.message
        assert "call step() equally often on every rank" in each.message


def step_otherwise() -> None:
    """Give a step another learning rate on rank 1, and go on training."""
    model, optimizer = make()
    with ending_at_once(model):
        for number in range(4):
            optimizer.param_groups[0]["lr"] = 2e-3 if number == 1 and is_second() else 1e-3
            train(model, optimizer, number)


def test_another_learning_rate_is_an_error_on_every_rank(two: RankPool) -> None:
    for each in two.outcomes(step_otherwise):
        assert isinstance(each, Raised)
        assert each.kind == "RankError", each.trace
        assert f"different options for a step of {ALL}: lr is 0.001 on rank 0, 0.002 on rank 1, so" in each.message


# What is right: each is called on every rank, and none raises.


def go_on(model: nn.Module, optimizer: Optimizer) -> None:
    """Train two more steps: all ranks meet in each."""
    for number in range(2):
        train(model, optimizer, number)


def skip_together(model: nn.Module, optimizer: Optimizer) -> None:
    """Skip a step on every rank, since the loss of one is not finite."""
    loss = forward(model, 0)
    loss.backward()
    bad = torch.tensor(float(is_second()))
    dist.all_reduce(bad)
    if not bad:
        optimizer.step()
    optimizer.zero_grad()


def step_in_any_order(model: nn.Module, optimizer: Optimizer) -> None:
    """Step two optimizers, in another order on each rank, and with a scheduler each."""
    optimizers = in_two(model)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1) for each in optimizers]
    for number in range(2):
        forward(model, number).backward()
        for each in optimizers if is_second() else reversed(optimizers):
            each.step()
            each.zero_grad()
        for schedule in schedules:
            schedule.step()


def step_what_is_mine(model: nn.Module, optimizer: Optimizer) -> None:
    """Step an optimizer of the parameters of this rank, of which another rank has none."""
    of_rank = AdamW([each for each in model.parameters() if not each.is_meta], lr=1e-2)
    for number in range(2):
        train(model, of_rank, number)


def step_in_hooks(model: nn.Module, optimizer: Optimizer) -> None:
    """Step an optimizer of each parameter as soon as there is its gradient: on its rank."""
    optimizers = {each: SGD([each], lr=0.1) for each in model.parameters()}
    handles = [each.register_post_accumulate_grad_hook(lambda one: optimizers[one].step()) for each in optimizers]
    for number in range(2):
        forward(model, number).backward()
        model.zero_grad()
    for handle in handles:
        handle.remove()


def step_copies(model: nn.Module, optimizer: Optimizer) -> None:
    """Step a copy of an optimizer, which has copies of parameters, on one rank; pickle it."""
    go_on(model, optimizer)
    if is_second():
        copy.deepcopy(optimizer).step()
    with pytest.raises(UnsupportedError, match="saving would read or write it"):
        pickle.dumps(optimizer)


def step_others(model: nn.Module, optimizer: Optimizer) -> None:
    """Step an optimizer of another model on one rank, as for a probe."""
    if is_second():
        probe = nn.Linear(2, 2)
        other = SGD(probe.parameters(), lr=0.1)
        probe(torch.ones(2)).sum().backward()
        other.step()


def close_after_a_skip(model: nn.Module, optimizer: Optimizer) -> None:
    """Skip the last step of another model on a rank, and close it; an optimizer of it may step where nothing of it is."""
    other, of_other = make()
    forward(other, 0).backward()
    if not is_second():
        of_other.step()
    zinf_compile.close(other)


RIGHT: dict[str, Callable[[nn.Module, Optimizer], None]] = {
    each.__name__: each
    for each in (
        *(skip_together, step_in_any_order, step_what_is_mine, step_in_hooks, step_copies, step_others),
        close_after_a_skip,
    )
}


def do_right() -> list[str]:
    """Return what raised an error, and which."""
    errors = []
    model, optimizer = make()
    for name, call in RIGHT.items():
        try:
            call(model, optimizer)
            go_on(model, optimizer)
        except zinf_compile.ZinfError as error:
            errors.append(f"{name}: {type(error).__name__}: {error}")
    zinf_compile.close(model)
    return errors


def test_steps_that_belong_together_go_on(two: RankPool) -> None:
    assert two.run(do_right) == [[]] * 2


# A scaler decides on each rank whether to skip a step: by the gradients of all.


def scale(is_fused: bool, unscales: bool) -> tuple[list[float], list[set[str]]]:
    """Train with a GradScaler, with infinities on one rank in one step; return scales, and the modules that changed."""
    model = optimize(build_deep(), {**OPTIONS, "schedule": "rounds"})
    block = list(model.deep.blocks[1].parameters())  # type: ignore
    others = [each for each in model.parameters() if not any(each is of_block for of_block in block)]
    optimizers = [AdamW(each, lr=1e-2, fused=is_fused) for each in (block, others)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
    mine = {name: each for name, each in model.named_parameters() if not isinstance(each, RemoteParameter)}
    scales, changed = [], []
    for number in range(3):
        before = {name: each.detach().clone() for name, each in mine.items()}
        scaler.scale(forward(model, number)).backward()
        if number == 1:
            model.deep.blocks[1].up.weight.grad.mul_(math.inf)  # type: ignore
        for optimizer in optimizers:
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        scales.append(scaler.get_scale())
        changed.append({_block_of(name) for name, each in mine.items() if not torch.equal(each, before[name])})
    zinf_compile.close(model)
    return scales, changed


def _block_of(name: str) -> str:
    return "block" if ".blocks.1." in name else "others"


@pytest.mark.parametrize(
    ("is_fused", "unscales"),
    [
        (True, False),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((False, False), (False, True), (True, True))),
    ],
)
def test_a_scaler_skips_the_same_steps_on_every_rank(is_fused: bool, unscales: bool, two: RankPool) -> None:
    scales = [1024.0, 512.0, 512.0]
    first, second = two.run(scale, is_fused, unscales)
    assert first == (scales, [{"others"}] * 3)
    assert second == (scales, [{"block", "others"}, {"others"}, {"block", "others"}])
