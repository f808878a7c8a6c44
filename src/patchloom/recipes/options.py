"""The part of a recipe that belongs to a task: one frozen dataclass of options per kind of learning.

Tasks that learn from images share `ImageOptions` (a module of the user's own `CropOptions` alone), those that train our
networks `NetworkOptions` too; a task adds its own fields. A recipe checks and prints them with the name of the recipe.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_type_hints

from patchloom.data.parts import THREE_AUGMENT
from patchloom.errors import PatchloomError
from patchloom.models.config import check_value, plain_number
from patchloom.models.vit import ScaleName


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fields that a task adds to a recipe. A subclass lists which are fractions and which cannot be negative."""

    TASK: ClassVar[str] = "any task"  # in messages: what a recipe with these options is for
    FRACTIONS: ClassVar[tuple[str, ...]] = ()
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = ()

    @property
    def batch_text(self) -> str | None:
        """The size of a batch in words, of a task whose batches do not have `batch_size` samples."""
        return None

    def check(self, recipe: str) -> None:
        """Raise `PatchloomError` for values that make no sense together; `recipe` is the name that messages give."""


@dataclass(frozen=True, kw_only=True)
class CropOptions(Options):
    """How training images are cropped and augmented, one by one."""

    resolution: int | None = 224  # of training and evaluation; None: the model's own
    # random resized crop; simple random crop along both axes, along x only (text of DeiT III; its code has both); zero
    # padding of 4 pixels and a random crop, for 32-pixel images, which are tested without resizing
    crop: Literal["rrc", "src", "src_axis", "pad"] = "rrc"
    crop_scale: float = 0.08  # smallest fraction of the image's area that a random resized crop keeps
    flip: float = 0.5
    augmentation: Literal["rand", "auto", "trivial", "three", "none"] = "rand"
    three_augment: tuple[str, ...] = THREE_AUGMENT  # of augmentation "three": the parts to choose from (Table 6.2)
    magnitude: float = 9.0  # of RandAugment
    color_jitter: float = 0.0
    affine: float = 0.0  # small moves: rotation by up to 90 degrees times this, shift and zoom by up to this fraction
    repeated_augmentation: int = 1
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    pixels: Literal["exact", "fast"] = "exact"  # of a JPEG; fast: decoded coarser, no smaller than the crop needs

    FRACTIONS: ClassVar[tuple[str, ...]] = ("crop_scale", "flip", "color_jitter", "affine")
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = ("magnitude",)

    def check(self, recipe: str) -> None:
        super().check(recipe)
        if not self.crop_scale > 0:
            raise PatchloomError(f"crop_scale of {recipe} is above 0 and at most 1, not {self.crop_scale}.")
        if not self.magnitude <= 10:
            raise PatchloomError(f"magnitude of {recipe} is at most 10, not {self.magnitude}.")
        self._check_three_augment(recipe)

    def _check_three_augment(self, recipe: str) -> None:
        parts = self.three_augment
        if not parts or len(set(parts)) < len(parts) or set(parts) - set(THREE_AUGMENT):
            raise PatchloomError(
                f"three_augment of {recipe} names one or more of {', '.join(THREE_AUGMENT)}, each once, not "
                f"{', '.join(map(str, parts)) or 'nothing'}."
            )
        if parts != THREE_AUGMENT and self.augmentation != "three":
            raise PatchloomError(
                f"three_augment of {recipe} chooses parts of 3-Augment, but augmentation is {self.augmentation}: "
                f"set augmentation=three too."
            )


@dataclass(frozen=True, kw_only=True)
class ImageOptions(CropOptions):
    """How training images are cropped, augmented and, in a batch, erased."""

    erasing: float = 0.25  # probability of random erasing

    FRACTIONS: ClassVar[tuple[str, ...]] = (*CropOptions.FRACTIONS, "erasing")


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(Options):
    """What a recipe decides about the network's residual branches."""

    drop_path: float | None = None  # None: as the model says
    drop_path_decay: Literal["uniform", "linear"] | None = None  # over the blocks; None: as the model says
    dropout: float | None = None  # None: as the model says
    scale: ScaleName | None = None  # of residual branches: "layerscale", "none", ...; None: as the model says
    layerscale: float | None = None  # LayerScale's start; None: as the model says

    FRACTIONS: ClassVar[tuple[str, ...]] = ("drop_path", "dropout")
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = ("layerscale",)


@dataclass(frozen=True, kw_only=True)
class ClassificationOptions(ImageOptions, NetworkOptions):
    """Loss, mixing, what fine-tuning trains, and the test crop."""

    loss: Literal["ce", "bce"] = "ce"
    label_smoothing: float = 0.1
    bce_threshold: float | None = 0.0  # a mixed target above it counts as 1 (DeiT III); None: soft targets stay soft
    mixup: float = 0.8
    cutmix: float = 1.0
    mix_probability: float = 1.0
    switch_probability: float = 0.5  # of CutMix where both are on
    tune: Literal["all", "attention", "ffn", "head"] = "all"  # the parameters that `finetune` trains
    test_crop_ratio: float = 0.875
    log_norms: bool = False  # log how much each residual branch adds, at every evaluation (thesis Fig. 3.6)

    TASK: ClassVar[str] = "classification"
    FRACTIONS: ClassVar[tuple[str, ...]] = (
        *ImageOptions.FRACTIONS, *NetworkOptions.FRACTIONS,
        "label_smoothing", "bce_threshold", "mix_probability", "switch_probability",
    )  # fmt: skip
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        *ImageOptions.NOT_NEGATIVE,
        *NetworkOptions.NOT_NEGATIVE,
        "mixup",
        "cutmix",
    )

    def check(self, recipe: str) -> None:
        super().check(recipe)
        if self.loss == "bce" and self.label_smoothing and self.bce_threshold == 0:
            raise PatchloomError(
                f"loss=bce of {recipe} counts every target above {self.bce_threshold} as 1, which smoothing would "
                f"make of every class: set label_smoothing=0."
            )
        if not 0 < self.test_crop_ratio <= 1:
            raise PatchloomError(f"test_crop_ratio of {recipe} is above 0 and at most 1, not {self.test_crop_ratio}.")


def check_fields(owner: Any, recipe: str, skip: tuple[str, ...] = ()) -> None:
    """Check types and ranges of a frozen dataclass of settings; lists become tuples, whole floats integers."""
    hints = get_type_hints(type(owner))
    for field in dataclasses.fields(owner):
        if field.name in skip:
            continue
        value = plain_number(getattr(owner, field.name))
        value = tuple(value) if isinstance(value, list) else value
        check_value(f"the recipe {recipe}", field, value, hints[field.name])
        object.__setattr__(owner, field.name, value)
    for name in owner.FRACTIONS:
        if not 0 <= (getattr(owner, name) or 0) <= 1:
            raise PatchloomError(f"{name} of {recipe} is a fraction between 0 and 1, not {getattr(owner, name)}.")
    for name in owner.NOT_NEGATIVE:
        if (getattr(owner, name) or 0) < 0:
            raise PatchloomError(f"{name} of {recipe} cannot be negative: {getattr(owner, name)}.")
