"""torch's own ways to save and resume work unchanged: state dicts, ``torch.save``, ``torch.distributed.checkpoint``."""

import io
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

WIDTH = 24
NUM_STEPS = 4
CUT = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 40, bias=False)
        self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.gelu(self.up(self.norm(self.embed(x).flatten(0, 1))))
        return F.cross_entropy(self.head(x), y.flatten())


def net():
    torch.manual_seed(0)
    tokens = torch.randint(40, (NUM_STEPS, 3, 8), generator=torch.Generator().manual_seed(1))
    return Net(), [{"x": each[:, :-1], "y": each[:, 1:]} for each in tokens]


def adamw(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW([{"params": trained[:2], "lr": 3e-3}, {"params": trained[2:]}], lr=1e-2)


def train(model, optimizer, batches, trace):
    for batch in batches:
        loss = model(**batch)
        loss.backward()
        trace.losses.append(loss.detach().clone())
        trace.take_step(model, optimizer)


def through_memory(model, optimizer, fresh, fresh_optimizer, folder):
    """Pass the state dicts on as they are."""
    fresh.load_state_dict(model.state_dict())
    fresh_optimizer.load_state_dict(optimizer.state_dict())


def through_torch_save(model, optimizer, fresh, fresh_optimizer, folder):
    """Save and load as torch's tutorials do; ``torch.load`` loads weights only by default."""
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    states = torch.load(buffer)
    assert all(type(value) is Tensor for value in states["model"].values())
    fresh.load_state_dict(states["model"])
    fresh_optimizer.load_state_dict(states["optimizer"])


def through_mapped_file(model, optimizer, fresh, fresh_optimizer, folder):
    """Pass state dicts whose tensors map a file."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "states.pt")
    states = torch.load(folder / "states.pt", mmap=True)
    fresh.load_state_dict(states["model"])
    fresh_optimizer.load_state_dict(states["optimizer"])


def through_dcp(model, optimizer, fresh, fresh_optimizer, folder):
    """Use ``torch.distributed.checkpoint`` without a process group, into the state dicts of the new model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing process group
        dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder / "dcp")
        # dcp loads in place, into existing tensors: create the optimizer's by a step at learning rate 0.
        for parameter in fresh.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        fresh_optimizer.step()
        fresh_optimizer.zero_grad()
        states = {"model": fresh.state_dict(), "optim": fresh_optimizer.state_dict()}
        dcp.load(states, checkpoint_id=folder / "dcp")
    fresh.load_state_dict(states["model"])
    fresh_optimizer.load_state_dict(states["optim"])


def through_dcp_state_dict(model, optimizer, fresh, fresh_optimizer, folder):
    """Use the helpers that torch recommends: names in place of numbers, and missing state is created."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder / "dcp")
        model_state, optimizer_state = get_state_dict(fresh, fresh_optimizer)
        dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder / "dcp")
        set_state_dict(fresh, fresh_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


WAYS = [through_memory, through_torch_save, through_mapped_file, through_dcp, through_dcp_state_dict]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("before", "after"), [("nvme", "nvme"), ("mixed", "plain"), ("plain", "mixed")])
def test_resume(parity, way, before, after, tmp_path):
    def make(placement):
        return net()[0] if placement == "plain" else parity.optimized(net, placement, captured=False)[0]

    plain, ours = parity.trace(), parity.trace()
    model, batches = net()
    train(model, adamw(model), batches, plain)

    model = make(before)
    optimizer = adamw(model)
    train(model, optimizer, batches[:CUT], ours)
    fresh = make(after)
    fresh_optimizer = adamw(fresh)
    way(model, optimizer, fresh, fresh_optimizer, tmp_path)
    train(fresh, fresh_optimizer, batches[CUT:], ours)
    parity.assert_same(ours, plain)
