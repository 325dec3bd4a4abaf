"""Module paths in Dynamo's spellings are normalised; and the block that a path belongs to."""

import pytest
import torch
from torch import fx

from zinf_compile.passes.analysis.modules import block_of, is_repeated, module_path


def _make_node(key: str, *paths: str) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta[key] = {str(index): (path, torch.nn.Linear) for index, path in enumerate(paths)}
    return node


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self']", ""),
        ("L['self'].embed", "embed"),
        ('L["self"].layers.0.up', "layers.0.up"),
        ("L['self']._modules['layers']._modules['0']._modules['up']", "layers.0.up"),
        ("L['self'].layers[3].up", "layers.3.up"),
        ("L['self'].experts['left'].up", "experts.left.up"),
        ("L['model'].layers.0", "layers.0"),
        ("G['model'].layers.0", "layers.0"),  # a model that is a global of the compiled function
        ("L['self']._orig_mod.layers.0", "layers.0"),
        ("L['args'][0].layers.0", "layers.0"),  # a decorated forward, whose wrapper takes *args
        ("L['args'][0]._modules['layers']._modules['0'].up", "layers.0.up"),
        ("L['layers'][0].up", "0.up"),  # one module of a list
        ("L['fn'].__self__", ""),  # torch.compile of a bound method of the model
        ("L['fn'].__self__._modules['11']", "11"),
        ("L['fn'].__self__.layers[3].up", "layers.3.up"),
        ("L['fn'].__self__._orig_mod.layers.0", "layers.0"),
        ("L['self'].modules_to_save", "modules_to_save"),
        ("L['self'].layers.__self__", "layers.__self__"),  # a submodule that is really named so
    ],
)
def test_paths_are_those_of_named_modules(path: str, expected: str) -> None:
    assert module_path(_make_node("nn_module_stack", path)) == expected


def test_the_innermost_module_counts() -> None:
    assert module_path(_make_node("nn_module_stack", "L['self']", "L['self'].layers.0", "L['self'].layers.0.up")) == (
        "layers.0.up"
    )


def test_backward_belongs_to_the_module_of_its_forward() -> None:
    assert module_path(_make_node("fwd_nn_module_stack", "L['self'].head")) == "head"


def test_a_node_without_a_module_has_no_path() -> None:
    assert module_path(fx.Graph().placeholder("x")) == ""


@pytest.mark.parametrize(
    ("path", "block", "repeated"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3", True),
        ("layers.0", "layers.0", True),
        ("encoder.0.layers.1.weight", "encoder.0", True),
        ("embed.weight", "embed", False),
        ("head", "head", False),
        ("w1.weight", "w1", False),
        ("", "", False),
    ],
)
def test_a_block_ends_at_the_first_number(path: str, block: str, *, repeated: bool) -> None:
    assert block_of(path) == block
    assert is_repeated(block) is repeated
