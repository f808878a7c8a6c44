"""The tokenizer of BeiT: a vector-quantised autoencoder, trained before BeiT on the same images.

loss = squared error of the pixels + commitment * squared distance of the encoder's vectors to their codes.
Codes follow the vectors by moving averages; those that fall out of use are put where vectors are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from patchloom.data.images import to_input
from patchloom.data.loader import Transform
from patchloom.data.randomness import torch_generator
from patchloom.data.transforms import OneView
from patchloom.models.tokenizer import Quantised, Tokenizer, perplexity
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.method import Method, Progress, Setup, Unlabelled, augment_of
from patchloom.tasks.pretraining.pictures import figure, row, to_pictures
from patchloom.tasks.pretraining.tokenizers import check_trunk, fitting_tokenizer
from patchloom.temporary import write_json
from patchloom.training.report import Section
from patchloom.weights.files import write

TOKENIZER = "tokenizer"
_FEW = 0.02  # of the codes: a perplexity below this share says that almost all images get the same codes


class _Part(NamedTuple):
    """What the codebook needs of one part of a step."""

    sums: Tensor  # (K, 1 + d), see `Codebook.sums`
    vectors: Tensor  # (B, N, d)


class TokenizerTraining(Method):
    """Images in, their reconstruction from codes out."""

    exported = TOKENIZER
    trains_trunk = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.tokenizer = fitting_tokenizer(self.recipe, setup.trunk)
        self.modules = nn.ModuleDict({TOKENIZER: self.tokenizer})
        self._seen: list[_Part] = []

    @classmethod
    def check(cls, config: PretrainingConfig, recipe: Recipe, trunk: Any) -> None:  # noqa: ARG003 - by the network
        check_trunk(trunk)

    def transform(self, flips: bool) -> Transform:
        return Unlabelled(OneView(augment_of(self.recipe, flips), self.tokenizer.config.img_size))

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:  # noqa: ARG002 - nothing is drawn here
        """{"reconstruction": (B,), "commitment": (B,)} of images (B, height, width, 3) uint8."""
        if part == 0:  # a step that was given up may have left some
            self._seen.clear()
        images = to_input(batch, self.tokenizer.preprocessing)
        found: Quantised = self.modules[TOKENIZER](images)
        vectors = found.vectors.detach()
        self._seen.append(_Part(self.tokenizer.codebook.sums(found.codes, vectors), vectors))
        error = (found.reconstruction.float() - found.pixels).square().mean(dim=(1, 2, 3))
        return {"reconstruction": error, "commitment": self.recipe.commitment * found.commitment}

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Move the codes, over all parts of the step and all processes."""
        codebook = self.tokenizer.codebook
        sums = self.processes.sum(torch.stack([part.sums for part in self._seen]).sum(dim=0))
        codebook.move(sums, self.recipe.code_decay)
        unused = codebook.unused(self.recipe.code_revival)
        if len(unused):
            generator = torch_generator(self.recipe.seed, step, "codes")
            places = torch.randint(int(sums[:, 0].sum()), (len(unused),), generator=generator)
            codebook.replace(unused, self._vectors_at(places))
        self._seen.clear()

    def _vectors_at(self, places: Tensor) -> Tensor:
        """The vectors (n, d) at places (n,) of the whole batch, which do not depend on the number of processes."""
        own = torch.cat([part.vectors for part in self._seen])  # (B, N, d)
        image, patch = places // own.shape[1], places % own.shape[1]
        count, rank = self.processes.count, self.processes.rank
        # Processes take turns along a batch: see `data.order.Steps`.
        mine = (image % count == rank).nonzero().flatten()
        found = own.new_zeros(len(places), own.shape[2])
        found[mine.to(own.device)] = own[(image[mine] // count).to(own.device), patch[mine].to(own.device)]
        return self.processes.sum(found)

    # What is shown

    def measure(self, modules: nn.ModuleDict, images: Tensor) -> dict[str, float]:
        found: Quantised = modules[TOKENIZER](images)
        spread = (found.pixels - found.pixels.mean(dim=(0, 2, 3), keepdim=True)).square().mean()
        error = (found.reconstruction.float() - found.pixels).square().mean()
        return {
            **code_numbers(found.codes, self.tokenizer.config.codes),
            "reconstruction_error": float(error / spread.clamp(min=1e-12)),
        }

    def collapse(self, numbers: Mapping[str, float], progress: Progress) -> str | None:
        return few_codes(numbers, self.tokenizer.config.codes) if 2 * progress.step >= progress.steps else None

    def charts(self) -> dict[str, dict[str, str]]:
        return {
            "codes": {"in use": "codes", "perplexity": "perplexity"},
            "error of reconstruction, as a share of the variance": {"": "reconstruction_error"},
        }

    def sections(self, modules: nn.ModuleDict, pictures: Sequence[Image.Image], images: Tensor) -> list[Section]:
        tokenizer: Any = modules[TOKENIZER]
        drawn = to_pictures(tokenizer.decode(tokenizer.encode(images), images), self.tokenizer.preprocessing)
        rows = [
            row([figure(picture, "image"), figure(other, "from its codes")])
            for picture, other in zip(pictures, drawn, strict=True)
        ]
        return [("Images and what the tokenizer makes of their codes", "".join(rows))]

    def describe(self) -> str:
        config = self.tokenizer.config
        return f"tokenizer: {config.codes} codes, {config.grid[0]} x {config.grid[1]} of them per image"

    def export(self, folder: Path, network: Any, modules: nn.ModuleDict, described: dict[str, Any]) -> None:  # noqa: ARG002 - only its own
        write_tokenizer(folder / "model.safetensors", network)
        values = {**network.metadata(), **described}
        write_json(folder / "model.json", values)


def write_tokenizer(file: Path, tokenizer: Tokenizer) -> None:
    """A tokenizer as a file that `load` and `--tokenizer` take."""
    write(file, tokenizer.state_dict(), {"layout": "patchloom", **tokenizer.metadata()})


def code_numbers(codes: Tensor, of: int) -> dict[str, float]:
    """How many of the codes are used, and their perplexity."""
    counts = torch.bincount(codes.flatten(), minlength=of)
    return {"codes": float((counts > 0).sum()), "perplexity": perplexity(counts)}


def few_codes(numbers: Mapping[str, float], of: int) -> str | None:
    """What to say of a tokenizer that gives nearly all patches the same codes; None for a healthy one."""
    found = numbers["perplexity"]
    if found > max(1.5, _FEW * of):
        return None
    return (
        f"The tokenizer uses {numbers['codes']:.0f} of {of} codes, with a perplexity of {found:.1f}, so there is next "
        "to nothing to predict. Either the images look alike (blank, or one picture many times), or the codes do not "
        "follow the encoder: lower tokenizer_lr or code_decay, raise tokenizer_epochs, or set code_revival above 0."
    )
