"""Train a small model in forked processes that kill themselves at a chosen system call. Driven by test_crash.py.

The server imports torch once, starts no thread, and forks for every run. It reads one JSON object per line and answers
with one:

    {"folder": ..., "kill_at": 17}    train from the checkpoint in the folder, if any, saving after every step; die in the
                                      middle of the 17th call that touches a disk (null: live)
    -> {"signal": 9, "events": [...]} what the run did until then
"""

import gc
import hashlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import zinf_compile

NUM_STEPS = 3
CALLS = ("pwritev", "preadv", "fsync", "ftruncate", "replace", "mkdir", "unlink", "rmdir", "posix_fallocate")


Call = Callable[..., object]


def dying(call: Call, name: str, kill_at: int | None, counter: "itertools.count[int]") -> Call:
    """Wrap a system call so that it kills this process when the counter is at ``kill_at``, after half of a write."""

    def run(*args: object, **kwargs: object) -> object:
        if next(counter) == kill_at:
            if name == "pwritev":
                descriptor, (buffer,), offset = args
                call(descriptor, [buffer[: len(buffer) // 2 // 4096 * 4096]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return run


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all parameters, buffers, optimizer state and the RNG state."""
    found = hashlib.sha256(torch.get_rng_state().numpy())
    state = optimizer.state_dict()["state"]
    values = [*model.state_dict().values(), *(value for index in sorted(state) for value in state[index].values())]
    for value in values:
        assert isinstance(value, Tensor)
        found.update(value.clone().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def train(folder: str, note: Callable[..., None]) -> None:
    """Train to the end, from the checkpoint in a folder if there is one."""
    note("placement")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(130, 135), nn.Dropout(0.1), nn.Tanh(), nn.Linear(135, 130))
    zinf_compile.optimize(model, device_memory="8MiB", host_memory="512KiB", nvme=Path(folder).parent, capture=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if (Path(folder) / "manifest.json").exists():
        note("loading")
        first = zinf_compile.load(folder, model, optimizer)
        note("loaded", first)
    for step in range(first, NUM_STEPS):
        note("training")
        model(torch.randn(3, 130)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note("saving")
        zinf_compile.save(folder, model, optimizer, extra=step + 1)
        note("saved", step + 1)
    note("digest", digest(model, optimizer))


def run(folder: str, kill_at: int | None) -> dict[str, object]:
    """Train in a forked process; return how it ended and what it noted."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        counter = itertools.count()
        for name in CALLS:
            setattr(os, name, dying(getattr(os, name), name, kill_at, counter))
        train(folder, lambda *event: os.write(write_end, json.dumps(event).encode() + b"\n") and None)
        os.write(write_end, json.dumps(["calls", next(counter)]).encode() + b"\n")
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as events:
        noted = [json.loads(line) for line in events]
    _, status = os.waitpid(child, 0)
    return {"signal": os.WTERMSIG(status), "status": os.WEXITSTATUS(status), "events": noted}


def main() -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    for name in ("optimize", "save", "load"):  # import in the parent what a run needs: public names load lazily
        getattr(zinf_compile, name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies no threads"
    gc.collect()
    gc.freeze()  # else the garbage collector of every fork writes to, and so copies, all pages of imported modules
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(request["folder"], request["kill_at"])), flush=True)


main()
