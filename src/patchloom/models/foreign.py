"""Networks of other libraries, by name: `timm:NAME` is a network of timm with the outer promises of our own.

Wherever a model name is taken: `create_model("timm:resnet50", num_classes=10)`. `timm:NAME:FILE` (weights from a file)
and .onnx files are sources of weights, not names of models.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from patchloom.compat import import_timm
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.models.config import Config, check_rate
from patchloom.models.features import Features, TokenLayout, block_indices
from patchloom.models.heads import MLPHead
from patchloom.models.masking import Visible
from patchloom.models.network import Network
from patchloom.models.preprocessing import Preprocessing
from patchloom.models.registry import register_architecture, register_pattern

TIMM = "timm:"
# arguments of timm's constructor that open files or addresses: a file of weights must not make timm open another
_LOADING = ("checkpoint_path", "cache_dir", "pretrained")
_MOST = 1 << 16  # far above every number among timm's options


def is_timm(source: object) -> bool:
    """Whether a name stands for a network of timm: timm:NAME[:FILE]."""
    return isinstance(source, str | os.PathLike) and str(source).startswith(TIMM)


def is_onnx(source: object) -> bool:
    """Whether a name stands for a network in an .onnx file."""
    return isinstance(source, str | os.PathLike) and str(source).endswith(".onnx")


def split_source(source: str) -> tuple[str, str]:
    """The name and the file (or "") of timm:NAME[:FILE]. Raises PatchloomError for a name that timm does not have."""
    name, _, file = source.removeprefix(TIMM).partition(":")
    timm = import_timm()
    if not timm.is_model(name):
        raise PatchloomError(f"timm has no model {name!r}.{did_you_mean(name, timm.list_models())}")
    return name, file


@dataclass(frozen=True, kw_only=True)
class ForeignConfig(Config):
    """A network of timm. Options that are not fields here go to timm's own constructor as they are.

    `drop_path` is timm's `drop_path_rate`, `dropout` its `drop_rate`. `options` holds the others, as (name, value)
    pairs so that a config can be compared and hashed; in JSON they are an object.
    """

    architecture: ClassVar[str] = "timm"

    name: str = "timm:resnet50"
    family: str = "timm"
    num_classes: int = field(default=1000, metadata={"least": 0})  # 0: no classifier
    head: Literal["linear", "mlp"] = "linear"  # linear: timm's own classifier; mlp: Grafit's (2.4.6) in its place
    drop_path: float = 0.0
    dropout: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        # Sorted, so that configs with the same options are equal whatever their order.
        given = ((key, _frozen(value)) for key, value in dict(self.options).items())
        object.__setattr__(self, "options", tuple(sorted(given)))
        for option, value in self.options:
            _check_option(self.name, option, value)
        super().__post_init__()
        check_rate(self.name, "drop_path", self.drop_path)
        check_rate(self.name, "dropout", self.dropout)

    @property
    def timm_name(self) -> str:
        """The name within timm, with its tag if it has one."""
        return self.name.removeprefix(TIMM)

    def replace(self, **options: Any) -> ForeignConfig:
        """A copy with other options; what is not a field here is one of timm's."""
        fields = {name: options.pop(name) for name in list(options) if name in self.__dataclass_fields__}
        given = {**dict(self.options), **dict(fields.pop("options", ())), **options}
        return super().replace(**fields, options=tuple(given.items()))

    @classmethod
    def check_known(cls, options: Any, name: str) -> None:
        """Nothing is refused here: timm knows its options, and refuses others when the network is built."""

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "options": dict(self.options)}


