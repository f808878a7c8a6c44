"""`explain`: the predictions for one image, maps of the regions that drive them, and faithfulness scores."""

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
from patchloom.devices import Device
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.explaining.baselines import network_input
from patchloom.explaining.faithfulness import faithfulness as judge
from patchloom.explaining.figures import SHOWN
from patchloom.explaining.likeness import likeness_network
from patchloom.explaining.maps import (
    Outputs,
    check_maps,
    class_names,
    forward_with_attention,
    head_maps,
    make_maps,
    patch_rows,
)
from patchloom.explaining.weights import sparsity
from patchloom.inference.models import Model, evaluating, open_model
from patchloom.models.features import TokenLayout
from patchloom.models.network import Network
from patchloom.models.patch_network import PatchNetwork, patch_network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = Image.Image | str | PathLike[str] | np.ndarray
TOP = 5  # classes that are always reported


@dataclass(frozen=True)
class Explanation:
    """Predictions and maps of one image. Maps have values in [0, 1] and the size of the crop."""

    model: str  # its registered name
    image: np.ndarray  # (H, W, 3) uint8, the input crop
    predictions: list[dict[str, Any]]  # {class, probability}, best first: five, and all above 10 %
    target: str  # the class of grad-cam, occlusion and faithfulness (maps per class have their own)
    maps: dict[str, np.ndarray]  # name -> (H, W) float32
    grids: dict[str, np.ndarray]  # name -> (grid height, grid width) float32: the map itself, one value per patch
    heads: dict[str, np.ndarray]  # layer -> (heads, grid height, grid width) float32, after softmax
    faithfulness: dict[str, dict[str, Any]]  # by map: deletion, insertion, random, verdict
    rows: dict[str, np.ndarray] = field(default_factory=dict)  # ResMLP: layer -> (36, grid height, grid width)
    sparsity: dict[str, dict[str, float]] = field(default_factory=dict)  # ResMLP: block -> {A, B, C}

    @cached_property
    def overlays(self) -> dict[str, np.ndarray]:
        """For each map, the grey image times the map in the colours of cividis, (H, W, 3) uint8 (CaiT D.2). Requires
        matplotlib."""
        from patchloom.explaining.figures import overlay

        return {name: overlay(self.image, values) for name, values in self.maps.items()}

    @property
    def figure(self) -> Figure:
        """A matplotlib figure of the whole explanation, drawn on access."""
        from patchloom.explaining.figures import draw_explanation

        return draw_explanation(self)

    def to_json(self) -> dict[str, Any]:
        """A summary without pixels."""
        return {
            "model": self.model,
            "target": self.target,
            "predictions": self.predictions,
            "maps": {name: _summary(values) for name, values in self.maps.items()},
            "faithfulness": self.faithfulness,
            **({"sparsity": self.sparsity} if self.sparsity else {}),
        }


@torch.inference_mode(False)  # Grad-CAM needs gradients, whatever the mode of the caller
def explain(
    model: Model,
    image: Picture,
    *,
    maps: str | Sequence[str] | None = None,
    target: str | int | None = None,
    top: int | None = None,
    faithfulness: bool = True,
    seed: int = 0,
    device: Device = "auto",
) -> Explanation:
    """Explain the prediction of a model for one image; of a network without a head, what its embedding rests on.

    Args:
        model: A network, or anything that `load` accepts.
        image: A PIL image, a file, or an (H, W, 3) array of uint8.
        maps: Some of class-attention, rollout, pooling, per-class, cross-patch, grad-cam and occlusion; None: all that
            the model supports.
        target: The class, by name or index, that grad-cam, occlusion and faithfulness explain; None: the most
            probable.
        top: For a model with one query per class: the number of best classes that have a map, beside the target's
            (thesis Fig. 5.6); None: every class above 10 %.
        faithfulness: Whether to measure faithfulness, which takes most of the time.
        seed: Seed of the random maps that maps are compared with.
        device: "cpu", "cuda:1", "mps", ...; by default the accelerator of this machine, else the CPU.

    Raises:
        PatchloomError: The image cannot be read, or the model does not support a map or has no such class.
    """
    with _evaluating(model, device) as network:
        check_top(network, top)
        return _explain(network, image, check_maps(network, maps), target, top, faithfulness, seed)


@contextmanager
def _evaluating(model: Model, device: Device) -> Iterator[PatchNetwork]:
    """The network in eval mode; a network of the caller gets the old mode of every module back afterwards."""
    with evaluating(model):
        yield patch_network(open_model(model, device=device))


