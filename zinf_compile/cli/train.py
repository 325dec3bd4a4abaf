"""`zinf train`: trains a model within memory budgets, and shows what was predicted beside what was measured."""

import argparse
import tempfile
import time
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

import zinf_compile
from zinf_compile.cli.checkpoints import CheckpointFolder, Setting
from zinf_compile.cli.models import Built, ExampleGPT, Subject
from zinf_compile.cli.optimizers import find_optimizer, make_optimizer, measure_state
from zinf_compile.cli.presets import PRESETS, STATE_BYTES, Preset, load_example, parse_count
from zinf_compile.cli.progress import process_peak, show_progress
from zinf_compile.cli.ranks import World, add_ranks_argument, as_rank, must_start, start_ranks
from zinf_compile.cli.text import ByteVocabulary, TokenizerVocabulary, TokenStream, read_text
from zinf_compile.cli.training import Schedule, Training
from zinf_compile.cli.transformers_model import TransformersModel, parse_folder
from zinf_compile.ir.config import parse_size
from zinf_compile.ir.copies import Code, Encoding
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import format_bytes
from zinf_compile.runtime.device.cpu import has_fast_bfloat16
from zinf_compile.runtime.model.model_state import ranks_of
from zinf_compile.runtime.ranks.agreement import check_alike

_CHECKPOINT = Path("zinf-checkpoint")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `zinf train`; those left out come from the preset."""
    parser.add_argument(
        "hf",
        nargs="?",
        metavar="hf:FOLDER",
        help="a transformers model: its config.json, and safetensors if it has some",
    )
    size = parser.add_argument_group("model and text")
    size.add_argument("--preset", choices=PRESETS, default="demo", help="a run with sensible numbers (default: demo)")
    size.add_argument("--params", metavar="N", help="number of parameters instead of the preset's, e.g. 300M or 1.5B")
    size.add_argument("--model", type=Path, metavar="PATH", help="the model file (default: examples/gpt.py)")
    size.add_argument("--lora", type=int, metavar="RANK", help="freeze the hf: model, and train adapters of this rank")
    size.add_argument("--text", type=Path, nargs="+", default=[], metavar="PATH", help="files or folders to train on")
    size.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json (default: the model's, or bytes)"
    )
    budget = parser.add_argument_group("budgets")
    budget.add_argument("--device-memory", metavar="SIZE", help="what compute may use at once, e.g. 128MiB")
    budget.add_argument("--host-memory", metavar="SIZE", help="RAM for states and transfers")
    budget.add_argument(
        "--reserve-memory",
        metavar="SIZE",
        help="of --device-memory, left to Python, torch and captured graphs; auto: as measured, so that budgets hold for "
        "the process; 0: they are for the model (default: auto for budgets that are given, 0 for those of presets)",
    )
    budget.add_argument("--nvme", type=Path, metavar="FOLDER", help="for the rest (default: a temporary folder here)")
    add_ranks_argument(budget)
    budget.add_argument("--plain", action="store_true", help="train the same model in memory with plain PyTorch")
    loop = parser.add_argument_group("training")
    loop.add_argument("--steps", type=int, help="optimizer steps in all, those before a --resume too")
    loop.add_argument("--batch", type=int, help="sequences per micro-batch")
    loop.add_argument("--seq", type=int, help="tokens per sequence")
    loop.add_argument(
        "--accumulate",
        type=int,
        metavar="N",
        help="gradient accumulation steps, which ranks share (default: 1, or one for each rank)",
    )
    loop.add_argument("--optimizer", default="adamw", metavar="NAME", help="a class of torch.optim (default: adamw)")
    loop.add_argument("--lr", type=float, help="peak learning rate")
    loop.add_argument("--clip", type=float, metavar="NORM", help="clip the gradient norm (default: off)")
    loop.add_argument("--seed", type=int, default=0)
    loop.add_argument("--compute-dtype", choices=STATE_BYTES)
    loop.add_argument(
        "--state-dtype", choices=tuple(map(str, Code)), help="store optimizer state in fewer bits (default: exactly)"
    )
    loop.add_argument(
        "--compute",
        choices=("aten", "inductor"),
        default="aten",
        help="op by op, with the bits of --plain and of any budgets; or compiled, to rounding (default: %(default)s)",
    )
    saving = parser.add_argument_group("saving")
    saving.add_argument("--save-every", type=int, metavar="N", help="save every N steps; the last one is always saved")
    saving.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help=f"where to save and resume (default: {_CHECKPOINT})"
    )
    saving.add_argument("--resume", action="store_true", help="resume from the checkpoint with these budgets")
    result = parser.add_argument_group("results")
    result.add_argument("--sample", type=int, default=64, metavar="N", help="tokens of generated text (default: 64)")
    result.add_argument("--prompt", default="def ", help="what the generated text begins with (default: 'def ')")
    result.add_argument("--save-plan", type=Path, metavar="PATH", help="write the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Train with these arguments and return 0. Raises ZinfError if it cannot, KeyboardInterrupt that says how to resume."""
    _check_plain(args)
    if must_start(args.ranks):
        _check_for_ranks(args, args.ranks)
        return start_ranks(args.ranks, args.words)
    with as_rank(args.ranks) as world:
        _run(args, world)
    return 0


