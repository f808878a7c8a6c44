"""BeiT (Bao et al. 2022; "Three things", section 5): a network predicts the codes of patches that it does not see.

x = stem(image), with a learned token in place of masked patches; then positions and blocks
loss = mean of -log softmax(head(x))[code] over masked patches; codes are those of a frozen tokenizer

Masking after the stem suits every stem. Where patches do not overlap (linear, hMLP) it lets nothing of a masked patch
through; in a convolutional stem the neighbours of a masked patch have seen a part of it. With BatchNorm an hMLP stem
leaks faintly in training mode: masked patches are among the statistics of the batch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.images import to_input
from patchloom.data.loader import Transform
from patchloom.data.randomness import seed_of
from patchloom.layers.init import trunc_normal
from patchloom.models.features import Features
from patchloom.models.preprocessing import Preprocessing
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.masks import block_mask, hidden_patches
from patchloom.tasks.pretraining.method import ENCODER, Method, Progress, Setup
from patchloom.tasks.pretraining.pictures import figure, row, to_pictures
from patchloom.tasks.pretraining.tokenizer import TOKENIZER, code_numbers, few_codes, write_tokenizer
from patchloom.tasks.pretraining.tokenizers import FILE, check_fits, check_trunk, fitting_tokenizer
from patchloom.training.report import Section

PREDICTION = "prediction"


@dataclass(frozen=True)
class Masked:
    """A view of an image and the mask of its patches: (height, width, 3) uint8, (N,) bool."""

    view: Transform
    grid: tuple[int, int]
    hidden: int
    smallest: int
    aspect: float

    def __call__(self, picture: Any, item: Any, seed: int) -> tuple[Any, np.ndarray]:
        return self.view(picture, item, seed), self.mask(seed)

    def mask(self, seed: int) -> np.ndarray:
        """The mask of the sample with this seed."""
        draw = random.Random(seed_of(seed, "mask"))
        return block_mask(self.grid, self.hidden, draw, self.smallest, self.aspect)


class Prediction(nn.Module):
    """The token that stands for masked patches, and the logits of their codes."""

    entry_points = ("token",)

    def __init__(self, dim: int, codes: int) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.empty(dim))
        self.head = nn.Linear(dim, codes)
        trunc_normal(self.mask_token)
        trunc_normal(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, patches: Tensor) -> Tensor:
        """(..., D) -> logits (..., codes)."""
        return self.head(patches)

    def token(self) -> Tensor:
        """(D,), in place of the embedding of a masked patch."""
        return self.mask_token * 1.0  # a tensor of its own: the parts of a sharded parameter are taken apart again


class Beit(Method):
    """Masked images in, the cross-entropy of the codes of their masked patches out."""

    frozen = (TOKENIZER,)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        trunk, recipe, trained = setup.trunk, self.recipe, setup.config.tokenizer
        config: Any = trunk.config
        self.preprocessing = trunk.preprocessing
        # Without a trained one it is a plan, whose time is measured before there is a tokenizer.
        made = fitting_tokenizer(recipe, trunk) if trained is None else trained.build(setup.from_checkpoint)
        self.tokenizer = made.eval()
        hidden, smallest = hidden_patches(recipe.mask_ratio, config.patches), recipe.mask_block * config.patches
        self.masked = Masked(super().transform(False), config.grid, hidden, max(1, round(smallest)), recipe.mask_aspect)
        leave_out_unread(trunk)
        prediction = Prediction(config.dim, self.tokenizer.config.codes)
        self.modules = nn.ModuleDict({ENCODER: trunk, PREDICTION: prediction, TOKENIZER: self.tokenizer})

    @classmethod
    def check(cls, config: PretrainingConfig, recipe: Recipe, trunk: Any) -> None:  # noqa: ARG003 - by the networks
        check_trunk(trunk)
        if config.tokenizer is not None:
            check_fits(config.tokenizer, trunk)

    def transform(self, flips: bool) -> Transform:
        masked = self.masked
        return Masked(super().transform(flips), masked.grid, masked.hidden, masked.smallest, masked.aspect)

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:  # noqa: ARG002 - nothing is drawn here
        """{"masked_codes": (B,)} of images (B, height, width, 3) uint8 and masks (B, N)."""
        pixels, mask = batch
        images = to_input(pixels, self.preprocessing)
        codes = self._codes(self.modules, images)
        logits = self._predict(self.modules, images, mask)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), codes[mask], reduction="none")
        return {"masked_codes": loss.view(len(mask), -1).mean(dim=1)}

    def _predict(self, modules: nn.ModuleDict, images: Tensor, mask: Tensor) -> Tensor:
        """Logits (B, M, codes) for the M masked patches of each image."""
        network: Any = modules[ENCODER]
        prediction: Any = modules[PREDICTION]
        found: Features = network.features(images, mask=mask, mask_token=prediction.token())
        logits: Tensor = prediction(found.patches[mask])
        # Every image has as many masked patches, so that they fill rows.
        return logits.view(len(mask), self.masked.hidden, -1)

    def _codes(self, modules: nn.ModuleDict, images: Tensor) -> Tensor:
        """Codes (B, N) of images that are normalised for the network."""
        tokenizer: Any = modules[TOKENIZER]
        return tokenizer.encode(renormalise(images, self.preprocessing, tokenizer.preprocessing))

    # What is shown

    def _fixed_masks(self, count: int, device: torch.device) -> Tensor:
        """Masks (count, N) that are the same at every evaluation."""
        seeds = (seed_of(self.recipe.seed, place, "measure") for place in range(count))
        return torch.from_numpy(np.stack([self.masked.mask(seed) for seed in seeds])).to(device)

    def measure(self, modules: nn.ModuleDict, images: Tensor) -> dict[str, float]:
        """The codes of the images, and how often those of masked patches are predicted: by the network, and by always
        naming the most frequent one."""
        mask, codes = self._fixed_masks(len(images), images.device), self._codes(modules, images)
        hits = self._predict(modules, images, mask).argmax(dim=2).flatten() == codes[mask]
        most = torch.bincount(codes.flatten()).argmax()
        return {
            **code_numbers(codes, self.tokenizer.config.codes),
            "accuracy": float(hits.float().mean()),
            "accuracy_of_most_frequent": float((codes[mask] == most).float().mean()),
        }

    def collapse(self, numbers: Mapping[str, float], progress: Progress) -> str | None:
        if found := few_codes(numbers, self.tokenizer.config.codes):
            return found
        if 2 * progress.step < progress.steps or numbers["accuracy"] > numbers["accuracy_of_most_frequent"]:
            return None
        return (
            f"Codes of masked patches are predicted no better ({numbers['accuracy']:.1%}) than by always naming the "
            f"most frequent one ({numbers['accuracy_of_most_frequent']:.1%}): the network does not look at the image. "
            "The learning rate may be too high or the run too short: lower lr, raise warmup_epochs or epochs, or lower "
            "mask_ratio."
        )

    def charts(self) -> dict[str, dict[str, str]]:
        accuracy = {"network": "accuracy", "most frequent code": "accuracy_of_most_frequent"}
        return {"accuracy on masked patches": accuracy, "codes": {"in use": "codes", "perplexity": "perplexity"}}

    def sections(self, modules: nn.ModuleDict, pictures: Sequence[Image.Image], images: Tensor) -> list[Section]:
        mask, codes = self._fixed_masks(len(images), images.device), self._codes(modules, images)
        predicted = codes.masked_scatter(mask, self._predict(modules, images, mask).argmax(dim=2))
        grid: tuple[int, int] = self.masked.grid
        shown = F.interpolate(mask.view(-1, 1, *grid).float(), images.shape[2:]) > 0
        tokenizer: Any = modules[TOKENIZER]
        like = renormalise(images, self.preprocessing, tokenizer.preprocessing)
        columns = {
            "seen": to_pictures(images.masked_fill(shown, 0.0), self.preprocessing),
            "predicted": to_pictures(tokenizer.decode(predicted, like), tokenizer.preprocessing),
            "from its codes": to_pictures(tokenizer.decode(codes, like), tokenizer.preprocessing),
            "image": pictures,
        }
        rows = [
            row([figure(image, caption) for caption, image in zip(columns, group, strict=True)])
            for group in zip(*columns.values(), strict=True)
        ]
        note = (
            "The network sees an image without its masked patches and predicts the codes of these. The tokenizer draws "
            "the second picture from them and the codes of the other patches, the third from the true codes of all "
            "patches: no prediction can be nearer to the image than that one."
        )
        return [("Masked patches and their predicted codes", f"<p>{note}</p>{'<hr>'.join(rows)}")]

    def describe(self) -> str:
        config, masked = self.tokenizer.config, self.masked
        return (
            f"BeiT: {masked.hidden} of {masked.grid[0] * masked.grid[1]} patches masked in blocks of at least "
            f"{masked.smallest}, {config.codes} codes"
        )

    def export(self, folder: Path, network: Any, modules: nn.ModuleDict, described: dict[str, Any]) -> None:
        """The trunk, and beside it the tokenizer for further runs."""
        tokenizer: Any = modules[TOKENIZER]
        write_tokenizer(folder / FILE, tokenizer)
        super().export(folder, network, modules, described)


def leave_out_unread(network: Any) -> None:
    """Freeze what no patch reads, and so no loss reaches: a stage that aggregates patches, and its queries."""
    unread = [*network.pool.parameters()]
    if network.join_at is None:
        unread += [token for token in (network.class_token, network.distill_token) if token is not None]
    for parameter in unread:
        parameter.requires_grad_(False)


def renormalise(images: Tensor, old: Preprocessing, new: Preprocessing) -> Tensor:
    """Images (B, C, height, width) that are normalised by `old`, as `new` normalises them."""
    if (old.mean, old.std) == (new.mean, new.std):
        return images
    mean, std, mean2, std2 = (
        images.new_tensor(values).view(1, -1, 1, 1) for values in (old.mean, old.std, new.mean, new.std)
    )
    return (images * std + mean - mean2) / std2
