"""Models of `zinf plan` and `zinf verify`: the example GPT, one of transformers, or the result of a user's function.

To be planned they are on meta, to be verified in memory, with random tokens.
"""

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zinf_compile.cli.presets import load_example
from zinf_compile.cli.transformers_model import import_transformers
from zinf_compile.ir.errors import ConfigError
from zinf_compile.weights.weight_files import INDEX_FILE, SINGLE_FILE

_DEFAULT_BATCH, _DEFAULT_SEQ = 1, 1024
_DEFAULT_VOCAB = 50257  # GPT-2's
# Errors that a user's function may raise, without those of the interpreter itself, such as MemoryError.
_USERS_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes given on the command line; None for others."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None
    batch: int | None = None
    seq: int | None = None

    def given(self, *names: str) -> list[str]:
        """Return those of the named options that were given."""
        return [f"--{name}" for name in names if getattr(self, name) is not None]


class Planned(NamedTuple):
    """A model and its inputs."""

    model: nn.Module
    inputs: Any


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that say which model, and its sizes."""
    parser.add_argument(
        "model",
        help="gpt; hf:PATH with a config.json of transformers; or MODULE:FUNCTION, which returns a model and its inputs",
    )
    size = parser.add_argument_group("model options (gpt and hf: only)")
    for name, what in (
        ("layers", "number of layers"),
        ("hidden", "hidden size"),
        ("heads", "number of attention heads"),
        ("vocab", "vocabulary size (default: 50257)"),
    ):
        size.add_argument(f"--{name}", type=int, metavar="N", help=f"{what}; gpt only")
    size.add_argument("--batch", type=int, metavar="N", help="sequences per step, of each rank (default: 1)")
    size.add_argument("--seq", type=int, metavar="N", help="tokens per sequence (default: 1024)")


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Return the sizes among parsed arguments."""
    return Sizes(**{name: getattr(args, name) for name in Sizes.__slots__})


def find_model(word: str, sizes: Sizes, *, device: str = "meta") -> Planned:
    """Return the model for a command-line word; ConfigError if there is none, or if sizes do not apply to it.

    On "cpu" it has values: those of the safetensors of transformers if there are any, else random ones.
    """
    for name in Sizes.__slots__:
        size = getattr(sizes, name)
        if size is not None and size < 1:
            raise ConfigError(f"--{name} must be at least 1, and is {size}")
    if word == "gpt":
        return _make_gpt(sizes, device)
    if word.startswith("hf:"):
        return _make_transformers(Path(word.removeprefix("hf:")), sizes, device)
    if ":" not in word:
        raise ConfigError(f"{word} is no model; give gpt, hf:PATH with a config.json, or MODULE:FUNCTION")
    return _call_function(word, sizes, device)


def _make_gpt(sizes: Sizes, device: str) -> Planned:
    missing = [f"--{name}" for name in ("layers", "hidden", "heads") if getattr(sizes, name) is None]
    if missing:
        raise ConfigError(f"gpt needs {', '.join(missing)}, for example: gpt --layers 24 --hidden 2048 --heads 16")
    assert sizes.layers is not None
    assert sizes.hidden is not None
    assert sizes.heads is not None
    if sizes.hidden % (2 * sizes.heads):
        raise ConfigError(
            "--hidden must be divisible by --heads, with an even head size; "
            f"{sizes.hidden} / {sizes.heads} is {sizes.hidden / sizes.heads:g}"
        )
    seq = sizes.seq or _DEFAULT_SEQ
    example = load_example(None)
    config = example.GPTConfig(sizes.vocab or _DEFAULT_VOCAB, sizes.layers, sizes.hidden, sizes.heads, seq)
    with torch.device(device):
        tokens = _make_tokens(config.vocab_size, sizes, device)
        return Planned(example.GPT(config), {"tokens": tokens, "targets": tokens})


def _make_transformers(path: Path, sizes: Sizes, device: str) -> Planned:
    _refuse("a transformers model has them in its config", sizes.given("layers", "hidden", "heads", "vocab"))
    transformers = import_transformers()
    if not (path if path.suffix == ".json" else path / "config.json").is_file():
        raise ConfigError(f"no config.json found at {path}; give hf: and the folder that has it, or the file")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        config.use_cache = False
        architecture = (config.architectures or [None])[0]
        kind = getattr(transformers, architecture or "", None)
        if device != "meta" and any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
            model = (kind or transformers.AutoModelForCausalLM).from_pretrained(
                path, config=config, dtype=torch.float32, local_files_only=True
            )
        else:
            with torch.device(device):
                model = kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"no model can be made from '{path}': {reason}") from error
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"{type(model).__name__} is not called with tokens, but with {model.main_input_name}; write a function that "
            "returns the model and its inputs, and give MODULE:FUNCTION"
        )
    tokens = _make_tokens(config.get_text_config().vocab_size, sizes, device)
    return Planned(model, {"input_ids": tokens, "labels": tokens})


def _make_tokens(num_different: int, sizes: Sizes, device: str) -> Tensor:
    shape = (sizes.batch or _DEFAULT_BATCH, sizes.seq or _DEFAULT_SEQ)
    return torch.randint(num_different, shape, device=device)


def _call_function(word: str, sizes: Sizes, device: str) -> Planned:
    """Return the result of ``MODULE:FUNCTION``, called under ``torch.device(device)``."""
    _refuse(f"{word} says how large its model and inputs are", sizes.given(*Sizes.__slots__))
    module_name, _, function_name = word.partition(":")
    sys.path.insert(0, os.getcwd())  # like python -m
    try:
        module = importlib.import_module(module_name)
    except _USERS_ERRORS as error:
        raise ConfigError(f"{module_name} cannot be imported: {_describe(error)}") from error
    function: Callable[[], object] | None = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(function_name, dir(module), n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise ConfigError(f"{module_name} has no function {function_name!r}{hint}")
    try:
        with torch.device(device):
            returned = function()
    except _USERS_ERRORS as error:
        raise ConfigError(f"{word} failed: {_describe(error)}") from error
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
        items = ", ".join(type(item).__name__ for item in returned) if isinstance(returned, tuple) else ""
        got = f"a tuple of ({items})" if isinstance(returned, tuple) else f"{type(returned).__name__}"
        raise ConfigError(
            f"{word} returned {got}; it has to return a torch.nn.Module and what that is called with: a tensor, a tuple "
            "or a dict"
        )
    return Planned(*returned)


def _refuse(why: str, given: list[str]) -> None:
    if given:
        raise ConfigError(f"{', '.join(given)} cannot be given: {why}; leave it out")


def _describe(error: BaseException) -> str:
    """Return what was raised, and by which line of the user's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {str(error).strip().partition(chr(10))[0]}"
