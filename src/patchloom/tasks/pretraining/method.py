"""The contract between the task and a method of pre-training, and where the methods are found.

The task owns images, batches, probes, the log, the report and the export. A method owns what is learned from an image:
its modules, the views of an image, the losses, and numbers that show a collapse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from patchloom.console import Console
from patchloom.data.loader import Transform
from patchloom.data.transforms import Augment, OneView
from patchloom.errors import PatchloomError
from patchloom.models.network import Network
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.finish import export_network
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.training.processes import Processes
from patchloom.training.report import Section

Pictures = Sequence[Image.Image]
ENCODER = "encoder"  # the module that the trunk is, unless a method says otherwise

_METHODS = {  # name -> module and class; imported when it is needed
    "dino": "dino:Dino",
    "beit": "beit:Beit",
    "mae": "mae:Mae",
    "tokenizer": "tokenizer:TokenizerTraining",
}


@dataclass(frozen=True)
class Setup:
    """What a method is made from."""

    config: PretrainingConfig
    recipe: Recipe
    trunk: Network  # without a head, with random weights or those that the run starts from
    steps_per_epoch: int
    steps: int  # of the whole run
    processes: Processes = field(default_factory=Processes)
    console: Console = field(default_factory=Console)
    from_checkpoint: bool = False  # the weights come from a checkpoint, so none are read from files


@dataclass(frozen=True)
class Progress:
    """Where a run is when its numbers are judged."""

    step: int
    steps: int  # of the whole run


class Method:
    """What is learned without labels. A subclass sets `modules` and defines `losses`; the rest has defaults.

    Modules are made in `__init__`, where torch's generator is seeded by the run. Like a task, a method keeps nothing
    between steps but its modules and the tensors of `state`.
    """

    modules: nn.ModuleDict  # everything with parameters, the trunk among them
    exported = ENCODER  # the name of the module that is probed, exported and loaded again: a headless `Network`
    frozen: Collection[str] = ()  # modules without gradients: teachers, tokenizers
    needs_images = 2  # fewer cannot be learned from
    trains_trunk = True  # False: `Setup.trunk` has a config and preprocessing, and no memory (device "meta")

    def __init__(self, setup: Setup) -> None:
        self.setup, self.recipe, self.processes = setup, setup.recipe, setup.processes

    @classmethod
    def check(cls, config: PretrainingConfig, recipe: Recipe, trunk: Any) -> None:
        """Raise PatchloomError for a combination that cannot be trained, from configs alone: the plan calls it before
        anything is built or written. `trunk` is the config of the trunk."""

    def transform(self, flips: bool) -> Transform:
        """What turns (picture, item, seed) into a sample: arrays (height, width, 3) uint8 in any nesting, drawn from
        the seed alone. By default one augmented image, and a 0 for the label. `flips`: mirrored images are allowed."""
        view = OneView(augment_of(self.recipe, flips), self.setup.trunk.config.img_size)
        return Unlabelled(view)

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        """Named losses of a batch of samples, one value per image (B,) each; see `Task.losses`. Random draws beside
        torch's own (seeded by the loop per step and process): `torch_generator(recipe.seed, step, part, rank, NAME)`,
        with step as given here."""
        raise NotImplementedError

    def after_backward(self, step: int) -> None:
        """See `Task.after_backward`."""

    def after_step(self, step: int) -> None:
        """See `Task.after_step`."""

    def to(self, device: torch.device) -> None:
        """Move tensors that are not in modules."""

    def state(self) -> dict[str, Tensor]:
        """Tensors beside the modules' that a checkpoint needs, the same in every process: see `Task.state`."""
        return {}

    def measure(self, modules: nn.ModuleDict, images: Tensor) -> dict[str, float]:  # noqa: ARG002 - for subclasses
        """Numbers for the log at every evaluation, of the same images (N, C, height, width) each time, test crops that
        are normalised and on the device. Modules are in evaluation mode; there are no gradients. Every process gets the
        same images and must give the same numbers."""
        return {}

    def collapse(self, numbers: Mapping[str, float], progress: Progress) -> str | None:  # noqa: ARG002 - likewise
        """One or two sentences on a collapse that `numbers` of `measure` (and "std", of the features) show, with the
        likely cause and what to change; None for a healthy run."""
        return None

    def sections(self, modules: nn.ModuleDict, pictures: Pictures, images: Tensor) -> list[Section]:  # noqa: ARG002
        """Pictures for the report: title and HTML each. `pictures` are test crops, `images` the same as `measure` gets
        them. Modules are whole, in evaluation mode, on the CPU; the main process alone calls it."""
        return []

    def charts(self) -> dict[str, dict[str, str]]:
        """Further curves of the report: title -> {name of a curve: key in log.jsonl}."""
        return {}

    def export(
        self,
        folder: Path,
        network: Any,
        modules: nn.ModuleDict,  # noqa: ARG002 - for subclasses
        described: dict[str, Any],
    ) -> None:
        """Write the files of the export, model.json last. `network` is the exported module, `modules` all of them,
        whole, on the CPU; `described` goes into model.json. The main process alone calls it."""
        export_network(folder, network, described)

    def describe(self) -> str:
        """What is learned, in a few words for the plan and the report."""
        return self.recipe.method


@dataclass(frozen=True)
class Unlabelled:
    """One view of an image without its label."""

    view: OneView

    def __call__(self, picture: Any, _: Any, seed: int) -> Any:
        return self.view.augment(picture, self.view.size, seed)


def augment_of(recipe: Recipe, flips: bool) -> Augment:
    """The recipe's augmentation of one image."""
    fields = {item.name: getattr(recipe, item.name) for item in dataclasses.fields(Augment)}
    return Augment(**{**fields, "flip": recipe.flip if flips else 0.0})


def find_method(name: str) -> type[Method]:
    """The class of a method. Raises PatchloomError for one that this version does not have."""
    if name not in _METHODS:
        raise PatchloomError(f"Unknown method {name!r}. Choose from: {', '.join(_METHODS)}.")
    module, _, cls = _METHODS[name].partition(":")
    return getattr(import_module(f"patchloom.tasks.pretraining.{module}"), cls)
