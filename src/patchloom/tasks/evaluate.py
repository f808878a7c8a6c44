"""`evaluate` and `predict`: a network from anywhere on images from anywhere."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom.data.decoding import EXTENSIONS
from patchloom.data.images import NOTE, read_image, resize_and_crop
from patchloom.data.mixing import normalise
from patchloom.data.scan import find_unreadable, reason_of
from patchloom.data.sources import Item, Source, join_splits, open_source, split_names, split_source
from patchloom.errors import PatchloomError
from patchloom.models.fused import fuse
from patchloom.models.imagenet import CLASSES, imagenet_order
from patchloom.models.network import Network, unwrapped
from patchloom.models.preprocessing import Preprocessing
from patchloom.tasks.classes import match_names
from patchloom.tasks.prepare import report_skipped
from patchloom.tasks.teachers import ForeignNetwork, is_foreign, open_teacher
from patchloom.training.console import Console
from patchloom.training.evaluation import Scores, few_images_warning, head_answer, score
from patchloom.training.run import Run
from patchloom.weights.hub import is_remote
from patchloom.weights.load import load

Model = Network | str | PathLike[str]


def evaluate(model: Model, data: str | PathLike[str], **options: Any) -> dict[str, Any]:
    """top1, top5, loss, ece (fractions), count and per_class of a model on labelled images; options as of `scores`."""
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
    imagenet_only: bool = False,
    images: tuple[Source, list[Item]] | None = None,
    console: Console | None = None,
) -> Scores:
    """What a model says of every labelled image.

    split        "train", "val", "test", several as "train+val", or "all"; by default the test split of the run that
                 the model comes from, else val (or test) where the data has one, else the fifth that training holds out
    crop_ratio   of the test crop; by default the one that travels with the weights
    resolution   another image size: positions and cross-patch matrices are resized
    head         of a distilled network: "class", "distill" or "both", with the fusion "logits" or "softmax"
    base         of a delta: the weights that it was made from
    class_map    the data's class names -> the model's names, or its class indices where it has no names
    int8         with products of bytes, see `patchloom.fuse`
    imagenet_only   refuse a model without ImageNet's 1000 classes before the first image: `real_accuracy` needs them
    images       what `open_items` gives for the data, where several evaluations share it; else it is opened here
    """
    if batch < 1 or workers < 0:
        raise PatchloomError(f"A batch has at least one image, and workers are 0 or more: {batch}, {workers}.")
    network = ready(model, resolution, base, int8)
    if imagenet_only:
        real_order(network.class_names or tuple(map(str, range(network.config.num_classes))))
    how = test_preprocessing(network, crop_ratio)
    answer = None if head is None else head_answer(network, head, fusion)
    source, items = images or open_items(data, labels, split, held_out_by(model, data), strict, workers, console)
    placed = relabel(items, source, network, class_map or {}, console)
    return score(network, source, placed, how, batch=batch, workers=workers, answer=answer)


def ready(
    model: Model, resolution: int | None = None, base: Model | None = None, int8: bool = False
) -> Network | ForeignNetwork:
    """A network as it is evaluated: ours fused, one of timm or in an ONNX file as it is."""
    if not is_foreign(model):
        return fuse(open_model(model, resolution, base), int8=int8)
    if base is not None or int8:
        raise PatchloomError(f"--base and --int8 are for networks of patchloom, not for {model}.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return ForeignNetwork(open_teacher(str(model), device, {} if resolution is None else {"img_size": resolution}))


def test_preprocessing(network: Network | ForeignNetwork, crop_ratio: float | None) -> Preprocessing:
    """How a network is tested: as its weights say, or with another crop."""
    if crop_ratio is None:
        return network.preprocessing
    return dataclasses.replace(network.preprocessing, crop_ratio=crop_ratio)


def open_items(
    data: str | PathLike[str],
    labels: str | None,
    split: str | None,
    run: RunSplit | None = None,
    strict: bool = False,
    workers: int = 0,
    console: Console | None = None,
) -> tuple[Source, list[Item]]:
    """The readable images of a split, and where they come from."""
    console = console or Console(quiet=True)
    source = open_source(data, labels)
    bad = find_unreadable(
        source, source.items(), lambda done, of: console.progress(f"reading images: {done} of {of}"), max(2, workers)
    )
    if bad:
        report_skipped(bad, console, strict)
    for note in source.notes:
        console.say(note)
    items, called = choose_items(source.without(bad), split, run)
    if not items:
        raise PatchloomError(f"{source.where} has no readable image in {called}.")
    console.say(f"{len(items)} images: {called}.")
    if warning := few_images_warning(len(items)):
        console.say(warning)
    return source, items


def open_model(model: Model, resolution: int | None = None, base: Model | None = None) -> Network:
    """A network in eval mode, on the GPU where there is one."""
    if is_foreign(model):
        raise PatchloomError(f"{model} is a network of timm or ONNX: only `evaluate` and `--disagreement` take those.")
    if isinstance(model, str | PathLike):
        network = load(model, img_size=resolution, base=base)
    else:
        network = unwrapped(model)
        if resolution is not None and network.config.img_size != (resolution, resolution):
            raise PatchloomError("Another resolution needs weights that are loaded: save the model, evaluate the file.")
    return network.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@dataclasses.dataclass(frozen=True)
class RunSplit:
    """What a run trained on and held out: names of splits, and the images where it chose them itself."""

    train: str | None = None
    test: str | None = None
    held_out: frozenset[str] | None = None

    def tested(self, source: Source) -> list[str] | None:
        """The run's test splits, where the data has all of them by name."""
        names = [] if self.test is None else self.test.split("+")
        return names if names and all(source.splits.get(name) for name in names) else None

    def trained(self, source: Source) -> str | None:
        """The run's training splits, where the data has all of them by name."""
        known = self.train is not None and all(source.splits.get(name) for name in self.train.split("+"))
        return self.train if known else None


