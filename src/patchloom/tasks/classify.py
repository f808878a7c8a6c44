"""Classification: from a source of labelled images to a trained, evaluated, exported network."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.data.loader import Order, Steps, TrainImages, train_batches
from patchloom.data.mixing import Mixing, erase, normalise, soft_targets
from patchloom.data.randomness import seed_of
from patchloom.data.scan import find_unreadable
from patchloom.data.sources import Source, Split, open_source, split_source
from patchloom.data.transforms import Augment
from patchloom.errors import PatchloomError
from patchloom.models.config import Config
from patchloom.models.network import Network
from patchloom.models.registry import build, config_from_json, find_config
from patchloom.recipes.changes import apply_changes, network_config
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import find_recipe
from patchloom.training.checkpoints import parse_interval, read_checkpoint
from patchloom.training.console import Console
from patchloom.training.evaluation import Scores, score
from patchloom.training.loop import Batch, Loop, check_batch
from patchloom.training.losses import recipe_loss
from patchloom.training.mirrors import check_log, open_mirrors
from patchloom.training.processes import Processes, join_processes
from patchloom.training.report import write_report
from patchloom.training.run import Run, write_text
from patchloom.training.sharding import whole_tensors
from patchloom.weights.save import save


class Classify:
    """The task of the loop: images and labels in, logits compared with mixed targets."""

    metric = "top1"

    def __init__(self, network: Network, source: Source, split: Split, recipe: Recipe, processes: Processes) -> None:
        self.network, self.source, self.split, self.recipe = network, source, split, recipe
        self.processes = processes
        self.order = Order(len(split.train), recipe.batch_size, recipe.repeated_augmentation, recipe.seed)
        self.steps_per_epoch, self.images_per_step = self.order.steps_per_epoch, self.order.images_per_step
        self.mixing = Mixing(recipe.mixup, recipe.cutmix, recipe.mix_probability, recipe.switch_probability)

    def batches(self, start: int, end: int) -> Iterable[Batch]:
        fields = {field.name: getattr(self.recipe, field.name) for field in dataclasses.fields(Augment)}
        augment = Augment(**{**fields, "flip": self.recipe.flip if self.source.flips else 0.0})
        size, recipe = self.network.config.img_size, self.recipe
        images = TrainImages(self.source, self.split.train, augment, size, recipe.seed)
        steps = Steps(self.order, start, end, self.processes.rank, self.processes.count)
        return train_batches(images, steps, recipe.workers)

    def prepare(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Normalised, erased, mixed images and their soft targets (B, classes)."""
        recipe, how = self.recipe, self.network.preprocessing
        images, labels = batch
        seed = (recipe.seed, step, self.processes.rank)
        x = normalise(images, how.mean, how.std)
        if recipe.erasing:
            x = erase(x, recipe.erasing, *seed)
        targets = soft_targets(labels, self.network.config.num_classes, recipe.label_smoothing)
        return self.mixing(x, targets, *seed)

    def losses(self, network: Any, batch: Batch, step: int) -> dict[str, Tensor]:
        x, targets = self.prepare(batch, step)
        outputs = network(x)
        pair = outputs if isinstance(outputs, tuple) else (outputs,)  # a distilled network learns with both heads
        per_head = [recipe_loss(self.recipe, logits, targets) for logits in pair]
        return {"loss": torch.stack(per_head).mean(dim=0)}

    def evaluate(self, network: Network, after_batch: Callable[[], None]) -> dict[str, float]:
        return self.scores(network, after_batch).figures()

    def scores(self, network: Network, after_batch: Callable[[], None] = lambda: None) -> Scores:
        """What the network says of the held-out images."""
        return score(
            network,
            self.source,
            self.split.held_out,
            self.network.preprocessing,
            batch=max(64, self.recipe.batch_size // self.processes.count),
            workers=self.recipe.workers,
            processes=self.processes,
            after_batch=after_batch,
        )

    def about(self) -> dict[str, Any]:
        return {
            "config": self.network.config.to_json(),
            "class_names": self.network.class_names,
            "preprocessing": self.network.preprocessing.to_json(),
        }


@dataclass(frozen=True)
class Job:
    """All that decides a run: what recipe.yaml holds."""

    data: str
    labels: str | None
    config: Config  # before the data's classes are known
    options: dict[str, Any]
    recipe: Recipe
    notes: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        return {
            "task": "classify",
            "data": self.data,
            "labels": self.labels,
            "model": self.config.to_json(),
            "model_options": self.options,
            **{f"recipe_{key}" if key == "name" else key: value for key, value in self.recipe.to_json().items()},
        }

    @classmethod
    def from_settings(cls, values: Mapping[str, Any]) -> Job:
        known = {field.name for field in dataclasses.fields(Recipe)}
        fields = {key: value for key, value in values.items() if key in known}
        recipe = Recipe(name=values["recipe_name"], **fields)
        options = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values["model_options"].items()
        }
        return cls(values["data"], values["labels"], config_from_json(values["model"]), options, recipe)


