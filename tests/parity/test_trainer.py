"""transformers' Trainer on an optimized Llama: the numbers of a plain model, and of a hand-written loop."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zinf_compile

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS, MICRO_STEPS, BATCH = 4, 2, 2
VOCAB = 96


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=16, use_cache=False, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), [
        {"input_ids": tokens, "labels": tokens.clone()} for tokens in examples().unflatten(0, (-1, BATCH))
    ]


def examples() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, VOCAB, (STEPS * MICRO_STEPS * BATCH, 8), generator=generator)


class InOrder(transformers.Trainer):
    """A Trainer that does not shuffle, so that a hand-written loop sees the same batches."""

    def _get_train_sampler(self, *args):
        return None


def train(
    model: nn.Module, folder: Path, *, resume: Path | None = None, **options
) -> tuple[list[float], dict[str, Tensor]]:
    """Return what the Trainer logs at each step, and the final parameters; it saves after half of the steps."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, gradient_accumulation_steps=MICRO_STEPS,
        max_grad_norm=0.5, warmup_steps=2, max_steps=STEPS, learning_rate=1e-2, weight_decay=0.1, logging_steps=1,
        save_steps=STEPS // 2, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    data = [{"input_ids": tokens, "labels": tokens.clone()} for tokens in examples()]
    trainer = InOrder(model=model, args=arguments, train_dataset=data, callbacks=[])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logged = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
    return logged, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def by_hand(model: nn.Module, batches) -> list[float]:
    """Return the losses of the same training in a hand-written loop, as the Trainer logs them."""
    decayed = {parameter for parameter in model.parameters() if parameter.dim() > 1}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p in decayed], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p not in decayed], "weight_decay": 0.0},
        ],
        lr=1e-2,
        fused=True,  # as in the Trainer
    )
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    num_tokens = torch.tensor(MICRO_STEPS * BATCH * 7)  # rows of 8 tokens, of which the first is not predicted
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for batch in batches[step * MICRO_STEPS :][:MICRO_STEPS]:
            loss = model(**batch, num_items_in_batch=num_tokens).loss
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.needs_more_on_streams(device_memory=2.5)
@pytest.mark.parametrize(
    ("captured", "options"),
    [(True, {}), pytest.param(False, {}, marks=pytest.mark.long), (False, {"bf16": True})],
    ids=["captured", "eager", "eager-bf16"],
)
def test_same_numbers_and_resumed_from_a_checkpoint(parity, tmp_path, captured, options):
    """Train a plain and an optimized model; then repeat the second half, each from the checkpoint of the other."""
    results = {}
    for name, resume in (("plain", None), ("ours", None), ("ours again", "plain"), ("plain again", "ours")):
        if name.startswith("ours"):
            model, _ = parity.optimized(llama, captured=captured, device_memory=160 * 2**10)
        else:
            model, _ = llama()
        half = tmp_path / resume / f"checkpoint-{STEPS // 2}" if resume else None
        results[name] = train(model, tmp_path / name, resume=half, **options)
        torch._dynamo.reset()
    logged, parameters = results["plain"]
    assert len(logged) == 2 * STEPS
    for name, (ours, values) in results.items():
        assert ours[-STEPS:] == logged[-STEPS:], name
        for key, value in parameters.items():
            parity.assert_equal(values[key], value, f"{name}: {key}")


def test_the_loop_by_hand(parity, tmp_path):
    model, batches = parity.optimized(llama, captured=False)
    losses = by_hand(model, batches)
    other, _ = parity.optimized(llama, captured=False)
    logged, values = train(other, tmp_path)
    assert logged[::2] == losses
    for name, parameter in model.named_parameters():
        parity.assert_equal(values[name], parameter, name)


def test_saved_pretrained_models_load_plainly(parity, tmp_path, captured):
    model, batches = parity.optimized(llama, captured=captured)
    model(**batches[0]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path / "saved")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    for name, parameter in loaded.named_parameters():
        parity.assert_equal(model.get_parameter(name), parameter, name)


@pytest.mark.parametrize("optim", ["stable_adamw", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit"])
def test_optimizers_of_other_libraries(optim: str, tmp_path: Path) -> None:
    """Options of single parameters, such as 32-bit state for an embedding, are kept, and state in groups advances."""
    pytest.importorskip("optimi" if optim == "stable_adamw" else "bitsandbytes")
    results = []
    for name in ("plain", "optimized"):
        model = wide_llama()
        if name == "optimized":
            zinf_compile.optimize(model, device_memory="16MiB", host_memory="4MiB", nvme=tmp_path, capture=False)
        results.append(train(model, tmp_path / name, optim=optim, save_strategy="no"))
    zinf_compile.close(model)
    assert results[0][0] == results[1][0]
    for name, parameter in results[0][1].items():
        assert torch.equal(parameter, results[1][1][name]), name


def wide_llama() -> nn.Module:
    """Return a model with more than 4096 elements in its embedding and others: smaller tensors keep 32-bit state."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=96, max_position_embeddings=16, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.long
def test_bf16_where_attention_is_traced_as_it_runs():
    """While traced, transformers passes a mask, and fused attention with shared heads rounds differently; see the docs."""
    gradients = []
    for captured in (False, True):
        model, batches = llama(attn_implementation="eager")
        if captured:
            zinf_compile.optimize(model, device_memory="8MiB", host_memory="8MiB")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batches[0]).loss
        loss.backward()
        gradients.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(torch.equal(ours, plain) for plain, ours in zip(*gradients, strict=True))
    zinf_compile.close(model)
