"""The example GPT: its size, its shapes, its causality, its sampling."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_PATH = Path(__file__).parents[2] / "examples" / "gpt.py"
_SPEC = importlib.util.spec_from_file_location("zinf_test_gpt", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
gpt = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = gpt
_SPEC.loader.exec_module(gpt)

SMALL = gpt.GPTConfig(vocab_size=50, layers=2, hidden=64, heads=2, seq=8)


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
def test_num_parameters_is_exact(tied: bool) -> None:
    model = gpt.GPT(SMALL, tied=tied)
    assert gpt.num_parameters(SMALL, tied=tied) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("wanted", [1e5, 1.5e5, 2e5, 3e5, 5e5, 1e6, 3e6, 1e7, 1e8, 5e8, 7e9, 1e11])
def test_config_for_is_within_ten_percent(wanted: float) -> None:
    config = gpt.config_for(int(wanted), 256, 512)
    assert abs(gpt.num_parameters(config) / wanted - 1) <= 0.1
    assert config.seq == 512
    assert config.hidden % config.heads == 0


def test_config_for_refuses_a_vocabulary_larger_than_the_model() -> None:
    with pytest.raises(ValueError, match="vocabulary of 50000"):
        gpt.config_for(100_000, 50_000, 64)


def test_without_targets_the_logits_with_them_the_loss() -> None:
    model = gpt.GPT(SMALL)
    tokens, targets = _tokens(3, 8), _tokens(3, 8)
    assert model(tokens).shape == (3, 8, 50)
    loss = model(tokens, targets)
    assert loss.shape == ()
    assert abs(loss.item() - torch.tensor(50.0).log().item()) < 0.3  # a fresh model knows nothing


def test_a_later_token_does_not_reach_an_earlier_position() -> None:
    model = gpt.GPT(SMALL)
    tokens = _tokens(1, 8)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_positions_matter() -> None:
    model = gpt.GPT(SMALL)
    one, other = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(one[:, 2], other[:, 2])


def test_init_is_seeded_and_leaves_the_global_generator_alone() -> None:
    one, same, other = gpt.GPT(SMALL, seed=3), gpt.GPT(SMALL, seed=3), gpt.GPT(SMALL, seed=4)
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)
    assert one.blocks[0].mlp.down.weight.std() < 0.6 * one.blocks[0].mlp.up.weight.std()


def test_built_on_meta_and_filled_later_it_is_the_same_model() -> None:
    with torch.device("meta"):
        model = gpt.GPT(SMALL)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(model.buffers()) == []
    model.to_empty(device="cpu").init_weights(0)
    expected = gpt.GPT(SMALL).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_tied_head_is_one_parameter() -> None:
    model = gpt.GPT(SMALL, tied=True)
    assert model.head.weight is model.embed.weight


def test_runs_in_bfloat16() -> None:
    model = gpt.GPT(SMALL).to(torch.bfloat16)
    assert model(_tokens(1, 8)).dtype == torch.bfloat16
    assert model(_tokens(1, 8), _tokens(1, 8)).dtype == torch.float32


def test_generate_sees_one_shape_and_keeps_the_prompt() -> None:
    model = gpt.GPT(SMALL)
    shapes = set()
    model.register_forward_pre_hook(lambda module, inputs: shapes.add(inputs[0].shape))
    prompt = _tokens(2, 3)
    text = gpt.generate(model, prompt, 10, generator=torch.Generator().manual_seed(0))
    assert text.shape == (2, 13)
    assert torch.equal(text[:, :3], prompt)
    assert shapes == {(2, 8)}
    assert torch.equal(text, gpt.generate(model, prompt, 10, generator=torch.Generator().manual_seed(0)))


def test_generate_at_temperature_zero_takes_the_likeliest() -> None:
    model = gpt.GPT(SMALL)
    prompt = _tokens(1, 3)
    assert gpt.generate(model, prompt, 1, temperature=0)[0, -1] == model(prompt)[0, -1].argmax()
