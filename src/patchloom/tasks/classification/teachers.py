"""Teachers for distillation: any network that classifies images, with its own normalisation and resolution."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.inference.models import check_head, check_images
from patchloom.install import needed
from patchloom.models.config import as_size
from patchloom.models.foreign import TIMM
from patchloom.models.imagenet import imagenet_ids
from patchloom.models.network import Network
from patchloom.models.preprocessing import Preprocessing
from patchloom.reading import read_json
from patchloom.tasks.classification.classes import match_names
from patchloom.tasks.classification.teacher_cache import TeacherCache
from patchloom.weights.delta import checksum
from patchloom.weights.foreign import load_timm
from patchloom.weights.load import load

STUDENT = "student"  # as an image size: that of the student (thesis 3.3)


@dataclass
class Teacher:
    """A network in eval mode: (B, 3, height, width) in its own normalisation -> logits (B, classes)."""

    label: str
    network: Callable[[Tensor], Tensor]
    preprocessing: Preprocessing
    class_names: tuple[str, ...] | None
    num_classes: int
    digest: str

    def __post_init__(self) -> None:
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise PatchloomError(
                f"The teacher {self.label} has {self.num_classes} outputs, and names of {len(self.class_names)}."
            )

    @property
    def identity(self) -> list[Any]:
        """Everything that decides its logits: weights, preprocessing and class names."""
        return [self.digest, self.preprocessing.to_json(), self.class_names]

    @torch.no_grad()
    def logits(self, x: Tensor, preprocessing: Preprocessing) -> Tensor:
        """Logits (B, classes) of images (B, 3, height, width) that `preprocessing`, the student's, normalised."""
        mean, std, mean_own, std_own = (
            torch.tensor(values, device=x.device, dtype=x.dtype)[:, None, None]
            for values in (preprocessing.mean, preprocessing.std, self.preprocessing.mean, self.preprocessing.std)
        )
        # Back to pixel values in 0 to 1, then into the teacher's normalisation.
        own = (x * std + mean - mean_own) / std_own
        if own.shape[-2:] != self.preprocessing.img_size:
            own = F.interpolate(own, self.preprocessing.img_size, mode="bicubic", antialias=True)
        return self.network(own).float()


