"""Training loops that users write: accumulation, clipping, evaluation, several forwards, frozen and written parameters."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zinf_compile.passes.planner.schedule import prefetch
from zinf_compile.passes.planner.search import search
from zinf_compile.passes.planner.search.build import LookAhead

STEPS = 3
MICRO_STEPS = 4
WIDTH = 32
OPEN_NBYTES = 7 * 2**10  # slightly more than a forward of ``net`` saves


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, 48, bias=False)

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.run_block(block, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class CheckpointedNet(Net):
    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class BrokenNet(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.embed(x)))
        torch._dynamo.graph_break()  # the line that the report names
        return F.cross_entropy(self.head(self.blocks[2](x)).flatten(0, 1), y.flatten())


def make(cls: type[Net], dropout: float = 0.0):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"x": tokens[:, :-1], "y": tokens[:, 1:]}
        for tokens in torch.randint(48, (STEPS * MICRO_STEPS, 2, 7), generator=generator)
    ]
    return cls(dropout), batches


def net():
    return make(Net)


def net_with_dropout():
    return make(Net, dropout=0.2)


def checkpointed_net():
    return make(CheckpointedNet, dropout=0.2)


def broken_net():
    return make(BrokenNet)


def partly_frozen_net():
    model, batches = make(Net)
    model.embed.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model, batches


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def step_simply(model, batches, trace):
    """Take one step per batch, and record everything."""
    optimizer = adamw(model)
    for batch in batches[:STEPS]:
        loss = model(**batch)
        loss.backward()
        trace.losses.append(loss.detach().clone())
        trace.take_step(model, optimizer)


def accumulate(model, batches, trace):
    """Take one step for every four micro-batches, with gradients clipped."""
    optimizer = adamw(model)
    for step in range(STEPS):
        for batch in batches[step * MICRO_STEPS :][:MICRO_STEPS]:
            loss = model(**batch) / MICRO_STEPS
            loss.backward()
            trace.losses.append(loss.detach().clone())
        trace.record_gradients(model)
        trace.losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        trace.take_step(model, optimizer)


def test_gradient_accumulation(parity, placement, way):
    parity.check_loop(accumulate, net, placement, **way)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(parity, way, set_to_none):
    def loop(model, batches, trace):
        optimizer = adamw(model)
        for step, batch in enumerate(batches[:STEPS]):
            loss = model(**batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
            trace.record_gradients(model)
            optimizer.step()
            (model if step == 1 else optimizer).zero_grad(set_to_none=set_to_none)
            trace.record_gradients(model)
            trace.record_model(model, optimizer)

    parity.check_loop(loop, net, **way)


def test_gradients_of_a_step_stay_until_they_are_zeroed(parity, way):
    """Without ``zero_grad`` the next backward adds to the gradients of the last step."""

    def loop(model, batches, trace):
        optimizer = adamw(model)
        for batch in batches[:STEPS]:
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            trace.losses.append(loss.detach().clone())
            trace.record_gradients(model)
            trace.record_model(model, optimizer)

    parity.check_loop(loop, net, **way)


def test_numbers_nobody_looks_at_in_between(parity, placement, way):
    """Read no home tensor before the end of the loop: the result must not depend on reads in between."""

    def loop(model, batches, trace):
        optimizer = torch.optim.AdamW(
            [{"params": model.blocks.parameters(), "lr": 3e-3}, {"params": [model.embed.weight, model.head.weight]}],
            lr=1e-2,
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for batch in batches[:STEPS]:
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            trace.losses.append(loss.detach().clone())
        trace.record_model(model, optimizer)

    parity.check_loop(loop, net, placement, **way)


@pytest.mark.parametrize("grad_mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.long)])
def test_inference_between_steps(parity, way, grad_mode):
    def loop(model, batches, trace):
        optimizer = adamw(model)
        for batch in batches[:STEPS]:
            model.eval()
            with grad_mode():
                trace.losses.append(model(**batch).clone())
            model.train()
            loss = model(**batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
            trace.take_step(model, optimizer)

    parity.check_loop(loop, net_with_dropout, **way)


def test_inference_between_forward_and_backward(parity, way):
    def loop(model, batches, trace):
        optimizer = adamw(model)
        for batch in batches[:STEPS]:
            loss = model(**batch)
            with torch.no_grad():
                trace.losses.append(model(**batches[-1]).clone())
            loss.backward()
            trace.losses.append(loss.detach().clone())
            trace.take_step(model, optimizer)

    parity.check_loop(loop, net, **way)


def test_several_forwards_before_one_backward(parity, placement, way):
    def loop(model, batches, trace):
        optimizer = adamw(model)
        for step in range(STEPS):
            losses = [model(**batch) for batch in batches[3 * step : 3 * step + 3]]
            torch.stack(losses).sum().backward()
            trace.losses += [loss.detach().clone() for loss in losses]
            trace.take_step(model, optimizer)

    options = {**way, "recompute": True}
    if way["captured"]:  # the activations of the first two forwards are still saved when the third runs
        options["device_memory"] = parity.budgets(net, placement, **options)["device_memory"] + 2 * OPEN_NBYTES
    is_streamed = "compute" not in way  # segments save less, which leaves room for some parameters
    parity.check_loop(loop, net, placement, is_streamed=is_streamed, **options)


def test_frozen_parameters(parity, placement, way):
    frozen = []

    def loop(model, batches, trace):
        step_simply(model, batches, trace)
        frozen.append({name: p for name, p in model.named_parameters() if not p.requires_grad})

    parity.check_loop(loop, partly_frozen_net, placement, **way)
    start = dict(partly_frozen_net()[0].named_parameters())
    for parameters in frozen:
        assert len(parameters) == 6
        for name, parameter in parameters.items():
            assert parameter.grad is None, name
            assert torch.equal(parameter, start[name]), name


def test_parameters_frozen_and_unfrozen_in_between(parity, way):
    """``requires_grad_`` after the first step works as in PyTorch."""

    def loop(model, batches, trace):
        optimizer = adamw(model)
        for step, batch in enumerate(batches[:STEPS]):
            model.blocks[0].requires_grad_(step != 1)
            loss = model(**batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
            trace.take_step(model, optimizer)

    parity.check_loop(loop, net, **way)


def test_user_writes_parameters_between_steps(parity, placement, way):
    def loop(model, batches, trace):
        optimizer = adamw(model)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        for step, batch in enumerate(batches[:STEPS]):
            if step == 1:
                model.head.weight.data.mul_(0.5)
                with torch.no_grad():
                    model.embed.weight[3] = 0.25
                nn.init.constant_(model.blocks[0].up.bias, 0.1)
            if step == 2:
                model.load_state_dict(saved)
            loss = model(**batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
            trace.take_step(model, optimizer)

    parity.check_loop(loop, net, placement, **way)


def test_user_writes_gradients(parity, way):
    """Gradients scaled in place, replaced and removed before the step."""

    def loop(model, batches, trace):
        optimizer = adamw(model)
        for batch in batches[:STEPS]:
            loss = model(**batch)
            loss.backward()
            for parameter in model.blocks.parameters():
                parameter.grad.mul_(0.5)
            model.head.weight.grad = model.head.weight.grad.sign()
            model.embed.weight.grad = None
            trace.losses.append(loss.detach().clone())
            trace.take_step(model, optimizer)

    parity.check_loop(loop, net, **way)


@pytest.mark.parametrize(
    "make_optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adafactor]
)
def test_other_optimizers(parity, make_optimizer):
    def loop(model, batches, trace):
        optimizer = make_optimizer(model.parameters(), lr=1e-2)
        for batch in batches[:STEPS]:
            loss = model(**batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
            trace.record_model(model, optimizer)

    parity.check_loop(loop, net, captured=False)


def test_optimizer_state_goes_through_a_checkpoint(parity, way):
    """Save the state, train, load it and train again: the second half gives the same numbers twice."""

    def loop(model, batches, trace):
        optimizer = adamw(model)
        step_with(model, optimizer, batches[0], trace)
        state = torch.utils._pytree.tree_map_only(Tensor, torch.clone, optimizer.state_dict())
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        step_with(model, optimizer, batches[1], trace)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        step_with(model, optimizer, batches[1], trace)
        assert torch.equal(trace.losses[1], trace.losses[2])
        assert all(torch.equal(trace.parameters[1][name], trace.parameters[2][name]) for name in trace.parameters[1])

    def step_with(model, optimizer, batch, trace):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(loss.detach().clone())
        trace.record_model(model, optimizer)

    parity.check_loop(loop, net, **way)


@pytest.mark.needs_more_on_streams(device_memory=4)
@pytest.mark.of_a_cpu(reason="with the larger budget of streams one of its graphs gathers nothing")
def test_graph_break(parity):
    report = parity.check_loop(step_simply, broken_net, captured=True, device_memory=64 * 2**10)
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, start=1) if "the line that the report names" in line)
    assert any(where.startswith(f"{__file__}:{number}:") for where in report.graph_breaks), report.graph_breaks
    assert [bool(plan.gathers) for plan in report.plans] == [True, True]


@pytest.mark.parametrize("recompute", [True, False])
def test_recompute(parity, recompute):
    report = parity.check_loop(step_simply, net_with_dropout, captured=True, recompute=recompute)
    assert [plan.activations.policy for plan in report.plans] == ["recompute_blocks" if recompute else "save"]


def test_transfers_that_run_ahead(parity, monkeypatch):
    """With so little memory the planner would keep parameters rather than prefetch them, so the test forces prefetching."""
    monkeypatch.setattr(search, "_look_aheads", lambda _: (LookAhead(prefetch_nbytes=24 * 2**10, group_nbytes=2**10),))
    monkeypatch.setattr(prefetch, "_latest_issues", lambda residencies, _: ([0] * len(residencies),) * 2)
    options = {"prefetch_memory": 24 * 2**10, "is_streamed": False}  # some parameters may be resident
    report = parity.check_loop(step_simply, net, captured=True, placement="nvme", **options)
    assert any(transfer.issue < transfer.need_by for plan in report.plans for transfer in plan.gathers)


def test_no_transfer_runs_ahead_unasked(parity):
    report = parity.check_loop(step_simply, net, captured=True, prefetch_memory=0, placement="host")
    assert not any(transfer.issue < transfer.need_by for plan in report.plans for transfer in plan.gathers)


def test_checkpoint_in_user_code(parity, way):
    parity.check_loop(step_simply, checkpointed_net, **way)
