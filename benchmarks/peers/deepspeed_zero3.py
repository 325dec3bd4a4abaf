"""Peer benchmark: DeepSpeed ZeRO-3 (none, CPU or NVMe offload) on CPU processes, one a rank; prints one JSON line.

Self-contained: it runs with the interpreter of an environment that has deepspeed and does not import zinf_compile. The
model is a Python file that defines ``GPTConfig(vocab_size, layers, hidden, heads, seq)`` and ``GPT(config)`` whose
``forward(tokens, targets)`` returns the loss. README.md in this folder says how to set the environment up.

The configuration is DeepSpeed's at its best for low memory on this kind of run; every value that is not a default is
explained where it is set.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_MIB = 1 << 20
# DeepSpeed keeps a tensor in memory when it is smaller than one AIO block, and never swaps below 1 MiB, so 1 MiB is the
# block size that puts the most on disk.
_AIO_BLOCK_BYTES = _MIB
_OPTIMIZER_TENSORS = 4  # master parameter, momentum, variance, gradient of one sub-group
_RANK_VARIABLE = "PEER_FOLDER"  # in the environment of ranks other than 0: the folder that rank 0 has made


class Model(NamedTuple):
    """What the configuration needs to know about the model, read from a copy on meta."""

    parameters: int
    largest_parameter: int
    largest_block: int


class Io(NamedTuple):
    """Bytes this process moved to and from storage devices so far."""

    read: int
    written: int


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Python file that defines GPTConfig and GPT")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps; DeepSpeed records its trace in these")
    parser.add_argument("--offload", choices=("none", "cpu", "nvme"), default="nvme")
    parser.add_argument("--nvme", type=Path, help="folder on a real disk; a subfolder is made and removed")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute each block in backward")
    parser.add_argument("--threads", type=int, default=2, help="of each rank")
    parser.add_argument("--ranks", type=int, default=1, help="processes, over gloo; --batch is that of each")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of compute")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--build", choices=("partitioned", "memory"), default="partitioned",
                        help="partitioned: under deepspeed.zero.Init, never whole in memory; memory: built whole, then "
                        "partitioned")  # fmt: skip
    tuning = parser.add_argument_group("tuning (elements, not bytes, unless the name says so)")
    tuning.add_argument("--sub-group-size", type=int, default=26_000_000)
    tuning.add_argument("--buffer-count", type=int, default=12, help="parameter swap buffers, each of the largest size")
    tuning.add_argument("--reuse-distance", type=int, help="default: two blocks; see zero3_config")
    tuning.add_argument("--prefetch-bucket", type=int, default=0)
    tuning.add_argument("--max-live", type=int, default=0)
    tuning.add_argument("--reduce-bucket", type=int, help="default: the largest parameter")
    tuning.add_argument("--pipeline-read", action="store_true", help="read the next optimizer sub-group early")
    tuning.add_argument("--pipeline-write", action="store_true", help="write the previous sub-group late")
    tuning.add_argument("--aio-queue-depth", type=int, default=32)
    tuning.add_argument("--aio-threads", type=int, default=1, help="intra_op_parallelism")
    tuning.add_argument("--mmap-threshold-bytes", type=int, default=0, help="of malloc; 0: glibc's own choice")
    arguments = parser.parse_args()
    if arguments.offload == "nvme" and arguments.nvme is None:
        parser.error("--offload nvme needs --nvme DIR")
    if arguments.warmup < 1 or arguments.steps < 1:
        parser.error("--warmup and --steps must be at least 1")
    return arguments


def set_environment(threads: int, ranks: int) -> None:
    """Set the environment of rank 0, unless this is another rank, which rank 0 has started with an environment.

    Call it before torch is imported, because OpenMP reads it once.
    """
    if _RANK_VARIABLE not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(
            OMP_NUM_THREADS=str(threads),
            DS_ACCELERATOR="cpu",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
        )
    # The JIT build of DeepSpeed's operators calls ninja by name.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def set_mmap_threshold(nbytes: int) -> None:
    """Make malloc give every block of at least ``nbytes`` its own mapping, returned to the system when freed.

    glibc raises its threshold to 32 MiB by itself. Parameters, gradients and activations then share a heap, whose
    fragmentation is half of DeepSpeed's peak. 1 MiB avoids that, at the price of fresh page faults for every large tensor.
    """
    m_mmap_threshold = -3  # <malloc.h>
    if nbytes and not ctypes.CDLL(None).mallopt(m_mmap_threshold, nbytes):
        raise SystemExit(f"mallopt(M_MMAP_THRESHOLD, {nbytes}) failed")


def load_model_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_model", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--model {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def find_blocks(model: torch.nn.Module, layers: int) -> list[torch.nn.Module]:
    """The transformer blocks: the ModuleList of ``layers`` entries."""
    import torch

    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == layers]
    if len(lists) != 1:
        raise SystemExit(f"the model must hold its blocks in one ModuleList of {layers} entries; found {len(lists)}")
    return list(lists[0])


def measure_model(definition: ModuleType, shape: Any) -> Model:
    import torch

    with torch.device("meta"):
        model = definition.GPT(shape)
    blocks = find_blocks(model, shape.layers)
    return Model(
        parameters=sum(p.numel() for p in model.parameters()),
        largest_parameter=max(p.numel() for p in model.parameters()),
        largest_block=max(sum(p.numel() for p in block.parameters()) for block in blocks),
    )


def zero3_config(arguments: argparse.Namespace, model: Model, folder: Path | None) -> dict[str, Any]:
    """DeepSpeed's configuration, tuned for the smallest memory that keeps its speed."""
    reuse_distance = arguments.reuse_distance
    if reuse_distance is None:
        # A parameter whose next use is closer than this is kept. The default of 1e9 keeps whole models and then runs
        # out of swap buffers. Two blocks keep exactly the recomputed block between its recompute and its backward,
        # which saves one read of every parameter per step.
        reuse_distance = 2 * model.largest_block
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": False,  # one rank: nothing to communicate
        "contiguous_gradients": True,
        "reduce_bucket_size": arguments.reduce_bucket or model.largest_parameter,  # default 5e8: a 1 GB buffer
        "sub_group_size": arguments.sub_group_size,  # default 1e9: the whole model's states in memory at once
        "stage3_param_persistence_threshold": 0,  # no parameter is exempt
        "stage3_prefetch_bucket_size": arguments.prefetch_bucket,
        "stage3_max_live_parameters": arguments.max_live,
        "stage3_max_reuse_distance": reuse_distance,
        # Linear layers save the parameter object, not a view of its storage: needed for correct gradients, because
        # the storage is a swap buffer that holds something else by the time backward runs.
        "memory_efficient_linear": True,
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": 1,
        # With it: fp32 master parameters and states; gradients are kept in bf16.
        "bf16": {"enabled": arguments.dtype == "bfloat16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
    if arguments.offload == "cpu":
        # pin_memory would only mlock ordinary memory here: no device reads it.
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if arguments.offload == "nvme":
        pipelined = arguments.pipeline_read + arguments.pipeline_write
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": str(folder),
            "pin_memory": False,
            "max_in_cpu": 0,  # default 1e9: parameters would never leave memory
            "buffer_count": arguments.buffer_count,
            "buffer_size": model.largest_parameter,
        }
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": str(folder),
            "pin_memory": False,
            "buffer_count": _OPTIMIZER_TENSORS * (1 + pipelined),
            "pipeline_read": arguments.pipeline_read,
            "pipeline_write": arguments.pipeline_write,
        }
        config["aio"] = {
            "block_size": _AIO_BLOCK_BYTES,
            "queue_depth": arguments.aio_queue_depth,
            "intra_op_parallelism": arguments.aio_threads,
            "single_submit": False,
            "overlap_events": True,
        }
    return config


