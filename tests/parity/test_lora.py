"""PEFT's LoRA on an optimized Llama: only adapters have gradients, state and updates; bitwise equal to plain PEFT."""

from importlib.util import find_spec

import pytest
import torch

transformers = pytest.importorskip("transformers")

STEPS = 3
VOCAB = 96
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")


def batches():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCAB, (STEPS, 2, 8), generator=generator)
    return [{"input_ids": each, "labels": each.clone()} for each in tokens]


def llama_with_adapters(*, checkpointing: bool = False, tied: bool = False):
    import peft  # takes seconds, which every process that collects these tests would spend

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=16, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    adapters = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0 if checkpointing else 0.1, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    model = peft.get_peft_model(model, adapters)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model, batches()


def checkpointed():
    return llama_with_adapters(checkpointing=True)


def tied():
    return llama_with_adapters(tied=True)


def loop(model, batches, trace):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        trace.losses.append(loss.detach().clone())
        trace.record_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        trace.record_model(model, optimizer)


@pytest.mark.parametrize(
    ("workload", "way"),
    [
        *((llama_with_adapters, way) for way in ("captured", "eager")),
        pytest.param(llama_with_adapters, "inductor", marks=pytest.mark.long),  # dropout cuts it into many segments
        *((workload, "eager") for workload in (tied, checkpointed)),
    ],
    indirect=["way"],
)
def test_only_adapters_are_trained(parity, way, workload):
    report = parity.check_loop(loop, workload, **way)
    model, _ = workload()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trained)
    for plan in report.plans:
        sizes = {item.parameter: item.gradient_nbytes + item.optimizer_state_nbytes for item in plan.placements}
        assert {name for name, nbytes in sizes.items() if nbytes} == trained


def test_adapters_are_saved_and_switched_off(parity, captured, tmp_path):
    import peft

    plain, batch = llama_with_adapters()[0], batches()[0]
    model, _ = parity.optimized(llama_with_adapters, captured=captured)
    outputs = []
    for each in (plain, model):
        with torch.no_grad():
            for name, parameter in each.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)
        each.eval()
        with torch.no_grad():
            outputs.append([each(**batch).loss])
            with each.disable_adapter():
                outputs[-1].append(each(**batch).loss)
    assert outputs[0][0] != outputs[0][1]
    for ours, expected in zip(outputs[1], outputs[0], strict=True):
        assert torch.equal(ours, expected) if not captured else torch.allclose(ours, expected, rtol=1e-6)
    model.save_pretrained(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(plain.get_base_model(), tmp_path / "adapters", adapter_name="second")
    for name, parameter in loaded.named_parameters():
        if "second" in name:
            parity.assert_equal(parameter, model.get_parameter(name.replace("second", "default")), name)
