"""A LightningModule: optimize the network inside it, which it calls: `python examples/lightning_module.py`."""

import lightning
import torch

import zinf_compile


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
        zinf_compile.optimize(self.layers, device_memory="6MiB", host_memory="4MiB", nvme=".")

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


net = Net()
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(net, torch.utils.data.DataLoader(torch.randn(128, 512), batch_size=16))

states = 16 * sum(parameter.numel() for parameter in net.parameters())  # with gradients and AdamW's two moments
peaks = {tier.tier: tier.measured_peak / 2**20 for tier in zinf_compile.report(net.layers).tiers}
print(
    f"{states / 2**20:.1f} MiB of model states:", ", ".join(f"{mib:.1f} MiB on {tier}" for tier, mib in peaks.items())
)