def _run(args: argparse.Namespace, world: World) -> None:
    if world.size > 1:
        _check_for_ranks(args, world.size)
    if args.accumulate is None:
        args.accumulate = world.size
    _fill_from_preset(args, PRESETS[args.preset])
    _check(args)
    kind = find_optimizer(args.optimizer, args.lr)
    stream = _read_stream(args)
    settings = _settings_of(args, stream)
    checkpoint = _choose_checkpoint(args, settings)
    subject = _choose_model(args, stream.vocabulary.size)
    print(_describe_run(args, subject, stream, kind, world), flush=True)
    try:
        _train(args, subject, stream, kind, checkpoint, settings, world)
    except KeyboardInterrupt:
        if checkpoint is None:
            raise KeyboardInterrupt("nothing is saved; with --save-every N it can be resumed") from None
        raise KeyboardInterrupt(checkpoint.tell_how_to_resume()) from None


def _train(
    args: argparse.Namespace,
    subject: Subject,
    stream: TokenStream,
    kind: type[Optimizer],
    checkpoint: CheckpointFolder | None,
    settings: Mapping[str, Setting],
    world: World,
) -> None:
    batches = stream.batches(batch=args.batch, seq=args.seq, seed=args.seed, rank=world.rank, num_ranks=world.size)
    schedule = Schedule(steps=args.steps, accumulate=args.accumulate // world.size, clip=args.clip)
    started = time.perf_counter()
    with ExitStack() as stack:
        built = _build(subject, args, stack)
        ranks = ranks_of(built.trunk)
        if not ranks.is_alone:
            same = ("steps", "optimizer", "save_every", "resume", "sample")
            check_alike(ranks, "settings of zinf train", {**settings, **{name: getattr(args, name) for name in same}})
        trained = [parameter for parameter in built.trunk.parameters() if parameter.requires_grad]
        torch.manual_seed(args.seed + world.rank)
        training = Training(built.trunk, make_optimizer(kind, trained, args.lr), batches, schedule)
        if checkpoint is not None and args.resume:
            checkpoint.resume(training)
            print(f"resumed: {checkpoint.folder}, after step {training.step}", flush=True)
        results = training.run(
            lambda batch: subject.loss(built.forward, batch),
            save=None if checkpoint is None else lambda: checkpoint.save_when_due(training),
            mean=lambda loss: sum(ranks.exchange("the loss of a step", loss)) / ranks.mesh_size,
        )
        losses = [
            result.loss
            for result in show_progress(
                results,
                steps=args.steps,
                tokens_per_step=args.batch * args.accumulate * args.seq,
                model=None if args.plain else built.trunk,
            )
        ]
        elapsed = time.perf_counter() - started
        last = losses[-5:]
        print(
            f"loss: {losses[0]:.3f} at first, {sum(last) / len(last):.3f} on average over the last {len(last)} step(s)"
        )
        whose = "the process" if world.size == 1 else "rank 0"
        print(f"elapsed: {elapsed:.1f} s; peak memory of {whose}, with Python and torch: {_peak()}")
        if checkpoint is not None:
            print(f"checkpoint: {checkpoint.folder}, after step {training.step}")
        if not args.plain:
            print(zinf_compile.report(built.trunk, all_ranks=True))
            _save_plans(built.trunk, args.save_plan if world.is_first else None)
        if args.sample:
            print(f"sample:\n{_sample(subject, built, stream, args)}")


def _check_for_ranks(args: argparse.Namespace, num_ranks: int) -> None:
    """Refuse what several ranks cannot do."""
    if args.plain:
        raise ConfigError("--plain trains in one process, for comparison; leave it out, or run it without ranks")
    if args.lora is not None:
        raise ConfigError(
            "--lora is not supported on several ranks: each of them would train adapters of its own; leave it out, or run "
            "it without ranks"
        )
    if args.accumulate is not None and args.accumulate % num_ranks:
        raise ConfigError(
            f"--accumulate {args.accumulate}: {num_ranks} ranks share the micro-batches of a step evenly; pass a multiple "
            f"of {num_ranks}"
        )


def _check_plain(args: argparse.Namespace) -> None:
    """Refuse what --plain would ignore, before presets fill it in."""
    if not args.plain:
        return
    names = ("device_memory", "host_memory", "nvme", "reserve_memory", "state_dtype")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    given += ["--compute"] if args.compute != "aten" else []
    if given:
        raise ConfigError(
            f"{', '.join(given)} means nothing with --plain, which trains in memory; leave one of them out"
        )


def _fill_from_preset(args: argparse.Namespace, preset: Preset) -> None:
    # The budgets of presets are for the model, those that a person states for the process.
    if args.reserve_memory is None:
        is_stated = args.device_memory is not None or args.host_memory is not None
        args.reserve_memory = "auto" if is_stated else 0
    args.avoids_bfloat16 = args.compute_dtype is None and preset.compute_dtype == "bfloat16" and not has_fast_bfloat16()
    if args.avoids_bfloat16:
        args.compute_dtype = "float32"
    for name in ("seq", "batch", "steps", "lr", "compute_dtype", "device_memory", "host_memory"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(preset, name))


def _check(args: argparse.Namespace) -> None:
    for name in ("steps", "batch", "seq", "accumulate", "clip", "lora", "save_every"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is not a positive number")
    if args.hf is not None and (args.params or args.model):
        raise ConfigError("the hf: folder says what the model is; leave out --params and --model")
    if args.hf is None and args.lora is not None:
        raise ConfigError("--lora needs a model of transformers; pass its folder, as in zinf train hf:llama --lora 8")
    if args.sample < 0:
        raise ConfigError(f"--sample {args.sample} is negative; 0 prints no sample")
    if args.sample and not args.prompt:
        raise ConfigError("--prompt is empty; a sample needs at least one token to go on from")
    if args.plain and args.save_plan:
        raise ConfigError("--save-plan has nothing to save with --plain; leave one of them out")


def _read_stream(args: argparse.Namespace) -> TokenStream:
    tokenizer = args.tokenizer
    if tokenizer is None and args.hf is not None and (parse_folder(args.hf) / "tokenizer.json").is_file():
        tokenizer = parse_folder(args.hf) / "tokenizer.json"
    return read_text(args.text, ByteVocabulary() if tokenizer is None else TokenizerVocabulary(tokenizer))


def _settings_of(args: argparse.Namespace, stream: TokenStream) -> dict[str, Setting]:
    """The options that determine the numbers of a run."""
    names = ("batch", "seq", "accumulate", "lr", "clip", "seed", "compute_dtype", "state_dtype")
    settings: dict[str, Setting] = {name.replace("_", "-"): getattr(args, name) for name in names}
    settings["text"] = f"of {len(stream.tokens)} tokens with checksum {zlib.crc32(stream.tokens.numpy().tobytes()):08x}"
    return settings


def _choose_checkpoint(args: argparse.Namespace, settings: Mapping[str, Setting]) -> CheckpointFolder | None:
    if args.checkpoint is None and args.save_every is None and not args.resume:
        return None
    checkpoint = CheckpointFolder(folder=args.checkpoint or _CHECKPOINT, every=args.save_every, settings=settings)
    checkpoint.check(resume=args.resume)
    return checkpoint


def _choose_model(args: argparse.Namespace, vocab_size: int) -> Subject:
    if args.hf is not None:
        folder = parse_folder(args.hf)
        return TransformersModel(folder, lora_rank=args.lora, seq=args.seq, vocab_size=vocab_size, seed=args.seed)
    example, preset = load_example(args.model), PRESETS[args.preset]
    if args.params is None:
        config = example.GPTConfig(vocab_size, preset.layers, preset.hidden, preset.hidden // 64, args.seq)
        return ExampleGPT(example=example, config=config, seed=args.seed)
    try:
        config = example.config_for(parse_count(args.params), vocab_size, args.seq)
    except ValueError as error:
        raise ConfigError(f"--params {args.params}: {error}") from error
    return ExampleGPT(example=example, config=config, seed=args.seed)


def _describe_run(
    args: argparse.Namespace, subject: Subject, stream: TokenStream, kind: type[Optimizer], world: World
) -> str:
    # plain casts anew in every step; adapters are fp32 whatever the rest computes in
    dtype = "float32" if args.plain or subject.num_frozen else args.compute_dtype
    of_state: float = measure_state(kind, args.lr)
    if args.state_dtype is not None:
        encoding = Encoding(dtype="float32", code=Code(args.state_dtype))
        of_state *= round(encoding.nbytes(2**20) / 2**20 / encoding.itemsize, 3)
    parts: dict[str, float] = {**STATE_BYTES[dtype], f"{kind.__name__} state": of_state}
    per_parameter = sum(parts.values())
    named = " + ".join(f"{nbytes:g} {name}" for name, nbytes in parts.items() if nbytes)
    per_frozen = getattr(torch, args.compute_dtype).itemsize
    states = subject.num_trained * per_parameter + subject.num_frozen * per_frozen
    frozen = f", and {per_frozen} bytes a frozen one" if subject.num_frozen else ""
    budget = sum(parse_size(getattr(args, name), option=name) for name in ("device_memory", "host_memory"))
    size = f"{args.batch} x {args.seq}" if args.accumulate == 1 else f"{args.accumulate} x {args.batch} x {args.seq}"
    lines = [
        f"model: {subject.description}",
        f"model states: {format_bytes(states)} = {per_parameter:g} bytes a parameter ({named}){frozen}, besides activations",
        f"text: {len(stream.tokens):,} tokens of {stream.source}; {args.steps} steps of {size}",
    ]
    if args.avoids_bfloat16:
        lines.append(
            "compute: float32, because torch multiplies bfloat16 slowly on this CPU (no AVX-512); "
            "--compute-dtype bfloat16 computes in it all the same"
        )
    if args.plain:
        lines.append("budget: none, plain PyTorch in memory")
    else:
        factor = f"{states / world.size / budget:.1f} times the budget" if budget else "there is no budget"
        is_of, share = "budget", "the model states are"
        if world.size > 1:
            is_of, share = f"budget of each of {world.size} ranks", "its share of the model states is"
        lines.append(
            f"{is_of}: {args.device_memory} device + {args.host_memory} host; {share} {factor}; "
            f"the rest goes to {args.nvme or 'a temporary folder here'}"
        )
    return "\n".join(lines)


def _build(subject: Subject, args: argparse.Namespace, stack: ExitStack) -> Built:
    dtype = torch.bfloat16 if args.compute_dtype == "bfloat16" else None
    if args.plain:
        return subject.build_plain(dtype)
    built = subject.build_optimized(
        {
            "device_memory": args.device_memory,
            "host_memory": args.host_memory,
            "nvme": args.nvme or stack.enter_context(_temporary_folder()),
            "compute_dtype": dtype,
            "state_dtype": args.state_dtype,
            "compute": args.compute,
            "reserve_memory": args.reserve_memory,
        }
    )
    stack.callback(zinf_compile.close, built.trunk)  # before the folder under it goes
    return built


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


def _sample(subject: Subject, built: Built, stream: TokenStream, args: argparse.Namespace) -> str:
    prompt = stream.vocabulary.encode(args.prompt.encode()).long()[None]
    text = stream.vocabulary.decode(subject.sample(built, prompt, args.sample)[0])
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _peak() -> str:
    return format_bytes(process_peak())
