"""The report of a pre-training run: what the probes say, numbers that show a collapse, and the method's pictures."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import nn

from patchloom.data.images import as_image, resize_and_crop, to_batch
from patchloom.data.own import TensorImage
from patchloom.data.sources import spread
from patchloom.models.network import Network
from patchloom.tasks.pretraining.probes import KNN, LINEAR
from patchloom.training.report import Section, epoch_records
from patchloom.training.run import Run

if TYPE_CHECKING:
    from patchloom.tasks.pretraining.task import Pretraining

PICTURES = 12  # images that the report shows


def pretraining_charts(task: Pretraining) -> dict[str, dict[str, str]]:
    """Curves of the log: probes from the untrained network on, losses, and numbers that show a collapse."""
    return {
        "accuracy of probes": {"kNN": KNN, "linear": LINEAR, "kNN, averaged": f"ema_{KNN}"},
        "loss": {"training": "train_loss"},
        "spread of the features": {"": "std"},
        **task.method.charts(),
        "learning rate": {"": "lr"},
    }


def pretraining_headline(run: Run, task: Pretraining, network: Network) -> str:
    """The title, the last numbers, and what was trained."""
    cells = "".join(f"<div><b>{value}</b><span class=soft>{escape(name)}</span></div>" for value, name in _cells(run))
    size = sum(parameter.numel() for parameter in network.parameters())
    title = f"{network.config.name} on {run.settings['data']}"
    labels = "Labels were used only for measuring." if task.probes.items else "No labels: nothing was probed."
    return (
        f"<h1>{escape(title)}</h1><div class=figures>{cells}</div>"
        f"<p class=soft>Recipe {escape(run.settings['recipe_name'])}, {task.recipe.duration}: "
        f"{escape(task.method.describe())}; {size / 1e6:.2f} million parameters. {labels}</p>"
    )


def _cells(run: Run) -> list[tuple[str, str]]:
    """The probes with what they were before training, then the losses."""
    records, cells = epoch_records(run), []
    for name, text in ((KNN, "kNN"), (LINEAR, "linear probe")):
        values = [row[name] for row in records if name in row]
        if values:
            cells.append((f"{values[-1]:.2%}", f"{text} on held-out images; {values[0]:.2%} before training"))
    losses: dict[str, Any] = records[-1].get("losses", {}) if records else {}
    return cells + [(f"{value:.4f}", f"{name} loss") for name, value in losses.items()]


def pretraining_sections(task: Pretraining, modules: nn.ModuleDict) -> list[Section]:
    """The method's pictures of some held-out images, or training images where none is held out."""
    preprocessing = task.trunk.preprocessing
    pictures: list[Image.Image] = []
    for item in spread(task.split.held_out or task.split.train, PICTURES):
        try:
            pictures.append(resize_and_crop(as_image(task.source.read(item)), preprocessing))
        except TensorImage:  # of a user's own dataset: nothing to show
            continue
    return task.method.sections(modules, pictures, to_batch(pictures, preprocessing)) if pictures else []
