"""Our own networks: a stem, a stack of residual updates, an aggregation and a head.

x = stem(image) + positions          `embed_patches`
x = block(x) for every block         `trunk`
prefix tokens read the patches       `aggregate`
logits = head(norm(prefix tokens)) or head(mean of norm(patches))

Shapes: images (B, C, height, width); tokens (B, prefix + N, D), prefix tokens first, patches row-major.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patchloom.errors import PatchloomError
from patchloom.layers.attention import recording
from patchloom.layers.init import init_module, trunc_normal
from patchloom.layers.inplace import drop
from patchloom.layers.positions import Grid, resize_positions
from patchloom.layers.residual import Block
from patchloom.models.config import PatchConfig, check_divisible
from patchloom.models.features import Features, TokenLayout, block_indices
from patchloom.models.heads import MLPHead, PerClassHead
from patchloom.models.masking import EVERYTHING, Visible, gather_kept, hide
from patchloom.models.network import Network, unwrapped
from patchloom.models.preprocessing import default_preprocessing


class PatchNetwork(Network):
    """What all families share; a family's constructor makes the parts, in the order in which an image meets them.

    Prefix tokens (class, distillation, or one per class) join the trunk before block `join_at`; with `join_at=None`
    they meet the patches only in the `pool` stage, whose blocks update them and leave the patches as they are.
    Without prefix tokens the patches are averaged. `position_prefix` prefix tokens have a position too; with None
    there are no positions at all. `dropout` is the dropout rate of the tokens that enter the first block.

    `maps`: the trunk works on maps (B, height, width, D) instead of tokens. `fixed_grid`: layers have weights per
    patch, so the network takes images of its own size alone. `keep_refused`: why patches cannot be left out.
    """

    ROLES = {
        "class_token": "token",
        "distill_token": "token",
        "positions": "position",
        "head": "head",
        "head_distill": "head",
    }

    config: PatchConfig
    class_token: nn.Parameter | None
    distill_token: nn.Parameter | None
    positions: nn.Parameter | None
    class_token_only = True  # for logits, the last block computes only what they need

    def __init__(
        self,
        config: PatchConfig,
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
        maps: bool = False,
        fixed_grid: bool = False,
        keep_refused: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.preprocessing = default_preprocessing(config.family, config.img_size, config.in_chans)
        self.class_names = None
        self.join_at = join_at
        self.position_prefix = position_prefix or 0
        self.dropout = dropout
        self.per_class = per_class
        self.maps, self.fixed_grid, self.keep_refused = maps, fixed_grid, keep_refused
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
        """Logits (B, classes); without a head what `embed` gives. A distilled network gives (class, distillation) in
        training, their mean in eval."""
        return self.classify(self._read(images))

    def _features(self, images: Tensor, blocks: Sequence[int] | None, visible: Visible) -> Features | list[Features]:
        layout = self._check_images(images)
        if visible.keep is not None and self.keep_refused is not None:
            raise PatchloomError(f"{self.config.name} cannot leave patches out (keep=...): {self.keep_refused}.")
        if blocks is not None:
            return self._block_outputs(
                images, layout, block_indices(blocks, len(self.blocks), self.config.name), visible
            )
        return Features(self.norm(self._tokens(images, layout, True, visible)), layout, visible.keep)

    def embed(self, images: Tensor) -> Tensor:
        """The vector before the head, (B, D): the mean over prefix tokens where there are several."""
        return self._read(images).mean(dim=1)

    def reset_head(self, num_classes: int) -> None:
        """A head with random weights for other classes; with one query per class, random queries too. A network
        without a head gets a linear one."""
        self.config = self.config.with_head().replace(num_classes=num_classes)
        self.class_names = None
        if self.per_class and self.class_token is not None:
            self.class_token = nn.Parameter(self.class_token.new_empty(1, num_classes, self.config.dim))
            trunc_normal(self.class_token)
        old = next(self.parameters())  # for its device and type
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
        """The number of prefix tokens."""
        return sum(token.shape[1] for token in self._prefix_parameters())

    @property
    def output_heads(self) -> list[nn.Module]:
        return [head for head in (self.head, self.head_distill) if head is not None]

    @property
    def traces_any_size(self) -> bool:  # type: ignore[override]
        """Whether one traced graph holds for every image size: nothing in it depends on the grid of patches."""
        return self.positions is None and not self.fixed_grid

    def head_logits(self, images: Tensor) -> tuple[Tensor, ...]:
        """The logits of every head, (B, classes) each: of the class token, then of the distillation token."""
        return self._head_logits(self._read(images))

    answers = head_logits  # its name in version 0.1

    # The steps from an image to logits

    def embed_patches(self, images: Tensor, layout: TokenLayout, visible: Visible = EVERYTHING) -> Tensor:
        """Patch embeddings with positions (B, N, D), or (B, K, D) of those that are kept."""
        x = self.stem(images)
        if visible.mask is not None:
            x = hide(x, visible.mask, visible.mask_token)
        if self.positions is not None:
            x = x + self.patch_positions(layout.grid)
        # after the positions: a kept patch has that of its place in the image
        return x if visible.keep is None else gather_kept(x, visible.keep)

    def patch_positions(self, grid: Grid) -> Tensor:
        """The positions of the patches, (1, N, D), resized where `grid` is not the network's own."""
        assert self.positions is not None
        table = self.positions[:, self.position_prefix :]
        if grid == self.config.grid:
            return table
        # as `load` does it: half precision would round twice
        wide = table if table.dtype == torch.float64 else table.float()
        return resize_positions(wide, self.config.grid, grid).to(table.dtype)

    def trunk(
        self, x: Tensor, layout: TokenLayout, whole: bool = True, outputs: dict[int, Tensor] | None = None
    ) -> Tensor:
        """All blocks of the trunk: patches (B, N, D) -> tokens (B, N or prefix + N, D).

        Unless `whole`, the last block computes only the prefix tokens, which are all that logits need. `outputs` is
        filled with what the blocks put out that are its keys; the trunk ends with the last of them.
        """
        if self.maps:
            x = x.unflatten(1, layout.grid)
        for i, block in enumerate(self.blocks):
            if i == self.join_at:  # class_token_at of thesis Table 3.13; 0 in DeiT
                x = torch.cat([self._prefix(x), x], dim=1)
            if i == 0:
                x = drop(x, self.dropout, self.training)
            # nothing after the last block reads the patches where prefix tokens have joined
            last = self.join_at is not None and i == len(self.blocks) - 1
            x = self._run(block, x, layout.prefix if last and not whole else None)
            if outputs is not None and i in outputs:
                outputs[i] = x.flatten(1, 2) if self.maps else x
                if i == max(outputs):
                    break
        return x.flatten(1, 2) if self.maps else x

    def aggregate(self, x: Tensor, prefix: int, whole: bool = True) -> Tensor:
        """Prefix tokens that read the patches in a stage of their own: (B, N, D) -> (B, prefix + N, D).

        Unless `whole`, the prefix tokens alone. Where they joined the trunk, or there are none, x stays as it is.
        """
        if self.join_at is not None or not prefix:
            return x
        # the patches are read and not updated (CaiT, thesis 3.6), so they go in as they are each time
        queries = self._prefix(x)
        for block in self.pool:
            queries = self._run(block, torch.cat([queries, x], dim=1), prefix)
        return torch.cat([queries, x], dim=1) if whole else queries

    def classify(self, read: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits from the tokens that the heads read, (B, prefix or 1, D)."""
        logits = self._head_logits(read)
        if len(logits) == 1:
            return logits[0]
        return (logits[0], logits[1]) if self.training else (logits[0] + logits[1]) / 2

    def _head_logits(self, read: Tensor) -> tuple[Tensor, ...]:
        if self.config.head == "none":
            return (read.mean(dim=1),)
        if self.per_class:
            return (self.head(read),)
        logits = self.head(read[:, 0])
        return (logits,) if self.head_distill is None else (logits, self.head_distill(read[:, 1]))

    def _read(self, images: Tensor) -> Tensor:
        """What the heads read: the prefix tokens, or the average of the patches."""
        layout = self._check_images(images)
        tokens = self._tokens(images, layout, whole=not self.class_token_only)
        if layout.prefix:
            return self.norm(tokens[:, : layout.prefix])
        return self.norm(tokens).mean(dim=1, keepdim=True)

    def _tokens(self, images: Tensor, layout: TokenLayout, whole: bool, visible: Visible = EVERYTHING) -> Tensor:
        """Tokens before the final norm. Unless `whole`, what only the patches' own outputs need is not computed."""
        x = self.trunk(self.embed_patches(images, layout, visible), layout, whole)
        return self.aggregate(x, layout.prefix, whole)

    def _block_outputs(
        self, images: Tensor, layout: TokenLayout, blocks: list[int], visible: Visible
    ) -> list[Features]:
        outputs = dict.fromkeys(blocks, images)  # placeholders: every one is replaced
        self.trunk(self.embed_patches(images, layout, visible), layout, outputs=outputs)
        # before the prefix tokens join, a row holds patches alone
        starts = [layout.prefix if self.join_at is not None and i >= self.join_at else 0 for i in blocks]
        return [
            Features(outputs[i], layout._replace(prefix=start), visible.keep)
            for i, start in zip(blocks, starts, strict=True)
        ]

    def _run(self, block: nn.Module, x: Tensor, queries: int | None) -> Tensor:
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if checkpointing and not recording(block):  # a capture may be over when the backward pass computes again
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

    # What is refused

    def _check_images(self, images: Tensor) -> TokenLayout:
        """The layout of the tokens of these images. Raises PatchloomError for what the network does not take."""
        config = self.config
        if not isinstance(images, Tensor):
            raise PatchloomError(f"{config.name} takes a tensor of images, not {type(images).__name__}.")
        if images.ndim != 4 or images.shape[1] != config.in_chans or 0 in images.shape[2:]:
            raise PatchloomError(
                f"{config.name} takes images of shape (batch, {config.in_chans} channels, height, width), "
                f"not {tuple(images.shape)}."
            )
        self._check_dtype(images)
        size = (images.shape[2], images.shape[3])
        check_divisible(size, config.patch_size, f"An image for {config.name}")
        # checked in this order so that torch.export keeps height and width dynamic
        if self.fixed_grid and size != config.img_size:
            raise PatchloomError(
                f"This {config.name} was made for images of {config.img_size[0]} x {config.img_size[1]}, "
                f"not {size[0]} x {size[1]}: its layers have weights per patch. Make or load it with img_size={size}; "
                "loading interpolates them."
            )
        return TokenLayout(self.num_prefix, size[0] // config.patch_size, size[1] // config.patch_size)

    def _check_dtype(self, images: Tensor) -> None:
        own = next(self.parameters()).dtype
        if not images.is_floating_point() or (images.dtype == torch.float64 and own != torch.float64):
            raise PatchloomError(f"{self.config.name} takes normalised images of {own}, not {images.dtype}.")

    def _make_heads(self, num_classes: int) -> None:
        if self.per_class and self.config.head == "mlp":
            raise PatchloomError(
                f"{self.config.name} with one query per class has one vector per class as its head, not an MLP."
            )
        if self.config.head == "none":
            self.head: nn.Module = nn.Identity()
            self.head_distill = None
            return
        kind = PerClassHead if self.per_class else MLPHead if self.config.head == "mlp" else nn.Linear
        self.head = kind(self.config.dim, num_classes)
        self.head_distill = None if self.distill_token is None else kind(self.config.dim, num_classes)

    def init_weights(self) -> None:
        """Start all parameters as the published code does."""
        for module in self.children():
            module.apply(init_module)
        for tokens in (self.class_token, self.distill_token, self.positions):
            if tokens is not None:
                trunc_normal(tokens)


def patch_network(model: Any) -> PatchNetwork:
    """The network of ours inside `model`. Raises PatchloomError for one of another library."""
    network = unwrapped(model)
    if not isinstance(network, PatchNetwork):
        raise PatchloomError(
            f"{network.config.name} is a network of another library: this needs one of patchloom's own "
            "(`patchloom models` lists them)."
        )
    return network


def _tokens(count: int, dim: int) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(1, count, dim)) if count else None
