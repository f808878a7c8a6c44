"""A training recipe as one flat, frozen, typed value: the values of a paper, each with its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from patchloom.data.parts import MOST_WORKERS, THREE_AUGMENT
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.config import check_value, plain_number
from patchloom.models.roles import ROLES
from patchloom.models.vit import ScaleName

Sources = Mapping[str, str]
_SHARES = (
    "drop_path", "flip", "erasing", "label_smoothing", "mix_probability", "switch_probability", "bce_threshold",
    "crop_scale", "color_jitter", "affine", "momentum", "dropout",
)  # fmt: skip
_NOT_NEGATIVE = (
    "lr", "head_lr", "min_lr", "warmup_lr", "warmup_epochs", "weight_decay", "clip_grad", "eps", "mixup", "cutmix",
    "magnitude", "layerscale",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training recipe. Every field is a `key=value` setting of `patchloom train`; `sources` has the source of each.

    Raises PatchloomError for values out of range.
    """

    name: str
    summary: str = ""  # one line for people

    # duration, batch and images
    epochs: int = field(default=300, metadata={"most": 1_000_000})
    batch_size: int = 1024  # global: over all processes and accumulated steps
    accumulate: int = 1  # micro-batches per update; the batch is divided by it
    resolution: int | None = 224  # of training and evaluation; None: the model's own
    seed: int = field(default=0, metadata={"least": 0})

    # optimizer
    optimizer: Literal["adamw", "lamb", "sgd"] = "adamw"
    lr: float = 1e-3  # effective, at `batch_size`
    head_lr: float | None = None  # the peak rate of the heads; None: lr
    lr_scaling: Literal["linear", "none"] = "none"  # whether lr follows a change of batch_size alone
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9  # of SGD
    nesterov: bool = False
    weight_decay: float = 0.05
    no_decay: tuple[str, ...] = ("norm", "scale", "position", "token")  # roles without decay, beside every vector
    clip_grad: float = 0.0  # largest global norm of the gradient; 0: none. LAMB clips by itself at this norm

    # learning rate over time
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    schedule_by: Literal["step", "epoch"] = "step"
    schedule_published: bool = False  # the published script's off-by-one: epoch e at the rate of epoch e - 1
    warmup_epochs: float = 5.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    decay_epochs: tuple[int, ...] = ()  # of schedule "step": divide by 10 after these
    # loss
    loss: Literal["ce", "bce"] = "ce"
    label_smoothing: float = 0.1
    bce_threshold: float | None = 0.0  # a mixed target above it counts as 1 (DeiT III); None: soft targets stay soft

    # augmentation
    # random resized crop; simple random crop along both axes, along x only (text of DeiT III; its code has both); zero
    # padding of 4 pixels and a random crop, for 32-pixel images, which are tested without resizing
    crop: Literal["rrc", "src", "src_axis", "pad"] = "rrc"
    crop_scale: float = 0.08  # least share of the image's area that a random resized crop keeps
    flip: float = 0.5
    augmentation: Literal["rand", "auto", "trivial", "three", "none"] = "rand"
    three_augment: tuple[str, ...] = THREE_AUGMENT  # of augmentation "three": the parts to choose from (Table 6.2)
    magnitude: float = 9.0  # of RandAugment
    color_jitter: float = 0.0
    affine: float = 0.0  # rotation by up to 90 degrees times this, shift and zoom by up to this share
    erasing: float = 0.25
    mixup: float = 0.8
    cutmix: float = 1.0
    mix_probability: float = 1.0
    switch_probability: float = 0.5  # of CutMix where both are on
    repeated_augmentation: int = 1
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    pixels: Literal["exact", "fast"] = "exact"  # of a JPEG; fast: decoded coarser, no smaller than the crop needs

    # network
    drop_path: float | None = None  # None: as in the model
    drop_path_decay: Literal["uniform", "linear"] | None = None  # over the blocks; None: as in the model
    dropout: float | None = None  # None: as in the model
    scale: ScaleName | None = None  # of residual branches: "layerscale", "none", ...; None: as in the model
    layerscale: float | None = None  # LayerScale's start; None: as in the model

    # fine-tuning
    tune: Literal["all", "attention", "ffn", "head"] = "all"  # the parameters that `finetune` trains

    # averaging and evaluation
    ema: float = 0.0  # decay of the averaged weights; 0: none
    ema_warmup: bool = True  # a decay of (1 + t) / (10 + t) while that is smaller
    test_crop_ratio: float = 0.875
    log_norms: bool = False  # log the relative norm of each residual branch at every evaluation (thesis Fig. 3.6)

    # the machine
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    workers: int = field(default=2, metadata={"least": 0, "most": MOST_WORKERS})
    checkpoint_every: str = "1 epoch"  # "30s", "500" steps or "1 epoch"
    gradient_checkpointing: bool = False
    compile: bool = False
    shard: Literal["none", "full"] = "none"
    sync_batchnorm: bool = False  # BatchNorm over the batches of all processes

    sources: Sources = field(default_factory=dict)  # field -> where its value comes from

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in dataclasses.fields(self):
            if item.name == "sources":
                continue
            value = plain_number(getattr(self, item.name))
            if isinstance(value, list):
                value = tuple(value)
            check_value(f"the recipe {self.name}", item, value, hints[item.name])
            object.__setattr__(self, item.name, value)
        self._check_ranges()
        if self.loss == "bce" and self.label_smoothing and self.bce_threshold == 0:
            raise PatchloomError(
                f"loss=bce of {self.name} counts every target above {self.bce_threshold} as 1, which smoothing would "
                f"make of every class. Set label_smoothing=0."
            )
        if not 0 <= self.ema < 1:
            raise PatchloomError(f"ema of {self.name} must be at least 0 and below 1, not {self.ema}.")

    def _check_ranges(self) -> None:
        for name in _SHARES:
            if not 0 <= (getattr(self, name) or 0) <= 1:
                raise PatchloomError(f"{name} of {self.name} must be between 0 and 1, not {getattr(self, name)}.")
        for name in _NOT_NEGATIVE:
            if (getattr(self, name) or 0) < 0:
                raise PatchloomError(f"{name} of {self.name} cannot be negative: {getattr(self, name)}.")
        if len(self.betas) != 2 or not all(_is_decay(beta) for beta in self.betas):
            raise PatchloomError(
                f"betas of {self.name} must be two numbers of at least 0 and below 1, not {self.betas}."
            )
        if unknown := set(self.no_decay) - set(ROLES):
            raise PatchloomError(
                f"no_decay of {self.name} must be roles of parameters ({', '.join(ROLES)}), not {unknown}."
            )
        if self.head_lr is not None and self.lr == 0:
            raise PatchloomError(
                f"lr=0 of {self.name} excludes head_lr. Train the head alone with `finetune --tune head`."
            )
        self._check_three_augment()
        if self.nesterov and not self.momentum:
            raise PatchloomError(f"nesterov of {self.name} needs a momentum.")
        if not 0 < self.test_crop_ratio <= 1 or not self.crop_scale > 0:
            raise PatchloomError(
                f"test_crop_ratio and crop_scale of {self.name} must be above 0 and at most 1, not "
                f"{self.test_crop_ratio} and {self.crop_scale}."
            )
        if not self.magnitude <= 10 or self.seed >= 2**32:
            raise PatchloomError(f"{self.name}: magnitude must be at most 10 and seed below 2^32.")

    def _check_three_augment(self) -> None:
        parts = self.three_augment
        if not parts or len(set(parts)) < len(parts) or set(parts) - set(THREE_AUGMENT):
            raise PatchloomError(
                f"three_augment of {self.name} must be one or more of {', '.join(THREE_AUGMENT)}, each once, not "
                f"{', '.join(map(str, parts)) or 'nothing'}."
            )
        if parts != THREE_AUGMENT and self.augmentation != "three":
            raise PatchloomError(
                f"three_augment of {self.name} has no effect with augmentation={self.augmentation}. "
                f"Set augmentation=three too."
            )

    def replace(self, **changes: Any) -> Recipe:
        """A copy with other values; raises PatchloomError for an unknown field."""
        known = {item.name for item in dataclasses.fields(self)} - {"sources"}
        for name in changes:
            if name not in known:
                raise PatchloomError(f"A recipe has no field {name!r}.{did_you_mean(name, known)}")
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return {**dataclasses.asdict(self), "sources": dict(self.sources)}


def _is_decay(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1
