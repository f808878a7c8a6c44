"""A contact sheet of what training sees: augmented images, mixing included, with their labels."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.tasks.classification.plans import plan_training
from patchloom.tasks.classification.setup import open_task
from patchloom.tasks.spec import Context
from patchloom.training.processes import Processes

COLUMNS, ROWS, SIDE, CAPTION = 8, 4, 128, 30


def write_sheet(
    data: str | PathLike[str],
    recipe: str,
    out: str | PathLike[str],
    model: str = "deit_nano",
    labels: str | None = None,
    changes: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
) -> Path:
    """A PNG with the first images that a run with this recipe and these changes would train on, as the network would
    see them."""
    settings = {"workers": 0, "batch_size": COLUMNS * ROWS, **(changes or {})}
    run = plan_training(data, model, recipe, settings, model_options or {}, labels)
    task = open_task(run.task, run.recipe, Context(Processes(), Console(quiet=True)))
    batch = next(iter(task.batches(0, 1)))
    images, targets = task.mixed(batch, 0, 0)
    preprocessing = task.network.preprocessing
    # Undo the normalisation: (B, 3, H, W) normalised -> (B, H, W, 3) in 0 to 1.
    pixels = images.permute(0, 2, 3, 1).numpy() * np.asarray(preprocessing.std) + np.asarray(preprocessing.mean)
    sheet = Image.new("RGB", (COLUMNS * SIDE, -(-len(pixels) // COLUMNS) * (SIDE + CAPTION)), "white")
    for i, picture in enumerate((pixels.clip(0, 1) * 255).round().astype(np.uint8)):
        corner = (i % COLUMNS * SIDE, i // COLUMNS * (SIDE + CAPTION))
        sheet.paste(Image.fromarray(picture).resize((SIDE - 4, SIDE - 4), Image.Resampling.NEAREST), corner)
        text = caption(targets[i], task.source.class_names)
        ImageDraw.Draw(sheet).multiline_text((corner[0] + 2, corner[1] + SIDE - 2), text, fill="black", spacing=1)
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except (OSError, ValueError) as error:
        raise PatchloomError(f"{path} cannot be written: {error}.") from error
    return path


def caption(target: Tensor, names: tuple[str, ...]) -> str:
    """The classes of a mixed target with their shares, largest first."""
    shares = [(float(share), name) for share, name in zip(target, names, strict=True)]
    # Label smoothing gives every class a small share; those are not shown.
    least = 1.5 / len(names) if len(names) > 2 else 0.02
    present = sorted((pair for pair in shares if pair[0] > min(least, 0.05)), reverse=True)[:2]
    return "\n".join(f"{name[:16]} {share:.0%}" for share, name in present)
