"""Plans steps of large runs that others have published, and prints the predicted seconds beside theirs. A minute.

    python -m benchmarks.published_steps

The rates are those of a preset, from data sheets and estimates that say so; none is fitted to these runs. That of attention
is for scores in memory, as these runs had them. Activations are recomputed, and stage 1 of ZeRO divides optimizer states, as
in the runs.
"""

import argparse
from dataclasses import replace

import torch

import zinf_compile
from benchmarks.oracles.published_runs import (
    DEVICES_PER_NODE,
    MT_NLG,
    PublishedModel,
    PublishedStep,
    attention_flops_per_second,
    published_flops,
)
from examples.gpt import GPT, GPTConfig
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Rate
from zinf_compile.ir.pipeline import StepPart


def plan_step(model: PublishedModel, step: PublishedStep, *, hardware: str = "a100-80g") -> PlanView:
    """Return the plan of a published step, with one sequence in a micro-batch."""
    with torch.device("meta"):
        config = GPTConfig(model.vocabulary, model.layers, model.hidden, model.heads, model.sequence)
        tokens = torch.zeros(1, model.sequence, dtype=torch.int64)
        gpt = GPT(config)
    preset = load_hardware(hardware)
    attention = attention_flops_per_second(model, preset.flops_per_second("bfloat16"), preset.memory_bytes_per_second)
    return zinf_compile.plan(
        gpt,
        {"tokens": tokens, "targets": tokens},
        hardware=replace(preset, attention_flops=(Rate(name="bfloat16", per_second=attention),)),
        compute_dtype=torch.bfloat16,
        world=step.num_nodes * DEVICES_PER_NODE,
        tp=model.num_tensor_ranks,
        pp=model.num_stages,
        accumulate=model.num_sequences,
        stage=1,
        recompute=True,
        partition_activations=False,  # as Megatron ran it
    )


def main() -> None:
    """Print a line for each step."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(
        "nodes  published  predicted  ratio  TFLOP/s of each GPU: published  by its formula  executed  bubble  peak, GiB"
    )
    for step in MT_NLG.steps:
        pipeline = plan_step(MT_NLG, step).pipeline
        assert pipeline is not None
        seconds, num_gpus = pipeline.step_seconds, step.num_nodes * DEVICES_PER_NODE
        peak = max(stage.peak(Tier.DEVICE) for stage in pipeline.stages)
        bubble = pipeline.seconds_of(StepPart.BUBBLE)
        print(
            f"{step.num_nodes:5d}  {step.step_seconds:7.1f} s  {seconds:7.1f} s  {seconds / step.step_seconds:5.2f}  "
            f"{step.flops_per_second / 1e12:30.0f}  {published_flops(MT_NLG) / seconds / num_gpus / 1e12:14.0f}  "
            f"{pipeline.flops_per_second / 1e12:8.0f}  {bubble / seconds:6.0%}  {peak / 2**30:9.1f}"
        )


if __name__ == "__main__":
    main()
