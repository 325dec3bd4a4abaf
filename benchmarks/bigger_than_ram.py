"""Question: does the whole workflow run within a small budget for a model whose states exceed this machine's RAM?

The model is built on meta, initialised, trained for two steps, saved, trained on, killed in the middle of a step,
resumed in another process, and exported. The step after the save must give the same loss, bit for bit, before the kill
and after the resume.

    python -m benchmarks.bigger_than_ram --nvme DIR [--states-gib 36] [--budget 3GiB] [--reserve-mib 256]

prints one JSON line per phase and one with the verdict. The store keeps 16 bytes of states per parameter: fp32 master
copy, two fp32 moments, bf16 compute copy and bf16 gradient. By default the states are 1.5 times the RAM. DIR needs room
for the store and the checkpoint (12 bytes per parameter). If it has less, the model is made smaller, and
``states_wanted_bytes`` is the requested size. Each phase runs in one of two child processes. Its peak is the anonymous
memory above that of the interpreter with torch imported. The budget covers device and host: the device gets three
quarters, of which ``--reserve-mib`` is left for Python and the captured graphs.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.json_lines import command_line
from benchmarks.out_of_core import PeakSampler, disk_bytes, load_gpt, read_status
from zinf_compile.ir.config import parse_size

_ROOT = Path(__file__).resolve().parents[1]
_STORED = 16  # bytes per parameter: master copy 4, moments 8, compute copy 2, gradient 2
_SAVED = 12  # master copy and moments
_SPARE_DISK = 4 * 2**30  # for other processes that write to this disk meanwhile
_VOCABULARY = 256
_HOST_SHARE = 0.25  # of the budget

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One model, its folders and its budgets. Sizes are bytes."""

    hidden: int
    layers: int
    tokens: int
    threads: int
    budget: int
    reserve: int
    nvme: str
    folder: str  # of the checkpoint and the export


class Journey:
    """One child process: a model in its store, its optimizer, and the measurements of each phase."""

    def __init__(self, trial: Trial) -> None:
        import torch

        torch.set_num_threads(trial.threads)
        torch.ones(1).sum()
        self.trial = trial
        self._base = read_status("RssAnon")
        gpt = load_gpt()
        shape = gpt.GPTConfig(_VOCABULARY, trial.layers, trial.hidden, trial.hidden // gpt.HEAD_WIDTH, trial.tokens)
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(0, _VOCABULARY, (4, trial.tokens + 1), generator=generator)  # one row per step
        with self.phase("build"):
            import zinf_compile

            with torch.device("meta"):
                self.model = gpt.GPT(shape)
            torch.manual_seed(0)
            host = int(trial.budget * _HOST_SHARE)
            zinf_compile.optimize(
                self.model,
                init="reset",
                device_memory=trial.budget - host,
                host_memory=host,
                reserve_memory=trial.reserve,
                nvme=trial.nvme,
                compute="aten",
                compute_dtype=torch.bfloat16,
                recompute=True,
            )
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())

    @contextmanager
    def phase(self, name: str) -> Iterator[Facts]:
        """Measure the body of the ``with``, and print the measurements with the facts that the body adds."""
        facts: Facts = {"phase": name}
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        start, before = time.perf_counter(), disk_bytes()
        with PeakSampler().running() as sampler:
            yield facts
        read, written = (last - first for first, last in zip(before, disk_bytes(), strict=True))
        facts |= {
            "seconds": round(time.perf_counter() - start, 2),
            "peak_rss_anon_above_base": sampler.peak - self._base,
            "vm_hwm": read_status("VmHWM"),
            "disk_read_bytes": read,
            "disk_written_bytes": written,
        }
        print(json.dumps(facts), flush=True)

    def train(self, step: int) -> None:
        """Take one step, and wait until its updates are stored."""
        import zinf_compile

        with self.phase(f"step {step}") as facts:
            tokens = self._tokens[step : step + 1]
            loss = self.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            zinf_compile.synchronize(self.model)
            facts["loss"] = loss.item()


def train_until_killed(trial: Trial) -> None:
    """Take two steps, save, take a third step, then start a fourth, during which the parent kills this process."""
    import zinf_compile

    journey = Journey(trial)
    journey.train(0)
    journey.train(1)
    with journey.phase("save"):
        zinf_compile.save(Path(trial.folder) / "checkpoint", journey.model, journey.optimizer, extra={"step": 2})
    journey.train(2)
    journey.train(3)
    sys.exit("this process was not killed")


def resume_and_export(trial: Trial) -> None:
    """Load, take the third step, and export in bfloat16. The checkpoint is removed first if the export needs its space."""
    import torch

    import zinf_compile

    checkpoint, exported = Path(trial.folder) / "checkpoint", Path(trial.folder) / "exported"
    journey = Journey(trial)
    with journey.phase("load"):
        extra = zinf_compile.load(checkpoint, journey.model, journey.optimizer)
    journey.train(extra["step"])
    free = shutil.disk_usage(trial.folder).free
    if free < 2 * journey.num_parameters + _SPARE_DISK:
        shutil.rmtree(checkpoint)
    with journey.phase("export") as facts:
        zinf_compile.export(journey.model, exported, dtype=torch.bfloat16)
        files = sorted(exported.glob("*.safetensors"))
        facts |= {"exported_files": len(files), "exported_bytes": sum(file.stat().st_size for file in files)}
        facts["is_exported_right"] = _holds(exported, journey.model)


