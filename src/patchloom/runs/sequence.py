"""Train low, finish high: a run at a low resolution, then a short fine-tuning at a higher one (FixRes; thesis 6.3.1).

RUN/stages.json says what was asked for, RUN/low is the first run, RUN itself the second.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from patchloom.console import Console
from patchloom.data.sources import open_source
from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.reading import read_json
from patchloom.recipes.changes import keep_scales
from patchloom.recipes.registry import find_recipe, finetuning_recipe
from patchloom.runs import launch as single
from patchloom.runs.config import Job, plan_job
from patchloom.tasks.classification.train import plan_finetune
from patchloom.training.processes import join_processes, restarted
from patchloom.training.run import Run, write_text

_FILE = "stages.json"
_LOW = "low"


@dataclass(frozen=True)
class Finish:
    """The second stage: a higher resolution, and what it changes of its recipe, by default the family's own."""

    resolution: int
    changes: dict[str, Any] = field(default_factory=dict)
    recipe: str | None = None

    def plan(self, low: Job) -> Job:
        """The second stage as it will be, before its weights are there: it refuses what cannot be."""
        images = len(open_source(low.data, low.labels).items())
        config = low.network_config(low.config.num_classes)
        recipe = find_recipe(self.recipe or finetuning_recipe(config.family, True, images), config)
        fitting = keep_scales(recipe)  # those of the first stage
        job = plan_job(low.data, config, fitting, self._settings(low), {}, low.labels, splits=low.splits)
        return dataclasses.replace(job, notes=())

    def job(self, low: Job, weights: Path) -> Job:
        """The second stage, from the weights of the first."""
        settings = self._settings(low)
        return plan_finetune(weights, low.data, self.recipe, settings, {}, labels=low.labels, splits=low.splits)

    def _settings(self, low: Job) -> dict[str, Any]:
        kept = {name: getattr(low.recipe, name) for name in ("seed", "workers", "checkpoint_every", "shard")}
        return {**kept, **self.changes, "resolution": self.resolution}


def carry_out(
    low: Job,
    finish: Finish,
    out: str | PathLike[str],
    *,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
) -> Run:
    """Both stages, one after the other."""
    folder = Path(out)
    if restarted() and (folder / _FILE).exists():
        return resume(folder, console, device=device)
    single.check_free(out)
    finish.plan(low)
    if join_processes(device).first:
        asked = {"low": low.settings(), "finish": asdict(finish), "strict": strict, "log": log}
        with Run(folder, asked).locked():
            _begin(folder, asked)
    join_processes(device).wait()
    try:
        return resume(folder, console, device=device)
    except PatchloomError:
        if not (folder / _LOW / "recipe.yaml").exists():  # refused before it began: the folder stays free
            (folder / _FILE).unlink(missing_ok=True)
        raise


def _begin(folder: Path, asked: dict[str, Any]) -> None:
    """Write what was asked for, where no other process has begun meanwhile."""
    single.check_free(folder)
    if (folder / _FILE).exists():
        raise PatchloomError(f"{folder} holds a run already: `patchloom resume {folder}` goes on with it.")
    try:
        write_text(folder / _FILE, json.dumps(asked, indent=1) + "\n")
    except OSError as error:
        raise PatchloomError(f"{folder} cannot be written: {error}.") from error


def resume(
    folder: str | PathLike[str], console: Console | None = None, more_epochs: int = 0, device: Device = "auto"
) -> Run:
    """Go on with a run, of one stage or of two; `more_epochs` are added to the last stage."""
    place, console = Path(folder), console or Console()
    if not (place / _FILE).exists() or (place / "recipe.yaml").exists():
        return single.resume(place, console, more_epochs, device)
    if more_epochs:
        raise PatchloomError(f"{place} is in its first stage: `patchloom resume {place}` first.")
    low, finish, options = _read(place / _FILE)
    options |= {"console": console, "device": device}
    console.say(f"Stage 1 of 2, in {place / _LOW}.")
    if not (place / _LOW / "recipe.yaml").exists():
        single.carry_out(low, place / _LOW, **options)
    elif not (place / _LOW / "export" / "model.json").exists():  # written last
        single.resume(place / _LOW, console, device=device)
    console.say(f"Stage 2 of 2, at {finish.resolution} pixels.")
    return single.carry_out(finish.job(low, place / _LOW), place, **options)


def _read(path: Path) -> tuple[Job, Finish, dict[str, Any]]:
    """Both stages, and the options of their runs."""
    try:
        asked = read_json(path)
        options = {key: asked[key] for key in ("strict", "log")}
        return Job.from_settings(asked["low"]), Finish(**asked["finish"]), options
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchloomError(f"{path} is damaged: {error!r}.") from error
