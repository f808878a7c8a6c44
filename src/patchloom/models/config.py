"""Typed, frozen descriptions of networks: plain JSON on disk, checked when made, nothing allocated."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.class_names import MOST_CLASSES

if TYPE_CHECKING:
    from typing_extensions import Self

ImageSize = int | tuple[int, int]
# far above every network that can be trained, so that a slip of the hand or a forged file is refused at once
_MOST = {
    "depth": 1000,
    "class_depth": 1000,
    "branches": 64,
    "dim": 1 << 17,
    "in_chans": 1024,
    "num_classes": MOST_CLASSES,
}
_LONGEST_SIDE = 8192
_WIDEST_FFN = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """What every network has, whatever it takes in: a name, a family, and options that are checked and are JSON."""

    architecture: ClassVar[str]
    kind: ClassVar[str] = "image"  # what the network takes

    name: str = "custom"
    family: str = "custom"

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            # Configs are compared and written as JSON: np.int64(12) would not be serialisable.
            value = plain_number(getattr(self, field.name))
            check_value(self.name, field, value, hints[field.name])
            # The class is frozen, hence object.__setattr__.
            object.__setattr__(self, field.name, value)

    def replace(self, **options: Any) -> Self:
        """A copy with other options; an unknown one is refused with the nearest known."""
        self.check_known(options, self.name)
        return dataclasses.replace(self, **options)

    @classmethod
    def check_known(cls, options: Iterable[str], name: str) -> None:
        """Raise PatchloomError for an option that this kind of network does not have."""
        known = {field.name for field in dataclasses.fields(cls)}
        for option in options:
            if option not in known:
                raise PatchloomError(
                    f"{name} has no option {option!r}.{did_you_mean(option, known)} "
                    f"Its options: {', '.join(sorted(known - {'name', 'family'}))}."
                )

    def to_json(self) -> dict[str, Any]:
        """The options as plain JSON with the architecture; `config_from_json` is the inverse."""
        return {"architecture": self.architecture, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """A network of images (B, in_chans, height, width) with a head of `num_classes` outputs."""

    num_classes: int = 1000
    img_size: tuple[int, int] = (224, 224)
    in_chans: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "img_size", as_size(self.img_size))
        super().__post_init__()
        if max(self.img_size) > _LONGEST_SIDE:
            size = " x ".join(map(str, self.img_size))
            raise PatchloomError(f"The img_size of {self.name} is at most {_LONGEST_SIDE}, not {size}.")

    @property
    def headless(self) -> bool:
        """Whether the network ends with the vector before a head."""
        return self.num_classes == 0

    def without_head(self) -> Self:
        """The same network without a head."""
        return self.replace(num_classes=0)

    def with_head(self) -> Self:
        """The same network, with a linear head where it has none."""
        return self.replace(num_classes=1) if self.headless else self


@dataclass(frozen=True, kw_only=True)
class PatchConfig(Config):
    """What our own networks share. A family adds its own choices, one field each, the same word everywhere."""

    patch_size: int = 16
    dim: int = 384
    depth: int = 12
    drop_path: float = 0.0
    # mlp: linear, BatchNorm, ReLU, linear (Grafit's transfer experiments); none: `forward` gives what `embed` does
    head: Literal["linear", "mlp", "none"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rate(self.name, "drop_path", self.drop_path)
        if not 1 <= int(self.dim * getattr(self, "mlp_ratio", 1)) <= _WIDEST_FFN:
            raise PatchloomError(
                f"The mlp_ratio of {self.name}, {getattr(self, 'mlp_ratio', 1)}, must give its FFN a width from 1 to "
                f"{_WIDEST_FFN}."
            )
        check_divisible(self.img_size, self.patch_size, f"An image size of {self.name}")

    @property
    def headless(self) -> bool:
        return self.head == "none"

    def without_head(self) -> Self:
        return self.replace(head="none", num_classes=1)

    def with_head(self) -> Self:
        return self.replace(head="linear") if self.headless else self

    @property
    def grid(self) -> tuple[int, int]:
        """Patches along the height and along the width."""
        return self.img_size[0] // self.patch_size, self.img_size[1] // self.patch_size

    @property
    def patches(self) -> int:
        """The number of patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def scale_start(self) -> float | None:
        """The first value of LayerScale's factors; None for a network without LayerScale."""
        return None


def check_rate(model: str, option: str, rate: float) -> None:
    """Refuse a drop probability that is not in [0, 1)."""
    if not 0 <= rate < 1:
        raise PatchloomError(f"The {option} of {model} must be at least 0 and below 1, not {rate}.")


def as_size(size: Any) -> tuple[int, int]:
    """(height, width) from one number or a pair."""
    sides = size if isinstance(size, tuple | list) else (size, size)
    pair = tuple(plain_number(side) for side in sides)
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair):
        raise PatchloomError(f"An image size is a whole number or (height, width), not {size!r}.")
    return pair


def check_divisible(size: tuple[int, int], patch_size: int, what: str) -> None:
    """Refuse a size that patches do not tile."""
    if patch_size < 1 or size[0] % patch_size or size[1] % patch_size:
        nearest = tuple(max(1, round(side / max(patch_size, 1))) * max(patch_size, 1) for side in size)
        raise PatchloomError(
            f"{what} must be divisible by its patch size {patch_size}: {size[0]} x {size[1]} is not; "
            f"{nearest[0]} x {nearest[1]} would be."
        )


def check_heads(config: Any) -> None:
    if config.dim % config.heads:
        raise PatchloomError(f"The dim of {config.name}, {config.dim}, must be divisible by its heads, {config.heads}.")


def plain_number(value: Any) -> Any:
    """numpy's numbers as Python's, so that a config is plain JSON."""
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_value(model: str, field: dataclasses.Field[Any], value: Any, hint: Any) -> None:
    """Raise PatchloomError if a value does not fit the type hint or the bounds of its field."""
    least, most = field.metadata.get("least", 1), field.metadata.get("most", _MOST.get(field.name, math.inf))
    # an `int | None` has the bounds of an int
    counted = int in (hint, *get_args(hint)) and _fits(value, int)
    if not _fits(value, hint) or (counted and not least <= value <= most):
        bound = f" from {least} to {most}" if most < math.inf else f" of at least {least}"
        raise PatchloomError(f"The option {field.name!r} of {model} must be {_describe(hint, bound)}, not {value!r}.")


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple)
    if hint is int:
        # bool is a subclass of int, but depth=True is a mistake.
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, hint)


def _describe(hint: Any, bound: str = "") -> str:
    """A type hint in words; `bound` follows a whole number."""
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(word) for word in get_args(hint))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(choice, bound) for choice in get_args(hint))
    return {
        int: f"a whole number{bound}",
        float: "a number",
        bool: "True or False",
        str: "a string",
        type(None): "None",
    }.get(hint, str(hint))
