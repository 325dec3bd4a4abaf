"""peft's LoRA: the frozen base is streamed, and only adapters have gradients and state: `python examples/peft_lora.py`."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import zinf_compile

config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = get_peft_model(LlamaForCausalLM(config), adapters)
zinf_compile.optimize(model, device_memory="4MiB", host_memory="2MiB", nvme=".")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
for _ in range(4):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
model.save_pretrained("adapters")  # the adapters only; PeftModel.from_pretrained loads them onto a plain base

weights = 4 * sum(parameter.numel() for parameter in model.parameters())
peaks = {tier.tier: tier.measured_peak / 2**20 for tier in zinf_compile.report(model).tiers}
print(f"{weights / 2**20:.1f} MiB of weights:", ", ".join(f"{mib:.1f} MiB on {tier}" for tier, mib in peaks.items()))
