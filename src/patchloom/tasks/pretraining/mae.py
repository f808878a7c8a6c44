"""MAE (He et al. 2021): an encoder sees a few patches of an image, a light decoder predicts the pixels of the others.

x = encoder(visible patches)               the cost falls with the mask
p = decoder(x, places of masked patches)
loss = mean (p - pixels)^2                 over masked patches; pixels are normalised within each patch
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from patchloom.data.images import to_input
from patchloom.data.loader import Transform
from patchloom.data.randomness import seed_of
from patchloom.errors import PatchloomError
from patchloom.layers.positions import grid_sinusoids
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.decoder import PixelDecoder
from patchloom.tasks.pretraining.method import ENCODER, Method, Progress, Setup
from patchloom.tasks.pretraining.patches import (
    gather_patches,
    normalised,
    patch_order,
    patch_statistics,
    pixel_loss,
    to_patches,
    visible_count,
)
from patchloom.tasks.pretraining.reconstructions import reconstruction_section
from patchloom.training.report import Section
from patchloom.weights.shape import shape_of

DECODER = "decoder"
_NO_LEARNING = 0.97  # of the error of each patch's mean, in the second half of a run
_BEGINNING = 100  # steps in which any network predicts little more than the mean
_NORMALISED = (
    "The decoder predicts patches of mean 0 and standard deviation 1. They are drawn with the mean and the standard "
    "deviation of the true patches, which the network has not seen."
)


@dataclass(frozen=True)
class Ordered:
    """A view of an image, and its patches in random order: {"image": (height, width, 3) uint8, "order": (N,)}."""

    view: Transform
    patches: int

    def __call__(self, picture: Any, item: Any, seed: int) -> dict[str, Any]:
        return {"image": self.view(picture, item, seed), "order": patch_order(self.patches, seed)}


class Mae(Method):
    """Masked autoencoding of pixels, for networks that can leave patches out."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        recipe, config = self.recipe, setup.trunk.config
        self.patch, self.patches = config.patch_size, config.patches
        self.visible = visible_count(self.patches, recipe.mask_ratio)
        self.preprocessing = setup.trunk.preprocessing
        if setup.config.start is None:
            start_positions(setup.trunk)
        decoder = PixelDecoder(
            config.dim, recipe.decoder_dim, recipe.decoder_depth, recipe.decoder_heads, config.grid,
            self.patch**2 * config.in_chans,
        )  # fmt: skip
        self.modules = nn.ModuleDict({ENCODER: setup.trunk, DECODER: decoder})

    @classmethod
    def check(cls, config: PretrainingConfig, recipe: Recipe, trunk: Any) -> None:  # noqa: ARG003 - not by the data
        reason = getattr(shape_of(trunk, trunk.name), "keep_refused", "it is a network of another library")
        if reason is not None:
            raise PatchloomError(
                f"MAE encodes the visible patches alone, and {trunk.name} cannot leave patches out: {reason}. Choose "
                "a vision transformer (deit, deit3, vit and cait in `patchloom models`), or --method dino."
            )
        if not visible_count(trunk.patches, recipe.mask_ratio):
            most = math.floor(1000 * (1 - 1 / trunk.patches)) / 1000
            raise PatchloomError(
                f"mask_ratio={recipe.mask_ratio:g} masks all {trunk.patches} patches of {trunk.name} at "
                f"{trunk.img_size[0]} x {trunk.img_size[1]} pixels: it must be at most {most:g}."
            )
        if recipe.decoder_dim % 4 or recipe.decoder_dim % recipe.decoder_heads:
            raise PatchloomError(
                f"decoder_dim must be a multiple of 4 and of decoder_heads={recipe.decoder_heads}, not "
                f"{recipe.decoder_dim}."
            )

    def transform(self, flips: bool) -> Transform:
        return Ordered(super().transform(flips), self.patches)

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:  # noqa: ARG002 - nothing is drawn here
        images = to_input(batch["image"], self.preprocessing)
        predicted, masked = self.predict(self.modules, images, batch["order"])
        return {"pixels": pixel_loss(predicted, self._targets(images, masked))}

    def predict(self, modules: nn.ModuleDict, images: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions (B, M, pixels) for the masked patches of images, and their indices (B, M)."""
        kept, masked = order[:, : self.visible], order[:, self.visible :]
        encoder: Any = modules[ENCODER]
        return modules[DECODER](encoder.features(images, keep=kept).tokens, kept, masked), masked

    def _targets(self, images: Tensor, masked: Tensor) -> Tensor:
        pixels = gather_patches(to_patches(images, self.patch), masked)
        return normalised(pixels) if self.recipe.norm_pixels else pixels

    # Measuring

    def measure(self, modules: nn.ModuleDict, images: Tensor) -> dict[str, float]:
        """The error of reconstruction, and that of predicting the mean of every masked patch, which is 1 where pixels
        are normalised."""
        predicted, masked = self.predict(modules, images, self._fixed_order(images, "measure"))
        targets = self._targets(images, masked)
        plain = pixel_loss(targets.mean(dim=-1, keepdim=True).expand_as(targets), targets).mean()
        error = pixel_loss(predicted, targets).mean()
        return {"reconstruction": float(error), "reconstruction_by_mean": float(plain)}

    def _fixed_order(self, images: Tensor, purpose: str) -> Tensor:
        """Patches in the same random order at every evaluation, (B, N)."""
        seeds = (seed_of(self.recipe.seed, place, purpose) for place in range(len(images)))
        return torch.stack([torch.from_numpy(patch_order(self.patches, seed)) for seed in seeds]).to(images.device)

    def collapse(self, numbers: Mapping[str, float], progress: Progress) -> str | None:
        error, plain = numbers["reconstruction"], numbers["reconstruction_by_mean"]
        early = progress.step < max(_BEGINNING, progress.steps / 2)
        if early or error <= _NO_LEARNING * plain:
            return None
        return (
            f"Masked patches are predicted no better than by their mean (error {error:.3f}, that of the mean "
            f"{plain:.3f}). Likely cause: a learning rate that is too high, too few steps, or images of noise: "
            f"lower lr ({self.recipe.lr:.3g}), train for more epochs, or lower mask_ratio ({self.recipe.mask_ratio:g})."
        )

    # The report

    def sections(self, modules: nn.ModuleDict, pictures: Sequence[Image.Image], images: Tensor) -> list[Section]:
        order = self._fixed_order(images, "pictures")
        predicted, masked = self.predict(modules, images, order)
        patches = to_patches(images, self.patch)
        filled, note = predicted.float(), "The decoder predicts pixels."
        if self.recipe.norm_pixels:
            mean, deviation = patch_statistics(gather_patches(patches, masked))
            filled, note = filled * deviation + mean, _NORMALISED
        return [reconstruction_section(pictures, patches, filled, masked, self.preprocessing, note)]

    def charts(self) -> dict[str, dict[str, str]]:
        curves = {"of the decoder": "reconstruction", "of each patch's mean": "reconstruction_by_mean"}
        return {"error of masked patches": curves}

    def describe(self) -> str:
        return (
            f"MAE: {self.patches - self.visible} of {self.patches} patches are masked; a decoder of "
            f"{self.recipe.decoder_depth} x {self.recipe.decoder_dim} predicts their pixels"
        )


@torch.no_grad()
def start_positions(trunk: Any) -> None:
    """Sines and cosines as the positions of a network with random weights, and zeros for its prefix tokens, as the
    authors' encoder has them. They are trained here."""
    if trunk.positions is not None and trunk.config.dim % 4 == 0:
        trunk.positions[:, : trunk.position_prefix] = 0
        trunk.positions[:, trunk.position_prefix :] = grid_sinusoids(trunk.config.grid, trunk.config.dim)
