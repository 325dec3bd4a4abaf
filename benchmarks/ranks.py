"""Several ranks on one machine: seconds of a step beside FSDP2 and beside one process, memory, and bytes exchanged.

    python -m benchmarks.ranks [--ranks 2] [--layers 8 --hidden 512] [--tokens 1024 --seq 256] [--rounds 2] [--nvme DIR]

Every contestant trains the same GPT with fp32 AdamW on the same tokens, over gloo, one thread a rank: in bfloat16 where the
CPU has instructions for it, and in float32 otherwise (``--dtype``). They run one after the other in fresh processes, in
turns. Prints one JSON line a contestant, with the median of all steps:

``zinf``      this library, ZeRO stage 3, with the default ``compute`` (``--compute``) and room for every compute copy, or
              with ``--device-mib`` for device memory. ``states``: bytes at home on a rank; ``gathered`` and ``reduced``:
              full bytes a step that passed between ranks, beside what the formula says: two gathers of what is streamed,
              one of what is resident (after its update), and one reduction, all in the compute dtype.
``fsdp2``     ``fully_shard`` of every block with ``CPUOffloadPolicy``, eager.
``compiled``  the same, with ``torch.compile`` of every block.
``alone``     this library in one process with as many threads as there are ranks, on the tokens of all ranks.
``rounds``    as ``zinf``, with ``schedule="rounds"``: each rank has half of the stages, and computes them for both batches.
``nvme``      as ``zinf``, with ``--nvme-device-mib`` and ``--nvme-host-mib``, too little for the states: they are on disk.
``rounds-nvme``, ``alone-nvme``  as ``rounds`` and ``alone``, with these budgets (those of all ranks together for ``alone``).
              ``moved``: bytes a step over each route between tiers, of all ranks together.
``deepspeed`` DeepSpeed ZeRO-3 with parameters and optimizer on NVMe, by ``benchmarks/peers``, where ``--peer`` names the
              python of an environment that has it. In float32 its optimizer keeps a master copy beside the parameters.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.json_lines import command_line
from benchmarks.out_of_core import load_gpt
from zinf_compile.ir.glossary import Tier
from zinf_compile.runtime.device.cpu import has_fast_bfloat16

_ROOT = Path(__file__).resolve().parents[1]
_WARM_UP, _STEPS = 2, 6
_MASTER_BYTES = 12  # a parameter: fp32 master and two moments
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _build(args: argparse.Namespace) -> Any:
    gpt = load_gpt()
    return gpt.GPT(gpt.GPTConfig(vocab_size=4096, layers=args.layers, hidden=args.hidden, heads=8, seq=args.seq))


def _batch(step: int, rank: int, sequences: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(4096, (sequences, seq + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _train(model: Any, rank: int, sequences: int, seq: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds = []
    for step in range(_WARM_UP + _STEPS):
        tokens, targets = _batch(step, rank, sequences, seq)
        start = time.perf_counter()
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds[_WARM_UP:]


def _zinf(name: str, args: argparse.Namespace, rank: int, num_ranks: int) -> dict[str, Any]:
    import zinf_compile
    from zinf_compile.runtime.params.records import record_of
    from zinf_compile.runtime.store.store import store_of

    model = _build(args)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype = _DTYPES[args.dtype]
    state_bytes = _MASTER_BYTES + 3 * dtype.itemsize  # a compute copy, a gradient, and room to add to it
    budget = int(state_bytes * num_parameters / num_ranks * args.share)
    device = args.device_mib * 2**20 or dtype.itemsize * num_parameters + budget // 2 + 2**28
    if name.endswith("nvme"):
        each = args.ranks // num_ranks
        device, budget = each * args.nvme_device_mib * 2**20, each * args.nvme_host_mib * 2**20
    zinf_compile.optimize(
        model,
        device_memory=device,
        host_memory=budget,
        nvme=args.nvme,
        compute_dtype=dtype,
        compute=args.compute,
        schedule="rounds" if name.startswith("rounds") else None,
    )
    store = store_of(next(record for each in model.parameters() if (record := record_of(each)) is not None))
    before = dict(store.meter.moved)
    seconds = _train(model, rank, args.sequences // num_ranks, args.seq)
    zinf_compile.synchronize(model)
    report = zinf_compile.report(model)
    steps = _WARM_UP + _STEPS
    moved = {route: (nbytes - before.get(route, 0)) / steps for route, nbytes in store.meter.moved}
    resident = sum(item.compute_nbytes for item in report.plans[0].placements if item.compute == "device")
    streamed = dtype.itemsize * num_parameters - resident
    result = {
        "seconds": seconds,
        "states": sum(slot.nbytes for record in store.records.values() for slot in record.slots),
        "on disk": sum(
            slot.nbytes for record in store.records.values() for slot in record.slots if slot.tier is Tier.NVME
        ),
        "moved": _sum_over_ranks(moved, num_ranks),
        "device": [report.tiers[0].measured_peak, report.tiers[0].predicted_peak],
        "stalled": sum(stall.seconds for stall in report.stalls if "all-gather" in stall.transfer) / steps,
        "gathered": store.meter.collectives["all-gather"] / steps,
        "gathered by formula": 2 * streamed + resident,
        "reduced": store.meter.collectives["reduction"] / steps,
        "reduced by formula": dtype.itemsize * num_parameters,
    }
    zinf_compile.close(model)
    return result


def _sum_over_ranks(numbers: dict[str, float], num_ranks: int) -> dict[str, int]:
    of_ranks: list[Any] = [numbers]
    if num_ranks > 1:
        of_ranks = [None] * num_ranks
        dist.all_gather_object(of_ranks, numbers)
    routes = sorted({route for each in of_ranks for route in each})
    return {route: round(sum(each.get(route, 0) for each in of_ranks)) for route in routes}


def _fsdp2(name: str, args: argparse.Namespace, rank: int, num_ranks: int) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = _build(args)
    dtype = _DTYPES[args.dtype]
    policy = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for block in model.blocks:
        if name == "compiled":
            block.compile()
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    return {"seconds": _train(model, rank, args.sequences // num_ranks, args.seq)}


_CONTESTANTS: dict[str, Callable[[str, argparse.Namespace, int, int], dict[str, Any]]] = {
    "zinf": _zinf,
    "fsdp2": _fsdp2,
    "compiled": _fsdp2,
    "alone": _zinf,
    "rounds": _zinf,
    "nvme": _zinf,
    "rounds-nvme": _zinf,
    "alone-nvme": _zinf,
}


def _deepspeed(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "model": _ROOT / "examples" / "gpt.py",
        "layers": args.layers,
        "hidden": args.hidden,
        "heads": 8,
        "vocab": 4096,
        "batch": args.tokens // args.seq,
        "seq": args.seq,
        "ranks": args.ranks,
        "threads": 1,
        "dtype": args.dtype,
        "offload": "nvme",
        "nvme": args.nvme,
        "warmup": _WARM_UP,
        "steps": _STEPS,
    }
    command = [args.peer, _ROOT / "benchmarks" / "peers" / "deepspeed_zero3.py"]
    command += [f"--{option}={value}" for option, value in given.items()]
    done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    return {"seconds": found["seconds_per_step"], "peak_rss": found["peak_rss_bytes"], "on disk": found["disk_bytes"]}


def _run(rank: int, name: str, num_ranks: int, args: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(args.ranks if num_ranks == 1 else 1)
    if num_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{args.rendezvous}", rank=rank, world_size=num_ranks)
    result = _CONTESTANTS[name](name, args, rank, num_ranks)
    if rank == 0:
        results.put(result)
    if num_ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    """Run every contestant in turns, and print what was measured."""
    parser = argparse.ArgumentParser(description="Several ranks on one machine.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank, a multiple of ``--seq``")
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16" if has_fast_bfloat16() else "float32")
    parser.add_argument("--compute", choices=("inductor", "aten"), default="inductor")
    parser.add_argument("--device-mib", type=int, default=0, help="device memory of a rank; enough where left out")
    parser.add_argument("--share", type=float, default=1.2, help="of the model states that budgets hold")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--nvme", default=".")
    parser.add_argument("--nvme-device-mib", type=int, default=256, help="device memory of each rank of ``nvme``")
    parser.add_argument("--nvme-host-mib", type=int, default=64, help="host memory of each rank of ``nvme``")
    parser.add_argument("--peer", help="python of an environment that has DeepSpeed")
    parser.add_argument("--only", default=",".join(_CONTESTANTS))
    args = parser.parse_args()
    if args.tokens % args.seq:
        parser.error(f"--tokens {args.tokens} is not a multiple of --seq {args.seq}")
    args.sequences = args.ranks * args.tokens // args.seq
    os.environ |= {"OMP_NUM_THREADS": "1", "ZINF_QUIET": "1"}
    found: dict[str, list[dict[str, Any]]] = {}
    context = mp.get_context("spawn")
    for turn in range(args.rounds):
        for name in (*args.only.split(","), *(["deepspeed"] if args.peer else [])):
            if name == "deepspeed":
                found.setdefault(name, []).append(_deepspeed(args))
                continue
            num_ranks = 1 if name.startswith("alone") else args.ranks
            args.rendezvous = str(Path(args.nvme).resolve() / f".rendezvous-{os.getpid()}-{turn}-{name}")
            results = context.SimpleQueue()
            mp.spawn(_run, args=(name, num_ranks, args, results), nprocs=num_ranks)
            found.setdefault(name, []).append(results.get())
            Path(args.rendezvous).unlink(missing_ok=True)
    medians = {
        name: statistics.median(seconds for run in runs for seconds in run["seconds"]) for name, runs in found.items()
    }
    for name, runs in found.items():
        line = {"command": command_line("ranks"), "contestant": name, "seconds": round(medians[name], 4)}
        for ours in medians.keys() & {"zinf", "nvme"}:
            line[f"over {ours}"] = round(medians[name] / medians[ours], 3)
        line["load"] = round(os.getloadavg()[0], 1)
        print(json.dumps({**line, **{key: value for key, value in runs[-1].items() if key != "seconds"}}), flush=True)


if __name__ == "__main__":
    main()