def checkpoint_blocks(model: torch.nn.Module, layers: int) -> None:
    """Recompute each block in backward.

    Reentrant on purpose: the non-reentrant variant keeps detached views of the recomputed weights. With NVMe offload those
    are swap buffers, which are reused before backward reads them.
    """
    from torch.utils.checkpoint import checkpoint

    for block in find_blocks(model, layers):
        forward = block.forward
        block.forward = lambda *inputs, _forward=forward: checkpoint(_forward, *inputs, use_reentrant=True)


def initialize_partitioned(model: torch.nn.Module) -> None:
    """Run the model's own ``init_weights(seed=0)``, one gathered parameter at a time.

    The model's constructor has already called it, to no effect, because every parameter was partitioned and empty by then.
    This way all builds and all peers start from the same values. A model without ``init_weights`` keeps the values that its
    modules drew (in bf16, so not those of an fp32 build).
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    if not hasattr(model, "init_weights"):
        return
    named_parameters = model.named_parameters

    def gathered_parameters() -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in named_parameters():
            with GatheredParameters([parameter], modifier_rank=0):  # rank 0 writes; the value goes back to its tier
                yield name, parameter

    model.named_parameters = gathered_parameters  # type: ignore[method-assign]  # of this instance, for one call
    model.init_weights(seed=0)
    del model.named_parameters


def build_model(
    definition: ModuleType, shape: Any, arguments: argparse.Namespace, config: dict[str, Any]
) -> torch.nn.Module:
    import deepspeed
    import torch

    torch.manual_seed(arguments.seed)
    if arguments.build == "partitioned":
        # Each parameter is partitioned, and with NVMe offload written out, as soon as its module is built.
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=getattr(torch, arguments.dtype)):
            model = definition.GPT(shape)
        initialize_partitioned(model)
    else:
        model = definition.GPT(shape).to(getattr(torch, arguments.dtype))
    if arguments.gradient_checkpointing:
        checkpoint_blocks(model, shape.layers)
    return model


def read_status(field: str) -> int:
    """One memory field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def reset_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS; ru_maxrss would keep the peak of the imports


def read_io() -> Io:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return Io(read=int(counters["read_bytes"]), written=int(counters["write_bytes"]))