def plan_job(
    data: str | PathLike[str],
    model: str,
    recipe: str | Recipe,
    changes: Mapping[str, Any],
    options: Mapping[str, Any],
    labels: str | None = None,
) -> Job:
    """Resolve names and changes; nothing is read or written."""
    config = find_config(model)
    shape = {name: value for name, value in options.items() if name in ("dim", "depth")}
    chosen = find_recipe(recipe, config.replace(**shape)) if isinstance(recipe, str) else recipe
    if chosen.resolution is not None and config.img_size[0] < 224 and "resolution" not in changes:
        chosen = chosen.replace(resolution=None)  # a model for small images keeps its size
    resolved, notes = apply_changes(chosen, changes)
    parse_interval(resolved.checkpoint_every)
    network_config(config, resolved, 2, options)  # refuses what cannot be built
    if "finetune" in resolved.name or "_to_1k" in resolved.name:
        notes.append(
            f"{resolved.name} is made for weights that are trained already; here the network starts at random."
        )
    where = str(data)
    if where != "digits" and Path(where).exists():
        where = str(Path(where).absolute())  # a run is resumed from anywhere
    return Job(where, labels, config, dict(options), resolved, tuple(notes))


def open_data(
    job: Job, console: Console, processes: Processes, strict: bool = False
) -> tuple[Source, Split, dict[str, str]]:
    """The source of a job without its unreadable files, split, and those files with the reasons."""
    source = open_source(job.data, job.labels)
    mine = source.items()[processes.rank :: processes.count]
    found = find_unreadable(source, mine, lambda done, of: console.progress(f"reading images: {done} of {of}"))
    bad = {key: reason for part in processes.gather(found) for key, reason in part.items()}
    if bad:
        report_skipped(bad, console, strict)
    usable = source.without(bad)
    for name, items in source.splits.items():
        if items and not usable.splits[name]:
            raise PatchloomError(f"No image of {job.data} in its split {name!r} can be read.")
    split = split_source(usable)
    for note in getattr(source, "notes", ()):
        console.say(note)
    console.say(
        f"{job.data}: {len(split.train)} training images, {len(split.held_out)} held out, "
        f"{len(source.class_names)} classes. {split.how}"
    )
    return usable, split, bad


def report_skipped(bad: Mapping[str, str], console: Console, strict: bool) -> None:
    listed = "\n".join(f"  {key}: {reason}" for key, reason in bad.items())
    if strict:
        raise PatchloomError(f"{len(bad)} files are unreadable:\n{listed}")
    console.say(f"{len(bad)} unreadable files are skipped:\n{listed}")


