"""Training that is saved and continued elsewhere, bit by bit: under other budgets, in a plain model, with any optimizer."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import zinf_compile

NUM_BEFORE, NUM_AFTER = 2, 2
NUM_BATCHES = 2 * (NUM_BEFORE + NUM_AFTER)  # two micro-batches a step
WIDTH = 24


class Counter(nn.Module):
    """A module with extra state, as ``get_extra_state`` returns it."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x * (1 + self.num_calls / 100)

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]


class Net(nn.Module):
    """Tied, frozen, transposed and scalar parameters, three kinds of buffers, dropout and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.mix = nn.Parameter(torch.randn(2 * WIDTH, WIDTH).t())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.counter = Counter()
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.rand(2 * WIDTH) > 0.3)
        self.register_buffer("table", torch.ones(2 * WIDTH), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.embed(x)).flatten(0, 1))
        x = F.dropout(x @ self.mix * self.mask * self.table, 0.2, self.training) * self.scale
        return F.cross_entropy(self.head(self.counter(x[:, :WIDTH])), y.flatten())


def net():
    torch.manual_seed(0)
    tokens = torch.randint(40, (NUM_BATCHES, 3, 8), generator=torch.Generator().manual_seed(1))
    return Net(), [{"x": each[:, :-1], "y": each[:, 1:]} for each in tokens]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with two groups that have different rates."""
    first = [model.embed.weight, model.mix]
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not other for other in first)]
    return torch.optim.AdamW([{"params": first, "lr": 3e-3, "betas": (0.8, 0.9)}, {"params": rest}], lr=1e-2)


def train(model, optimizer, schedule, batches, trace, *, first: int = 0) -> None:
    """Take a step after every second batch, numbered from ``first``. An odd batch at the end leaves its gradients."""
    for index, batch in enumerate(batches, start=first):
        loss = model(**batch)
        loss.backward()
        trace.losses.append(loss.detach().clone())
        trace.record_gradients(model)
        if index % 2:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            trace.record_model(model, optimizer)


def schedule_of(optimizer: torch.optim.Optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)


def resume(parity, folder: Path, before, after, make_optimizer=adamw, *, pending: bool = True):
    """Train ``before``, save, load into ``after`` and train on; compare with a plain model that is never interrupted.

    ``before`` and ``after`` are names of placements, or "plain".
    """

    def make(placement):
        return net() if placement == "plain" else parity.optimized(net, placement, captured=False)

    model, batches = net()
    optimizer = make_optimizer(model)
    plain = parity.trace()
    torch.manual_seed(5)
    train(model, optimizer, schedule_of(optimizer), batches, plain)

    ours = parity.trace()
    model, _ = make(before)
    optimizer = make_optimizer(model)
    schedule = schedule_of(optimizer)
    torch.manual_seed(5)
    cut = 2 * NUM_BEFORE + pending
    train(model, optimizer, schedule, batches[:cut], ours)
    zinf_compile.save(folder, model, optimizer, extra={"schedule": schedule.state_dict(), "cut": cut})

    model, _ = make(after)
    optimizer = make_optimizer(model)
    schedule = schedule_of(optimizer)
    torch.manual_seed(6)
    if pending:  # train first, so that load has gradients and state to replace
        train(model, optimizer, schedule, batches[:3], parity.trace())
    extra = zinf_compile.load(folder, model, optimizer)
    schedule.load_state_dict(extra["schedule"])
    assert extra["cut"] == cut
    parity.assert_equal(model.embed.weight.grad, ours.gradients[-1]["embed.weight"] if pending else None, "pending")
    train(model, optimizer, schedule, batches[cut:], ours, first=cut)
    assert len(ours.losses) == NUM_BATCHES
    parity.assert_same(ours, plain)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["initial_lr"] / 4)
    return model, optimizer


PLACES = ["nvme", "host", "mixed", "plain"]


@pytest.mark.parametrize("before", PLACES)
@pytest.mark.parametrize("after", PLACES)
def test_anywhere(parity, before, after, tmp_path):
    resume(parity, tmp_path / "checkpoint", before, after, pending=before != "host")


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "Adam with amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2, t0=1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, centered=True, momentum=0.5),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-2),
    # Adafactor sums rows and columns, in a different order where the plain model's weight is transposed.
    "Adafactor": lambda parameters: torch.optim.Adafactor([p for p in parameters if p.shape != (WIDTH, 2 * WIDTH)]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(parity, name, tmp_path):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])

    resume(parity, tmp_path, "nvme", "nvme", make)