def _explain(
    network: PatchNetwork,
    image: Picture,
    wanted: Sequence[str],
    target: str | int | None,
    top: int | None,
    faithfulness: bool,
    seed: int,
) -> Explanation:
    picture = _crop(network, image)
    x = network_input(network, picture)
    if network.config.headless:
        network = likeness_network(network, x)
    logits, attention = forward_with_attention(network, x)
    if not logits.isfinite().all():
        raise PatchloomError(f"The output of {network.config.name} for this image is NaN: its weights are damaged.")
    probabilities = logits.softmax(dim=-1).cpu().numpy()
    order = np.argsort(-probabilities, kind="stable")
    likely = order[probabilities[order] > SHOWN]
    chosen = int(order[0]) if target is None else find_class(network, target)
    shown = tuple(dict.fromkeys([*map(int, likely if top is None else order[:top]), chosen]))
    patch = network.config.patch_size  # the grid of x, since convolutional networks accept other image sizes
    layout = TokenLayout(network.num_prefix, x.shape[2] // patch, x.shape[3] // patch)
    outputs = Outputs(network, x, layout, logits, attention, shown, chosen)
    made = make_maps(outputs, wanted)
    found = {name: _saliency(values, picture) for name, values in made.items()}
    names, rows = class_names(network), _arrays(patch_rows(network))
    own = {f"per-class: {names[i]}": i for i in shown}
    targets = {name: own.get(name, chosen) for name in found}
    return Explanation(
        model=network.config.name,
        image=picture,
        predictions=[
            {"class": names[i], "probability": float(probabilities[i])}
            for i in order[: max(TOP, len(likely), top or 0)]
        ],
        target=names[chosen],
        maps=found,
        grids=_arrays(made),
        heads=_arrays(head_maps(outputs)),
        faithfulness=judge(network, picture, found, targets, seed) if faithfulness and found else {},
        rows=rows,
        sparsity=sparsity(network) if rows else {},
    )


def _crop(network: Network, image: Picture) -> np.ndarray:
    """The input of the network before normalisation, (H, W, 3) uint8."""
    if len(network.preprocessing.mean) != 3:
        channels = len(network.preprocessing.mean)
        raise PatchloomError(f"{network.config.name} expects {channels} channels, but photos have 3.")
    if isinstance(image, Tensor):
        raise PatchloomError("A picture to explain is a PIL image, a file or an array, not a tensor.")
    return np.array(crop(as_picture(image), network.preprocessing))  # a copy: that of Pillow cannot be written to


def check_top(network: Network, top: int | None) -> None:
    """Raise PatchloomError if the network has no map per class, or fewer than `top` classes."""
    if top is None:
        return
    if not network.per_class:
        raise PatchloomError(
            f"{network.config.name} has no map per class. Leave out --top, or use a model with queries='per_class'."
        )
    if not isinstance(top, int) or not 1 <= top <= network.config.num_classes:
        classes = network.config.num_classes
        raise PatchloomError(f"--top must be from 1 to the {classes} classes of {network.config.name}, not {top}.")


def find_class(network: Network, target: str | int) -> int:
    """The index of a class, given its name or index (an integer or digits).

    Raises PatchloomError if there is no such class, or several with this name.
    """
    names = class_names(network)
    if isinstance(target, str) and target in names:
        return names.index(target)
    alike = [name for name, plain in zip(names, network.class_names or (), strict=False) if plain == target]
    if alike:
        raise PatchloomError(f"{network.config.name} has {len(alike)} classes named {target!r}: {', '.join(alike)}.")
    place = _place(target)
    if place is None or not 0 <= place < len(names):
        near = did_you_mean(str(target), names)
        raise PatchloomError(f"{network.config.name} has no class {target!r}, by name or by index.{near}")
    return place


def _place(target: object) -> int | None:
    """The index given by an integer or ASCII digits; None for anything else."""
    if isinstance(target, str):
        # isdigit alone accepts superscripts, and int() of a huge number of digits is slow.
        return int(target) if target.isascii() and target.isdigit() and len(target) < 10 else None
    return int(target) if isinstance(target, int | np.integer) and not isinstance(target, bool) else None


def _saliency(values: Tensor, picture: np.ndarray) -> np.ndarray:
    """(H, W) float32 in [0, 1]: the map upsampled to the image, then (x - min) / (max - min); zero if constant."""
    size = picture.shape[:2]
    # Upsampled first, then scaled: the extremes of the picture are those that are shown.
    large = F.interpolate(values.float()[None, None], size, mode="bilinear", align_corners=False)[0, 0]
    spread = large.max() - large.min()
    # A constant map has only rounding noise, which scaling would blow up to a picture.
    flat = spread <= 1e-12 + 1e-6 * large.abs().max()
    return (torch.zeros_like(large) if flat else (large - large.min()) / spread).cpu().numpy()


def _arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: values.float().cpu().numpy() for name, values in tensors.items()}


def _summary(values: np.ndarray) -> dict[str, Any]:
    """Statistics of a map: its peak as fractions of height and width, and the fraction of pixels with half its mass."""
    row, column = np.unravel_index(values.argmax(), values.shape)
    ordered = np.sort(values.ravel())[::-1].cumsum()
    # The number of pixels, largest first, until half of the sum is reached.
    half = int(np.searchsorted(ordered, ordered[-1] / 2)) + 1
    return {
        "size": list(values.shape),
        "peak": [float((row + 0.5) / values.shape[0]), float((column + 0.5) / values.shape[1])],
        "mean": float(values.mean()),
        "std": float(values.std()),
        "half_of_it_in": half / values.size,
    }
