"""Question: what does optimizer state in fewer bits cost in quality, and in time per element?

``quality``: the example GPT trained on the source of the Python standard library, from the same values on the same batches,
once for each way to keep the state of AdamW: exactly, as int8, as bfloat16, and by the 8-bit AdamW of bitsandbytes in
memory. ``loss`` is the mean of the last 20 steps; ``over_exact`` is its ratio to that of exact state.

``time``: nanoseconds an element and thread to decode and to encode one state, the median of repeats.

    python -m benchmarks.state_codes --nvme DIR
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

import zinf_compile
from benchmarks.json_lines import JsonLines
from benchmarks.out_of_core import load_gpt
from zinf_compile.cli.text import ByteVocabulary, read_text
from zinf_compile.ir.copies import Code, Encoding
from zinf_compile.runtime.storage.state_codes import decode, encode

_LAYERS, _HIDDEN, _SEQ, _BATCH = 4, 256, 128, 8
_LAST = 20  # steps whose mean loss counts
_ELEMENTS = 2**22


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    """Return the mean loss of the last steps."""
    batches = read_text([], ByteVocabulary(), max_bytes=2**20).batches(batch=_BATCH, seq=_SEQ, seed=0)
    losses = []
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 30)
        tokens, targets = next(batches)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return statistics.mean(losses[-_LAST:])


def make_model() -> nn.Module:
    gpt = load_gpt()
    model: nn.Module = gpt.GPT(gpt.GPTConfig(256, _LAYERS, _HIDDEN, _HIDDEN // 64, _SEQ), seed=0)
    return model


def measure_quality(lines: JsonLines, nvme: Path, num_steps: int) -> None:
    exact = 0.0
    for code in (None, *Code):
        model = zinf_compile.optimize(
            make_model(), device_memory="48MiB", host_memory="16MiB", reserve_memory=0, nvme=nvme, state_dtype=code
        )
        loss = train(model, torch.optim.AdamW(model.parameters(), weight_decay=0.1), num_steps)
        exact = exact or loss
        state_nbytes = sum(place.optimizer_state_nbytes for place in zinf_compile.report(model).plans[0].placements)
        lines.note(
            {
                "question": "quality",
                "state": code or "exact",
                "steps": num_steps,
                "loss": loss,
                "over_exact": loss / exact,
                "state_nbytes": state_nbytes,
            }
        )
        zinf_compile.close(model)
    import bitsandbytes

    model = make_model()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), weight_decay=0.1)
    loss = train(model, optimizer, num_steps)
    lines.note(
        {
            "question": "quality",
            "state": "bitsandbytes AdamW8bit",
            "steps": num_steps,
            "loss": loss,
            "over_exact": loss / exact,
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
    parser.add_argument("--nvme", type=Path, default=Path("."), help="folder on a local disk")
    parser.add_argument("--steps", type=int, default=300)
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
        measure_quality(lines, args.nvme, args.steps)


if __name__ == "__main__":
    main()
