"""How far models agree: with the truth, with one another, and their two tokens through the layers (thesis 3.4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.console import Console
from patchloom.data.images import to_batch
from patchloom.data.sources import spread
from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.inference.items import RunSplit, held_out_by, open_items
from patchloom.inference.models import open_model, weights_text
from patchloom.models.foreign import is_onnx
from patchloom.plots import new_figure, save_figure
from patchloom.tasks.classification.distillation import token_cosines, token_parameter_cosine
from patchloom.tasks.classification.evaluate import ready, relabel
from patchloom.tasks.classification.metrics import head_forward, score

TRUTH = "ground truth"
_LABEL = 24  # characters of a name beside the picture; paths are longer
_TOKEN_IMAGES = 64  # of which the cosines are averaged


def disagreement(
    models: Sequence[str | PathLike[str]],
    data: str | PathLike[str],
    *,
    labels: str | None = None,
    split: str | None = None,
    batch: int = 128,
    device: Device = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """The share of images on which two deciders differ: the truth, every model, and of a distilled one both heads.

    Returns names, rates (a symmetric table, names by names) and, of distilled models, cosines (class and
    distillation token before the first block, then after each) and parameter_cosines (of the two parameters alone,
    without their positions).

    Args:
        models: run folders, weight files, published tags, timm:NAME or .onnx files; one or more.
        data, labels, split: as of `evaluate`. Without `split`, the images that all runs among the models held out.
        batch: images per forward pass.

    Raises:
        PatchloomError: no model is given, or the classes of a model and of the data cannot be matched.
    """
    if not models:
        raise PatchloomError("Disagreement needs at least one model.")
    # Images that one of the models was trained on would make it look better than the others.
    common = _common_split([run for run in (held_out_by(model, data) for model in models) if run is not None])
    source, items = open_items(data, labels, split, common, console=console)
    names, decisions = [TRUTH], []
    cosines: dict[str, list[float]] = {}
    parameters: dict[str, float] = {}
    for model in models:
        # Hooks and token parameters below are those of the network itself, not of its fused copy.
        plain: Any = model if is_onnx(model) else open_model(model, device=device)
        network, label = ready(plain, device=device), str(model)
        if console is not None and (text := weights_text(network)):
            console.say(text)
        placed = relabel(items, source, network, {}, console)
        forwards: dict[str, Any] = {label: None}
        if network.head_distill is not None:
            forwards |= {f"{label} ({head})": head_forward(network, head) for head in ("class", "distill")}
            cosines[label] = _cosines(plain, source, items)
            parameters[label] = token_parameter_cosine(plain)
        # an output that is a class of the data has the data's name for it, any other the model's own
        ours = {there.label: source.class_names[item.label] for item, there in zip(items, placed, strict=True)}
        for name, forward in forwards.items():
            scores = score(network, source, placed, network.preprocessing, batch=batch, forward=forward)
            names.append(name)
            decisions.append(np.asarray([ours.get(i, scores.class_names[i]) for i in scores.predicted]))
    decisions.insert(0, np.asarray([source.class_names[item.label] for item in items]))
    rates = np.zeros((len(names), len(names)))
    for i, j in combinations(range(len(names)), 2):
        rates[i, j] = rates[j, i] = float((decisions[i] != decisions[j]).mean())
    agreement = {"names": names, "rates": rates.tolist(), "count": len(items)}
    return agreement | {"cosines": cosines, "parameter_cosines": parameters}


def _common_split(runs: Sequence[RunSplit]) -> RunSplit | None:
    """The images that every run held out, and the test split where they all have the same."""
    kept = [run.held_out for run in runs if run.held_out is not None]
    names = {(run.train, run.test) for run in runs}
    common = frozenset.intersection(*kept) if kept else None
    return RunSplit(*(names.pop() if len(names) == 1 else (None, None)), common) if runs else None


def _cosines(network: Any, source: Any, items: Sequence[Any]) -> list[float]:
    """The cosines of class and distillation token on a sample of the images."""
    pictures = [source.picture(item) for item in spread(items, _TOKEN_IMAGES)]
    return token_cosines(network, to_batch(pictures, network.preprocessing, next(network.parameters()).device))


def disagreement_lines(result: dict[str, Any]) -> list[str]:
    """The table for people, in percent."""
    names = [f"{i} {name}" for i, name in enumerate(result["names"])]
    width = max(map(len, names))
    lines = [" " * width + "".join(f"{i:>8}" for i in range(len(names)))]
    for name, row in zip(names, result["rates"], strict=True):
        lines.append(f"{name:{width}}" + "".join(f"{rate:8.2%}" for rate in row))
    for name, values in result["cosines"].items():
        lines.append(f"cosine of the two tokens of {name}: " + " ".join(f"{value:.2f}" for value in values))
        lines.append(f"cosine of their parameters alone: {result['parameter_cosines'][name]:.2f}")
    return lines


def draw_disagreement(result: dict[str, Any], path: Path) -> None:
    """The table as a picture, and the cosines through the layers beside it."""
    names, rates, cosines = result["names"], np.asarray(result["rates"]), result["cosines"]
    figure = new_figure(5 + 4 * bool(cosines), 4)
    panels = figure.subplots(1, 1 + bool(cosines), squeeze=False)
    table = panels[0][0]
    table.imshow(rates, cmap="cividis", vmin=0)
    labels = [name if len(name) <= _LABEL else f"...{name[-_LABEL:]}" for name in names]
    table.set_xticks(range(len(names)), labels, rotation=40, ha="right")
    table.set_yticks(range(len(names)), labels)
    for i, j in np.ndindex(*rates.shape):
        # cividis is bright for high values: black text is legible there, white text on the dark cells.
        bright = rates[i, j] > rates.max() / 2
        table.text(j, i, f"{rates[i, j]:.1%}", ha="center", va="center", color="black" if bright else "white")
    table.set_title(f"different decisions, {result['count']} images")
    if cosines:
        for name, values in cosines.items():
            panels[0][1].plot(values, marker="o", label=name[-_LABEL:])
        panels[0][1].set(xlabel="after block", ylabel="cosine of class and distillation token", ylim=(-0.1, 1.02))
        panels[0][1].legend()
    save_figure(figure, path)
