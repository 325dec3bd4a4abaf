"""Training that goes on when ranks die, with as many as are left. docs/ranks.md says how torchrun starts it."""

import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import zinf_compile


def main() -> None:
    """Train on the ranks that torchrun has started this time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default="checkpoint", help="a folder that all machines can reach")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds to wait for ranks that start, plan or are gone"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    train(args.steps, args.save_every, args.checkpoint)
    dist.destroy_process_group()


def train(steps: int, save_every: int, checkpoint: Path, nvme: str = ".") -> None:
    """Load the last checkpoint, if there is one, and train the steps that are left."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same first values on every rank
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    # With "aten" the numbers do not depend on the plan, and so not on what the machine was doing when it was made.
    zinf_compile.optimize(model, device_memory="4MiB", host_memory="2MiB", nvme=nvme, compute="aten")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = batches = 0
    if (checkpoint / "manifest.json").exists():  # as soon as one save is complete
        step, batches = zinf_compile.load(checkpoint, model, optimizer)
    if rank == 0:
        print(f"after step {step}: {num_ranks} ranks", flush=True)
    while step < steps:
        torch.manual_seed(batches + rank)  # here you would read this batch of your data
        x = torch.randn(32, 256)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step, batches = step + 1, batches + num_ranks  # however many ranks there are, each batch is used once
        if rank == 0:
            print(f"step {step}: loss of rank 0 {loss.item():.4f}", flush=True)
        if step % save_every == 0 or step == steps:
            zinf_compile.save(checkpoint, model, optimizer, extra=(step, batches))
    zinf_compile.close(model)


if __name__ == "__main__":
    main()
