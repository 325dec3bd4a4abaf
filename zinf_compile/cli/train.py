"""`zinf train`: trains a GPT within memory budgets, and shows what was predicted beside what was measured."""

import argparse
import math
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import zinf_compile
from zinf_compile.cli.presets import PRESETS, STATE_BYTES, Preset, load_example, parse_count
from zinf_compile.cli.progress import StepResult, process_peak, show_progress
from zinf_compile.cli.text import Batch, ByteVocabulary, TokenizerVocabulary, TokenStream, read_text
from zinf_compile.config import parse_size
from zinf_compile.errors import ConfigError
from zinf_compile.terms import format_bytes

_TEMPERATURE = 0.8  # of the sample: a model trained for minutes rambles at 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `zinf train`; those left out come from the preset."""
    size = parser.add_argument_group("model and text")
    size.add_argument("--preset", choices=PRESETS, default="demo", help="a run with sensible numbers (default: demo)")
    size.add_argument("--params", metavar="N", help="number of parameters instead of the preset's, e.g. 300M or 1.5B")
    size.add_argument("--model", type=Path, metavar="PATH", help="the model file (default: examples/gpt.py)")
    size.add_argument("--text", type=Path, nargs="+", default=[], metavar="PATH", help="files or folders to train on")
    size.add_argument("--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json (default: bytes)")
    budget = parser.add_argument_group("budgets")
    budget.add_argument("--device-memory", metavar="SIZE", help="what compute may use at once, e.g. 128MiB")
    budget.add_argument("--host-memory", metavar="SIZE", help="RAM for states and transfers")
    budget.add_argument("--nvme", type=Path, metavar="FOLDER", help="for the rest (default: a temporary folder here)")
    budget.add_argument("--plain", action="store_true", help="train the same model in memory with plain PyTorch")
    loop = parser.add_argument_group("training")
    loop.add_argument("--steps", type=int)
    loop.add_argument("--batch", type=int, help="sequences per step")
    loop.add_argument("--seq", type=int, help="tokens per sequence")
    loop.add_argument("--lr", type=float, help="highest learning rate")
    loop.add_argument("--clip", type=float, metavar="NORM", help="clip the gradient norm (default: off)")
    loop.add_argument("--seed", type=int, default=0)
    loop.add_argument("--compute-dtype", choices=STATE_BYTES)
    result = parser.add_argument_group("results")
    result.add_argument("--sample", type=int, default=64, metavar="N", help="tokens of generated text (default: 64)")
    result.add_argument("--prompt", default="def ", help="what the generated text begins with (default: 'def ')")
    result.add_argument("--save-plan", type=Path, metavar="PATH", help="write the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Train as told and return 0; a ZinfError says why it could not."""
    _fill_from_preset(args, PRESETS[args.preset])
    _check(args)
    example = load_example(args.model)
    stream = read_text(args.text, TokenizerVocabulary(args.tokenizer) if args.tokenizer else ByteVocabulary())
    batches = stream.batches(batch=args.batch, seq=args.seq, seed=args.seed)
    config = _make_config(args, example, stream)
    print(_describe_run(args, config, example.num_parameters(config), stream), flush=True)
    started = time.perf_counter()
    with ExitStack() as stack:
        model: nn.Module = example.GPT(config, seed=args.seed)
        if args.plain:
            model = InComputeDtype(model, torch.bfloat16) if args.compute_dtype == "bfloat16" else model
        else:
            _optimize(model, args, stack)
        losses = [
            result.loss
            for result in show_progress(
                train(model, batches, steps=args.steps, lr=args.lr, clip=args.clip),
                steps=args.steps,
                tokens_per_step=args.batch * args.seq,
                model=None if args.plain else model,
            )
        ]
        elapsed = time.perf_counter() - started
        last = losses[-5:]
        print(
            f"loss: {losses[0]:.3f} at first, {sum(last) / len(last):.3f} on average over the last {len(last)} step(s)"
        )
        print(f"elapsed: {elapsed:.1f} s; peak memory of the process, with Python and torch: {_peak()}")
        if not args.plain:
            print(zinf_compile.report(model))
            _save_plans(model, args.save_plan)
        if args.sample:
            print(f"sample:\n{_sample(example, model, stream, args)}")
    return 0


def train(
    model: nn.Module, batches: Iterable[Batch], *, steps: int, lr: float, clip: float | None
) -> Iterator[StepResult]:
    """The training loop, one result a step. It is plain PyTorch and does not know whether the model was optimized."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_up_cosine(step, steps))
    started = time.perf_counter()
    for step, (tokens, targets) in zip(range(1, steps + 1), batches, strict=False):
        loss = model(tokens, targets)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield StepResult(step, loss.item(), time.perf_counter() - started)
        started = time.perf_counter()


class InComputeDtype(nn.Module):
    """The plain counterpart of ``compute_dtype``: fp32 parameters, cast for every forward."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype, self.config = model, dtype, model.config

    def forward(self, *inputs: Tensor) -> Tensor:
        parameters = {name: parameter.to(self.dtype) for name, parameter in self.model.named_parameters()}
        output: Tensor = functional_call(self.model, parameters, inputs)
        return output


def _warm_up_cosine(step: int, steps: int) -> float:
    warm_up = min(1.0, (step + 1) / max(1, steps // 10))
    return warm_up * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))  # ends at a tenth, as GPT-3's schedule


def _fill_from_preset(args: argparse.Namespace, preset: Preset) -> None:
    for name in ("seq", "batch", "steps", "lr", "compute_dtype", "device_memory", "host_memory"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(preset, name))


def _check(args: argparse.Namespace) -> None:
    for name in ("steps", "batch", "seq"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} is not a positive number")
    if args.sample < 0:
        raise ConfigError(f"--sample {args.sample} is negative; 0 prints no sample")
    if args.sample and not args.prompt:
        raise ConfigError("--prompt is empty; a sample needs at least one token to go on from")
    if args.plain and args.save_plan:
        raise ConfigError("--save-plan has nothing to save with --plain; leave one of them out")


def _make_config(args: argparse.Namespace, example: ModuleType, stream: TokenStream) -> Any:
    vocab_size = stream.vocabulary.size
    if args.params is None:
        preset = PRESETS[args.preset]
        return example.GPTConfig(vocab_size, preset.layers, preset.hidden, preset.hidden // 64, args.seq)
    try:
        return example.config_for(parse_count(args.params), vocab_size, args.seq)
    except ValueError as error:
        raise ConfigError(f"--params {args.params}: {error}") from error


def _describe_run(args: argparse.Namespace, config: Any, num_parameters: int, stream: TokenStream) -> str:
    parts = STATE_BYTES["float32" if args.plain else args.compute_dtype]  # plain casts anew in every step
    per_parameter = sum(parts.values())
    states = num_parameters * per_parameter
    budget = sum(parse_size(getattr(args, name), option=name) for name in ("device_memory", "host_memory"))
    named = " + ".join(f"{nbytes} {name}" for name, nbytes in parts.items())
    lines = [
        f"model: a GPT of {num_parameters:,} parameters, {config.layers} layers, hidden {config.hidden}, "
        f"{config.heads} heads, vocabulary {config.vocab_size}",
        f"model states: {format_bytes(states)} = {per_parameter} bytes a parameter ({named}), besides activations",
        f"text: {len(stream.tokens):,} tokens of {stream.source}; {args.steps} steps of {args.batch} x {args.seq}",
    ]
    if args.plain:
        lines.append("budget: none, plain PyTorch in memory")
    else:
        factor = f"{states / budget:.1f} times the budget" if budget else "there is no budget"
        lines.append(
            f"budget: {args.device_memory} device + {args.host_memory} host; the model states are {factor}; "
            f"the rest goes to {args.nvme or 'a temporary folder here'}"
        )
    return "\n".join(lines)


def _optimize(model: nn.Module, args: argparse.Namespace, stack: ExitStack) -> None:
    nvme = args.nvme or stack.enter_context(_temporary_folder())
    zinf_compile.optimize(
        model,
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        nvme=nvme,
        compute_dtype=torch.bfloat16 if args.compute_dtype == "bfloat16" else None,
    )
    stack.callback(zinf_compile.close, model)  # before the folder under it goes


def _temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    here = Path.cwd()
    if _filesystem_of(here) in ("tmpfs", "ramfs"):
        raise ConfigError(f"the current folder {here} is in memory, not on a disk; pass --nvme with a folder on a disk")
    try:
        return tempfile.TemporaryDirectory(prefix=".zinf-", dir=here)
    except OSError as error:
        raise ConfigError(f"cannot make a folder in {here}: {error.strerror}; pass --nvme with a folder") from error


def _filesystem_of(folder: Path) -> str:
    """The type of the filesystem a folder is on, from the deepest mount point above it."""
    mounts = {Path(mount): kind for _, mount, kind, *_ in map(str.split, Path("/proc/mounts").read_text().splitlines())}
    return next((mounts[parent] for parent in (folder, *folder.parents) if parent in mounts), "unknown")


def _save_plans(model: nn.Module, path: Path | None) -> None:
    """The first plan at ``path``, further ones (a second shape, a graph break) beside it with a number."""
    if path is None:
        return
    for index, plan in enumerate(zinf_compile.report(model).plans):
        file = path if index == 0 else path.with_name(f"{path.stem}.{index + 1}{path.suffix}")
        plan.save(file)
        print(f"plan saved: {file}")


def _sample(example: ModuleType, model: nn.Module, stream: TokenStream, args: argparse.Namespace) -> str:
    prompt = stream.vocabulary.encode(args.prompt.encode()).long()[None]
    generator = torch.Generator().manual_seed(args.seed)
    tokens = example.generate(model, prompt, args.sample, temperature=_TEMPERATURE, generator=generator)
    text = stream.vocabulary.decode(tokens[0])
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _peak() -> str:
    return format_bytes(process_peak())
