"""What `zinf train` begins with: presets, the model file, and what states weigh beside the optimizer's."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from zinf_compile.ir.errors import ConfigError

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt.py"
_EXAMPLE_NAMES = ("GPT", "GPTConfig", "config_for", "generate", "num_parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A run with sensible numbers; ``layers`` and ``hidden`` are those of the GPT, with heads of 64."""

    layers: int
    hidden: int
    seq: int
    batch: int
    steps: int
    lr: float
    compute_dtype: str
    device_memory: str
    host_memory: str


# Depth and width are near GPT-2's, but with the 256 tokens of bytes instead of 50257. Activations grow with
# layers * hidden and parameters with layers * hidden ** 2, so the demo is wide and shallow: its states are the larger
# part by far. Budgets are a quarter of the model states or less, except for tiny, which is there to be quick: its states
# are smaller than its budget, and some still go to nvme.
PRESETS = {
    "tiny": Preset(
        layers=2, hidden=128, seq=64, batch=4, steps=20, lr=1e-3,
        compute_dtype="float32", device_memory="8MiB", host_memory="4MiB",
    ),  # 0.46 M
    "demo": Preset(
        layers=4, hidden=1280, seq=256, batch=2, steps=70, lr=3e-4,
        compute_dtype="bfloat16", device_memory="160MiB", host_memory="128MiB",
    ),  # 79 M
    "small": Preset(
        layers=10, hidden=1024, seq=512, batch=2, steps=100, lr=3e-4,
        compute_dtype="bfloat16", device_memory="256MiB", host_memory="192MiB",
    ),  # 126 M
    "medium": Preset(
        layers=18, hidden=1280, seq=512, batch=2, steps=100, lr=2e-4,
        compute_dtype="bfloat16", device_memory="512MiB", host_memory="512MiB",
    ),  # 355 M
    "large": Preset(
        layers=36, hidden=1280, seq=512, batch=2, steps=100, lr=1.5e-4,
        compute_dtype="bfloat16", device_memory="1GiB", host_memory="1GiB",
    ),  # 709 M
}  # fmt: skip

# Bytes per parameter of what training keeps from one step to the next or from backward to the optimizer step, without
# the optimizer's own state.
STATE_BYTES = {
    "bfloat16": {"fp32 master": 4, "bf16 compute copy": 2, "bf16 gradient": 2},
    "float32": {"fp32 parameter": 4, "fp32 gradient": 4},
}


def load_example(path: Path | None) -> ModuleType:
    """Import the model file, by default the checkout's examples/gpt.py; ConfigError when it cannot serve."""
    if path is None and not _EXAMPLE.is_file():
        raise ConfigError("this installation has no examples folder; pass --model with the path of an examples/gpt.py")
    path = path or _EXAMPLE
    if not path.is_file():
        raise ConfigError(f"the model file {path} does not exist; --model takes a file like examples/gpt.py")
    name = f"zinf_example_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; --model takes a file like examples/gpt.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo finds the globals of a function through its module's name
    spec.loader.exec_module(module)
    missing = [required for required in _EXAMPLE_NAMES if not hasattr(module, required)]
    if missing:
        raise ConfigError(f"{path} has no {', '.join(missing)}; --model takes a file with the names of examples/gpt.py")
    return module


def parse_count(text: str) -> int:
    """A number of parameters from text such as ``300M``, ``1.5B`` or ``80000``; ConfigError otherwise."""
    factors = {"K": 10**3, "M": 10**6, "B": 10**9}
    factor = factors.get(text[-1:].upper(), 1)
    try:
        count = int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ConfigError(f"--params {text} is not a number of parameters; write for example 300M or 1.5B")
    return count
