"""Every network of the house: a stem, a stack of residual updates, an aggregation and a head.

Shapes: images (B, C, height, width); tokens (B, prefix + N, D), prefix tokens first, patches row-major.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patchloom.errors import PatchloomError
from patchloom.kernels.libraries import instruction_set
from patchloom.layers.attention import recording
from patchloom.layers.init import init_module, trunc_normal
from patchloom.layers.inplace import drop, hooked
from patchloom.layers.residual import Block
from patchloom.models.config import Config, check_divisible
from patchloom.models.preprocessing import default_preprocessing


class TokenLayout(NamedTuple):
    """Where things are in a row of tokens: first `prefix` tokens, then height * width patches, row-major."""

    prefix: int
    height: int
    width: int


@dataclass(frozen=True)
class Features:
    """Tokens after the final norm, (B, prefix + N, D), with their layout."""

    tokens: Tensor
    layout: TokenLayout

    @property
    def prefix(self) -> Tensor:
        """(B, prefix, D): class token, then distillation token; or one token a class; or none."""
        return self.tokens[:, : self.layout.prefix]

    @property
    def patches(self) -> Tensor:
        """(B, N, D)."""
        return self.tokens[:, self.layout.prefix :]

    @property
    def grid(self) -> Tensor:
        """The patches as a map (B, D, height, width)."""
        return self.patches.transpose(1, 2).unflatten(2, (self.layout.height, self.layout.width))


class PerClassHead(nn.Module):
    """One vector a class, applied to that class's own token: (B, classes, D) -> (B, classes) (PatchConvNet 5.2.1)."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, dim))
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def init_weights(self) -> None:
        trunc_normal(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(dim=-1) + self.bias


class MLPHead(nn.Sequential):
    """Linear, BatchNorm, ReLU, linear: (B, D) -> (B, classes) (Grafit 2.4.6)."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, num_classes))


class Network(nn.Module):
    """What all families share; a family's constructor makes the parts, in the order in which an image meets them.

    Prefix tokens (class, distillation, or one a class) join the trunk before block `join_at`; with `join_at=None`
    they meet the patches only in the `pool` stage, whose blocks update them and leave the patches as they are.
    Without prefix tokens the patches are averaged. `position_prefix` prefix tokens have a position too; with None
    there are no positions at all. `dropout` is the dropout rate of the tokens that
    enter the first block.
    """

    ROLES = {
        "class_token": "token",
        "distill_token": "token",
        "positions": "position",
        "head": "head",
        "head_distill": "head",
    }

    class_token: nn.Parameter | None
    distill_token: nn.Parameter | None
    positions: nn.Parameter | None
    maps = False  # the trunk works on maps (B, height, width, D) instead of tokens
    load_report: Any = None  # set by patchloom.load
    fused = False  # a copy for inference, made by patchloom.fuse
    writes_over = False  # a fused copy whose blocks write over what they are given
    instructions: str | None = None  # those of the processor that a fused copy was laid out for
    class_token_only = True  # for logits, the last block computes only what they need
    gradient_checkpointing = False  # recompute each block in the backward pass instead of keeping its activations

    def __init__(
        self,
        config: Config,
        *,
        stem: nn.Module,
        position_prefix: int | None = None,
        class_tokens: int = 0,
        per_class: bool = False,
        distilled: bool = False,
        join_at: int | None = None,
        blocks: Iterable[Block] = (),
        pool: Iterable[Block] = (),
        norm: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.config = config
        self.preprocessing = default_preprocessing(config.family, config.img_size, config.in_chans)
        self.class_names: tuple[str, ...] | None = None
        self.join_at = join_at
        self.position_prefix = position_prefix or 0
        self.dropout = dropout
        self.per_class = per_class
        self.stem = stem
        self.register_parameter("class_token", _tokens(class_tokens, config.dim))
        self.register_parameter("distill_token", _tokens(int(distilled), config.dim))
        positions = 0 if position_prefix is None else position_prefix + config.patches
        self.register_parameter("positions", _tokens(positions, config.dim))
        self.blocks = nn.ModuleList(blocks)
        self.pool = nn.ModuleList(pool)
        self.norm = norm
        self._make_heads(config.num_classes)
        self.init_weights()

    # What users call

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits (B, classes). A distilled network gives (class, distillation) in training, their mean in eval."""
        return self.classify(self._read(images))

    def features(self, images: Tensor) -> Features:
        """All tokens after the final norm, with their layout."""
        tokens, layout = self._tokens(images, whole=True)
        return Features(self.norm(tokens), layout)

    def embed(self, images: Tensor) -> Tensor:
        """The vector before the head, (B, D): the mean over prefix tokens where there are several."""
        return self._read(images).mean(dim=1)

    def reset_head(self, num_classes: int) -> None:
        """A fresh head for other classes; with one query a class, fresh queries too."""
        self.config = self.config.replace(num_classes=num_classes)
        self.class_names = None
        if self.per_class and self.class_token is not None:
            self.class_token = nn.Parameter(self.class_token.new_empty(1, num_classes, self.config.dim))
            trunc_normal(self.class_token)
        old = next(self.head.parameters())
        self._make_heads(num_classes)
        for head in self.output_heads:
            head.apply(init_module)
            head.to(old)

    @property
    def token_layout(self) -> TokenLayout:
        """The layout of `features` at the network's own image size."""
        return TokenLayout(self.num_prefix, *self.config.grid)

    @property
    def num_prefix(self) -> int:
        return sum(token.shape[1] for token in self._prefix_parameters())

    def answers(self, images: Tensor) -> tuple[Tensor, ...]:
        """The logits of every head, (B, classes) each: of the class token, then of the distillation token."""
        return self._answers(self._read(images))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Network:
        """What `to`, `half`, `double` and the like do."""
        one = next(self.parameters()).new_empty(1, 2, 2, 2)
        after = fn(one) if self.fused else one
        if (after.dtype, after.device, after.stride()) != (one.dtype, one.device, one.stride()):
            here = f"{one.dtype} on {one.device}"
            raise PatchloomError(f"A fused copy stays {here}: convert the network that it was made from, then fuse it.")
        return super()._apply(fn, recurse)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.instructions not in (None, instruction_set()):
            found = f"This fused copy is laid out for {self.instructions}, and this processor has {instruction_set()}"
            raise PatchloomError(f"{found}: fuse its network here.")

    def train(self, mode: bool = True) -> Network:
        """As every module's; a BatchNorm whose parameters are frozen keeps its statistics as well."""
        if self.fused and mode:
            raise PatchloomError("A fused copy is for inference: train the network that it was made from.")
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and not any(
                p.requires_grad for p in module.parameters()
            ):
                module.eval()
        return self

    # How it works

    def classify(self, read: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits from the tokens that the heads read, (B, prefix or 1, D)."""
        answers = self._answers(read)
        if len(answers) == 1:
            return answers[0]
        return (answers[0], answers[1]) if self.training else (answers[0] + answers[1]) / 2

    def _answers(self, read: Tensor) -> tuple[Tensor, ...]:
        if self.per_class:
            return (self.head(read),)
        logits = self.head(read[:, 0])
        return (logits,) if self.head_distill is None else (logits, self.head_distill(read[:, 1]))

    def _read(self, images: Tensor) -> Tensor:
        """What the heads read: the prefix tokens, or the average of the patches."""
        tokens, layout = self._tokens(images, whole=not self.class_token_only)
        if layout.prefix:
            return self.norm(tokens[:, : layout.prefix])
        return self.norm(tokens).mean(dim=1, keepdim=True)

    def _tokens(self, images: Tensor, whole: bool) -> tuple[Tensor, TokenLayout]:
        """Tokens before the final norm. Unless `whole`, what only the patches' own outputs need is not computed."""
        layout = self._check_images(images)
        if self.writes_over and any(hooked(m) for part in (self.stem, self.blocks, self.pool) for m in part.modules()):
            raise PatchloomError(
                "A fused copy writes over what a hook on its layers would see: set it on the network, then fuse that."
            )
        if self.fused and _autocast(images):
            # a fused copy has the precision that it was made in
            with torch.autocast(images.device.type, enabled=False):
                return self._tokens(images.to(next(self.parameters()).dtype), whole)
        x = self.stem(images)
        if self.positions is not None:
            x = x + self.positions[:, self.position_prefix :]
        if self.maps:
            x = x.unflatten(1, layout[1:])
        for i, block in enumerate(self.blocks):
            if i == self.join_at:
                x = torch.cat([self._prefix(x), x], dim=1)
            if i == 0:
                x = drop(x, self.dropout, self.training)
            last = self.join_at is not None and i == len(self.blocks) - 1
            x = self._run(block, x, layout.prefix if last and not whole else None)
        if self.maps:
            x = x.flatten(1, 2)
        if self.join_at is None and layout.prefix:
            prefix = self._prefix(x)
            for block in self.pool:
                prefix = self._run(block, torch.cat([prefix, x], dim=1), layout.prefix)
            x = torch.cat([prefix, x], dim=1) if whole else prefix
        return x, layout

    def _run(self, block: nn.Module, x: Tensor, queries: int | None) -> Tensor:
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if checkpointing and not recording(block):  # a capture may be over when the backward pass computes anew
            return checkpoint(block, x, queries, use_reentrant=False)
        return block(x, queries)

    def _prefix(self, x: Tensor) -> Tensor:
        """The prefix tokens with their positions, (B, prefix, D)."""
        prefix = torch.cat(self._prefix_parameters(), dim=1)
        if self.positions is not None and self.position_prefix:
            prefix = prefix + self.positions[:, : self.position_prefix]
        return prefix.expand(x.shape[0], -1, -1)

    def _prefix_parameters(self) -> list[Tensor]:
        return [token for token in (self.class_token, self.distill_token) if token is not None]

    def _check_images(self, images: Tensor) -> TokenLayout:
        config = self.config
        if not isinstance(images, Tensor):
            raise PatchloomError(f"{config.name} takes a tensor of images, not {type(images).__name__}.")
        if images.ndim != 4 or images.shape[1] != config.in_chans or 0 in images.shape[2:]:
            raise PatchloomError(
                f"{config.name} takes images of shape (batch, {config.in_chans} channels, height, width), "
                f"not {tuple(images.shape)}."
            )
        own = next(self.parameters()).dtype
        fitting = images.is_floating_point() and (images.dtype != torch.float64 or own == torch.float64)
        if not fitting or (self.fused and images.dtype != own and not _autocast(images)):
            raise PatchloomError(f"{config.name} takes normalised images of {own}, not {images.dtype}.")
        size = (images.shape[2], images.shape[3])
        check_divisible(size, config.patch_size, f"An image for {config.name}")
        if not self._takes_any_size() and size != config.img_size:  # in this order an export keeps sizes free
            raise PatchloomError(
                f"This {config.name} was made for images of {config.img_size[0]} x {config.img_size[1]}, "
                f"not {size[0]} x {size[1]}: make or load it with img_size={size}."
            )
        return TokenLayout(self.num_prefix, size[0] // config.patch_size, size[1] // config.patch_size)

    def _takes_any_size(self) -> bool:
        return self.positions is None

    def _make_heads(self, num_classes: int) -> None:
        if self.per_class and self.config.head == "mlp":
            raise PatchloomError(
                f"{self.config.name} with one query a class has one vector a class, no MLP as its head."
            )
        kind = PerClassHead if self.per_class else MLPHead if self.config.head == "mlp" else nn.Linear
        self.head: nn.Module = kind(self.config.dim, num_classes)
        self.head_distill = None if self.distill_token is None else kind(self.config.dim, num_classes)

    @property
    def output_heads(self) -> list[nn.Module]:
        return [head for head in (self.head, self.head_distill) if head is not None]

    def init_weights(self) -> None:
        """Start all parameters as the published code does."""
        for module in self.children():
            module.apply(init_module)
        for tokens in (self.class_token, self.distill_token, self.positions):
            if tokens is not None:
                trunc_normal(tokens)


def _autocast(images: Tensor) -> bool:
    device = images.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def check_class_names(names: Any, num_classes: int) -> tuple[str, ...]:
    """Class names in the order of the logits."""
    sound = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not sound or len(names) != num_classes:
        what = f"{len(names)} names" if sound else repr(names)[:80]
        raise PatchloomError(f"The class names of {num_classes} classes are a list of {num_classes} words, not {what}.")
    return check_distinct(names, "The network")


def check_distinct(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Class names, none of them twice: a prediction by name must say which class it is."""
    if twice := [name for name, number in Counter(names).items() if number > 1]:
        raise PatchloomError(f"{where} has several classes named {twice[0]!r}: class names must be different.")
    return tuple(names)


def unwrapped(model: Any) -> Network:
    """The network inside what torch.compile, data-parallel training and weight averaging make of it."""
    inner = model
    while not isinstance(inner, Network):
        inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))
        if inner is None:
            raise PatchloomError(f"A network of patchloom is needed, not {type(model).__name__}.")
    return inner


def _tokens(count: int, dim: int) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(1, count, dim)) if count else None
