"""Question: what does optimizer state in fewer bits cost in quality, and in time per element?

``quality``: the example GPT trained on the source of the Python standard library, from the same values on the same batches,
for each way to keep the state of AdamW: exactly, as int8, as bfloat16, and by the 8-bit AdamW of bitsandbytes in memory.
``loss`` is that of other batches afterwards, the mean over seeds; ``over_exact`` is the mean of its ratios to exact state,
``spread`` their standard deviation. What of it is chance shows in exact state after the last bits of one value in each
parameter were changed.

``time``: nanoseconds an element and thread to decode and to encode one state, the median of repeats.

    python -m benchmarks.state_codes
    python -m benchmarks.state_codes --only time

print one JSON line each.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.json_lines import JsonLines
from benchmarks.out_of_core import load_gpt
from zinf_compile.cli.text import ByteVocabulary, read_text
from zinf_compile.ir.copies import LEAST_CODED, Code, Encoding
from zinf_compile.runtime.storage.state_codes import decode, encode

_LAYERS, _HIDDEN, _SEQ, _BATCH = 2, 192, 96, 8
_TESTED = 60  # batches that were not trained on
_ELEMENTS = 2**22


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, seed: int, code: Code | None = None
) -> float:
    """Return the mean loss on other batches after training, in memory. State is rounded as storing it in codes does."""
    text = read_text([], ByteVocabulary(), max_bytes=2**20)
    batches = text.batches(batch=_BATCH, seq=_SEQ, seed=seed)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 30) * (1 - 0.9 * step / num_steps)
        tokens, targets = next(batches)
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if code is not None:
            _round(code, optimizer, step)
    others = text.batches(batch=_BATCH, seq=_SEQ, seed=1000)
    with torch.no_grad():
        return statistics.mean(float(model(*next(others))) for _ in range(_TESTED))


def _round(code: Code, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Do to the state of a plain optimizer what storing it does; ``tests/parity/test_state_dtype.py`` has it bit for bit."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if value.numel() >= LEAST_CODED:
                flat = value.view(-1)
                pages = torch.empty(Encoding(dtype="float32", code=code).nbytes(flat.numel()), dtype=torch.uint8)
                encode(code, flat, pages, seed=step, drawn_from=parameter.detach().view(-1))
                decode(code, pages, flat)


def trained(state: str, num_steps: int, seed: int) -> float:
    """Return the loss after training with state that is kept in some way."""
    gpt = load_gpt()
    model: nn.Module = gpt.GPT(gpt.GPTConfig(256, _LAYERS, _HIDDEN, _HIDDEN // 64, _SEQ), seed=seed)
    if state == "bitsandbytes":
        import bitsandbytes

        return train(model, bitsandbytes.optim.AdamW8bit(model.parameters(), weight_decay=0.1), num_steps, seed)
    if state == "exact, bits changed":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[0].mul_(1 + 2**-22)
    code = Code(state) if state in set(Code) else None
    return train(model, torch.optim.AdamW(model.parameters(), weight_decay=0.1), num_steps, seed, code)


def measure_quality(lines: JsonLines, num_steps: int, num_seeds: int) -> None:
    exact = [trained("exact", num_steps, seed) for seed in range(num_seeds)]
    for state in ("exact", "exact, bits changed", *Code, "bitsandbytes"):
        losses = exact if state == "exact" else [trained(state, num_steps, seed) for seed in range(num_seeds)]
        ratios = [loss / other for loss, other in zip(losses, exact, strict=True)]
        lines.note(
            {
                "question": "quality",
                "state": str(state),
                "steps": num_steps,
                "seeds": num_seeds,
                "loss": statistics.mean(losses),
                "over_exact": statistics.mean(ratios),
                "spread": statistics.stdev(ratios) if num_seeds > 1 else None,
            }
        )


def measure_time(lines: JsonLines, repeats: int) -> None:
    values = torch.randn(_ELEMENTS)
    for code in Code:
        pages = torch.empty(Encoding(dtype="float32", code=code).nbytes(_ELEMENTS), dtype=torch.uint8)
        seconds: dict[str, list[float]] = {"encode": [], "decode": []}
        ways: dict[str, Callable[[], None]] = {
            "encode": lambda code=code, pages=pages: encode(code, values, pages),  # type: ignore[misc]
            "decode": lambda code=code, pages=pages: decode(code, pages, values),  # type: ignore[misc]
        }
        for _ in range(repeats):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - start)
        medians = {f"{name}_ns": statistics.median(each) / _ELEMENTS * 1e9 for name, each in seconds.items()}
        lines.note({"question": "time", "code": code, **medians})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("quality", "time"))
    parser.add_argument("--json", type=Path, help="append lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = JsonLines("state_codes", args.json)
    if args.only in (None, "time"):
        measure_time(lines, args.repeats)
    if args.only in (None, "quality"):
        measure_quality(lines, args.steps, args.seeds)


if __name__ == "__main__":
    main()
