"""Draw the plan of a small GPT that trains out of core: ``python docs/plan_picture.py`` writes ``docs/plan.svg``."""

import importlib.util
import io
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.text import Text

import zinf_compile

DOCS = Path(__file__).resolve().parent
WIDTH = 100  # columns
STYLES = (
    (r"^[a-z]+( v\d+)?\b", "bold bright_white"),  # headings, the only lines that are not indented
    (r"\bdevice\b", "green"),
    (r"\bhost\b", "cyan"),
    (r"\bnvme\b", "magenta"),
    (r"(?<=\)  )[-#.]{8,}", "yellow"),  # the rows of the arena chart
)


def load_gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt", DOCS.parent / "examples" / "gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_plan() -> zinf_compile.Plan:
    """Return the plan of one training step of 20 million parameters in 40 + 24 MiB."""
    gpt = load_gpt()
    model = gpt.GPT(gpt.GPTConfig(vocab_size=256, layers=6, hidden=512, heads=8, seq=128))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        zinf_compile.optimize(
            model,
            device_memory="40MiB",
            host_memory="24MiB",
            nvme=folder,
            compute_dtype=torch.bfloat16,
            recompute=True,
        )
        tokens = torch.randint(256, (2, 129))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        (plan,) = zinf_compile.report(model).plans
        zinf_compile.close(model)
    hardware = replace(plan.hardware, name="a machine with 2 cores")
    return replace(plan, plan=replace(plan.plan, hardware=hardware))


def draw(text: str) -> str:
    """Return text as an SVG of a terminal."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for line in text.splitlines():
        drawn = Text(line, no_wrap=True)
        for pattern, style in STYLES:
            for match in re.finditer(pattern, line):
                drawn.stylize(style, match.start(), match.end())
        console.print(drawn)
    return console.export_svg(title="print(plan)")


def main() -> None:
    plan = make_plan()
    (DOCS / "plan.svg").write_text(draw(str(plan)), encoding="utf-8")
    print(plan)


if __name__ == "__main__":
    main()