def make_task(job: Job, source: Source, split: Split, processes: Processes, console: Console) -> Classify:
    """The task with a fresh network, the same in every process."""
    config = network_config(job.config, job.recipe, len(source.class_names), job.options)
    if len(split.train) < job.recipe.batch_size:
        console.say(
            f"All {len(split.train)} training images are one batch: fewer than batch_size={job.recipe.batch_size}. The "
            f"learning rate stays {job.recipe.lr:.3g}."
        )
    check_batch(job.recipe, len(split.train), processes.count)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(job.recipe.seed, "start"))
        network = build(config)
    network.class_names = source.class_names
    network.preprocessing = dataclasses.replace(
        network.preprocessing, crop_ratio=job.recipe.test_crop_ratio, interpolation=job.recipe.interpolation
    )
    return Classify(network, source, split, job.recipe, processes)


def train(
    data: str | PathLike[str],
    *,
    model: str,
    recipe: str | Recipe,
    out: str | PathLike[str],
    labels: str | None = None,
    model_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    **changes: Any,
) -> Run:
    """Train a model on labelled images, to a run folder with checkpoints, log, export and report.

    data            class folders, a CSV manifest, "digits", ... (docs/data.md)
    recipe          a recipe's name, such as "cait@small", or a Recipe
    log             "wandb" for a copy of the log there; TensorBoard has one where it is installed
    out             the run folder; one that holds a run is refused
    model_options   fields of the model's config; further keywords are fields of the recipe (epochs=10)
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and (Path(out) / "recipe.yaml").exists():
        return resume(out, console)  # torchrun starts the same command again after a process was lost
    job = plan_job(data, model, recipe, changes, model_options or {}, labels)
    processes = join_processes()
    console = console or Console()
    console.quiet = console.quiet or not processes.first
    for note in job.notes:
        console.say(note)
    if not os.fspath(out):
        raise PatchloomError("--out is the name of a folder for the run.")
    _check_free(Path(out))
    check_log(log)
    source, split, bad = open_data(job, console, processes, strict)
    task = make_task(job, source, split, processes, console)
    run = Run(Path(out), {**job.settings(), "log": log})
    loop = Loop(task, job.recipe, run, processes, console)  # before anything is written: it refuses what cannot be
    processes.wait()
    if processes.first:
        run.create({"data": _about_data(job, source, split, bad)})
    return _carry_out(run, task, loop)


def resume(folder: str | PathLike[str], console: Console | None = None, more_epochs: int = 0) -> Run:
    """Go on with a run from its last checkpoint, exactly; with `more_epochs`, beyond its end."""
    run = Run.open(Path(folder))
    processes = join_processes()
    console = console or Console()
    console.quiet = console.quiet or not processes.first
    try:
        job = Job.from_settings(run.settings)
    except (KeyError, TypeError, AttributeError) as error:
        raise PatchloomError(f"{run.folder / 'recipe.yaml'} is damaged: {error!r}.") from error
    if more_epochs:
        job = _extended(job, more_epochs, console)
    environment = run.about()
    if environment["data"].get("fingerprint") != source_fingerprint(job):
        raise PatchloomError(
            f"{job.data} has changed since {run.folder} began: exact resuming needs the same images and labels."
        )
    source = open_source(job.data, job.labels).without(environment["data"].get("skipped", {}))
    task = make_task(job, source, split_source(source), processes, console)
    run.settings |= job.settings()
    return _carry_out(run, task, Loop(task, job.recipe, run, processes, console))


def _extended(job: Job, more: int, console: Console) -> Job:
    epochs = job.recipe.epochs + more
    how = {
        "constant": "the learning rate stays as it is",
        "step": f"the drops of the learning rate stay at epochs {', '.join(map(str, job.recipe.decay_epochs))}",
    }.get(
        job.recipe.schedule,
        f"its {job.recipe.schedule} curve spans all of them, and the learning rate goes on from where that curve is at "
        "the last checkpoint",
    )
    console.say(f"The schedule changes to {epochs} epochs instead of {job.recipe.epochs}: {how}.")
    return dataclasses.replace(job, recipe=job.recipe.replace(epochs=epochs))


def _about_data(job: Job, source: Source, split: Split, bad: dict[str, str]) -> dict[str, Any]:
    """What a run remembers of its data: enough to notice a change, and which images it never saw."""
    about = {"where": job.data, "fingerprint": source_fingerprint(job), "skipped": bad, "split": split.how}
    if not any(source.splits.get(name) for name in ("val", "test")):
        about["held_out"] = [item.key for item in split.held_out]
    return about


def source_fingerprint(job: Job) -> str:
    return open_source(job.data, job.labels).fingerprint()


def _check_free(out: Path) -> None:
    """Refuse before hours of reading what would be refused after them."""
    if (out / "recipe.yaml").exists() or (out / "checkpoints").exists():
        raise PatchloomError(
            f"{out} holds a run already: `patchloom resume {out}` goes on with it, or give another folder for this run."
        )
    existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise PatchloomError(f"{out} cannot be written: {existing} is no folder that this user may write to.")


def _carry_out(run: Run, task: Classify, loop: Loop) -> Run:
    """From the last checkpoint, where there is one, to the report."""
    processes = loop.processes
    with run.locked() if processes.first else nullcontext():
        _restore(run, loop)
        if processes.first:
            run.renew()
            run.mirrors = open_mirrors(run.folder, run.settings, loop.counters.step)
        processes.wait()
        try:
            loop.fit()
        finally:
            for mirror in run.mirrors:
                mirror.close()
        _finish(run, task, loop, loop.console)
    return run


def _restore(run: Run, loop: Loop) -> None:
    """The first process looks for the last whole checkpoint; all take that one."""
    processes = loop.processes
    path, problem = processes.gather(_newest(run, loop.console) if processes.first else None)[0]
    if problem is not None:
        raise PatchloomError(problem)
    if path is not None:
        if not path.exists():
            raise PatchloomError(f"Process {processes.rank} does not see {path}: is the folder shared by all of them?")
        try:
            loop.restore(read_checkpoint(path, loop.empty))
        except (RuntimeError, KeyError) as error:
            raise PatchloomError(f"The checkpoint of {run.folder} does not fit its recipe.yaml: {error}.") from error
        loop.console.say(f"Resuming {run.folder} at step {loop.counters.step} of {loop.total}.")
    elif (run.folder / "log.jsonl").exists():
        loop.console.say(f"{run.folder} has no checkpoint: the run begins at its start.")


def _newest(run: Run, console: Console) -> tuple[Path | None, str | None]:
    """The last whole checkpoint, or what is wrong."""
    try:
        return run.checkpoints.newest(console.say), None
    except PatchloomError as error:
        return None, str(error)


def _finish(run: Run, task: Classify, loop: Loop, console: Console) -> None:
    """The export and the report."""
    trained = loop.average.model if loop.average is not None else loop.network
    scores, whole = task.scores(trained), whole_tensors(trained)
    if not loop.processes.first:
        return
    network = build(trained.config)
    network.load_state_dict(whole)
    network.class_names, network.preprocessing = trained.class_names, trained.preprocessing
    about = {
        "step": loop.counters.step,
        "weights": "averaged" if loop.average is not None else "raw",
        "held_out": {key: value for key, value in scores.summary().items() if key != "per_class"},
        "best": loop.counters.best,
    }
    export_network(run.folder / "export", network, about)
    write_report(run, task.source, task.split.held_out, scores, network)
    console.say(f"The report is {run.folder / 'report.html'}, the weights are in {run.folder / 'export'}.")


def export_network(folder: Path, network: Network, about: Mapping[str, Any]) -> None:
    """model.safetensors, which says all itself, and model.json for those who read no safetensors."""
    save(network, folder / "model.safetensors")
    told = {
        "config": network.config.to_json(),
        "class_names": network.class_names,
        "preprocessing": network.preprocessing.to_json(),
        **about,
    }
    write_text(folder / "model.json", json.dumps(told, indent=1) + "\n")