def _frozen(value: Any) -> Any:
    """Lists as tuples, which JSON does not have."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _check_option(name: str, option: str, value: Any) -> None:
    """Refuse what is not about the network, and numbers that no network has."""
    if option.startswith(_LOADING):
        raise PatchloomError(f"{option!r} of {name} loads weights: load them as {TIMM}NAME or {TIMM}NAME:FILE instead.")
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, int | float) and not abs(part) <= _MOST:
            raise PatchloomError(f"The {option} of {name} is at most {_MOST:,}, not {part}.")


class ForeignNetwork(Network):
    """A network of timm, called as our own are.

    Its tensors are those of timm's network, in the same order, with the prefix `network.` in their names.
    """

    config: ForeignConfig

    def __init__(self, config: ForeignConfig) -> None:
        super().__init__()
        self.config = config
        self.network = _make(config)
        self.fixed_size = _fixed_size(config)
        self.preprocessing = _preprocessing(self.network, config)
        self.class_names = None
        self.head_distill = None

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes)."""
        self._check_images(images)
        return self.network(images)

    def embed(self, images: Tensor) -> Tensor:
        """The vector before the classifier, (B, D)."""
        self._check_images(images)
        vector = self.network.forward_head(self.network.forward_features(images), pre_logits=True)
        if vector.ndim != 2:
            raise PatchloomError(f"{self.config.name} has no vector before its classifier, but {tuple(vector.shape)}.")
        return vector

    def _features(self, images: Tensor, blocks: Sequence[int] | None, visible: Visible) -> Features | list[Features]:
        """The last map or tokens of timm's `forward_features`; with `blocks`, maps of the stages that timm counts."""
        self._check_images(images)
        if any(part is not None for part in visible):
            raise PatchloomError(f"{self.config.name} is a network of timm: it takes neither mask nor keep.")
        if blocks is None:
            return self._as_features(self.network.forward_features(images), images)
        return self._stages(images, blocks)

    def _stages(self, images: Tensor, blocks: Sequence[int]) -> list[Features]:
        count = len(getattr(self.network, "feature_info", ()))
        if not hasattr(self.network, "forward_intermediates") or not count:
            raise PatchloomError(f"{self.config.name} does not provide the outputs of single blocks.")
        chosen = block_indices(blocks, count, self.config.name)
        wanted = sorted(set(chosen))  # timm gives each once, in its own order
        maps = self.network.forward_intermediates(images, indices=wanted, intermediates_only=True, output_fmt="NCHW")
        found = dict(zip(wanted, maps, strict=True))
        return [_from_map(found[i]) for i in chosen]

    def _as_features(self, out: Any, images: Tensor) -> Features:
        # A map of a convolutional network; Swin and some others have channels last.
        if isinstance(out, Tensor) and out.ndim == 4:
            return _from_map(out.permute(0, 3, 1, 2) if _channels_last(self.network) else out)
        patch = _patch_size(self.network)
        if isinstance(out, Tensor) and out.ndim == 3 and patch is not None:
            height, width = images.shape[2] // patch[0], images.shape[3] // patch[1]
            # Tokens that are not patches: class, distillation and register tokens come first.
            prefix = out.shape[1] - height * width
            if prefix >= 0 and prefix == getattr(self.network, "num_prefix_tokens", prefix):
                return Features(out, TokenLayout(prefix, height, width))
        raise PatchloomError(f"{self.config.name} provides neither a feature map nor patch tokens: use `embed`.")

    def reset_head(self, num_classes: int) -> None:
        """A classifier with random weights for other classes."""
        old = next(self.parameters())
        self.config = self.config.replace(num_classes=num_classes)
        self.class_names = None
        self.network.reset_classifier(num_classes)
        if self.config.head == "mlp":
            _give_mlp(self.network, self.config)
        # A new classifier is made on the CPU in float32; the network may be elsewhere.
        self.network.to(old)

    def set_image_size(self, size: tuple[int, int]) -> None:
        """Fit the network to images of another size, with its weights: timm resizes positions and windows.

        Raises PatchloomError where timm cannot.
        """
        if size == self.config.img_size:
            return
        try:
            if self.fixed_size:
                self.network.set_input_size(img_size=size)
        except (AttributeError, AssertionError, ValueError, RuntimeError) as error:
            raise PatchloomError(
                f"{self.config.name} does not take images of {size[0]} x {size[1]} pixels: {error}."
            ) from error
        self.config = self.config.replace(img_size=size)
        self.preprocessing = dataclasses.replace(self.preprocessing, img_size=size)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether timm's own gradient checkpointing is on. Setting it raises PatchloomError where timm has none."""
        return self.__dict__.get("_checkpointing", False)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        if value != self.gradient_checkpointing:
            try:
                self.network.set_grad_checkpointing(value)
            except (AttributeError, AssertionError) as error:
                raise PatchloomError(f"{self.config.name} does not support gradient checkpointing.") from error
        self.__dict__["_checkpointing"] = bool(value)

    def _check_images(self, images: Tensor) -> None:
        config = self.config
        if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] != config.in_chans:
            found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise PatchloomError(
                f"{config.name} takes images of shape (batch, {config.in_chans} channels, height, width), not {found}."
            )
        if not images.is_floating_point():
            raise PatchloomError(f"{config.name} takes normalised images of floats, not {images.dtype}.")
        size = tuple(images.shape[2:])
        if self.fixed_size and size != config.img_size:
            raise PatchloomError(
                f"This {config.name} was made for images of {config.img_size[0]} x {config.img_size[1]}, not "
                f"{size[0]} x {size[1]}: make or load it with img_size={size}."
            )


def _from_map(maps: Tensor) -> Features:
    """(B, D, height, width) as tokens with their layout."""
    return Features(maps.flatten(2).transpose(1, 2), TokenLayout(0, maps.shape[2], maps.shape[3]))


