"""An accelerate loop, with accumulation and clipping: `python examples/accelerate_loop.py`."""

import torch
from accelerate import Accelerator

import zinf_compile

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
zinf_compile.optimize(model, device_memory="6MiB", host_memory="4MiB", nvme=".")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
batches = torch.utils.data.DataLoader(torch.randn(128, 512), batch_size=16)
model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
for x in batches:
    with accelerator.accumulate(model):
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
accelerator.save_state("state")  # accelerator.load_state("state") resumes

states = 16 * sum(parameter.numel() for parameter in model.parameters())  # with gradients and AdamW's two moments
peaks = {tier.tier: tier.measured_peak / 2**20 for tier in zinf_compile.report(model).tiers}
print(
    f"{states / 2**20:.1f} MiB of model states:", ", ".join(f"{mib:.1f} MiB on {tier}" for tier, mib in peaks.items())
)
