"""`explain`: what a network says of a picture, where it looks, and whether that means anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.images import as_picture, crop
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.explaining.baselines import network_input
from patchloom.explaining.faithfulness import faithfulness as judge
from patchloom.explaining.figures import SHOWN
from patchloom.explaining.maps import Seen, check_maps, class_names, head_maps, look, make_maps, patch_rows
from patchloom.explaining.weights import sparsity
from patchloom.inference.models import Model, open_model
from patchloom.models.network import Network, TokenLayout, unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = Image.Image | str | PathLike[str] | np.ndarray
TOP = 5  # classes that are always reported


@dataclass(frozen=True)
class Explanation:
    """What a network says of one picture, and why. Maps are in [0, 1] at the size of the crop."""

    model: str  # its registered name
    image: np.ndarray  # (H, W, 3) uint8, the crop that the network saw
    predictions: list[dict[str, Any]]  # {class, probability}, best first: five, and all above 10 %
    target: str  # the class that grad-cam and occlusion are about, and faithfulness but for maps a class
    maps: dict[str, np.ndarray]  # name -> (H, W) float32
    grids: dict[str, np.ndarray]  # name -> (grid height, grid width) float32: the map itself, one value per patch
    heads: dict[str, np.ndarray]  # layer -> (heads, grid height, grid width) float32, after softmax
    faithfulness: dict[str, dict[str, Any]]  # by map: deletion, insertion, random, verdict
    rows: dict[str, np.ndarray] = field(default_factory=dict)  # ResMLP: layer -> (36, grid height, grid width)
    sparsity: dict[str, dict[str, float]] = field(default_factory=dict)  # ResMLP: block -> {A, B, C}

    @cached_property
    def overlays(self) -> dict[str, np.ndarray]:
        """By map, the grey image times the map in the colours of cividis, (H, W, 3) uint8 (CaiT D.2). Needs
        matplotlib."""
        from patchloom.explaining.figures import overlay

        return {name: overlay(self.image, values) for name, values in self.maps.items()}

    @property
    def figure(self) -> Figure:
        """All of it as one matplotlib figure, drawn when asked for."""
        from patchloom.explaining.figures import draw_explanation

        return draw_explanation(self)

    def to_json(self) -> dict[str, Any]:
        """What fits in a few lines of JSON: no pixels."""
        return {
            "model": self.model,
            "target": self.target,
            "predictions": self.predictions,
            "maps": {name: _about(values) for name, values in self.maps.items()},
            "faithfulness": self.faithfulness,
            **({"sparsity": self.sparsity} if self.sparsity else {}),
        }


@torch.inference_mode(False)  # whatever the caller is in: Grad-CAM needs gradients
def explain(
    model: Model,
    image: Picture,
    *,
    maps: str | Sequence[str] | None = None,
    target: str | int | None = None,
    top: int | None = None,
    faithfulness: bool = True,
    seed: int = 0,
) -> Explanation:
    """Explain what a model says of one picture: a PIL image, a file, or an (H, W, 3) array of uint8.

    Args:
        maps: Some of class-attention, rollout, pooling, per-class, cross-patch, grad-cam, occlusion; None: all that the
            model supports.
        target: The class, by name or index, that grad-cam, occlusion and faithfulness are about; None: the most
            probable.
        top: For a model with one query per class: the number of best classes that have a map, beside the target's
            (thesis Fig. 5.6); None: every class above 10 %.
        faithfulness: Whether to measure it, which takes most of the time.
        seed: Seed of the random maps that it is measured against.
    """
    with _evaluating(model) as network:
        check_top(network, top)
        return _explain(network, image, check_maps(network, maps), target, top, faithfulness, seed)


@contextmanager
def _evaluating(model: Model) -> Iterator[Network]:
    """Its network in eval mode; one that was handed over has every part in its old mode afterwards."""
    given = [] if isinstance(model, str | PathLike) else list(unwrapped(model).modules())
    modes = [module.training for module in given]
    try:
        yield open_model(model)
    finally:
        for module, mode in zip(given, modes, strict=True):
            module.training = mode


def _explain(
    network: Network,
    image: Picture,
    wanted: Sequence[str],
    target: str | int | None,
    top: int | None,
    faithfulness: bool,
    seed: int,
) -> Explanation:
    picture = _crop(network, image)
    x = network_input(network, picture)
    logits, attention = look(network, x)
    if not logits.isfinite().all():
        raise PatchloomError(f"{network.config.name} gives no numbers for this picture: its weights are damaged.")
    chances = logits.softmax(dim=-1).cpu().numpy()
    order = np.argsort(-chances, kind="stable")
    likely = order[chances[order] > SHOWN]
    chosen = int(order[0]) if target is None else find_class(network, target)
    shown = tuple(dict.fromkeys([*map(int, likely if top is None else order[:top]), chosen]))
    patch = network.config.patch_size  # convolutional networks take crops of other sizes than their own
    layout = TokenLayout(network.num_prefix, x.shape[2] // patch, x.shape[3] // patch)
    seen = Seen(network, x, layout, logits, attention, shown, chosen)
    made = make_maps(seen, wanted)
    found = {name: _saliency(values, picture) for name, values in made.items()}
    names, rows = class_names(network), _arrays(patch_rows(network))
    own = {f"per-class: {names[i]}": i for i in shown}
    targets = {name: own.get(name, chosen) for name in found}
    return Explanation(
        model=network.config.name,
        image=picture,
        predictions=[
            {"class": names[i], "probability": float(chances[i])} for i in order[: max(TOP, len(likely), top or 0)]
        ],
        target=names[chosen],
        maps=found,
        grids=_arrays(made),
        heads=_arrays(head_maps(seen)),
        faithfulness=judge(network, picture, found, targets, seed) if faithfulness and found else {},
        rows=rows,
        sparsity=sparsity(network) if rows else {},
    )


def _crop(network: Network, image: Picture) -> np.ndarray:
    """(H, W, 3) uint8, what the network sees of a picture."""
    if len(network.preprocessing.mean) != 3:
        channels = len(network.preprocessing.mean)
        raise PatchloomError(f"{network.config.name} takes {channels} channels; a photo has 3.")
    if isinstance(image, Tensor):
        raise PatchloomError("A picture to explain is a PIL image, a file or an array, not a tensor.")
    return np.array(crop(as_picture(image), network.preprocessing))  # a copy: that of Pillow cannot be written to


def check_top(network: Network, top: int | None) -> None:
    """Refuse `top` where a network has no map per class, or not so many classes."""
    if top is None:
        return
    if not network.per_class:
        raise PatchloomError(
            f"{network.config.name} has no map per class: --top is for models with queries='per_class'. Leave it out."
        )
    if not isinstance(top, int) or not 1 <= top <= network.config.num_classes:
        classes = network.config.num_classes
        raise PatchloomError(
            f"--top is a number of classes from 1 to the {classes} of {network.config.name}, not {top}."
        )


def find_class(network: Network, target: str | int) -> int:
    """A class by its name, or by its place, an integer or its digits; a name of several classes is refused."""
    names = class_names(network)
    if isinstance(target, str) and target in names:
        return names.index(target)
    alike = [name for name, plain in zip(names, network.class_names or (), strict=False) if plain == target]
    if alike:
        raise PatchloomError(f"{network.config.name} has {len(alike)} classes {target!r}: {', '.join(alike)}.")
    place = _place(target)
    if place is None or not 0 <= place < len(names):
        near = did_you_mean(str(target), names)
        raise PatchloomError(f"{network.config.name} has no class {target!r}, by name or by index.{near}")
    return place


def _place(target: object) -> int | None:
    """The index that an integer or a word of ASCII digits stands for."""
    if isinstance(target, str):
        return int(target) if target.isascii() and target.isdigit() and len(target) < 10 else None
    return int(target) if isinstance(target, int | np.integer) and not isinstance(target, bool) else None


def _saliency(values: Tensor, picture: np.ndarray) -> np.ndarray:
    """(H, W) float32: upsampled to the picture, then (x - min) / (max - min); all zero where nothing stands out."""
    size = picture.shape[:2]
    large = F.interpolate(values.float()[None, None], size, mode="bilinear", align_corners=False)[0, 0]
    spread = large.max() - large.min()
    flat = spread <= 1e-12 + 1e-6 * large.abs().max()
    return (torch.zeros_like(large) if flat else (large - large.min()) / spread).cpu().numpy()


def _arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: values.float().cpu().numpy() for name, values in tensors.items()}


def _about(values: np.ndarray) -> dict[str, Any]:
    """Where a map has its maximum, as shares of height and width, and how much of the picture holds half of it."""
    row, column = np.unravel_index(values.argmax(), values.shape)
    ordered = np.sort(values.ravel())[::-1].cumsum()
    half = int(np.searchsorted(ordered, ordered[-1] / 2)) + 1
    return {
        "size": list(values.shape),
        "peak": [float((row + 0.5) / values.shape[0]), float((column + 0.5) / values.shape[1])],
        "mean": float(values.mean()),
        "std": float(values.std()),
        "half_of_it_in": half / values.size,
    }
