"""The recipe fields of self-supervised pre-training: those that all methods share, and those of one method.

A field of one method names it in its metadata: set for another method it is refused, not ignored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from patchloom.errors import PatchloomError
from patchloom.models.tokenizer import PATCH_SIZES as TOKENIZER_PATCHES
from patchloom.recipes.options import ImageOptions, NetworkOptions

MethodName = Literal["dino", "beit", "mae", "tokenizer"]
StemName = Literal["linear", "linear_norm", "linear_gelu", "hmlp", "conv"]
AggregationName = Literal["class_token", "average", "class_attention"]
_DINO, _MASKED, _BEIT, _MAE = ("dino",), ("beit", "mae"), ("beit",), ("mae",)
_TOKENIZER = ("beit", "tokenizer")  # BeiT hands them to the run that trains its tokenizer


def _of(methods: tuple[str, ...], default: Any, **bounds: Any) -> Any:
    """A field that only these methods read."""
    return field(default=default, metadata={"methods": methods, **bounds})


@dataclass(frozen=True, kw_only=True)
class PretrainingOptions(ImageOptions, NetworkOptions):
    """What is learned without labels, and how it is measured."""

    method: MethodName = "dino"
    stem: StemName | None = None  # of a vision transformer; None: as the model says
    # of a vision transformer that starts from random weights; None: as the model says
    aggregation: AggregationName | None = None
    # measuring
    probe_every: int = field(default=10, metadata={"least": 0})  # epochs between probes of data with labels; 0: never
    neighbours: int = 20  # k of the kNN probe
    test_crop_ratio: float = 0.875
    # DINO: crops
    local_crops: int = _of(_DINO, 8, least=0)
    local_size: int | None = _of(_DINO, 96)  # pixels; None: half of the network's
    local_scale: tuple[float, float] = _of(_DINO, (0.05, 0.4))  # areas of local crops; global ones: crop_scale to 1
    saturation: float = _of(_DINO, 0.2)  # strength of its jitter; color_jitter is that of brightness and contrast
    hue: float = _of(_DINO, 0.1)  # likewise, as a fraction of the circle
    gray: float = _of(_DINO, 0.2)  # probability of a crop without colours
    blur: float = _of(_DINO, 2.0)  # largest radius, in pixels; 0: none
    solarize: float = _of(_DINO, 0.2)  # probability, of the second global crop alone
    # DINO: head and targets
    prototypes: int = _of(_DINO, 65_536)  # outputs of the head
    head_hidden: int = _of(_DINO, 2048)
    head_bottleneck: int = _of(_DINO, 256)
    student_temperature: float = _of(_DINO, 0.1)
    teacher_temperature: float = _of(_DINO, 0.04)
    teacher_temperature_start: float = _of(_DINO, 0.04)
    teacher_warmup_epochs: float = _of(_DINO, 0.0)  # of the temperature
    teacher_momentum: float = _of(_DINO, 0.996)  # teacher <- m teacher + (1 - m) student, after every step
    teacher_momentum_end: float = _of(_DINO, 1.0)  # m goes there along a cosine
    center_momentum: float = _of(_DINO, 0.9)
    freeze_last_layer: float = _of(_DINO, 1.0)  # epochs in which the head's last layer stays as it is
    # BeiT and MAE: masking
    mask_ratio: float = _of(_MASKED, 0.75)
    # BeiT: block-wise masking
    mask_block: float = _of(_BEIT, 0.08)  # of the patches, that the smallest block covers
    mask_aspect: float = _of(_BEIT, 0.3)  # of a block, at least; at most its inverse
    # BeiT: the tokenizer that is trained first
    tokenizer_epochs: int = _of(_TOKENIZER, 100)
    tokenizer_lr: float = _of(_TOKENIZER, 1e-3)
    tokenizer_patch: int = _of(_TOKENIZER, 8)  # pixels per code along height and width, at most: 2, 4, 8 or 16
    tokenizer_dim: int = _of(_TOKENIZER, 256, least=16)  # channels
    tokenizer_depth: int = _of(_TOKENIZER, 2)  # residual blocks of the encoder, and of the decoder
    tokenizer_standardise: bool = _of(_TOKENIZER, False)  # each image first: codes do not tell its exposure
    codes: int = _of(_TOKENIZER, 8192, least=2)
    code_dim: int = _of(_TOKENIZER, 32, least=2)
    code_decay: float = _of(_TOKENIZER, 0.99)  # of the moving averages that are the codes
    code_revival: float = _of(_TOKENIZER, 0.1)  # codes used below this share of an even one are replaced; 0: never
    commitment: float = _of(_TOKENIZER, 1.0)  # weight of the distance between vectors and their codes
    # MAE: decoder and target
    decoder_dim: int = _of(_MAE, 512)
    decoder_depth: int = _of(_MAE, 8)
    decoder_heads: int = _of(_MAE, 16)
    norm_pixels: bool = _of(_MAE, True)  # targets are pixels normalised within each patch

    TASK: ClassVar[str] = "self-supervised pre-training"
    FRACTIONS: ClassVar[tuple[str, ...]] = (
        *ImageOptions.FRACTIONS, *NetworkOptions.FRACTIONS, "test_crop_ratio", "teacher_momentum",
        "teacher_momentum_end", "center_momentum", "saturation", "hue", "gray", "solarize", "mask_block", "mask_aspect",
        "code_decay", "code_revival",
    )  # fmt: skip
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        *ImageOptions.NOT_NEGATIVE, *NetworkOptions.NOT_NEGATIVE, "teacher_warmup_epochs", "freeze_last_layer",
        "blur", "commitment", "tokenizer_lr",
    )  # fmt: skip

    def check(self, recipe: str) -> None:
        super().check(recipe)
        if not 0 < self.test_crop_ratio <= 1:
            raise PatchloomError(f"test_crop_ratio of {recipe} is above 0 and at most 1, not {self.test_crop_ratio}.")
        if not 0 < self.mask_ratio < 1:
            raise PatchloomError(
                f"mask_ratio of {recipe} is the fraction of patches that are masked, above 0 and below 1, not "
                f"{self.mask_ratio:g}: some must be seen, and some predicted."
            )
        if not 0 < self.mask_aspect <= 1:
            raise PatchloomError(f"mask_aspect of {recipe} is above 0 and at most 1, not {self.mask_aspect:g}.")
        if self.tokenizer_patch not in TOKENIZER_PATCHES:
            raise PatchloomError(
                f"tokenizer_patch of {recipe} is one of {', '.join(map(str, TOKENIZER_PATCHES))}, not "
                f"{self.tokenizer_patch}."
            )
        self._check_dino(recipe)

    def _check_dino(self, recipe: str) -> None:
        scale = self.local_scale
        numbers = len(scale) == 2 and all(isinstance(value, int | float) for value in scale)
        if not numbers or not 0 < scale[0] <= scale[1] <= 1:
            raise PatchloomError(
                f"local_scale of {recipe} is two fractions of the image's area, such as 0.05,0.4, not "
                f"{','.join(map(str, scale))}."
            )
        for name in ("student_temperature", "teacher_temperature", "teacher_temperature_start"):
            if not getattr(self, name) > 0:
                raise PatchloomError(f"{name} of {recipe} is above 0, not {getattr(self, name):g}.")
        if self.prototypes < 2:
            raise PatchloomError(f"prototypes of {recipe} is at least 2, not {self.prototypes}.")


def methods_of(setting: str) -> tuple[str, ...] | None:
    """The methods that read a field of `PretrainingOptions`; None: all of them, or it is not a field of one method."""
    fields = {item.name: item for item in dataclasses.fields(PretrainingOptions)}
    return fields[setting].metadata.get("methods") if setting in fields else None