def _holds(folder: Path, model: Any) -> bool:
    """Return whether the export has every parameter, and the right values of the first and the last one."""
    import torch
    from safetensors import safe_open

    shapes, values = {}, {}
    parameters = dict(model.named_parameters())
    names = list(parameters)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # safe_open is not a mapping
                shapes[name] = tuple(opened.get_slice(name).get_shape())
                if name in (names[0], names[-1]):
                    values[name] = opened.get_tensor(name)
    is_complete = shapes == {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    return is_complete and all(
        torch.equal(value, parameters[name].detach().to(value.dtype)) for name, value in values.items()
    )


def run_child(trial: Trial, role: str, *, last_phase: str) -> list[Facts]:
    """Run one child process and return its phases. If it goes on after ``last_phase``, it is killed there."""
    command = [sys.executable, "-m", "benchmarks.bigger_than_ram", "--child", role, json.dumps(asdict(trial))]
    phases: list[Facts] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                phases.append({"process": role, **json.loads(line)})
                print(json.dumps(phases[-1]), flush=True)
                if phases[-1]["phase"] == last_phase:
                    break
            if role == "train":
                time.sleep(phases[-1]["seconds"] / 2)  # in the middle of the next step
                child.send_signal(signal.SIGKILL)
            code = child.wait()
        except BaseException:
            child.kill()
            raise
    wanted = -signal.SIGKILL if role == "train" else 0
    if code != wanted or not phases or phases[-1]["phase"] != last_phase:
        sys.exit(f"the {role} process ended with {code}, not {wanted}")
    return phases


def choose_shape(states: int, free_disk: int) -> tuple[int, int]:
    """Return hidden size and layers of a GPT with at least ``states`` bytes of states, or of the largest that fits."""
    gpt = load_gpt()
    hidden = gpt.config_for(states // _STORED, _VOCABULARY, 1024).hidden
    hidden = max(gpt.HEAD_WIDTH, hidden // gpt.HEAD_WIDTH * gpt.HEAD_WIDTH)
    per_layer = 12 * hidden**2
    wanted = math.ceil((states / _STORED - 2 * _VOCABULARY * hidden) / per_layer)
    fitting = int(((free_disk - _SPARE_DISK) / (_STORED + _SAVED) - 2 * _VOCABULARY * hidden) / per_layer)
    return hidden, min(wanted, fitting)


def read_ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def judge(trial: Trial, phases: list[Facts]) -> Facts:
    """Return the verdict over all phases."""
    losses = {process: [facts["loss"] for facts in phases if facts["process"] == process and "loss" in facts]
              for process in ("train", "resume")}  # fmt: skip
    peak = max(facts["peak_rss_anon_above_base"] for facts in phases)
    return {
        "budget_bytes": trial.budget,
        "peak_rss_anon_above_base": peak,
        "within_budget": peak <= trial.budget,
        "largest_vm_hwm": max(facts["vm_hwm"] for facts in phases),
        "loss_before_kill": losses["train"][-1],
        "loss_after_resumption": losses["resume"][-1],
        "is_bitwise": losses["train"][-1] == losses["resume"][-1],
        "is_exported_right": phases[-1]["is_exported_right"],
        "seconds": round(sum(facts["seconds"] for facts in phases), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", default=".", help="folder on a local disk")
    parser.add_argument("--states-gib", type=float, default=1.5 * read_ram() / 2**30, help="16 bytes per parameter")
    parser.add_argument("--budget", default="3GiB", help="device and host memory together")
    parser.add_argument("--reserve-mib", type=int, default=256, help="of the budget, for Python and its graphs")
    parser.add_argument("--tokens", type=int, default=512, help="per step")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        role, trial_text = args.child
        {"train": train_until_killed, "resume": resume_and_export}[role](Trial(**json.loads(trial_text)))
        return
    nvme = Path(args.nvme).resolve()
    wanted = int(args.states_gib * 2**30)
    hidden, layers = choose_shape(wanted, shutil.disk_usage(nvme).free)
    if layers < 1:
        parser.error(f"{nvme} has no room for a store, a checkpoint and {_SPARE_DISK // 2**30} GiB to spare")
    with tempfile.TemporaryDirectory(dir=nvme, prefix=".zinf-benchmark-") as folder:
        trial = Trial(
            hidden=hidden,
            layers=layers,
            tokens=args.tokens,
            threads=args.threads,
            budget=parse_size(args.budget, option="budget"),
            reserve=args.reserve_mib * 2**20,
            nvme=str(nvme),
            folder=folder,
        )
        shape = {key: value for key, value in asdict(trial).items() if key not in ("nvme", "folder")}
        num_parameters = load_gpt().num_parameters(
            load_gpt().GPTConfig(_VOCABULARY, layers, hidden, hidden // 64, args.tokens)
        )
        print(
            json.dumps(
                {
                    "command": command_line("bigger_than_ram"),
                    **shape,
                    "num_parameters": num_parameters,
                    "states_wanted_bytes": wanted,
                    "states_bytes": num_parameters * _STORED,
                    "ram_bytes": read_ram(),
                    "states_over_ram": round(num_parameters * _STORED / read_ram(), 3),
                }
            ),
            flush=True,
        )
        phases = run_child(trial, "train", last_phase="step 2")
        phases += run_child(trial, "resume", last_phase="export")
        print(json.dumps({"phase": "verdict", **judge(trial, phases)}), flush=True)


if __name__ == "__main__":
    main()
