"""Question: how long will a training step take on one H200, by the planner, before such steps have been measured?

    python -m benchmarks.predictions [--only 7B]

GPTs of 1.5 to 32 billion parameters with float32 master copies and bfloat16 compute, compiled (``compute="inductor"``), with
4,096, 16,384 and 65,536 tokens per step in sequences of 1,024. One H200 of the preset ``h200``, with 100 GiB of host memory
and its share of the node's disks. The shapes are those of ``benchmarks.gpu_step``, whose run of the same case judges a
prediction: ``python -m benchmarks.gpu_step --only 7B --tokens 4096 --contestants zinf --device-memory 141000000000``.

One JSON line for each: the simulated seconds of a step and of its phases, what bounds it, the peak of each tier, and where
the bytes of parameters, gradients and optimizer state live.
"""

import argparse
import json
from datetime import date

import zinf_compile
from benchmarks.gpu_step import PREDICTED
from benchmarks.json_lines import command_line
from zinf_compile.cli.planned_models import Planned, Sizes, find_model
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.passes.planner.simulator.summary import tell_bound

_HOST_MEMORY = "100GiB"
_TOKENS = (4096, 16384, 65536)


def find_case(name: str, tokens: int) -> Planned:
    """Return a model on meta, and the inputs of a step."""
    shape = PREDICTED[name]
    batch, layers, hidden = tokens // shape.sequence, shape.layers, shape.hidden
    sizes = Sizes(
        layers=layers, hidden=hidden, heads=shape.heads, vocab=shape.vocabulary, batch=batch, seq=shape.sequence
    )
    return find_model("gpt", sizes)


def predict(name: str, tokens: int) -> dict[str, object]:
    """Return the prediction for a model and a number of tokens, or why it is refused."""
    subject = find_case(name, tokens)
    num_parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    head: dict[str, object] = {"model": name, "num_parameters": num_parameters, "tokens": tokens}
    try:
        plan = zinf_compile.plan(
            subject.model, subject.inputs, hardware="h200", host_memory=_HOST_MEMORY, compute_dtype="bfloat16"
        )
    except CapacityError as error:
        return {**head, "refused": str(error)}
    timeline = simulate(plan.plan)
    return {
        **head,
        "step_seconds": timeline.step_seconds,
        "tokens_per_second": tokens / timeline.step_seconds,
        "phases": {str(phase): seconds for phase, seconds in timeline.phase_seconds},
        "bound_by": tell_bound(timeline),
        "policy": plan.activations.policy,
        "peaks": {str(tier): plan.tier(tier).predicted_peak for tier in Tier},
        "homes": {str(tier): sum(item.nbytes_on(tier) for item in plan.placements) for tier in Tier},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PREDICTED), help="one model instead of all")
    args = parser.parse_args()
    for name in PREDICTED if args.only is None else (args.only,):
        for tokens in _TOKENS:
            line = {"date": date.today().isoformat(), "command": command_line("predictions"), **predict(name, tokens)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
