"""Optimizers that need whole tensors, on ranks: each parameter has an owner, and the bits are those of one process."""

import copy
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import zinf_compile
from tests.distributed.test_errors import SOON
from tests.distributed.workloads import (
    KIB,
    Loop,
    batch_of,
    check_at_rest,
    full,
    of_rank,
    optimize,
    placements,
    train_alone,
    train_on_ranks,
    train_step,
)
from tests.support.rank_pool import RankPool
from tests.support.traces import Trace, assert_equal, assert_same
from zinf_compile.ir.errors import StoreError
from zinf_compile.runtime.optim.owners import OwnedUpdate
from zinf_compile.runtime.optim.shadow import is_element_wise
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.store.store import Store, store_of


class TwoClasses(nn.Module):
    """Its last layer has fewer rows than some ranks; no size is even."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(51, 61), nn.Linear(61, 2)
        self.ups = nn.ModuleList(nn.Linear(61, 181) for _ in range(6))
        self.downs = nn.ModuleList(nn.Linear(181, 61) for _ in range(6))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.embed(tokens)
        for up, down in zip(self.ups, self.downs, strict=True):
            hidden = hidden + down(functional.gelu(up(hidden)))
        return functional.cross_entropy(self.head(hidden).view(-1, 2), targets.view(-1) % 2)


class NormedMomentum(Optimizer):
    """Element-wise in its first step and in need of whole tensors from then on; it counts its steps in its groups."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, fails_at: int = -1) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "fails_at": fails_at})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            group["count"] += bool(given)
            for parameter in given:
                state = self.state[parameter]
                if group["count"] == 1:
                    state["mean"] = parameter.grad.clone()
                    continue
                norm = float(state["mean"].lerp_(parameter.grad, 0.1).norm())
                if group["count"] == group["fails_at"] and parameter.shape == (51, 61):
                    raise ArithmeticError("the norm is odd")
                state["norm"] = torch.tensor(norm)
                parameter.add_(state["mean"], alpha=-group["lr"] / (1 + norm))


def build_classes() -> nn.Module:
    """Return a small model, the same on every rank."""
    torch.manual_seed(0)
    return TwoClasses()


def build_matrices() -> nn.Module:
    """Return one of which only matrices are trained, since Muon takes nothing else."""
    model = build_classes()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return model


class InGroups(Loop):
    """A loop whose optimizer has two groups."""

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of the trained parameters, those of ``head`` in a group of their own."""
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        last = [each for name, each in trained.items() if name.startswith("head")]
        others = [each for name, each in trained.items() if not name.startswith("head")]
        cls = NormedMomentum if self.optimizer == "NormedMomentum" else getattr(torch.optim, self.optimizer)
        made: Optimizer = cls([{"params": others}, {"params": last, "lr": 0.3}], **self.optimizer_options)
        return made


LOOPS = {
    "Adafactor": InGroups(
        build=build_classes, optimizer="Adafactor", optimizer_options={"lr": 0.1, "weight_decay": 0.1}
    ),
    "Muon": InGroups(build=build_matrices, optimizer="Muon", optimizer_options={"lr": 0.1}, num_accumulated=2),
    "NormedMomentum": InGroups(build=build_classes, optimizer="NormedMomentum", optimizer_options={"lr": 0.1}),
}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return budgets that put parameters on each tier, without capturing, which takes longer than the rest."""
    given = {name: {**each, "capture": False} for name, each in placements(str(tmp_path)).items()}
    given["nvme"]["host_memory"] = 520 * KIB
    return given


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("Adafactor", "nvme"),
        *(pytest.param(name, "nvme", marks=pytest.mark.long) for name in LOOPS if name != "Adafactor"),
        *(pytest.param(name, "resident", marks=pytest.mark.long) for name in LOOPS),
    ],
)
def test_three_ranks(name: str, placement: str, three: RankPool, options: dict[str, dict[str, Any]]) -> None:
    plain = train_alone(LOOPS[name], 3)
    for rank, ours in enumerate(three.run(train_on_ranks, LOOPS[name], options[placement])):
        assert_same(ours, of_rank(plain, rank, 3))


