"""Learning rate schedules, and all combinations of optimizer, placement, accumulation, clipping and schedule."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

import zinf_compile

STEPS = 5
WIDTH = 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), y)


def net():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    return Net(), [
        {"x": torch.randn(4, WIDTH, generator=generator), "y": torch.randint(5, (4,), generator=generator)}
        for _ in range(STEPS)
    ]


def warm_up_and_decay(optimizer):
    return schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.CosineAnnealingLR(optimizer, T_max=3)],
        milestones=[2],
    )


SCHEDULES = {
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "multiplicative": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda _: 0.8),
    "step": lambda optimizer: schedules.StepLR(optimizer, 2, gamma=0.5),
    "multi step": lambda optimizer: schedules.MultiStepLR(optimizer, [1, 3], gamma=0.3),
    "constant": lambda optimizer: schedules.ConstantLR(optimizer, 0.5, total_iters=2),
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.7),
    "polynomial": lambda optimizer: schedules.PolynomialLR(optimizer, total_iters=4, power=2.0),
    "cosine restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, T_0=2),
    "cyclic": lambda optimizer: schedules.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=2, cycle_momentum=True),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 2e-2, total_steps=STEPS + 1),  # changes betas too
    "warm-up, decay": warm_up_and_decay,
    "plateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(parity, schedule):
    def loop(model, batches, trace):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        stepping = SCHEDULES[schedule](optimizer)
        rates = set()
        for batch in batches:
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stepping.step(*([loss.detach()] if schedule == "plateau" else []))
            rates.add(float(optimizer.param_groups[0]["lr"]))
            trace.losses.append(loss.detach().clone())
            trace.record_model(model, optimizer)
        assert len(rates) > 1

    parity.check_loop(loop, net, captured=False)


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "two groups": lambda model: torch.optim.AdamW(
        [
            {"params": [parameter for parameter in model.parameters() if parameter.dim() > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in model.parameters() if parameter.dim() == 1], "lr": 3e-3},
        ],
        lr=1e-2,
        amsgrad=True,
    ),
}
CLIPS = {
    "": lambda model: torch.zeros(()),
    "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3) or torch.zeros(()),
}
MATRIX = list(itertools.product(OPTIMIZERS, [1, 3], CLIPS, ["", "one cycle", "plateau"]))


def train(model, batches, trace, optimizer_name, num_micro_steps, clip, schedule):
    optimizer = OPTIMIZERS[optimizer_name](model)
    stepping = SCHEDULES[schedule](optimizer) if schedule else None
    for step in range(2):
        for micro_step in range(num_micro_steps):
            loss = model(**batches[(step + micro_step) % STEPS]) / num_micro_steps
            loss.backward()
            trace.losses.append(loss.detach().clone())
        trace.losses.append(CLIPS[clip](model).clone())
        trace.record_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if stepping is not None:
            stepping.step(*([loss.detach()] if schedule == "plateau" else []))
        trace.record_model(model, optimizer)


def test_matrix(parity, placement, captured):
    """Run all combinations in turn on the same models; initial values are loaded before each."""
    plain, batches = net()
    ours, _ = parity.optimized(net, placement, captured=captured)
    start = net()[0].state_dict()
    for combination in MATRIX:
        traces = []
        for model in (ours, plain):
            model.load_state_dict(start)
            traces.append(parity.trace())
            train(model, batches, traces[-1], *combination)
        try:
            parity.assert_same(*traces)
        except BaseException as error:
            error.add_note(f"in {combination}")
            raise
    parity.assert_streamed(zinf_compile.report(ours), placement, captured=captured)
