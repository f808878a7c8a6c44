"""Attention pooling on any convnet (thesis 5.3.4): a timm trunk, then PatchConvNet's pooling stage.

`resnet50_attention_pool` is listed; `NAME_attention_pool` works for every timm convnet that gives a feature map.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from patchloom.compat import import_timm
from patchloom.errors import PatchloomError, did_you_mean
from patchloom.layers.norms import make_norm
from patchloom.models.patch_network import PatchNetwork
from patchloom.models.patchconvnet import PoolConfig, pool_stage
from patchloom.models.registry import Paper, register, register_architecture, register_pattern


@dataclass(frozen=True, kw_only=True)
class ConvNetConfig(PoolConfig):
    """A timm trunk by name; `dim` and `patch_size` are the channels and the stride of its last map."""

    architecture: ClassVar[str] = "convnet"

    trunk: str = "resnet50"
    dim: int = 2048
    depth: int = field(default=0, metadata={"least": 0})
    patch_size: int = 32


class TimmStem(nn.Module):
    """A timm convnet without its head, (B, C, height, width) -> tokens of its last map (B, N, D)."""

    role = "stem"

    def __init__(self, trunk: str, in_chans: int, drop_path: float) -> None:
        super().__init__()
        options = {"drop_path_rate": drop_path} if drop_path else {}
        self.trunk = import_timm().create_model(trunk, num_classes=0, global_pool="", in_chans=in_chans, **options)

    def forward(self, images: Tensor) -> Tensor:
        return self.trunk(images).flatten(2).transpose(1, 2)


class ConvNet(PatchNetwork):
    """See the module's docstring."""

    config: ConvNetConfig

    def __init__(self, config: ConvNetConfig) -> None:
        for option, own in {**trunk_shape(config.trunk), "depth": 0}.items():
            if getattr(config, option) != own:
                raise PatchloomError(
                    f"The {option} of {config.name} is that of its trunk {config.trunk}: {own}, not "
                    f"{getattr(config, option)}. Another trunk has a name of its own: TRUNK_attention_pool."
                )
        super().__init__(
            config,
            stem=TimmStem(config.trunk, config.in_chans, config.drop_path),
            class_tokens=config.prefix_tokens,
            per_class=config.queries == "per_class",
            pool=pool_stage(config),
            norm=make_norm("layer", config.dim),
            keep_refused="its trunk is a convnet, which computes whole maps",
        )

    def init_weights(self) -> None:
        trunk, self.stem = self.stem, nn.Identity()  # the trunk keeps timm's own start
        super().init_weights()
        self.stem = trunk


# parameters, MACs and activations at 224 pixels of trunks that the table of models shows without importing timm
_COUNTED = {"resnet50": (23_508_032, 4_087_136_256, 11_113_984)}


def trunk_complexity(config: ConvNetConfig) -> tuple[int, int, int]:
    """Parameters, MACs and activations of the trunk; its map scales with the image, so the last two do too."""
    counts = _COUNTED.get(config.trunk) if config.in_chans == 3 else None
    params, macs, activations = counts or count_trunk(config.trunk, config.in_chans)
    pixels, reference = config.img_size[0] * config.img_size[1], 224 * 224
    return params, macs * pixels // reference, activations * pixels // reference


def count_trunk(trunk: str, in_chans: int = 3) -> tuple[int, int, int]:
    """Parameters, MACs and activations of a timm trunk at 224 pixels."""
    return _probe(trunk, in_chans)[0]


def trunk_shape(trunk: str) -> dict[str, Any]:
    """The channels and the stride of a timm convnet's last map."""
    timm = import_timm()
    if not timm.is_model(trunk):
        raise PatchloomError(f"timm has no model {trunk!r}.{did_you_mean(trunk, timm.list_models())}")
    shape = _probe(trunk, 3)[1]
    if len(shape) != 4 or shape[2] != shape[3] or shape[2] == 1 or 224 % shape[2]:
        raise PatchloomError(
            f"timm's {trunk!r} returns no feature map (batch, channels, height, width) to pool "
            f"whose cells tile an image of 224 pixels, but {shape}."
        )
    return {"dim": shape[1], "patch_size": 224 // shape[2]}


@lru_cache
def _probe(trunk: str, in_chans: int) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Costs at 224 pixels and shape of the last map, from a run on the meta device, which computes nothing."""
    counts = [0, 0]

    def count(module: nn.Conv2d | nn.Linear, _: object, output: Tensor) -> None:
        counts[0] += module.weight[0].numel() * output.numel()
        counts[1] += output.numel()

    with torch.device("meta"):
        model = TimmStem(trunk, in_chans, 0.0).trunk.eval()
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_forward_hook(count)
        shape = tuple(model(torch.empty(1, in_chans, 224, 224)).shape)
    return (sum(p.numel() for p in model.parameters()), counts[0], counts[1]), shape


def attention_pooled(name: str, trunk: str) -> ConvNetConfig:
    """The config of TRUNK_attention_pool."""
    return ConvNetConfig(name=name, family="convnet", trunk=trunk, **trunk_shape(trunk))


register_architecture(ConvNetConfig, ConvNet)
register(
    ConvNetConfig(name="resnet50_attention_pool", family="convnet"),
    Paper("PatchConvNet 5.3.4", None, 4.6, "printed for the 4.1 billion MACs of ResNet-50 and its pooling"),
)
register_pattern(r"(\w+)_attention_pool", attention_pooled)