def _patch_size(network: Any) -> tuple[int, int] | None:
    """The patch of a network of tokens; timm's mixers call its layer a stem."""
    layers = (getattr(network, name, None) for name in ("patch_embed", "stem"))
    return next((size for layer in layers if (size := getattr(layer, "patch_size", None)) is not None), None)


def _channels_last(network: nn.Module) -> bool:
    return str(getattr(network, "output_fmt", "")).endswith("NHWC")


def _fixed_size(config: ForeignConfig) -> bool:
    """Whether the network has weights for one image size alone (positions, windows)."""
    return _published(config.timm_name).fixed_input_size and not dict(config.options).get("dynamic_img_size")


@lru_cache
def _published(name: str) -> Any:
    """timm's metadata of a network: image size, normalisation, classifier."""
    return import_timm().get_pretrained_cfg(name)


def _make(config: ForeignConfig) -> Any:
    """timm's network, with random weights."""
    rates = {"drop_path_rate": config.drop_path, "drop_rate": config.dropout}
    options = {name: rate for name, rate in rates.items() if rate} | dict(config.options)
    if _fixed_size(config) and config.img_size != _published(config.timm_name).input_size[1:]:
        options["img_size"] = config.img_size
    name, _ = split_source(config.name)
    sizes = {"num_classes": config.num_classes, "in_chans": config.in_chans}
    try:
        network = import_timm().create_model(name, **sizes, **options)
        return _give_mlp(network, config) if config.head == "mlp" else network
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:  # options that timm does not have or accept
        unknown = next((option for option in options if f"'{option}'" in str(error)), None)
        if unknown is None:
            reason = str(error) or type(error).__name__
            raise PatchloomError(f"{config.name} cannot be built: {reason}.") from error
        ours = {"drop_path_rate": "drop_path", "drop_rate": "dropout"}.get(unknown, unknown)
        raise PatchloomError(f"timm's {name} has no option {ours!r}: leave it out, or set it to 0.") from error


def _give_mlp(network: Any, config: ForeignConfig) -> Any:
    """The network with an MLP in the place of its classifier, which must be a linear layer."""
    names = _published(config.timm_name).classifier
    place, _, name = str(names).rpartition(".")
    linear = network.get_submodule(str(names)) if isinstance(names, str) and names else None
    if not isinstance(linear, nn.Linear):
        raise PatchloomError(f"{config.name} has no single linear classifier that head=mlp could replace.")
    setattr(network.get_submodule(place), name, MLPHead(linear.in_features, config.num_classes))
    return network


def _preprocessing(network: Any, config: ForeignConfig) -> Preprocessing:
    """timm's own normalisation and test crop; other numbers of channels get the average of the RGB values."""
    published = import_timm().data.resolve_model_data_config(network)
    mean, std = (
        values if len(values) == config.in_chans else (sum(values) / len(values),) * config.in_chans
        for values in (tuple(published["mean"]), tuple(published["std"]))
    )
    interpolation = published["interpolation"] if published["interpolation"] in ("bicubic", "bilinear") else "bicubic"
    return Preprocessing(config.img_size, mean, std, published["crop_pct"], interpolation)


def foreign_config(name: str, source: str) -> ForeignConfig:
    """The config of timm:NAME, with timm's image size and classes. Raises PatchloomError for an unknown name."""
    model, file = split_source(source)
    if file:
        raise PatchloomError(
            f"{name} names a file of weights, not a model: create_model('{TIMM}{model}') makes it with random weights, "
            f"load({name!r}) opens the file."
        )
    published = _published(model)
    channels, height, width = published.input_size
    return ForeignConfig(name=name, num_classes=published.num_classes, img_size=(height, width), in_chans=channels)


@lru_cache
def count_foreign(config: ForeignConfig) -> tuple[int, int, int]:
    """Parameters, MACs and activations for one image, from a forward pass on the meta device, which computes nothing.

    Counted as in `complexity`: convolutions, Linear layers and the two products of attention.
    """
    from torch.utils.flop_counter import FlopCounterMode

    outputs = [0]

    def count(_: nn.Module, __: object, output: Tensor) -> None:
        outputs[0] += output.numel()

    with torch.device("meta"), torch.no_grad():
        network = _make(config).eval()
        for module in network.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False  # as matrix products, which the counter sees
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_forward_hook(count)
        with FlopCounterMode(display=False) as flops:
            network(torch.empty(1, config.in_chans, *config.img_size))
    return sum(p.numel() for p in network.parameters()), flops.get_total_flops() // 2, outputs[0]


register_architecture(ForeignConfig, ForeignNetwork)
register_pattern(rf"{TIMM}(.+)", foreign_config)