def test_before_the_first_step(parity, tmp_path):
    """A checkpoint without optimizer state: after ``load`` there is none, whatever the optimizer had before."""
    model, batches = parity.optimized(net, "nvme", captured=False)
    zinf_compile.save(tmp_path, model, adamw(model))
    for make in (net, lambda: parity.optimized(net, "nvme", captured=False)):
        other, _ = make()
        optimizer = adamw(other)
        train(other, optimizer, schedule_of(optimizer), batches[:3], parity.trace())
        zinf_compile.load(tmp_path, other, optimizer)
        assert len(optimizer.state) == 0
        assert all(parameter.grad is None for parameter in other.parameters())
        for name, parameter in model.named_parameters():
            parity.assert_equal(other.get_parameter(name).detach(), parameter.detach(), name)


def gpt():
    from test_mixed_precision import gpt as make

    return make()


@pytest.mark.parametrize("after", ["nvme", pytest.param("mixed", marks=pytest.mark.long)])
def test_mixed_precision_captured(parity, after, tmp_path, monkeypatch):
    """Master copies, bfloat16 compute copies and gradients; what the user wrote just before the save is included."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def optimizer_of(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def run(model, optimizer, batches, trace):
        for batch in batches:
            loss = model(**batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
            trace.take_step(model, optimizer)

    plain, ours = parity.trace(), parity.trace()
    model, batches = parity.optimized(gpt, "nvme", captured=True, compute_dtype=torch.bfloat16)
    optimizer = optimizer_of(model)
    run(model, optimizer, batches[:2], parity.trace())
    model.head.weight.data.mul_(0.75)
    zinf_compile.save(tmp_path, model, optimizer)
    run(model, optimizer, batches[2:], plain)

    model, _ = parity.optimized(gpt, after, captured=True, compute_dtype=torch.bfloat16)
    optimizer = optimizer_of(model)
    run(model, optimizer, batches[3:4], parity.trace())
    zinf_compile.load(tmp_path, model, optimizer)
    run(model, optimizer, batches[2:], ours)
    parity.assert_same(ours, plain)


def test_a_compiled_model_has_the_names_of_the_module(tmp_path):
    model, _ = net()
    zinf_compile.save(tmp_path, torch.compile(model, backend="eager"))
    other, _ = net()
    with torch.no_grad():
        other.mix.zero_()
    zinf_compile.load(tmp_path, other)
    assert torch.equal(other.mix, model.mix)


def test_under_the_backend(parity, tmp_path, monkeypatch):
    """With ``torch.compile(model, backend="zinf")`` the model is plain before its first call, and has a store afterwards."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    budgets = parity.budgets(gpt, "mixed", captured=True)

    def make():
        model, _ = gpt()
        compiled = torch.compile(model, backend="zinf", options={**budgets, "device_memory": "1MiB"}, dynamic=False)
        return model, compiled, torch.optim.AdamW(model.parameters(), lr=1e-2)

    _, batches = gpt()
    before, late, early = parity.trace(), parity.trace(), parity.trace()
    model, compiled, optimizer = make()
    train(compiled, optimizer, schedule_of(optimizer), batches[:3], parity.trace())
    zinf_compile.save(tmp_path, compiled, optimizer)
    train(compiled, optimizer, schedule_of(optimizer), batches[3:], before, first=3)
    zinf_compile.load(tmp_path, compiled, optimizer)
    train(compiled, optimizer, schedule_of(optimizer), batches[3:], late, first=3)
    parity.assert_same(late, before)
    zinf_compile.close(model)
    torch._dynamo.reset()
    model, compiled, optimizer = make()
    zinf_compile.load(tmp_path, compiled, optimizer)
    train(compiled, optimizer, schedule_of(optimizer), batches[3:], early, first=3)
    parity.assert_same(early, before)
    zinf_compile.close(model)


def test_people_can_open_the_files(parity, tmp_path):
    """``model.safetensors`` has the names of ``state_dict()``, and the safetensors library reads every value."""
    model, optimizer = resume(parity, tmp_path, "nvme", "nvme")
    zinf_compile.save(tmp_path, model, optimizer)
    (data,) = tmp_path.glob("data-*")
    loaded, state = load_file(data / "model.safetensors"), model.state_dict()
    assert set(loaded) == set(state) - {"head.weight", "counter._extra_state"}  # tied, and no tensor
    for name, value in loaded.items():
        parity.assert_equal(value, state[name].clone(), name)
    states = load_file(data / "optimizer.safetensors")
    exp_avg = optimizer.state[model.mix]["exp_avg"]
    assert torch.equal(states["mix/exp_avg"], exp_avg)
    assert not (data / "gradients.safetensors").exists()
