"""Take a picture of a plan's page: ``python docs/plan_page_picture.py`` writes ``docs/plan_page.png``. Needs chromium."""

import subprocess
import tempfile
from pathlib import Path

from zinf_compile import Plan
from zinf_compile.cli.main import main

DOCS = Path(__file__).resolve().parent
WIDTH, HEIGHT = 1000, 2350  # to the end of the timeline
GPT = "gpt --layers 32 --hidden 4096 --heads 32 --batch 8 --seq 2048 --compute-dtype bfloat16"
HARDWARE = "--hardware rtx4090 --host-memory 32GiB"


def save_plan(path: Path) -> Plan:
    """Plan the training of 6.9 billion parameters on one consumer GPU."""
    assert main(["plan", *GPT.split(), *HARDWARE.split(), "--save", str(path)]) == 0
    return Plan.load(path)


def take_picture(page: Path, picture: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--timeout=20000"]
    command += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        save_plan(Path(folder, "plan.json")).to_html(Path(folder, "plan.html"))
        take_picture(Path(folder, "plan.html"), DOCS / "plan_page.png")