def choose_items(source: Source, split: str | None, run: RunSplit | None = None) -> tuple[list[Item], str]:
    """The images of a split, by default those that the run, or training, holds out, and how they are called."""
    if split == "all":
        return source.items(), "all images"
    if split == "":
        raise PatchloomError("--split is empty: name a split of the data, or all.")
    if split is None and run is not None and (tested := run.tested(source)):
        return join_splits(source, tested), f"the run's test split {run.test}"
    held_out = run.held_out if run is not None else None
    own = [name for name in ("val", "test") if source.splits.get(name)]
    if split is None and own and held_out is None:
        return source.splits[own[0]], f"the split {own[0]}"
    if split is None or (split in ("train", "val") and not own):
        return _chosen_by_training(source, split, run)
    return join_splits(source, split_names(source, split)), f"the split {split}"


def _chosen_by_training(source: Source, split: str | None, run: RunSplit | None) -> tuple[list[Item], str]:
    """The images that were, or would be, held out of data without a split to measure on; or all but those."""
    if run is None or run.held_out is None:
        parts, who = split_source(source), "the fifth that training would hold out"
        train, held_out = parts.train, parts.held_out
    else:
        keys, who = run.held_out, "what the run held out"
        named = run.trained(source) or ("train" if "train" in source.splits else "all")
        everything = join_splits(source, split_names(source, named))
        train = [item for item in everything if item.key not in keys]
        held_out = [item for item in everything if item.key in keys]
        if not keys and split != "train":
            known = ", ".join(name for name, items in source.splits.items() if items)
            raise PatchloomError(
                f"The run held out no image of {source.where}: choose --split all or one of its splits ({known})."
            )
    if split == "train":
        return train, f"all but {who}"
    return held_out, f"{who}; --split all takes every image"


def held_out_by(model: Model, data: str | PathLike[str]) -> RunSplit | None:
    """The splits of a run where the model comes from its folder, and the images that it held out of this data."""
    if isinstance(model, Network) or is_foreign(model) or is_remote(model):
        return None
    place = Path(model).resolve()
    for folder in (place, *place.parents[:2]):  # the run, its export or checkpoints, a file in them
        try:
            run = Run.open(folder)
            about, settings = run.about()["data"], run.settings
            same = os.path.realpath(about["where"]) == os.path.realpath(data)
            held_out = frozenset(about["held_out"]) if same and "held_out" in about else None
            return RunSplit(settings.get("train_split"), settings.get("test_split"), held_out)
        except (PatchloomError, OSError, KeyError):
            continue
    return None


