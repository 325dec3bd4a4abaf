"""The model of one rank: its part of divided weights, its stage's blocks, and what cannot be divided."""

import re

import pytest
import torch
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig
from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.passes.capture.offline.shards import (
    copy_on_meta,
    count_tokens,
    cut_stages,
    divide_weights,
    find_pipeline,
    find_stage_input,
    keep_stage,
)
from zinf_compile.passes.capture.offline.trace import Inputs

TOKENS = torch.zeros(2, 16, dtype=torch.int64)


def make_gpt(*, layers: int = 8, vocabulary: int = 64, tied: bool = False) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=vocabulary, layers=layers, hidden=64, heads=8, seq=16), tied=tied)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_a_rank_has_a_part_of_each_matrix_and_all_of_each_norm() -> None:
    model = make_gpt(layers=1, vocabulary=63)
    divided = copy_on_meta(model)
    divide_weights(divided, None, 4)
    assert shapes(divided) == {
        "embed.weight": (16, 64),  # 63 rows, padded to four times 16
        "blocks.0.attention_norm.weight": (64,),
        "blocks.0.attention.qkv.weight": (48, 64),
        "blocks.0.attention.out.weight": (64, 16),
        "blocks.0.mlp_norm.weight": (64,),
        "blocks.0.mlp.up.weight": (64, 64),
        "blocks.0.mlp.down.weight": (64, 64),
        "norm.weight": (64,),
        "head.weight": (16, 64),
    }
    assert shapes(model)["head.weight"] == (63, 64)  # unchanged


def test_shared_weights_stay_shared_and_a_rowwise_bias_whole() -> None:
    divided = copy_on_meta(make_gpt(tied=True))
    divide_weights(divided, None, 2)
    assert divided.head.weight is divided.embed.weight
    chain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    divide_weights(chain, {"0": "colwise", "2": "rowwise"}, 2)
    assert shapes(chain) == {"0.weight": (8, 8), "0.bias": (8,), "2.weight": (8, 8), "2.bias": (8,)}


class Attention(nn.Module):
    def __init__(self, *, num_keys: int) -> None:
        super().__init__()
        self.head_dim = 8
        self.key = nn.Linear(32, 8 * num_keys)


@pytest.mark.parametrize(
    ("model", "plan", "ranks", "message"),
    [
        (
            nn.Linear(4, 4),
            None,
            2,
            "Linear does not say which of its weights tensor-parallel ranks divide; give tp_plan",
        ),
        (make_gpt(), {"head": "diagonally"}, 2, "tp_plan divides 'head' in the way 'diagonally'; it may say colwise, "),
        (
            make_gpt(),
            {"blocks.*.mlp.dwn": "rowwise"},
            2,
            "GPT has no such layer; its linear layers are blocks.*.attention",
        ),
        (
            make_gpt(),
            {"norm": "colwise"},
            2,
            "tp_plan divides norm, a RMSNorm, as colwise; it may divide torch.nn.Linear",
        ),
        (
            make_gpt(),
            {"blocks.*.mlp.up": "colwise"},
            3,
            "3 tensor-parallel ranks do not divide the rows of blocks.0.mlp.up",
        ),
        (
            make_gpt(),
            None,
            16,
            "16 tensor-parallel ranks do not divide the 8 heads of blocks.0.attention.out, whose weight",
        ),
        (Attention(num_keys=2), {"key": "colwise"}, 4, "4 tensor-parallel ranks do not divide the 2 heads of key"),
    ],
    ids=["no plan", "style", "name", "norm", "rows", "heads", "keys"],
)
def test_what_cannot_be_divided_is_refused(
    model: nn.Module, plan: dict[str, str] | None, ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        divide_weights(copy_on_meta(model), plan, ranks)


@pytest.mark.parametrize(
    ("layers", "vocabulary", "stages", "blocks"),
    [
        (8, 8, 4, [2, 2, 2, 2]),
        (10, 8, 4, [2, 3, 3, 2]),  # the later ones have more, as they have fewer forwards open
        (9, 8, 2, [5, 4]),
        (8, 4096, 2, [7, 1]),  # the head costs more than five blocks
        (8, 8, 1, [8]),
    ],
)
def test_blocks_are_divided_by_cost(layers: int, vocabulary: int, stages: int, blocks: list[int]) -> None:
    model = make_gpt(layers=layers, vocabulary=vocabulary)
    cut = cut_stages(model, find_pipeline(model, stages), stages, 3)
    assert [stage.num_blocks for stage in cut] == blocks
    assert [stage.num_open for stage in cut] == [min(3, stages - number) for number in range(stages)]
    assert [stage.is_first for stage in cut] == [number == 0 for number in range(stages)]
    assert [stage.is_last for stage in cut] == [number == stages - 1 for number in range(stages)]


def test_a_stage_has_its_blocks_alone() -> None:
    model = copy_on_meta(make_gpt())
    run = find_pipeline(model, 4)
    stages = cut_stages(model, run, 4, 4)
    keep_stage(model, run, stages, stages[1])
    assert len(model.blocks) == 2
    passed = torch.empty(2, 16, 64, device="meta", requires_grad=True)
    tokens = TOKENS.to("meta")
    assert model(tokens, tokens, zinf_stage_input=passed).shape == (2, 16, 64)  # no loss


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            make_gpt(layers=3),
            "4 pipeline stages need at least as many identical blocks, and GPT has 3 alike, in blocks",
        ),
        (nn.Linear(4, 4), "Linear has no list of blocks; give at most 1 stages"),
    ],
)
def test_fewer_blocks_than_stages_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_pipeline(model, 4)


class Widening(nn.Sequential):
    """A list of equal blocks whose result is no tensor like what they take."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)[..., :4]
        return x


def test_what_stages_pass_on() -> None:
    inputs = Inputs(args=(TOKENS, TOKENS))
    model = make_gpt()
    passed = find_stage_input(model, find_pipeline(model, 2), inputs, compute_dtype="bfloat16", train=True)
    assert (passed.shape, passed.dtype, passed.requires_grad) == ((2, 16, 64), torch.bfloat16, True)
    widening = Widening(*(nn.Linear(4, 8) for _ in range(4)))
    with pytest.raises(
        UnsupportedError, match="cannot be pipeline stages: they have to take a tensor first and return one"
    ):
        find_stage_input(
            widening, find_pipeline(widening, 2), Inputs(args=(torch.zeros(2, 4),)), compute_dtype=None, train=True
        )


def test_tokens_are_counted_by_integers_or_else_by_rows() -> None:
    assert count_tokens(Inputs(args=(torch.zeros(3, 5), TOKENS))) == 32
    assert count_tokens(Inputs(kwargs={"x": torch.zeros(3, 5, 7)})) == 15
    assert count_tokens(Inputs()) == 1
