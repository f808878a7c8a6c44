"""The public functions that train: each plans a run with its task, and launches it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from torch import Tensor, nn

from patchloom.console import Console, choose_console
from patchloom.data.splits import Splits
from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.recipes.recipe import Recipe
from patchloom.runs.launch import launch
from patchloom.runs.own import earlier_environment, has_checkpoint, run_task
from patchloom.runs.sequence import launch as launch_one_or_two
from patchloom.tasks.classification.config import DistillationConfig
from patchloom.tasks.classification.plans import plan_distillation, plan_finetuning, plan_training
from patchloom.tasks.own.plan import OwnRun, open_own, own_config
from patchloom.tasks.pretraining.plans import plan_pretraining
from patchloom.tasks.retrieval.sequence import plan_runs
from patchloom.tasks.spec import Context
from patchloom.tasks.translation.plans import plan_translation
from patchloom.training.callbacks import Callback
from patchloom.training.processes import join_processes
from patchloom.training.run import Run

Place = str | PathLike[str]


def train(
    data: Any,
    *,
    model: str | nn.Module,
    recipe: str | Recipe,
    out: Place,
    loss: Callable[[Any, Any], Tensor] | str | None = None,
    augmentation: Callable[[Any], Any] | str | None = None,
    validation: Any = None,
    callbacks: Sequence[Callback] = (),
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
    """Train a classifier on labelled images. The run folder gets checkpoints, a log, the exported model and a report.

    Args:
        data: A folder with one subfolder per class, a CSV file, "digits", or another source (docs/data.md); or a data
            set of your own, anything with `__len__` and `__getitem__` that gives (input, target).
        model: A name of `list_models()`, or a torch.nn.Module of your own.
        recipe: The name of a recipe, such as "cait@small", or a Recipe.
        out: The run folder; one that holds a run is refused, or with parts of your own continued.
        loss: (outputs, targets) -> one value for the batch, its mean, or one value per sample; or a recipe's "bce".
        augmentation: A function from a PIL image to an image or tensor, in place of the recipe's; or a recipe's "none".
        validation: A second data set of your own to hold out; by default a fifth of the first.
        callbacks: `patchloom.Callback` objects, called after steps and evaluations.
        labels: The label column of a CSV file.
        scales_from: A model whose learned residual scales the new network begins with; with the model option
            scale_trainable=False they stay fixed (thesis 3.5.3).
        train_split: The split to train on, several joined as "train+val"; by default the data's own.
        test_split: The split to hold out, likewise.
        hold_out: For data without a validation split: the fraction of each class that is held out, or "none".
        model_options: Fields of the model's config.
        strict: Raise an error for unreadable files instead of skipping them.
        log: "wandb" for a copy of the log there; TensorBoard has one where it is installed.
        console: Where progress is printed; standard output by default.
        device: "cpu", "cuda:1", "mps", ...; by default the accelerator of this machine, else the CPU. It is not part of
            the recipe: a run can be resumed on another device.
        changes: Fields of the recipe (epochs=10).

    Returns:
        The finished run; `run.folder` has the export and the report.

    Raises:
        PatchloomError: wrong arguments or data that cannot be read; nothing is written then.
        StoppedError: the loss is not finite, or the disk is full; the state before is saved.
        InterruptedWork: a signal ended the run, with everything saved.
    """
    splits = Splits(train_split, test_split, hold_out)
    options = model_options or {}
    named = {"loss": loss, "augmentation": augmentation}  # as words they are fields of the recipe, such as loss="bce"
    changes |= {name: part for name, part in named.items() if isinstance(part, str)}
    own_loss = None if isinstance(loss, str) else loss
    own_augmentation = None if isinstance(augmentation, str) else augmentation
    given = (own_loss, own_augmentation, validation)
    # Without own parts the run can be described completely in recipe.yaml, and so be resumed by the command line.
    if isinstance(model, str) and isinstance(data, str | PathLike) and all(part is None for part in given):
        config = plan_training(data, model, recipe, changes, options, labels, scales_from=scales_from, splits=splits)
        return launch(config, out, strict=strict, log=log, console=console, device=device, callbacks=callbacks)
    if scales_from is not None or strict:
        raise PatchloomError("scales_from and strict have no effect with parts of your own: leave them out.")
    run = OwnRun(data, model, validation, own_loss, own_augmentation, splits, labels, options)
    processes, console = join_processes(device), choose_console(console)
    console.quiet = console.quiet or not processes.is_main_process
    # The folder may hold this very run: then the split and the fingerprint of its start apply.
    context = Context(processes, console, environment=earlier_environment(out), from_checkpoint=has_checkpoint(out))
    task, resolved = open_own(run, recipe, changes, context)
    return run_task(task, resolved, out, processes, console, log, callbacks, own_config(run, task))


def distill(
    teacher: Place | Iterable[Place],
    data: Place,
    *,
    model: str,
    recipe: str | Recipe,
    out: Place,
    method: str | None = None,
    labels: str | None = None,
    train_split: str | None = None,
    test_split: str | None = None,
    hold_out: float | str | None = None,
    model_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    callbacks: Sequence[Callback] = (),
    distillation: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Run:
    """Train a classifier with knowledge distillation: on labels, and on a teacher's logits for the same augmented and
    mixed images (thesis 3.3).

    Args:
        teacher: A run folder, weights that `load` takes, "timm:NAME[:FILE]", an .onnx file, or several of them.
        method: "hard" (Eq. 3.3), "soft" (Eq. 3.2), or "token": hard, on the output of a distillation token; by default
            "token" for DeiT and "hard" for the other families. `how` is its earlier name.
        distillation: Further fields of `DistillationConfig`: weight, tau, kl, cache, hints. `teaching` is its earlier
            name.

    The others are those of `train`.
    """
    method = changes.pop("how", method)
    fields = changes.pop("teaching", None) or distillation or {}
    if not isinstance(fields, Mapping):
        raise PatchloomError(f"distillation is a dictionary such as {{'tau': 3.0}}, not {fields!r}.")
    teachers = plan_distillation(teacher, method, **fields)
    splits = Splits(train_split, test_split, hold_out)
    options = model_options or {}
    config = plan_training(data, model, recipe, changes, options, labels, distillation=teachers, splits=splits)
    return launch(config, out, strict=strict, log=log, console=console, device=device, callbacks=callbacks)


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
    distillation: DistillationConfig | None = None,
    labels: str | None = None,
    train_split: str | None = None,
    test_split: str | None = None,
    hold_out: float | str | None = None,
    model_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> Run:
    """Fine-tune trained weights: at another resolution, on other classes, with all or some of the parameters.

    Args:
        weights: A run folder, an exported model, a weight file or a published tag: what `load` takes.
        recipe: By default the one of the family's paper where the classes stay, "new_classes" where they do not.
        tune: "all", "attention", "ffn" (both with heads and positions) or "head"; by default the recipe's.
        delta: Also export only what changed, for `load(delta, base=...)`.
        mean: The normalisation that the weights were trained with, where their file does not say.
        std: Likewise.
        distillation: `plan_distillation(...)`, to distil at the same time. `teaching` is its earlier name.
        model_options: head="mlp" for Grafit's head; queries="per_class" for one query per class of a PatchConvNet
            (thesis 5.2.1); what a bare weight file does not say (heads=3).

    The others are those of `train`; resolution=384 is another image size.
    """
    config = plan_finetuning(
        weights, data, recipe, changes, model_options or {},
        tune=tune, delta=delta, mean=mean, std=std, distillation=changes.pop("teaching", distillation),
        labels=labels, splits=Splits(train_split, test_split, hold_out),
    )  # fmt: skip
    return launch(config, out, strict=strict, log=log, console=console, device=device, callbacks=callbacks)


def grafit(
    data: Place,
    *,
    model: Place,
    out: Place,
    labels: str | None = None,
    recipe: str | Recipe | None = None,
    clusters_from: Place | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    train_split: str | None = None,
    test_split: str | None = None,
    hold_out: float | str | None = None,
    model_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> Run:
    """Train an embedding for fine-grained image search from coarse labels or none (Grafit, thesis chapter 2).

    `patchloom.load(run.folder).embed(images)` gives the vectors. No fine label is used in training.

    Args:
        data: A CSV file with one column per level, a folder with one subfolder per class, or another source.
        model: The trunk: a name of `list_models(kind="image")` or "timm:NAME", with random weights; or weights to start
            from, a run folder, a file or a published tag.
        labels: The column to train on, of any level; "none" for no labels. By default the only column of the data.
        recipe: "grafit", "grafit_fc", "grafit_baseline", "snca", "snca_plus", "clusterfit_plus" or a small form; by
            default "grafit", or "grafit@small" for small images or few of them.
        clusters_from: For "clusterfit_plus": the network whose vectors are clustered; by default the baseline, which is
            trained first, in out/baseline.
        mean: The normalisation that the weights were trained with, where their file does not say.
        std: Likewise.
        changes: Fields of the recipe: loss="knn", views=8, projector="fc", instance_weight=0.5, epochs=10, ...

    The others are those of `train`.
    """
    config = plan_runs(
        data, model, recipe, changes, model_options, labels=labels, mean=mean, std=std, clusters_from=clusters_from,
        splits=Splits(train_split, test_split, hold_out),
    )  # fmt: skip
    return launch_one_or_two(config, out, strict=strict, log=log, console=console, device=device, callbacks=callbacks)


def translate(
    data: Place,
    *,
    pair: str,
    model: str,
    out: Place,
    recipe: str | Recipe | None = None,
    vocabulary: Place | int | None = None,
    model_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> Run:
    """Train a network that translates. `patchloom.predict(run.folder, sentences)` applies it.

    Args:
        data: A folder with the files train.en, train.de, val.en and val.de for the pair en-de, plain or with .gz, one
            sentence per line.
        pair: Source and target language, such as "en-de".
        model: A name of `list_models(kind="text")`.
        recipe: "resmlp_mt", "transformer_mt" or a small form; by default that of the family.
        vocabulary: A model of sentencepiece, or the number of tokens of one that is trained on the training split; by
            default the recipe's number.
        strict: Raise an error for empty and too long lines instead of leaving them out.

    The others are those of `train`.
    """
    if isinstance(vocabulary, int):  # the setting `vocabulary`, whose name the file of a vocabulary has here
        changes, vocabulary = {**changes, "vocabulary": vocabulary}, None
    config = plan_translation(data, pair, model, recipe, vocabulary, changes, model_options)
    return launch(config, out, strict=strict, log=log, console=console, device=device, callbacks=callbacks)


def pretrain(
    data: Place,
    *,
    method: str,
    model: Place,
    out: Place,
    recipe: str | Recipe | None = None,
    tokenizer: Place | None = None,
    labels: str | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    train_split: str | None = None,
    test_split: str | None = None,
    hold_out: float | str | None = None,
    model_options: Mapping[str, Any] | None = None,
    strict: bool = False,
    log: str | None = None,
    console: Console | None = None,
    device: Device = "auto",
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> Run:
    """Learn features from images without labels (DINO, BeiT, MAE). Labels, if there are any, are used to measure alone.

    `patchloom.load(run.folder)` is the trunk without a head; `patchloom.finetune(run.folder, ...)` starts from it.

    Args:
        data: A folder of images, flat or nested, a CSV file or another source.
        method: "dino", "beit" or "mae".
        model: A name of `list_models(kind="image")` or "timm:NAME", with random weights; or weights to start from, a
            run folder, a file or a published tag.
        recipe: By default that of the method, in its small form for small images or few of them.
        tokenizer: For "beit": a trained tokenizer, a run of "beit" or a file of it; by default one is trained on the
            same images first, in the folder `tokenizer` of the run.
        labels: The column to measure by, where the data has several.
        changes: Fields of the recipe: epochs=100, local_crops=4, mask_ratio=0.6, probe_every=5, stem="hmlp", ...

    The others are those of `train`.
    """
    config = plan_pretraining(
        data, model, method, recipe, changes, model_options, tokenizer=tokenizer, labels=labels, mean=mean, std=std,
        splits=Splits(train_split, test_split, hold_out),
    )  # fmt: skip
    return launch_one_or_two(config, out, strict=strict, log=log, console=console, device=device, callbacks=callbacks)