class OnnxNetwork(nn.Module):
    """A network in an ONNX file, called as our own are: normalised images of its size -> logits."""

    head_distill = None

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self.network, self.class_names, self.preprocessing = teacher.network, teacher.class_names, teacher.preprocessing
        self.config = SimpleNamespace(name=teacher.label, num_classes=teacher.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


class Teachers:
    """One teacher, or several whose probabilities are averaged; logits in the order of `class_names`."""

    def __init__(self, teachers: Sequence[Teacher], class_names: Sequence[str], cache: TeacherCache | None) -> None:
        matched = [match_classes(teacher, class_names) for teacher in teachers]
        self.teachers = [(teacher, order) for teacher, (order, _) in zip(teachers, matched, strict=True)]
        self.notes = [message for _, message in matched if message]  # how class names were interpreted
        self.cache = cache

    def __call__(self, x: Tensor, preprocessing: Preprocessing, step: int, rank: int) -> Tensor:
        """(B, classes). The same for the same step, so that a cache may answer.

        Args:
            x: (B, 3, height, width) in the student's normalisation, `preprocessing`.
            step: the number of the batch, parts of accumulated steps counted one by one.
            rank: this process.
        """
        classes = len(self.teachers[0][1])
        if self.cache is not None and (known := self.cache.read(step, rank, (len(x), classes))) is not None:
            return known.to(x.device)
        several = [teacher.logits(x, preprocessing)[:, order.to(x.device)] for teacher, order in self.teachers]
        logits = several[0]
        if len(several) > 1:  # the mean of probabilities, as logits
            # log(mean_i p_i) = logsumexp_i(log p_i) - log n, without leaving the logarithm.
            logits = torch.stack([one.log_softmax(dim=-1) for one in several]).logsumexp(dim=0) - math.log(len(several))
        if self.cache is not None:
            self.cache.write(step, rank, logits)
        return logits


def match_classes(teacher: Teacher, class_names: Sequence[str]) -> tuple[Tensor, str | None]:
    """For each class of the data, its place among the teacher's logits; and how the names were interpreted, where the
    teacher has none."""
    places, message = match_names(
        class_names,
        teacher.class_names,
        teacher.num_classes,
        who=f"The teacher {teacher.label}",
        where="The data",
        advice="Name the classes of the data as the teacher does.",
    )
    return torch.tensor([places[label] for label in range(len(class_names))]), message


def open_teacher(
    source: str,
    device: torch.device,
    hints: Mapping[str, Any] | None = None,
    fit_head: Callable[[Network], None] | None = None,
) -> Teacher:
    """A run folder, anything that `load` takes, timm:NAME (from the hub) or timm:NAME:FILE, or an .onnx file.
    `hints`: mean and std of its normalisation, its image size, how many classes it has, and, for `load`, what a bare
    file does not say (heads=3). A hint that contradicts the teacher or does not apply to it is refused. `fit_head`
    gives a network without a head one; without it, such a network is refused."""
    hints = dict(hints or {})
    colours = {name: hints.pop(name) for name in ("mean", "std") if name in hints}
    classes = hints.pop("num_classes", None)
    if source.startswith(TIMM):
        teacher = _timm_teacher(source, device, _only_size(source, hints))
    elif source.endswith(".onnx"):
        teacher = _onnx_teacher(Path(source), _only_size(source, hints))
    else:
        network = load(source, **hints)
        check_images(network, source)
        network = network.to(device).eval()
        digest = checksum(network)  # before a head is fitted, whose last bits may differ between machines
        if network.config.headless and fit_head is not None:
            fit_head(network)
        check_head(network, source)
        count, names = network.config.num_classes, network.class_names
        teacher = Teacher(source, network, network.preprocessing, names, count, digest)
    if classes not in (None, teacher.num_classes):
        raise PatchloomError(f"teacher.num_classes={classes}: the teacher {source} has {teacher.num_classes} classes.")
    teacher.preprocessing = dataclasses.replace(teacher.preprocessing, **colours)
    return teacher


def _only_size(source: str, hints: dict[str, Any]) -> tuple[int, int] | None:
    """The image size among the hints; any other hint is for files of weights that `load` reads."""
    size = hints.pop("img_size", None)
    if hints:
        name = next(iter(hints))
        raise PatchloomError(
            f"teacher.{name}={hints[name]} does not apply to {source}: a teacher of timm or in an ONNX file takes "
            "img_size, num_classes, mean and std."
        )
    return None if size is None else as_size(size)


def _timm_teacher(source: str, device: torch.device, size: tuple[int, int] | None) -> Teacher:
    foreign = load_timm(source)
    network = foreign.network.to(device)
    if size is not None:
        foreign.set_image_size(size)
        _try_size(network, source, size, device)
    # timm's classifiers with 1000 outputs are in ImageNet's order, but do not say so.
    names = imagenet_ids() if network.num_classes == 1000 else None
    return Teacher(source, network, foreign.preprocessing, names, network.num_classes, checksum(network))


def _try_size(network: Any, source: str, size: tuple[int, int], device: torch.device) -> None:
    """Refuse an image size that only a forward pass shows to be too small."""
    try:
        with torch.no_grad():
            network(torch.zeros(2, 3, *size, device=device))
    except Exception as error:  # a network for one image size may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PatchloomError(f"{source} does not take images of {size[0]} x {size[1]} pixels: {reason}.") from error


def _onnx_teacher(path: Path, asked: tuple[int, int] | None) -> Teacher:
    """An ONNX file with one input (B, 3, height, width). Class names and preprocessing are in the metadata of our own
    exports, or in FILE.json beside the file."""
    with needed("A teacher in an ONNX file needs onnxruntime", "onnx"):
        import onnxruntime
    try:
        # The one provider that every build of onnxruntime has.
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        given = session.get_inputs()[0]
        if len(given.shape) != 4:
            raise ValueError(f"its input {given.name!r} is not a batch of images, (B, 3, height, width)")
        # A dynamic axis has a name instead of a number; then 224 unless the metadata says another size.
        size = tuple(side if isinstance(side, int) else 224 for side in given.shape[2:])
        beside, own = path.with_suffix(".json"), session.get_modelmeta().custom_metadata_map
        metadata = {name: json.loads(own[name]) for name in ("preprocessing", "class_names") if name in own}
        metadata |= read_json(beside) if beside.exists() else {}
        preprocessing = Preprocessing.from_json({"img_size": size, **metadata.get("preprocessing", {})})
        if asked is not None:
            preprocessing = dataclasses.replace(preprocessing, img_size=asked)
        names = tuple(metadata["class_names"]) if metadata.get("class_names") else None
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    except Exception as error:  # the library raises all kinds of errors for other files
        raise PatchloomError(f"The teacher {path} cannot be read: {error}.") from error

    pairs = zip(given.shape[2:], asked or (), strict=False)
    if any(isinstance(side, int) and side != wanted for side, wanted in pairs):
        raise PatchloomError(
            f"{path} takes images of {given.shape[2]} x {given.shape[3]} pixels only, not "
            f"{preprocessing.img_size[0]} x {preprocessing.img_size[1]}."
        )

    def run(x: Tensor) -> Tensor:
        (logits, *_) = session.run(None, {given.name: x.cpu().float().numpy()})
        return torch.from_numpy(logits).to(x.device)

    try:
        # Two images: a graph that was exported for a batch of one fails here rather than in the first step.
        count = run(torch.zeros(2, 3, *preprocessing.img_size)).shape[-1]
    except Exception as error:  # the library raises all kinds of errors for wrong shapes
        raise PatchloomError(
            f"The teacher {path} does not take several images of {preprocessing.img_size} pixels: export it with a "
            f"batch of any size. {str(error).splitlines()[0]}"
        ) from error
    return Teacher(str(path), run, preprocessing, names, count, content)
