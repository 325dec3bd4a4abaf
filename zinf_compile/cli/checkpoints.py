"""`--checkpoint`, `--save-every`, `--resume`: where a run saves, and from what it may resume."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zinf_compile
from zinf_compile.checkpoint.checkpoint_folder import read_manifest
from zinf_compile.cli.training import Training
from zinf_compile.ir.errors import ConfigError

Setting = int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """Where a run saves: every ``every`` steps, and after the last one.

    ``settings`` are the options that determine the numbers of a run.
    """

    folder: Path
    every: int | None
    settings: Mapping[str, Setting]
    saved: list[int] = field(default_factory=list)  # the step of the last checkpoint; empty at first

    def tell_how_to_resume(self) -> str:
        """Return, for a user who stops a run, how to resume it: the rest of a sentence."""
        if not self.saved:
            return f"nothing is saved in {self.folder} yet; pass a smaller --save-every to save earlier"
        return f"resume with --resume; last checkpoint: step {self.saved[-1]} in {self.folder}"

    def check(self, *, resume: bool) -> None:
        """Raise ConfigError, before anything is built, if there is no checkpoint to resume, or one that would be lost."""
        there = read_manifest(self.folder) is not None
        if resume and not there:
            raise ConfigError(
                f"--resume: there is no checkpoint in '{self.folder}'; pass its folder with --checkpoint, or begin without "
                "--resume"
            )
        if there and not resume:
            raise ConfigError(
                f"there is a checkpoint in '{self.folder}', which this run would replace; pass --resume to go on from it, "
                "or another folder with --checkpoint"
            )
        nearest = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(
                f"cannot save to '{self.folder}': '{nearest}' is not a folder that can be written; pass another with "
                "--checkpoint"
            )

    def save_when_due(self, training: Training) -> None:
        """Save after the last step, and after every ``every`` steps."""
        is_last = training.step == training.schedule.steps
        if is_last or (self.every is not None and training.step % self.every == 0):
            position = {
                "step": training.step,
                "rate": training.rate.state_dict(),
                "text": training.batches.position,
                "settings": dict(self.settings),
            }
            zinf_compile.save(self.folder, training.model, training.optimizer, extra=position)
            self.saved[:] = [training.step]

    def resume(self, training: Training) -> None:
        """Resume from the checkpoint, including its step, random numbers and position in the text.

        ConfigError for one of another model, of other settings, of another program, or with no steps left.
        """
        try:
            extra = zinf_compile.load(self.folder, training.model, training.optimizer)
        except ConfigError as error:  # it lists every difference; the first one identifies the option
            head, *differences = str(error).splitlines()
            first = f" {differences[0].strip()}; pass the options of the run that saved it" if differences else ""
            raise ConfigError(f"--resume: {head}{first}") from error
        if not isinstance(extra, dict) or extra.keys() != {"step", "rate", "text", "settings"}:
            raise ConfigError(
                f"--resume: the checkpoint in '{self.folder}' was not saved by zinf train; load it with zinf_compile.load"
            )
        saved = extra["settings"]
        changed = [
            f"--{name} {saved.get(name)} (now {now})" for name, now in self.settings.items() if saved.get(name) != now
        ]
        if changed:
            raise ConfigError(
                f"--resume: the run in '{self.folder}' has {', '.join(changed)}; pass what it was begun with, or begin "
                "another one with another --checkpoint"
            )
        if extra["step"] >= training.schedule.steps:
            raise ConfigError(
                f"--resume: step {extra['step']} is done in '{self.folder}', and --steps is {training.schedule.steps}; "
                "pass more --steps to train on"
            )
        training.step = extra["step"]
        self.saved[:] = [training.step]
        training.rate.load_state_dict(extra["rate"])
        training.batches.position = extra["text"]