@pytest.mark.parametrize(
    ("name", "stage", "capture"),
    [
        ("Adafactor", 1, False),
        *(
            pytest.param(name, stage, capture, marks=pytest.mark.long)
            for name in LOOPS
            for stage in (1, 2, 3)
            for capture in (False, True)
        ),
    ],
)
def test_stages(name: str, stage: int, capture: bool, two: RankPool, options: dict[str, dict[str, Any]]) -> None:
    loop = replace(LOOPS[name], num_steps=2, num_accumulated=2, looks_at_gradients=False)
    plain = train_alone(loop, 2, reduces_once=stage == 1 and capture)
    plain.gradients = []
    given = {**options["nvme"], "capture": capture, "stage": stage, "device_memory": 1536 * KIB}
    for rank, ours in enumerate(two.run(train_on_ranks, loop, given)):
        assert_same(ours, of_rank(plain, rank, 2))


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [((2, 2), 3), *(pytest.param(*each, marks=pytest.mark.long) for each in (((4, 1), 3), ((2, 2), 1), ((2, 2), 2)))],
)
def test_replicas(mesh: tuple[int, int], stage: int, four: RankPool, options: dict[str, dict[str, Any]]) -> None:
    loop = replace(LOOPS["Adafactor"], num_steps=2)
    plain = train_alone(loop, 4)
    given = {**options["nvme"], "mesh": mesh, "stage": stage, "host_memory": 1024 * KIB, "device_memory": 1536 * KIB}
    for rank, ours in enumerate(four.run(train_on_ranks, loop, given)):
        assert_same(ours, of_rank(plain, rank, 4))


def look_at_homes(options: Mapping[str, Any]) -> tuple[set[str], int, bool, list[int]]:
    """Take steps of Muon in bfloat16, and look at what a rank has then.

    Returns the tiers of what an update reads, the bytes of states, whether the compute copies are the master copies in
    bfloat16, and the bytes that have passed to owners and back until each step.
    """
    loop = LOOPS["Muon"]
    model = optimize(loop.build(), {**options, "compute_dtype": torch.bfloat16})
    meter = store_of(record_of(next(model.parameters()))).meter
    optimizer, tiers, nbytes, agree, moved = loop.make_optimizer(model), set[str](), 0, True, [0]
    for step in range(2):
        model(**batch_of(step, dist.get_rank())).backward()
        optimizer.step()
        moved.append(meter.collectives["owners"])
    for parameter in model.parameters():
        record = record_of(parameter)
        assert record is not None
        tiers.update(slot.tier.value for slot in record.slots if parameter.requires_grad)
        nbytes += sum(slot.nbytes for slot in record.copies.states.values())
        if record.copies.are_two:
            compute = record.copies.compute.elements(record.shard)
            agree &= torch.equal(compute, full_rows(parameter).to(torch.bfloat16))
    assert any(record_of(parameter).copies.are_two for parameter in model.parameters())
    check_at_rest(model)
    zinf_compile.close(model)
    return tiers, nbytes, agree, moved


def full_rows(parameter: Tensor) -> Tensor:
    """Return this rank's rows of a parameter, flat."""
    local: Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]  # a DTensor
    return local.reshape(-1)


def test_each_rank_keeps_its_share_on_every_tier(three: RankPool, options: dict[str, dict[str, Any]]) -> None:
    total = sum(each.nbytes for each in build_matrices().parameters() if each.requires_grad)
    for tiers, nbytes, agree, moved in three.run(look_at_homes, options["nvme"]):
        assert tiers == {"host", "nvme"}
        assert abs(nbytes - total / 3) < 0.05 * total
        assert agree
        master, gradient, momentum = total, total // 2, total
        assert moved[1] == master + gradient + master + momentum  # there is no momentum before the first step
        assert moved[2] - moved[1] == moved[1] + momentum


