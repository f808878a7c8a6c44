"""`evaluate`: the accuracy of a model from anywhere on labelled images from anywhere."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.console import Console
from patchloom.data.sources import Item, Source
from patchloom.devices import Device, choose_device
from patchloom.errors import PatchloomError
from patchloom.inference.items import held_out_by, open_items
from patchloom.inference.models import Model, check_head, open_fused, test_preprocessing, weights_of, weights_text
from patchloom.models.class_names import names_or_indices
from patchloom.models.foreign import is_onnx, is_timm
from patchloom.models.imagenet import CLASSES, imagenet_order
from patchloom.models.network import Network
from patchloom.tasks.classification.classes import match_names
from patchloom.tasks.classification.metrics import Scores, head_forward, score
from patchloom.tasks.classification.teachers import OnnxNetwork, open_teacher


def evaluate(model: Model, data: str | PathLike[str], **options: Any) -> dict[str, Any]:
    """top1, top5, loss, ece (fractions), count and per_class of a model on labelled images; options as of `scores`.

    Args:
        model: a network, or what `patchloom.load` takes, timm:NAME or an .onnx file.
        data: what `patchloom.data.opening.open_source` takes.
    """
    return scores(model, data, **options).summary()


def scores(
    model: Model,
    data: str | PathLike[str],
    *,
    labels: str | None = None,
    split: str | None = None,
    crop_ratio: float | None = None,
    resolution: int | None = None,
    head: str | None = None,
    fusion: str = "logits",
    base: Model | None = None,
    batch: int = 128,
    workers: int = 0,
    strict: bool = False,
    class_map: Mapping[str, str] | None = None,
    int8: bool = False,
    device: Device = "auto",
    imagenet_only: bool = False,
    images: tuple[Source, list[Item]] | None = None,
    network: Network | OnnxNetwork | None = None,
    console: Console | None = None,
) -> Scores:
    """The predictions of a model for labelled images.

    split        "train", "val", "test", several as "train+val", or "all"; by default the test split of the run that
                 the model comes from, else val (or test) where the data has one, else the fifth that training holds out
    crop_ratio   of the test crop; by default the one that travels with the weights
    resolution   another image size: positions and cross-patch matrices are resized
    head         of a distilled network: "class", "distill" or "both", with the fusion "logits" or "softmax"
    base         of a delta: the weights that it was made from
    class_map    the data's class names -> the model's names, or its class indices where it has no names
    int8         use int8 matmul, see `patchloom.fuse`
    device       cpu, cuda:1, mps, ...; by default the accelerator of this machine, else the CPU
    imagenet_only   refuse a model without ImageNet's 1000 classes before the first image: `real_accuracy` needs them
    images       what `open_items` gives for the data, where several evaluations share it; else it is opened here
    network      what `ready` gives for the model, likewise
    """
    if batch < 1 or workers < 0:
        raise PatchloomError(f"batch must be at least 1 and workers at least 0, not {batch} and {workers}.")
    # The network comes first: a wrong name or option is found before the images are read.
    network = network or ready(model, resolution, base, int8, device)
    if imagenet_only:
        real_order(names_or_indices(network.class_names, network.config.num_classes))
    preprocessing = test_preprocessing(network, crop_ratio)
    forward = None if head is None else head_forward(network, head, fusion)
    if console is not None and (text := weights_text(network)):
        console.say(text)
    source, items = images or open_items(data, labels, split, held_out_by(model, data), strict, workers, console)
    placed = relabel(items, source, network, class_map or {}, console)
    result = score(network, source, placed, preprocessing, batch=batch, workers=workers, forward=forward)
    return dataclasses.replace(result, weights=weights_of(network))


def ready(
    model: Model,
    resolution: int | None = None,
    base: Model | None = None,
    int8: bool = False,
    device: Device = "auto",
) -> Network | OnnxNetwork:
    """A network as it is evaluated: ours fused, one of timm or in an ONNX file as it is.

    Args:
        resolution: another image size; positions and cross-patch matrices are resized.
        base: for a delta, the weights that it was made from.
        int8: quantise the matrix multiplications of the fused copy.

    Raises:
        PatchloomError: `base` or `int8` with a network that is not patchloom's.
    """
    if (is_timm(model) or is_onnx(model)) and (base is not None or int8):
        raise PatchloomError(f"--base and --int8 are for networks of patchloom, not for {model}.")
    if not is_onnx(model):
        # The fused copy computes the same logits faster; see `patchloom.fuse`.
        network = open_fused(model, resolution, base, device, int8=int8)
        check_head(network, model if isinstance(model, str | PathLike) else network.config.name)
        return network
    hints = {} if resolution is None else {"img_size": resolution}
    return OnnxNetwork(open_teacher(str(model), choose_device(device), hints))


def real_accuracy(result: Scores, labels: Any) -> dict[str, float]:
    """Accuracy on ImageNet's reassessed labels (ReaL), as real_top1 and real_count.

    `labels` has a list of class indices for every image of the validation set; an image is found by the number in its
    file name, from 1 on. A prediction is right if it is one of them; images with an empty list are left out. The model
    must have ImageNet's 1000 classes: by name in any order, or without names in ImageNet's order.

    Raises:
        PatchloomError: the model has other classes, or an image has no number in its name.
    """
    order = real_order(result.class_names)
    check_real_labels(labels)
    right = []
    for key, predicted in zip(result.keys, result.predicted, strict=True):
        # The last number in the name: ILSVRC2012_val_00000293 is image 293.
        number = re.findall(r"\d+", Path(key).stem)
        if not number or not 1 <= int(number[-1]) <= len(labels):
            raise PatchloomError(
                f"{key} has no number from 1 to {len(labels)} in its name: ReaL cannot tell which it is."
            )
        if several := labels[int(number[-1]) - 1]:
            # Images that the annotators gave no label are not counted at all, as in the ReaL paper.
            right.append(order[predicted] in several)
    return {"real_top1": float(np.mean(right)) if right else float("nan"), "real_count": len(right)}


def check_real_labels(labels: Any, where: str = "The value") -> None:
    """Refuse what is not a list of lists, as the JSON file of ReaL labels has it."""
    if isinstance(labels, list) and labels and all(isinstance(several, list) for several in labels):
        return
    found = "entries that are not lists" if isinstance(labels, list) else type(labels).__name__
    raise PatchloomError(
        f"{where} holds {'an empty list' if labels == [] else found}. ReaL labels are a JSON list with one list of "
        "class indices per image of ImageNet's validation set."
    )


def real_order(class_names: Sequence[str]) -> Sequence[int]:
    """For each output of a model its ImageNet index; refused where its classes are not ImageNet's 1000."""
    if tuple(class_names) == names_or_indices(None, CLASSES):  # without names
        return range(CLASSES)
    order = imagenet_order(class_names)
    if order is None:
        raise PatchloomError(
            f"--real needs a model with ImageNet's 1000 classes, by name (WordNet ids or names) or 1000 without names; "
            f"this one has {len(class_names)} classes: {', '.join(class_names[:5])}"
            f"{' ...' if len(class_names) > 5 else ''}."
        )
    return order


def relabel(
    items: Sequence[Item],
    source: Source,
    network: Any,
    class_map: Mapping[str, str],
    console: Console | None = None,
) -> list[Item]:
    """Labels as places in the network's outputs: see `match_names`, whose interpretation is printed, or a warning where
    there is no console."""
    # Only classes that occur must be known to the model: a folder may hold a part of ImageNet.
    place, message = match_names(
        source.class_names,
        network.class_names,
        network.config.num_classes,
        {item.label for item in items},
        class_map,
        where=source.where,
    )
    if message and console is None:
        warnings.warn(message, stacklevel=2)
    elif message and console is not None:
        console.say(message)
    return [item.with_label(place[item.label]) for item in items]