class AnonymousPeak:
    """Samples RssAnon every 10 ms. It can miss a shorter peak; VmHWM cannot, but counts file pages as well."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(0.01):
            self.peak_bytes = max(self.peak_bytes, read_status("RssAnon"))

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def train(arguments: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(arguments.threads)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    definition = load_model_file(arguments.model)
    shape = definition.GPTConfig(
        vocab_size=arguments.vocab,
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        seq=arguments.seq,
    )
    facts = measure_model(definition, shape)
    config = zero3_config(arguments, facts, folder)
    generator = torch.Generator().manual_seed(arguments.seed + int(os.environ["RANK"]))
    sequence = torch.randint(arguments.vocab, (arguments.batch, arguments.seq + 1), generator=generator)
    tokens, targets = sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()

    base_rss = read_status("VmRSS")
    reset_peak_rss()
    with AnonymousPeak() as setup_anonymous:
        started = time.perf_counter()
        model = build_model(definition, shape, arguments, config)
        optimizer = DeepSpeedCPUAdam(
            model.parameters(),
            lr=arguments.lr,
            betas=(0.9, 0.95),
            weight_decay=arguments.weight_decay,
            adamw_mode=True,
        )
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        setup_seconds = time.perf_counter() - started
    setup_peak_rss = read_status("VmHWM")

    seconds, losses, reads, writes, peaks = [], [], [], [], []
    with AnonymousPeak() as step_anonymous:
        for _ in range(arguments.warmup + arguments.steps):
            reset_peak_rss()
            before, started = read_io(), time.perf_counter()
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - started)
            after = read_io()
            reads.append(after.read - before.read)
            writes.append(after.written - before.written)
            peaks.append(read_status("VmHWM"))

    timed = seconds[arguments.warmup :]
    return {
        "system": f"deepspeed-zero3-{arguments.offload}",
        "version": deepspeed.__version__,
        "torch": torch.__version__,
        "layers": arguments.layers,
        "hidden": arguments.hidden,
        "heads": arguments.heads,
        "vocab": arguments.vocab,
        "batch": arguments.batch,
        "seq": arguments.seq,
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "ranks": arguments.ranks,
        "parameters": facts.parameters,
        "tokens_per_step": arguments.ranks * arguments.batch * arguments.seq,
        "warmup_seconds": [round(s, 4) for s in seconds[: arguments.warmup]],
        "seconds_per_step": [round(s, 4) for s in timed],
        "median_seconds_per_step": round(statistics.median(timed), 4),
        "setup_seconds": round(setup_seconds, 2),
        "base_rss_bytes": base_rss,
        "peak_rss_bytes": max(setup_peak_rss, *peaks),
        "peak_rss_setup_bytes": setup_peak_rss,
        "peak_rss_per_step_bytes": peaks,  # warm-up steps included: Adam's states are created in the first
        "peak_anonymous_bytes": max(setup_anonymous.peak_bytes, step_anonymous.peak_bytes),
        "peak_anonymous_steps_bytes": step_anonymous.peak_bytes,
        "read_bytes_per_step": reads[arguments.warmup :],
        "written_bytes_per_step": writes[arguments.warmup :],
        "read_bytes_per_parameter": round(statistics.median(reads[arguments.warmup :]) / facts.parameters, 2),
        "written_bytes_per_parameter": round(statistics.median(writes[arguments.warmup :]) / facts.parameters, 2),
        "losses": losses,
        "zero_optimization": {key: value for key, value in config["zero_optimization"].items() if key != "stage"},
        "aio": config.get("aio"),
        "mmap_threshold_bytes": arguments.mmap_threshold_bytes,
    }


def start_other_ranks(ranks: int, folder: Path | None) -> list[subprocess.Popen[bytes]]:
    """Start this script once for each rank but this one, with the same arguments."""
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), _RANK_VARIABLE: str(folder or "")},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(1, ranks)
    ]


def main() -> None:
    arguments = parse_arguments()
    set_environment(arguments.threads, arguments.ranks)
    set_mmap_threshold(arguments.mmap_threshold_bytes)
    # DeepSpeed and its JIT builds log to standard output: send all of that to standard error, so that the only line
    # on standard output is the result.
    result_stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if (given := os.environ.get(_RANK_VARIABLE)) is not None:
        train(arguments, Path(given) if given else None)
        return
    folder = None
    if arguments.offload == "nvme":
        folder = arguments.nvme / f"deepspeed-{os.getpid()}"
        folder.mkdir(parents=True)
    others = start_other_ranks(arguments.ranks, folder)
    try:
        report = train(arguments, folder)
        if any(other.wait() for other in others):
            raise SystemExit("a rank has failed; its error is above")
        if folder is not None:
            report["disk_bytes"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
            report["zero_optimization"] = json.loads(
                json.dumps(report["zero_optimization"]).replace(str(folder), "DIR")
            )
    finally:
        for other in others:
            other.kill()
        if folder is not None:
            shutil.rmtree(folder)
    print(json.dumps(report), file=result_stream, flush=True)


if __name__ == "__main__":
    main()
