"""What every network promises, whoever wrote it: logits, features, an embedding, a head that can be replaced.

Our own networks are `PatchNetwork`s; `timm:NAME` gives a `ForeignNetwork` with the same outer methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.models.features import Features
from patchloom.models.masking import Visible
from patchloom.models.preprocessing import Preprocessing


class Network(nn.Module):
    """A network of images (B, C, height, width), made from `config`.

    `preprocessing`, `class_names` and `label_column` travel with its weights. Subclasses define `forward`,
    `_features`, `embed` and `reset_head`.
    """

    config: Any  # a frozen Config; each class declares its own
    preprocessing: Preprocessing
    class_names: tuple[str, ...] | None
    label_column: str | None = None  # of the data that it was trained on, whose classes are `class_names`
    load_report: Any = None  # set by patchloom.load
    gradient_checkpointing = False  # recompute each block in the backward pass instead of keeping its activations
    per_class = False  # one query and one output vector per class (PatchConvNet 5.2.1)
    head_distill: nn.Module | None  # the head of a distillation token
    traces_any_size = False  # whether one traced graph holds for every image size

    def forward(self, images: Tensor) -> Any:
        """Logits (B, classes)."""
        raise NotImplementedError

    @overload
    def features(self, images: Tensor, blocks: None = None, mask: Tensor | None = None, keep: Tensor | None = None,
                 mask_token: Tensor | None = None) -> Features: ...  # fmt: skip

    @overload
    def features(self, images: Tensor, blocks: Sequence[int], mask: Tensor | None = None, keep: Tensor | None = None,
                 mask_token: Tensor | None = None) -> list[Features]: ...  # fmt: skip

    def features(
        self,
        images: Tensor,
        blocks: Sequence[int] | None = None,
        mask: Tensor | None = None,
        keep: Tensor | None = None,
        mask_token: Tensor | None = None,
    ) -> Features | list[Features]:
        """All tokens after the final norm, with their layout; or the outputs of single blocks.

        Args:
            images: (B, C, height, width), normalised. Our own networks take any size that the patch size divides and
                resize positions to it as `load(..., img_size=...)` does; ResMLP takes its own size alone.
            blocks: Blocks of the trunk, from 0, negative from the end. The result is a list with one `Features` for
                each: what the block puts out, without the final norm. Prefix tokens are among them from the block on
                that they join. Blocks after the last one asked for are not computed.
            mask: (B, N) bool, True = hidden. Hidden patches get the mask token in place of their embedding, after the
                stem; their positions are added as usual.
            keep: (B, K) indices of patches. Only these, in this order, go through the blocks, with the positions that
                they have in the image; `Features.kept` has the indices. With `mask` too, patches are hidden first.
            mask_token: D numbers, such as a learned parameter of the task; zeros by default.

        Raises PatchloomError for `keep` where the layers need every patch (ResMLP, PatchConvNet, convnets). Networks of
        other libraries take neither mask nor keep.
        """
        return self._features(images, blocks, Visible(mask, mask_token, keep))

    def _features(self, images: Tensor, blocks: Sequence[int] | None, visible: Visible) -> Any:
        raise NotImplementedError

    def embed(self, images: Tensor) -> Tensor:
        """The vector before the head, (B, D)."""
        raise NotImplementedError

    def reset_head(self, num_classes: int) -> None:
        """A head with random weights for other classes."""
        raise NotImplementedError

    def head_logits(self, images: Tensor) -> tuple[Tensor, ...]:
        """The logits of every head, (B, classes) each: of the class token, then of the distillation token."""
        return (self(images),)

    def metadata(self) -> dict[str, Any]:
        """What travels with the weights, as JSON; a checkpoint of a run holds it."""
        return {
            "config": self.config.to_json(),
            "class_names": self.class_names,
            "preprocessing": self.preprocessing.to_json(),
            "label_column": self.label_column,
        }

    def train(self, mode: bool = True) -> Network:
        """As every module's; a BatchNorm whose parameters are frozen keeps its statistics as well."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                parameters = list(module.parameters())
                if parameters and not any(p.requires_grad for p in parameters):
                    module.eval()
        return self


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and give every module in it its own mode back at the end."""
    # Module by module: some may be in evaluation mode on purpose, such as a frozen BatchNorm.
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def unwrapped(model: Any) -> Network:
    """The network inside what torch.compile, data-parallel training and weight averaging make of it."""
    inner = model
    while not isinstance(inner, Network):
        inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))
        if inner is None:
            raise PatchloomError(f"Expected a network of patchloom, not {type(model).__name__}.")
    return inner
