"""How much memory does it take to fine-tune adapters of a frozen base that is many times larger?

    python -m benchmarks.frozen_base --nvme DIR [--frozen-dtype exact|int8|nf4] [--hidden 3200] [--layers 26] [--tokens 128]

Writes the weights of a Llama to safetensors in bfloat16 (3.4 billion by default, as OpenLLaMA 3B has), then trains adapters
of rank 16 on all of its linear layers with peft, in a fresh process with all defaults, including ``compute="inductor"``.
With ``exact`` the base is read from its files and never copied; with ``int8`` it is encoded once. With ``nf4`` the files
have what bitsandbytes makes of it, linear layers in 4 bits with nested statistics, and are never copied either. Prints one
JSON line per phase: seconds, bytes that the process read and wrote, and the peak of its anonymous memory above that of the
interpreter with everything imported; the goal is 1.5 GiB, so the budgets are less. ``resident`` is the peak of all resident
memory above that, including pages of mapped files, which the kernel may drop. DIR needs 2 bytes per parameter, and 1 more
for ``int8``; for ``nf4`` 0.6.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.json_lines import JsonLines
from benchmarks.out_of_core import PeakSampler, disk_bytes, read_status

_ROOT = Path(__file__).resolve().parents[1]
_HEAD_WIDTH, _VOCABULARY, _RANK = 100, 32_000, 16
_SHARD_NBYTES = 2**30


def make_config(hidden: int, layers: int) -> Any:
    """Return the config of a Llama with the proportions of OpenLLaMA 3B."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 27 // 10,
        num_hidden_layers=layers,
        num_attention_heads=hidden // _HEAD_WIDTH,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def make_base(config: Any, frozen_dtype: str) -> Any:
    """Return the frozen model on meta."""
    import torch
    import transformers
    from transformers.quantizers import AutoHfQuantizer

    with torch.device("meta"):
        base = transformers.LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    if frozen_dtype == "nf4":
        settings = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        quantizer = AutoHfQuantizer.from_config(settings)
        quantizer.preprocess_model(base, device_map=None)
        quantizer.postprocess_model(base)
    return base


def quantise(name: str, value: Any) -> dict[str, Any]:
    """Return what bitsandbytes saves of a weight in nf4, by name."""
    import bitsandbytes

    codes, state = bitsandbytes.functional.quantize_4bit(value, quant_type="nf4", compress_statistics=True)
    return {name: codes, **{f"{name}.{key}": each for key, each in state.as_dict(packed=True).items()}}


def write_weights(folder: Path, config: Any, frozen_dtype: str) -> int:
    """Write random weights in shards, one quantised after another; return the number of elements."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, Any]] = [{}]
    index: dict[str, str] = {}
    num_elements = nbytes = 0

    def save() -> None:
        name = f"model-{len(shards):05}.safetensors"
        save_file(shards[-1], folder / name)
        index.update(dict.fromkeys(shards[-1], name))
        shards[-1] = {}

    for name, parameter in make_base(config, frozen_dtype).named_parameters():
        is_norm = parameter.dim() == 1
        value = torch.ones(parameter.shape) if is_norm else torch.randn(parameter.shape, generator=generator) * 0.02
        value = value.to(torch.bfloat16)
        is_quantised = type(parameter) is not torch.nn.Parameter
        tensors = quantise(name, value) if is_quantised else {name: value}
        more = sum(each.nbytes for each in tensors.values())
        if nbytes + more > _SHARD_NBYTES and shards[-1]:
            save()
            shards.append({})
            nbytes = 0
        shards[-1] |= tensors
        nbytes += more
        num_elements += value.numel()
    save()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return num_elements


@contextmanager
def measured(phase: str, before: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Measure what runs inside, and print it. ``before`` is anonymous and resident memory with nothing loaded."""
    facts: dict[str, Any] = {"phase": phase}
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    start, moved = time.perf_counter(), disk_bytes()
    with PeakSampler().running() as sampler:
        yield facts
    read, written = (last - first for first, last in zip(moved, disk_bytes(), strict=True))
    facts |= {
        "seconds": round(time.perf_counter() - start, 2),
        "peak": sampler.peak - before[0],
        "resident": read_status("VmHWM") - before[1],
        "read": read,
        "written": written,
    }
    print(json.dumps(facts), flush=True)


def train(args: argparse.Namespace, folder: Path) -> None:
    """Train in this process, which should be fresh."""
    import peft
    import torch

    import zinf_compile

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config, optimize = make_config(args.hidden, args.layers), zinf_compile.optimize  # loads the lazy imports
    before = read_status("RssAnon"), read_status("VmRSS")
    with measured("load", before) as facts:
        base = make_base(config, args.frozen_dtype)
        frozen_dtype = "int8" if args.frozen_dtype == "int8" else None
        budgets = {"device_memory": args.device_memory, "host_memory": args.host_memory, "nvme": args.nvme}
        optimize(base, init=folder, frozen_dtype=frozen_dtype, **budgets)
        model = peft.get_peft_model(base, peft.LoraConfig(r=_RANK, target_modules="all-linear"))
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        facts["trained"] = sum(parameter.numel() for parameter in adapters)
        optimizer = torch.optim.AdamW(adapters, lr=1e-4)
    tokens = torch.randint(_VOCABULARY, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    for step in range(args.steps):
        with measured(f"step {step}", before) as facts:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            zinf_compile.synchronize(model)
            facts["loss"] = loss.item()
    report = zinf_compile.report(model)
    facts = {"phase": "end", "in_place": report.in_place_nbytes}
    facts |= {f"peak of {each.tier}": each.measured_peak for each in report.tiers}
    print(report, file=sys.stderr)
    print(json.dumps(facts), flush=True)
    zinf_compile.close(model)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", default=".", help="folder on a local disk")
    parser.add_argument("--frozen-dtype", choices=("exact", "int8", "nf4"), default="int8")
    parser.add_argument("--hidden", type=int, default=3200, help=f"a multiple of {_HEAD_WIDTH}")
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--tokens", type=int, default=128, help="per step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device-memory", default="1200MiB")
    parser.add_argument("--host-memory", default="280MiB")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to a file, not to standard output")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        train(args, args.child)
        return
    lines = JsonLines("frozen_base", args.json)
    with tempfile.TemporaryDirectory(dir=args.nvme, prefix=".zinf-benchmark-") as folder:
        num_elements = write_weights(Path(folder), make_config(args.hidden, args.layers), args.frozen_dtype)
        shape = {key: getattr(args, key) for key in ("frozen_dtype", "hidden", "layers", "tokens", "threads")}
        lines.note({"phase": "base", "parameters": num_elements, **shape})
        command = [sys.executable, "-m", "benchmarks.frozen_base", *sys.argv[1:], "--child", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as child:
            assert child.stdout is not None
            for line in child.stdout:
                lines.note(json.loads(line))
        if child.returncode != 0:
            sys.exit(f"the process that trains ended with {child.returncode}")


if __name__ == "__main__":
    main()
