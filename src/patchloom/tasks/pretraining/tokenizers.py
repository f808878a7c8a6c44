"""The tokenizer of a BeiT run: the one that fits a network, or a trained one from a run or a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.models.config import Config
from patchloom.models.preprocessing import Preprocessing
from patchloom.models.registry import config_from_json
from patchloom.models.tokenizer import PATCH_SIZES, Tokenizer, TokenizerConfig
from patchloom.recipes.recipe import Recipe
from patchloom.weights.files import metadata_of
from patchloom.weights.load import load

FILE = "tokenizer.safetensors"  # in the export of a BeiT run


@dataclass(frozen=True)
class TrainedTokenizer:
    """A trained tokenizer: its file, and what is needed where a checkpoint holds its weights."""

    weights: str
    config: TokenizerConfig
    preprocessing: Preprocessing

    def to_json(self) -> dict[str, Any]:
        values = {"config": self.config.to_json(), "preprocessing": self.preprocessing.to_json()}
        return {"weights": self.weights, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainedTokenizer:
        config: Any = config_from_json(values["config"])
        return cls(values["weights"], config, Preprocessing.from_json(values["preprocessing"]))

    def build(self, from_checkpoint: bool) -> Tokenizer:
        """The tokenizer, with the weights of its file unless a checkpoint brings them."""
        if not from_checkpoint:
            loaded: Any = load(self.weights)
            return loaded
        tokenizer = Tokenizer(self.config)
        tokenizer.preprocessing = self.preprocessing
        return tokenizer


def find_tokenizer(place: str) -> TrainedTokenizer:
    """The tokenizer of a BeiT run, of the first of its two runs, or in a file.

    Raises PatchloomError if there is none.
    """
    path = Path(place)
    if not path.exists():
        raise PatchloomError(
            f"There is no tokenizer {place}: --tokenizer takes a run of --method beit, or a file of it."
        )
    inside = ("export/" + FILE, "tokenizer/export/model.safetensors", "export/model.safetensors", FILE)
    files = [path] if path.is_file() else [path / name for name in inside if (path / name).is_file()]
    for file in files:
        if (found := _described(file)) is not None:
            return found
    if (path / "recipe.yaml").exists() or (path / "stages.json").exists():
        raise PatchloomError(f"{place} holds no trained tokenizer: --tokenizer takes a finished run of --method beit.")
    raise PatchloomError(f"{place} is not a tokenizer: --tokenizer takes a run of --method beit, or a file of it.")


def _described(file: Path) -> TrainedTokenizer | None:
    """What a file says of itself; None if it is not a tokenizer's."""
    metadata = metadata_of(file) if file.suffix == ".safetensors" else {}
    described = metadata.get("config")
    if not isinstance(described, dict) or described.get("architecture") != TokenizerConfig.architecture:
        return None
    config: Any = config_from_json(described)
    return TrainedTokenizer(str(file.absolute()), config, Preprocessing.from_json(metadata.get("preprocessing")))


def fitting_config(recipe: Recipe, trunk: Any) -> TokenizerConfig:
    """A tokenizer with one code per patch of the trunk. Its pixels per code are a power of 2, whatever the patch size:
    images are resized to it."""
    patch = max([size for size in PATCH_SIZES if size <= min(recipe.tokenizer_patch, trunk.patch_size)], default=2)
    rows, columns = trunk.grid
    return TokenizerConfig(
        name=f"tokenizer of {rows} x {columns} codes", img_size=(rows * patch, columns * patch), patch_size=patch,
        in_chans=trunk.in_chans, dim=recipe.tokenizer_dim, depth=recipe.tokenizer_depth, codes=recipe.codes,
        code_dim=recipe.code_dim, standardise=recipe.tokenizer_standardise,
    )  # fmt: skip


def fitting_tokenizer(recipe: Recipe, trunk: Any) -> Tokenizer:
    """A tokenizer with random weights for a network; it takes images with the network's mean and std."""
    tokenizer = Tokenizer(fitting_config(recipe, trunk.config))
    size = tokenizer.config.img_size
    tokenizer.preprocessing = dataclasses.replace(trunk.preprocessing, img_size=size)
    return tokenizer


def check_trunk(trunk: Config) -> None:
    """Refuse networks without a grid of patches that can be masked."""
    if not hasattr(trunk, "grid") or trunk.family == "convnet":
        raise PatchloomError(
            f"--method beit masks patches after the stem, and {trunk.name} has no patches of its own: choose a network "
            "of patchloom with patches, such as deit_small or resmlp_s12."
        )
    if trunk.patches < 2:  # type: ignore[attr-defined]
        raise PatchloomError(f"{trunk.name} cuts an image into one patch: --method beit needs some to see and to hide.")


def check_fits(tokenizer: TrainedTokenizer, trunk: Any) -> None:
    """Refuse a tokenizer whose codes do not stand for the patches of the trunk."""
    theirs, ours = tokenizer.config.grid, trunk.grid
    if theirs != ours:
        raise PatchloomError(
            f"The tokenizer {tokenizer.weights} gives {theirs[0]} x {theirs[1]} codes per image, and {trunk.name} has "
            f"a grid of {ours[0]} x {ours[1]} patches: change patch size or img_size, or leave out --tokenizer."
        )
    if tokenizer.config.in_chans != trunk.in_chans:
        raise PatchloomError(
            f"The tokenizer {tokenizer.weights} takes images of {tokenizer.config.in_chans} channels, and {trunk.name} "
            f"takes {trunk.in_chans}."
        )
