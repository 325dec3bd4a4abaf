"""``torch.autocast`` around the forward or inside of it, and ``GradScaler``: bitwise as around a plain model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 3
WIDTH = 32


class Net(nn.Module):
    """The output is tied to the input: an embedding is not autocast, a matrix product is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(self.norm(hidden)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class AutocastInside(Net):
    """Only its blocks compute in bfloat16, one of them with autocast off again."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers[:3]:
                hidden = hidden + torch.tanh(layer(hidden))
            with torch.autocast("cpu", enabled=False):
                hidden = hidden.float() + torch.tanh(self.layers[3](hidden.float()))
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def make(cls: type[Net]):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(48, (STEPS, 2, 7), generator=generator)
    return cls(), [{"x": each[:, :-1], "y": each[:, 1:]} for each in tokens]


def net():
    return make(Net)


def net_with_autocast_inside():
    return make(AutocastInside)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def autocast_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**batch)


def test_autocast_around_the_forward(parity, placement, captured):
    parity.check(net, placement, captured=captured, loss=autocast_loss)


def test_autocast_inside_of_the_model(parity, captured):
    parity.check(net_with_autocast_inside, "nvme", captured=captured)


def test_autocast_on_and_off(parity, captured):
    """A plain evaluation between steps under autocast, and a plain step: each its own graph."""

    def loop(model, batches, trace):
        optimizer = adamw(model)
        for step, batch in enumerate(batches):
            loss = autocast_loss(model, batch) if step != 1 else model(**batch)
            loss.backward()
            with torch.no_grad():
                trace.losses += [loss.clone(), model(**batch).clone()]
            trace.record_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            trace.record_model(model, optimizer)

    parity.check_loop(loop, net, captured=captured, device_memory=48 * 2**10)


def test_grad_scaler(parity, placement, captured):
    """Scaled, unscaled, clipped; the step with an infinite gradient is skipped and changes no bit."""

    def loop(model, batches, trace):
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step, batch in enumerate([*batches, *batches]):
            loss = autocast_loss(model, batch)
            scaler.scale(loss).backward()
            if step == 2:
                model.get_parameter("layers.1.weight").grad[0, 0] = float("inf")
            if step == 4:
                model.get_parameter("layers.2.bias").grad[1] = float("nan")
            if step != 5:
                scaler.unscale_(optimizer)
                trace.losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).nan_to_num())
            before = {name: parameter.clone() for name, parameter in model.named_parameters()}
            scaler.step(optimizer)
            scaler.update()
            if step in (2, 4):
                assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
            optimizer.zero_grad()
            trace.losses += [loss.detach().clone(), torch.tensor(scaler.get_scale())]
            trace.record_model(model, optimizer)

    parity.check_loop(loop, net, placement, captured=captured, loss=autocast_loss)
