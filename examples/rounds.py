"""Two ranks deal the stages of a model out among them: `torchrun --nproc-per-node 2 examples/rounds.py`."""

import torch
import torch.distributed as dist

import zinf_compile


def main() -> None:
    """Train three steps, print what one process would see, and save."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same first values on every rank
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    zinf_compile.optimize(model, schedule="rounds", device_memory="12MiB", host_memory="4MiB", nvme=".")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)  # it skips what other ranks have
    torch.manual_seed(1 + dist.get_rank())  # another batch on every rank
    for step in range(3):
        x = torch.randn(64, 512)
        loss = (model(x) - x).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of all gradients
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss of rank 0 {loss.item():.4f}, norm of all gradients {norm.item():.4f}")
    zinf_compile.save("checkpoint", model, optimizer)  # fits any number of ranks, and one process
    zinf_compile.close(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