class Lion(Optimizer):
    """An element-wise optimizer that is not of torch."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.add_(mean.clone().lerp_(parameter.grad, 0.1).sign_(), alpha=-self.param_groups[0]["lr"])
                mean.lerp_(parameter.grad, 0.01)


def ask_in_each_step(options: Mapping[str, Any]) -> list[bool]:
    """Return whether an optimizer of another library is found to be element-wise, in each step."""
    model, found = optimize(build_classes(), options), []
    optimizer = Lion(model.parameters())
    for step in range(3):
        model(**batch_of(step, dist.get_rank())).backward()
        found.append(is_element_wise(optimizer))
        optimizer.step()
    zinf_compile.close(model)
    return found


def test_element_wise_optimizers_of_others_need_no_owners(two: RankPool, options: dict[str, dict[str, Any]]) -> None:
    assert two.run(ask_in_each_step, options["resident"]) == [[True] * 3] * 2


def count_steps(options: Mapping[str, Any]) -> list[int]:
    """Return how many steps each group of an optimizer has counted, of which this rank may own no parameter."""
    loop, trace = LOOPS["NormedMomentum"], Trace()
    model = optimize(loop.build(), options)
    optimizer = loop.make_optimizer(model)
    for step in range(3):
        train_step(loop, model, optimizer, step, trace, looks_at_gradients=False)
    zinf_compile.close(model)
    return [group["count"] for group in optimizer.param_groups]


def test_what_an_update_writes_into_its_group_is_written_on_every_rank(
    three: RankPool, options: dict[str, dict[str, Any]]
) -> None:
    assert three.run(count_steps, options["resident"]) == [[3, 3]] * 3


def train_from(loop: Loop, options: Mapping[str, Any], steps: range, load: str | None, save: str | None) -> list[Any]:
    """Train some steps on each rank, between checkpoints; return the losses, and full parameters and states."""
    model = optimize(loop.build(), options)
    optimizer, trace = loop.make_optimizer(model), Trace()
    if load is not None:
        assert zinf_compile.load(load, model, optimizer) == {"step": steps.start}
    for step in steps:
        train_step(loop, model, optimizer, step, trace)
    if save is not None:
        zinf_compile.save(save, model, optimizer, extra={"step": steps.stop})
    values = values_of(model, optimizer)
    check_at_rest(model)
    zinf_compile.close(model)
    return [trace.losses, values]


def values_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor | None]:
    """Return full parameters and states."""
    values = {name: full(parameter) for name, parameter in model.named_parameters()}
    states = optimizer.state_dict()["state"]
    return values | {f"{index} {key}": full(each) for index, state in states.items() for key, each in state.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_checkpoints_fit_one_process_and_other_numbers_of_ranks(
    name: str, three: RankPool, two: RankPool, options: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    loop, folder, again = replace(LOOPS[name], num_steps=4), tmp_path / "checkpoint", tmp_path / "of one process"
    plain = train_alone(loop, 3)
    three.run(train_from, loop, options["nvme"], range(2), None, str(folder))
    model = loop.build()
    optimizer = loop.make_optimizer(model)
    zinf_compile.load(folder, model, optimizer)
    loaded = values_of(model, optimizer)
    assert_values(loaded, plain.parameters[1] | plain.states[1])
    zinf_compile.save(again, model, optimizer, extra={"step": 2})
    for file in ("model.safetensors", "optimizer.safetensors"):
        contents = [next(each.glob(f"data-*/{file}")).read_bytes() for each in (folder, again)]
        assert contents[0] == contents[1]
    for rank, (losses, values) in enumerate(
        three.run(train_from, loop, options["resident"], range(2, 4), str(again), None)
    ):
        assert losses == plain.losses[rank::3][2 * loop.num_accumulated :]
        assert_values(values, plain.parameters[3] | plain.states[3])
    for _, values in two.run(train_from, loop, options["resident"], range(2, 2), str(folder), None):
        assert_values(values, loaded)


def assert_values(ours: Mapping[str, Tensor | None], plain: Mapping[str, Tensor | None]) -> None:
    """Assert that values agree in every bit."""
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert_equal(ours[name], value, name)


def clip_and_swap(loop: Loop, options: Mapping[str, Any]) -> Trace:
    """Train with clipping, with a new optimizer in the middle that gets the state of the first."""
    model, trace = optimize(loop.build(), options), Trace()
    optimizer = loop.make_optimizer(model)
    for step in range(4):
        train_step(loop, model, optimizer, step, trace)
        if step == 1:
            states = copy.deepcopy(optimizer.state_dict())
            optimizer = loop.make_optimizer(model)
            optimizer.load_state_dict(states)
            model.load_state_dict(model.state_dict())
    check_at_rest(model)
    zinf_compile.close(model)
    return trace


@pytest.mark.parametrize("name", ["Adafactor", *(pytest.param(each, marks=pytest.mark.long) for each in LOOPS)])
def test_clipped_gradients_and_state_dicts(name: str, two: RankPool, options: dict[str, dict[str, Any]]) -> None:
    """The norm of all gradients agrees to rounding only; what is done with the clipped ones has the bits of one process."""
    loop = replace(LOOPS[name], clip=0.1)
    traces = two.run(clip_and_swap, loop, options["nvme"])
    model = loop.build()
    optimizer, plain = loop.make_optimizer(model), Trace()
    for gradients in traces[0].gradients:
        total = torch.stack([each.norm() for each in gradients.values() if each is not None]).norm()
        assert 0.05 < total < 0.1001
        for parameter_name, parameter in model.named_parameters():
            parameter.grad = gradients[parameter_name]
        plain.record_gradients(model)
        optimizer.step()
        plain.record_model(model, optimizer)
    for ours in traces:
        plain.losses = ours.losses
        assert_same(ours, plain)


def fail_in_update(options: Mapping[str, Any]) -> None:
    """Train until the update of one parameter raises on its owner."""
    loop = replace(LOOPS["NormedMomentum"], optimizer_options={"fails_at": 2})
    train_on_ranks(loop, options)


def test_an_error_in_an_update_ends_all_ranks(three: RankPool, options: dict[str, dict[str, Any]]) -> None:
    start = time.monotonic()
    outcomes = three.outcomes(fail_in_update, options["nvme"])
    assert time.monotonic() - start < SOON + 60
    assert sorted(each.kind for each in outcomes) == ["ArithmeticError", "RankError", "RankError"]
    (owner,) = (rank for rank, each in enumerate(outcomes) if each.kind == "ArithmeticError")
    for rank in {0, 1, 2} - {owner}:
        what = f"rank {owner}: an update of whole tensors by their owners: ArithmeticError: the norm is odd"
        assert what in outcomes[rank].message
        assert "restart all ranks" in outcomes[rank].message


FAILING = LOOPS["NormedMomentum"]  # whose state is on disk
ANY = {"before", "after", "torn"}  # the values that rows may have: all of them one of these


@dataclass(frozen=True, kw_only=True)
class Broken:
    """What a rank raised and when, and which value it then has of its rows of each parameter."""

    kind: str
    message: str
    ended: float
    values: Mapping[str, str]

    @property
    def states(self) -> set[str]:
        """Return the values that there are."""
        return set(self.values.values()) - {"no rows"}


def break_off(store: Store, happens: str) -> None:
    """Let something happen on rank 1 in the next step: on its disk, or Ctrl-C, while rank 0 takes long where it waits."""
    rank, ranks, engine, update = dist.get_rank(), store.ranks, store.engine, OwnedUpdate.run
    signal.signal(signal.SIGINT, signal.default_int_handler)
    waits = {"interrupt before updates": "share_alike", "interrupt behind updates": "send_from_owner"}

    def fail(*_: object) -> None:
        raise StoreError(f"the {happens} failed: Input/output error")

    def interrupt_and_update(updated: OwnedUpdate) -> dict[str, Any]:
        for _ in range(2):  # by someone who does not want to wait for the end of the step
            signal.raise_signal(signal.SIGINT)
        return update(updated)

    def while_others_wait(call: Callable[..., Any], *args: Any) -> Any:
        setattr(ranks, waits[happens], call)
        if rank == 0:
            time.sleep(2.0)
        elif rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return call(*args)

    if happens in waits:
        setattr(ranks, waits[happens], functools.partial(while_others_wait, getattr(ranks, waits[happens])))
    elif rank == 1 and happens == "interrupts in an update":
        OwnedUpdate.run = interrupt_and_update  # type: ignore[method-assign]
    elif rank == 1:
        setattr(engine, happens, fail)


def step_until(happens: str, options: Mapping[str, Any], values: Sequence[Mapping[str, Tensor]]) -> Broken:
    """Train on each rank; in its second step something happens on rank 1. ``values`` are those after each step."""
    model = optimize(FAILING.build(), options)
    optimizer, store = FAILING.make_optimizer(model), store_of(record_of(next(model.parameters())))
    try:
        for step in range(3):
            model(**batch_of(step, dist.get_rank())).backward()
            if step == 1:
                break_off(store, happens)
            optimizer.step()
            optimizer.zero_grad()
    except (StoreError, KeyboardInterrupt) as error:
        raised, ended = error, time.monotonic()
    for again in (lambda: model(**batch_of(0, 0)), optimizer.step, lambda: full(model.embed.weight)):
        with pytest.raises(StoreError):  # at once
            again()
    assert time.monotonic() - ended < SOON
    store.check_integrity()
    found = {name: find_value(parameter, name, values) for name, parameter in model.named_parameters()}
    return Broken(kind=type(raised).__name__, message=str(raised), ended=ended, values=found)


def find_value(parameter: Tensor, name: str, values: Sequence[Mapping[str, Tensor]]) -> str:
    """Return which value a rank has of its rows of a parameter: that before the second step, after it, or none."""
    try:
        rows = full_rows(parameter)
    except StoreError as error:
        assert f"parameter '{name}' was being updated when an error came" in str(error)  # noqa: PT017
        return "torn"
    shards = [each[name].chunk(dist.get_world_size()) for each in values]
    rank = dist.get_rank()
    if rank >= len(shards[0]):
        return "no rows"
    found = [step for step, of_ranks in enumerate(shards) if torch.equal(rows, of_ranks[rank].reshape(-1))]
    assert found in ([0], [1]), f"{name} has neither value"
    return ("before", "after")[found[0]]


def run_until(happens: str, three: RankPool, options: Mapping[str, Any]) -> list[Broken]:
    """Return what each rank raised, after checking that rank 1 has its own error, and that the others name it, soon."""
    outcomes = three.run(step_until, happens, options, train_alone(FAILING, 3).parameters)
    three.stop()  # collectives may be left behind
    assert outcomes[1].kind == ("KeyboardInterrupt" if "interrupt" in happens else "StoreError")
    for rank in (0, 2):
        assert outcomes[rank].kind == "RankError"
        assert "rank 1: " in outcomes[rank].message
        assert ("KeyboardInterrupt" if "interrupt" in happens else f"the {happens} failed") in outcomes[rank].message
        assert "restart all ranks" in outcomes[rank].message
        assert outcomes[rank].ended - outcomes[1].ended < SOON
    return outcomes


@pytest.mark.long
@pytest.mark.parametrize(
    ("happens", "here", "elsewhere"),
    [
        ("write", {"after", "torn"}, {"after"}),
        ("read", {"before"}, {"before"}),
        ("interrupt before updates", {"before"}, {"before"}),
    ],
)
def test_what_breaks_off_an_update_on_one_rank_ends_all(
    happens: str, here: set[str], elsewhere: set[str], three: RankPool, options: dict[str, dict[str, Any]]
) -> None:
    """What is read in time changes nothing on any rank; what cannot be written home cannot be read, on that rank."""
    outcomes = run_until(happens, three, options["nvme"])
    assert [each.states for each in outcomes] == [elsewhere, here, elsewhere]


@pytest.mark.long
def test_an_interrupt_while_updated_rows_are_on_their_way(three: RankPool, options: dict[str, dict[str, Any]]) -> None:
    """Rows that may have come in part cannot be read; those of later rounds have not changed on any rank."""
    outcomes = run_until("interrupt behind updates", three, options["nvme"])
    assert outcomes[1].states == {"before", "torn"}
    for name, value in outcomes[1].values.items():
        assert {each.values[name] for each in outcomes} - {"no rows"} <= ({"before"} if value == "before" else ANY)


@pytest.mark.long
def test_an_impatient_interrupt_in_an_update(three: RankPool, options: dict[str, dict[str, Any]]) -> None:
    """It takes effect in the next wait for other ranks, or after the round."""
    for each in run_until("interrupts in an update", three, options["nvme"]):
        assert each.states <= ANY


def drop_a_gradient(options: Mapping[str, Any]) -> str:
    """Let rank 1 have no gradient of a parameter; return the error."""
    model = optimize(build_classes(), options)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(**batch_of(0, 0)).backward()
    if dist.get_rank() == 1:
        model.head.weight.grad = None
    with pytest.raises(zinf_compile.RankError) as raised:
        optimizer.step()
    zinf_compile.close(model)
    return str(raised.value)


def test_other_gradients_on_a_rank_are_named(two: RankPool, options: dict[str, dict[str, Any]]) -> None:
    for message in two.run(drop_a_gradient, options["resident"]):
        assert "updates of whole tensors differ: 'head.weight' is (2, 61) with a gradient of torch.float32" in message
        assert "on rank 0 and missing on rank 1" in message
