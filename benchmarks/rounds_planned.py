"""Plans training steps of 8 GPUs without peer access in rounds and by ZeRO stage 3, and prints both with their ratio.

    python -m benchmarks.rounds_planned --models 8b --tokens 2048
    python -m benchmarks.rounds_planned --models 8b --layers 8 --free-links
    python -m benchmarks.rounds_planned --models 32b --host-memory 40GiB --only stage_3

Full fine-tuning in bfloat16 with fp32 AdamW: of a model with the shapes of Llama 3.1 8B, and one of Qwen3 32B. Nothing runs;
the rates are those of the preset ``8xrtx4090``, which says where each is from. ``--host-memory`` is what each rank has, and
what does not fit there is on nvme. ``--free-links`` makes all that moves arrive at once. A line per model and size takes
minutes for 8b and a quarter of an hour for 32b: ranks that work in rounds are captured whole.

RoundPipe (https://arxiv.org/abs/2604.27085) reports 1.48 to 2.16 times the throughput of the best other system, for models
of 1.7 to 32 billion parameters on 8 RTX 4090.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zinf_compile
from benchmarks.json_lines import JsonLines
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.hardware.rates import with_rates
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.copies import Role
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.passes.planner.simulator.summary import tell_bound

SHAPES = {
    "8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "32b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
NUM_RANKS = 8
_SCHEDULES = {"rounds": "rounds", "stage_3": None}
_FREE = "1000 TB/s"


class Loss(nn.Module):
    """A causal language model of transformers that returns its loss alone: logits would pass to the caller's rank."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape, tie_word_embeddings=False))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from those before it."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def plan_step(
    shape: dict[str, Any], tokens: int, hardware: Hardware, schedule: str | None, host: str | None
) -> PlanView:
    """Return the plan of a step with one sequence of so many tokens on each rank."""
    with torch.device("meta"):
        model, inputs = Loss({**shape, "max_position_embeddings": tokens}), torch.zeros(1, tokens, dtype=torch.int64)
    return zinf_compile.plan(
        model,
        {"tokens": inputs},
        hardware=hardware,
        compute_dtype=torch.bfloat16,
        host_memory=host,
        world=NUM_RANKS,
        schedule=schedule,
    )


def describe(plan: PlanView) -> dict[str, Any]:
    """Return what a plan predicts, and what bounds it."""
    timeline = simulate(plan.plan)
    pipeline = plan.pipeline
    compute = sum(span.seconds for span in plan.plan.spans)
    described = {
        "seconds": timeline.step_seconds if pipeline is None else pipeline.step_seconds,
        "compute_seconds": compute,
        "busiest_lane": tell_bound(timeline),
        "policy": str(plan.activations.policy),
        "device_gib": plan.plan.tier(Tier.DEVICE).predicted_peak / 2**30,
        "host_gib": plan.plan.tier(Tier.HOST).predicted_peak / 2**30,
        "nvme_gib": plan.plan.tier(Tier.NVME).predicted_peak / 2**30,
        "gathered_gib": sum(gather.moved_nbytes for gather in plan.gathers) / 2**30,
        "resident_gib": sum(item.nbytes_of(Role.COMPUTE) for item in plan.placements if item.compute is Tier.DEVICE)
        / 2**30,
    }
    if pipeline is not None:
        described |= {"parts": {str(part): seconds for part, seconds in pipeline.parts}, "bound": str(pipeline.bound)}
        described["slowest_rank"] = pipeline.slowest.first
        passes = sum(stage.num_stages * stage.micro_batch_seconds for stage in pipeline.stages)
        described["mean_pass_seconds"] = passes / pipeline.num_stages  # of a rank, forward and backward
    return described


def free_links(hardware: Hardware) -> Hardware:
    """Return the hardware with routes and links on which everything arrives at once."""
    rate = replace(with_rates(hardware, device_link=_FREE), device_link_lanes=())
    routes = (
        replace(route, bytes_per_second=rate.device_link_bytes_per_second, latency_seconds=0.0) for route in rate.routes
    )
    return replace(rate, routes=tuple(routes))


def main() -> None:
    """Print a line for each model and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=["8b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048], help="of each rank's sequence in a step")
    parser.add_argument("--only", choices=tuple(_SCHEDULES), help="plan one of both, which takes half as long")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--hardware", default="8xrtx4090")
    parser.add_argument("--host-memory", help="of each rank; default: an eighth of the node's")
    parser.add_argument("--free-links", action="store_true", help="everything that moves arrives at once")
    parser.add_argument("--json", type=Path, help="file to append to, instead of standard output")
    args = parser.parse_args()
    lines = JsonLines("rounds_planned", args.json)
    hardware = load_hardware(args.hardware)
    if args.free_links:
        hardware = free_links(hardware)
    for name in args.models:
        shape = {**SHAPES[name], **({"num_hidden_layers": args.layers} if args.layers else {})}
        for tokens in args.tokens:
            line: dict[str, Any] = {"model": name, "layers": shape["num_hidden_layers"], "tokens": tokens}
            for key in [args.only] if args.only else _SCHEDULES:
                schedule = _SCHEDULES[key]
                started = time.perf_counter()
                try:
                    line[key] = describe(plan_step(shape, tokens, hardware, schedule, args.host_memory))
                except CapacityError as error:
                    line[key] = {"seconds": None, "does_not_fit": str(error)}
                line[key]["planned_in_seconds"] = round(time.perf_counter() - started)
            both = [line.get(key, {}).get("seconds") for key in ("stage_3", "rounds")]
            line["ratio"] = None if None in both else both[0] / both[1]
            lines.note(json.loads(json.dumps(line), parse_float=lambda text: float(f"{float(text):.4g}")))


if __name__ == "__main__":
    main()