def real_accuracy(result: Scores, labels: Any) -> dict[str, float]:
    """Accuracy on ImageNet's reassessed labels (ReaL): several labels an image of the validation set, by the number in
    its file name, from 1 on; images without any are left out. The model must have ImageNet's 1000 classes: by name in
    any order, or 1000 classes without names, which are taken in ImageNet's order."""
    order = real_order(result.class_names)
    if not isinstance(labels, list) or not all(isinstance(several, list) for several in labels):
        raise PatchloomError("ReaL labels are a list of lists of labels, one an image of the validation set.")
    right = []
    for key, said in zip(result.keys, result.predicted, strict=True):
        number = re.findall(r"\d+", Path(key).stem)
        if not number or not 1 <= int(number[-1]) <= len(labels):
            raise PatchloomError(
                f"{key} has no number from 1 to {len(labels)} in its name: ReaL cannot tell which it is."
            )
        if several := labels[int(number[-1]) - 1]:
            right.append(order[said] in several)
    return {"real_top1": float(np.mean(right)) if right else float("nan"), "real_count": len(right)}


def real_order(class_names: Sequence[str]) -> Sequence[int]:
    """For each output of a model its ImageNet index; refused where its classes are not ImageNet's 1000."""
    if tuple(class_names) == tuple(map(str, range(CLASSES))):  # without names
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
    return [dataclasses.replace(item, label=place[item.label]) for item in items]


def predict(
    model: Model,
    images: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    top: int = 5,
    batch: int = 64,
    base: Model | None = None,
) -> list[dict[str, Any]]:
    """For each image file, in order, {path, predictions: [{class, probability}]} or {path, error}; with a `note` where
    float or 32-bit values were scaled to 8 bits.

    `images` are files, folders (all images in them) and glob patterns; `base` is that of a delta.
    """
    if top < 1:
        raise PatchloomError(f"At least one class is named, not {top}.")
    network = fuse(open_model(model, base=base))
    several = [images] if isinstance(images, str | PathLike) else list(images)
    paths = [path for given in several for path in expand_images(given)]
    rows: list[dict[str, Any]] = []
    for i in range(0, len(paths), batch):
        rows += _predict_batch(network, paths[i : i + batch], top)
    return rows


def expand_images(given: str | PathLike[str]) -> list[Path]:
    """The files that a file, a folder or a glob pattern stands for."""
    path = Path(given or "''")  # an empty name, too, becomes a row with an error, and not the current folder
    try:
        path.exists()
    except (OSError, ValueError):  # a name that no file can have becomes a row with an error
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in EXTENSIONS and not _hidden(p, path))
        return found or [path]
    if not path.exists() and glob.has_magic(os.fspath(given)):
        matches = sorted(Path(match) for match in glob.glob(os.fspath(given), recursive=True))
        return [match for match in matches if not match.is_dir()] or [path]
    return [path]  # what is no image, or does not exist, becomes a row with an error


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _predict_batch(network: Network, paths: list[Path], top: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    pictures = []
    for path in paths:
        row: dict[str, Any] = {"path": str(path)}
        try:
            picture = read_image(path)
            pictures.append(np.asarray(resize_and_crop(picture, network.preprocessing)))
            row |= {"note": note} if (note := picture.info.get(NOTE)) else {}
        except (ValueError, MemoryError) as error:  # ours among them
            row["error"] = reason_of(error)
        rows.append(row)
    if pictures:
        good = [row for row in rows if "error" not in row]
        for row, chances in zip(good, probabilities(network, np.stack(pictures)), strict=True):
            if np.isfinite(chances).all():
                row["predictions"] = best_classes(network, chances, top)
            else:
                row["error"] = f"{network.config.name} gives no numbers for it: its weights are damaged."
    return rows


@torch.inference_mode()
def probabilities(network: Network, pictures: np.ndarray) -> np.ndarray:
    """Pictures (B, height, width, C) uint8, resized and cropped -> (B, classes)."""
    how, device = network.preprocessing, next(network.parameters()).device
    logits = network(normalise(torch.from_numpy(pictures).to(device), how.mean, how.std))
    assert isinstance(logits, torch.Tensor)
    return logits.float().softmax(dim=-1).cpu().numpy()


def best_classes(network: Network, chances: np.ndarray, top: int) -> list[dict[str, Any]]:
    """The likeliest classes of one image, [{class, probability}]; classes without a name are numbered."""
    names = network.class_names or tuple(map(str, range(len(chances))))
    order = np.argsort(-chances, kind="stable")[:top]
    return [{"class": names[i], "probability": float(chances[i])} for i in order]
