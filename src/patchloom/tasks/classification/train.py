"""Entry points that train: each resolves a job, and `carry_out` does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from patchloom.console import Console
from patchloom.data.sources import Splits, open_source
from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.models.roles import TUNINGS, tuned_parameters
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import finetuning_recipe
from patchloom.runs.config import How, Job, Teaching, plan_job, teacher_place
from patchloom.runs.launch import carry_out
from patchloom.tasks.classification.start import open_start
from patchloom.training.run import Run

Place = str | PathLike[str]
_OF_THE_RUN = (
    "head",
    "drop_path",
    "drop_path_decay",
    "dropout",
    "queries",
)  # options of the network that its weights do not decide


def train(
    data: Place,
    *,
    model: str,
    recipe: str | Recipe,
    out: Place,
    labels: str | None = None,
    scales_from: Place | None = None,
    train_split: str | None = None,
    test_split: str | None = None,
    hold_out: float | str | None = None,
    model_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    **changes: Any,
) -> Run:
    """Train a model on labelled images, to a run folder with checkpoints, log, export and report.

    Args:
        data: A folder with one subfolder per class, a CSV file, "digits", or another source (docs/data.md).
        recipe: The name of a recipe, such as "cait@small", or a Recipe.
        log: "wandb" for a copy of the log there; TensorBoard has one where it is installed.
        train_split: The split to train on, several joined as "train+val"; by default the data's own.
        test_split: The split to hold out, likewise.
        hold_out: For data without a validation split: the share of each class that is held out, or "none".
        out: The run folder; one that holds a run is refused.
        scales_from: A model whose learned residual scales the new network begins with; with the model option
            scale_trainable=False they stay fixed (thesis 3.5.3).
        model_options: Fields of the model's config.
        device: cpu, cuda:1, mps, ...; by default the accelerator of this machine, else the CPU. It is no part of the
            recipe: a run can be resumed on another device.
        changes: Fields of the recipe (epochs=10).
    """
    splits = Splits(train_split, test_split, hold_out)
    options = model_options or {}
    job = plan_job(data, model, recipe, changes, options, labels, scales_from=scales_from, splits=splits)
    return carry_out(job, out, strict=strict, log=log, console=console, device=device)


def distill(
    teacher: Place | Iterable[Place],
    data: Place,
    *,
    model: str,
    recipe: str | Recipe,
    out: Place,
    how: How | None = None,
    labels: str | None = None,
    train_split: str | None = None,
    test_split: str | None = None,
    hold_out: float | str | None = None,
    model_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    teaching: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Run:
    """Train a model on labels and on what a teacher says of the same augmented, mixed images (thesis 3.3).

    Args:
        teacher: A run folder, weights that `load` takes, "timm:NAME[:FILE]", an .onnx file, or several of them.
        how: "hard" (Eq. 3.3), "soft" (Eq. 3.2), or "token": hard, on the output of a distillation token; by default
            "token" for DeiT and "hard" for the other families.
        teaching: Further fields of `patchloom.runs.config.Teaching`: weight, tau, kl, cache, hints.

    The others are those of `train`.
    """
    taught = make_teaching(teacher, how, **(teaching or {}))
    splits = Splits(train_split, test_split, hold_out)
    options = model_options or {}
    job = plan_job(data, model, recipe, changes, options, labels, teaching=taught, splits=splits)
    return carry_out(job, out, strict=strict, log=log, console=console, device=device)


def finetune(
    weights: Place,
    data: Place,
    *,
    out: Place,
    recipe: str | Recipe | None = None,
    tune: str | None = None,
    delta: bool = False,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    teaching: Teaching | None = None,
    labels: str | None = None,
    train_split: str | None = None,
    test_split: str | None = None,
    hold_out: float | str | None = None,
    model_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    **changes: Any,
) -> Run:
    """Go on from trained weights: at another resolution, on other classes, with all or some of the parameters.

    Args:
        weights: A run folder, an export, a weight file or a published tag: what `load` takes.
        recipe: By default the one of the family's paper where the classes stay, "new_classes" where they do not.
        tune: "all", "attention", "ffn" (both with heads and positions) or "head"; by default the recipe's.
        delta: Also export only what changed, for `load(delta, base=...)`.
        mean: The normalisation that the weights were trained with, where their file does not say.
        std: Likewise.
        teaching: `make_teaching(...)`, to distil meanwhile.
        model_options: head="mlp" for Grafit's head; queries="per_class" for one query per class of a PatchConvNet
            (thesis 5.2.1); what a bare weight file does not say (heads=3).

    The others are those of `train`; resolution=384 is another image size.
    """
    job = plan_finetune(
        weights, data, recipe, changes, model_options or {},
        tune=tune, delta=delta, mean=mean, std=std, teaching=teaching, labels=labels,
        splits=Splits(train_split, test_split, hold_out),
    )  # fmt: skip
    return carry_out(job, out, strict=strict, log=log, console=console, device=device)


def make_teaching(teacher: Place | Iterable[Place], how: str | None = None, **fields: Any) -> Teaching:
    several = [teacher] if isinstance(teacher, str | PathLike) else list(teacher)
    return Teaching(tuple(teacher_place(one) for one in several), how, **fields)  # type: ignore[arg-type]


def plan_finetune(
    weights: Place,
    data: Place,
    recipe: str | Recipe | None,
    changes: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    tune: str | None = None,
    delta: bool = False,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    teaching: Teaching | None = None,
    labels: str | None = None,
    splits: Splits | None = None,
) -> Job:
    """The job of a fine-tuning: nothing is written, but the weights and the list of images are read."""
    source = open_source(data, labels)
    own = {name: value for name, value in options.items() if name in _OF_THE_RUN}
    hints = {name: value for name, value in options.items() if name not in _OF_THE_RUN}
    if tune is not None:
        if tune not in TUNINGS:
            raise PatchloomError(f"--tune is one of {', '.join(TUNINGS)}, not {tune!r}.")
        if changes.get("tune", tune) != tune:
            raise PatchloomError(f"--tune {tune} contradicts tune={changes['tune']}: give one.")
        changes = {**changes, "tune": tune}
    network, start, notes = open_start(weights, source, hints, delta, mean, std)
    if teaching and teaching.how == "token" and not getattr(network.config, "distilled", False):
        raise PatchloomError(
            f"{weights} has no distillation token: --how hard and --how soft teach a network without one."
        )
    if own.get("head", network.config.head) != network.config.head:
        start = dataclasses.replace(start, class_names=None)  # a head of another kind starts afresh too
    queries = getattr(network.config, "queries", None)
    if queries == "per_class" and own.get("queries", queries) != queries:
        raise PatchloomError(f"{weights} has one query per class: it cannot be fine-tuned to queries={own['queries']}.")
    per_class = queries == "one" and own.get("queries") == "per_class"
    same_classes = start.class_names is not None
    chosen = recipe or finetuning_recipe(network.config.family, same_classes, len(source.items()), per_class)
    if recipe is None:
        notes.append(f"The recipe is {chosen}; --recipe takes another.")
    job = plan_job(data, network.config, chosen, changes, own, labels, start, teaching, splits=splits)
    assert job.start is not None
    tuned_parameters(network, job.start.tune)  # refuses what the network does not have
    return dataclasses.replace(job, notes=(*notes, *job.notes))
