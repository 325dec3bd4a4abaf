"""transformers' Trainer on a model whose states are mostly on disk: `python examples/trainer.py`."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import zinf_compile

config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
model = zinf_compile.optimize(LlamaForCausalLM(config), device_memory="8MiB", host_memory="4MiB", nvme=".")
tokens = torch.randint(256, (32, 32), generator=torch.Generator().manual_seed(0))
trainer = Trainer(
    model=model,
    args=TrainingArguments("out", max_steps=4, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
trainer.train()

states = 16 * sum(parameter.numel() for parameter in model.parameters())  # with gradients and AdamW's two moments
peaks = {tier.tier: tier.measured_peak / 2**20 for tier in zinf_compile.report(model).tiers}
print(
    f"{states / 2**20:.1f} MiB of model states:", ", ".join(f"{mib:.1f} MiB on {tier}" for tier, mib in peaks.items())
)
