"""Networks whose result is a vector to compare images by: a trunk, a projector, and perhaps a classifier.

v = trunk(image)            (B, trunk_dim), any network here
z = projector(v)            (B, dim)          `embed`
logits = classifier(v)      (B, classes)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from patchloom.models.config import Config
from patchloom.models.foreign import ForeignNetwork
from patchloom.models.masking import Visible
from patchloom.models.network import Network, evaluation_mode
from patchloom.models.patch_network import PatchNetwork
from patchloom.models.preprocessing import Preprocessing
from patchloom.models.registry import build, config_from_json, register_architecture

ProjectorKind = Literal["mlp", "fc", "none"]


class Outputs(NamedTuple):
    """What an `EmbeddingNetwork` gives in training."""

    vector: Tensor  # (B, trunk_dim), of the trunk
    embedding: Tensor  # (B, dim), of the projector
    logits: Tensor | None  # (B, classes), where there is a classifier


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(Config):
    """A trunk without its head, and what follows it. Image size and channels are those of the trunk."""

    architecture: ClassVar[str] = "embedding"

    name: str = "embedding"
    family: str = "embedding"
    num_classes: int = 1  # of the labels that it was trained with, whether it has a classifier or not
    trunk: Config = field(default_factory=Config)
    trunk_dim: int = 384
    projector: ProjectorKind = "mlp"
    hidden: int = 4096  # width of an MLP projector
    dim: int = 256  # of the projector's output; without projector that of the trunk
    classifier: bool = False

    def __post_init__(self) -> None:
        trunk = self.trunk
        if isinstance(trunk, Mapping):
            trunk = config_from_json(trunk)
            object.__setattr__(self, "trunk", trunk)
        object.__setattr__(self, "img_size", trunk.img_size)
        object.__setattr__(self, "in_chans", trunk.in_chans)
        if self.projector == "none":
            object.__setattr__(self, "dim", self.trunk_dim)
        super().__post_init__()

    def replace(self, **options: Any) -> EmbeddingConfig:
        """A copy with other options; another image size is that of the trunk."""
        trunk = options.pop("trunk", self.trunk)
        if isinstance(trunk, Mapping):
            trunk = config_from_json(trunk)
        size = {name: options.pop(name) for name in ("img_size", "in_chans") if name in options}
        return super().replace(**options, trunk=trunk.replace(**size))

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "trunk": self.trunk.to_json()}


class EmbeddingNetwork(Network):
    """A trunk with a projector. In training, `forward` gives `Outputs`; in evaluation the logits, or the embedding
    where there is no classifier.

    `trunk` is used as it is, without its head; by default it is built from the config, with random weights.
    """

    config: EmbeddingConfig
    head_distill = None

    def __init__(self, config: EmbeddingConfig, trunk: Network | None = None) -> None:
        super().__init__()
        self.config = config
        self.trunk = without_head(trunk if trunk is not None else build(config.trunk))
        self.projector = make_projector(config.projector, config.trunk_dim, config.hidden, config.dim)
        self.head: nn.Module | None = nn.Linear(config.trunk_dim, config.num_classes) if config.classifier else None
        self.class_names = None

    @property
    def preprocessing(self) -> Preprocessing:
        """That of the trunk."""
        return self.trunk.preprocessing

    @preprocessing.setter
    def preprocessing(self, value: Preprocessing) -> None:
        self.trunk.preprocessing = value

    @property
    def gradient_checkpointing(self) -> bool:
        """That of the trunk."""
        return self.trunk.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.trunk.gradient_checkpointing = value

    def forward(self, images: Tensor) -> Any:
        """`Outputs` in training; else logits (B, classes), or the embedding (B, dim) without a classifier."""
        vector = self.trunk.embed(images)
        if self.training:
            return Outputs(vector, self.projector(vector), None if self.head is None else self.head(vector))
        return self.projector(vector) if self.head is None else self.head(vector)

    def _features(self, images: Tensor, blocks: Sequence[int] | None, visible: Visible) -> Any:
        return self.trunk._features(images, blocks, visible)

    def embed(self, images: Tensor) -> Tensor:
        """The projector's output, (B, dim), which is not normalised; without projector the trunk's vector."""
        return self.projector(self.trunk.embed(images))

    def reset_head(self, num_classes: int) -> None:
        """A classifier of the trunk's vector with random weights."""
        old = next(self.parameters())
        self.config = self.config.replace(num_classes=num_classes, classifier=True)
        self.class_names, self.label_column = None, None
        self.head = nn.Linear(self.config.trunk_dim, num_classes).to(old)


def make_projector(kind: ProjectorKind, inputs: int, hidden: int, outputs: int) -> nn.Module:
    """mlp: linear, BatchNorm, ReLU, linear; fc: linear; none: the identity. (B, inputs) -> (B, outputs)."""
    if kind == "none":
        return nn.Identity()
    if kind == "fc":
        return LinearProjector(inputs, outputs)
    return MlpProjector(
        nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, outputs)
    )


class LinearProjector(nn.Linear):
    """A linear projector."""

    role = "head"  # as a whole: it starts at random, and so may have a rate of its own


class MlpProjector(nn.Sequential):
    """Linear, BatchNorm, ReLU, linear."""

    role = "head"


@torch.no_grad()
def start_linear(projector: nn.Module) -> None:
    """Give a projector weights with which it passes its inputs on, or a random projection of them where it is narrower,
    so that it keeps their angles ("looks linear" of Balduzzi et al. 2017; of an MLP, those of standardised inputs)."""
    if isinstance(projector, LinearProjector):
        _fill(projector, _isometry(projector.out_features, projector.in_features))
    elif isinstance(projector, MlpProjector):
        first, last = projector[0], projector[-1]
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        turn = _isometry(first.out_features // 2, first.in_features)
        back = _isometry(last.out_features, first.in_features) @ turn.T
        # relu(a) - relu(-a) = a: units in pairs of opposite sign pass everything on.
        _fill(first, torch.cat([turn, -turn]))
        _fill(last, torch.cat([back, -back], dim=1))


def _isometry(outputs: int, inputs: int) -> Tensor:
    """(outputs, inputs): the identity with zeros below, or orthonormal rows where that would lose inputs."""
    return torch.eye(outputs, inputs) if outputs >= inputs else nn.init.orthogonal_(torch.empty(outputs, inputs))


def _fill(layer: nn.Linear, weight: Tensor) -> None:
    """The weight with zeros around it where the layer is larger, and no bias."""
    nn.init.zeros_(layer.weight)
    layer.weight[: weight.shape[0], : weight.shape[1]] = weight
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def without_head(network: Network) -> Network:
    """The same network, with its head taken away: `embed` and `features` stay what they are."""
    if isinstance(network, ForeignNetwork):
        network.network.reset_classifier(0)
    elif isinstance(network, PatchNetwork):
        network.head, network.head_distill = nn.Identity(), None
    return network


def trunk_of(network: Network) -> Network:
    """The trunk of an `EmbeddingNetwork`; any other network as it is."""
    return network.trunk if isinstance(network, EmbeddingNetwork) else network


@torch.no_grad()
def embedding_dim(network: Network) -> int:
    """The length of a network's embedding, by one image."""
    config, parameter = network.config, next(network.parameters())
    with evaluation_mode(network):
        return network.embed(parameter.new_zeros(1, config.in_chans, *config.img_size)).shape[1]


register_architecture(EmbeddingConfig, EmbeddingNetwork)
