"""The speed part of benchmarks/pretraining.py: whole steps of DINO and MAE beside lightly's modules.

Both sides have the same network with the same weights, the same crops and masks, and compute the same loss. Lightly's
side is put together as its examples are, with timm's network and torch's AdamW. It gets crops that are normalised
already; ours normalises them in the step.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import patchloom
import patchloom.compat
from patchloom.benching.timing import interleaved, ratio
from patchloom.data.images import to_input
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.registry import find_recipe
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.decoder import PixelDecoder
from patchloom.tasks.pretraining.method import Setup, find_method
from patchloom.tasks.pretraining.patches import patch_order
from patchloom.training.optimizers import make_optimizer
from steps import bytes_kept

_RATE = 1e-6  # the steps are timed, not learned from
_STEPS = 100  # of the run that a step is part of
_STEP = 1  # after the first epoch, in which DINO's last layer is frozen
_DRAWS = 3  # of stochastic depth, over which the memory is averaged


@dataclass(frozen=True)
class Case:
    """A network of timm's at one image size, with a recipe of ours."""

    recipe: str
    network: dict[str, Any]  # of timm's VisionTransformer
    batch: int
    settings: dict[str, Any] = field(default_factory=dict)


_SMALL = {"img_size": 224, "patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
_NANO = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3}
_TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
CASES = {
    "DINO, ViT-S at 224": Case("dino", _SMALL, 4),
    "DINO, nano at 32": Case("dino@small", _NANO, 64),
    "MAE, ViT-S at 224": Case("mae", _SMALL, 8),
    "MAE, nano at 32": Case("mae@small", _NANO, 64),
}
_FEW = {"prototypes": 16, "head_hidden": 16, "head_bottleneck": 8}
TINY = {
    "DINO, tiny": Case("dino@small", _TINY, 2, _FEW),
    "MAE, tiny": Case("mae@small", _TINY, 2, {"decoder_depth": 2, "decoder_dim": 16}),
}


def available() -> bool:
    return find_spec("lightly") is not None


def speed_rows(rounds: int, tiny: bool = False) -> Iterator[dict[str, Any]]:
    if not available():
        raise patchloom.PatchloomError("lightly is not installed: pip install lightly, or leave out --parts speed.")
    for name, case in (TINY if tiny else CASES).items():
        yield measure(name, case, rounds)


def measure(name: str, case: Case, rounds: int) -> dict[str, Any]:
    recipe = find_recipe(case.recipe).replace(
        teacher_warmup_epochs=0.0, **case.settings
    )  # one temperature on both sides
    theirs = (TheirDino if recipe.method == "dino" else TheirMae)(case, recipe)
    ours = Ours(case, recipe, theirs.network)
    theirs.give_weights(ours)
    batch, given = ours.draw(case.batch)
    optimizer = make_optimizer(ours.trained(), recipe)
    for group in optimizer.param_groups:
        group["lr"] = _RATE
    theirs_optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=_RATE)
    losses = {"loss": equal_conditions(ours, batch), "peer_loss": equal_conditions(theirs, given)}
    calls = {
        "lightly": partial(step, theirs, theirs_optimizer, given),
        "ours": partial(step, ours, optimizer, batch),
    }
    draws = _DRAWS if recipe.drop_path else 1
    kept = [
        statistics.mean(bytes_kept(side, images) for _ in range(draws))
        for side, images in ((ours, batch), (theirs, given))
    ]
    times = interleaved(calls, rounds)
    middle, low, high = ratio(times, "lightly", "ours")
    return {
        "part": "speed", "model": name, "peer": f"lightly {version_of_lightly()}", "batch": case.batch,
        "images_per_s": case.batch / statistics.median(times["ours"]),
        "peer_images_per_s": case.batch / statistics.median(times["lightly"]), "ratio": middle, "low": low,
        "high": high, "kept": kept[0] / kept[1], "kept_megabytes": kept[0] / 2**20,
        "peer_kept_megabytes": kept[1] / 2**20, "rounds": rounds, "threads": torch.get_num_threads(), **losses,
    }  # fmt: skip


def version_of_lightly() -> str:
    try:
        return version("lightly")
    except PackageNotFoundError:  # a copy of its source
        return ""


def step(side: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Forward, backward, update, and what follows an update."""
    optimizer.zero_grad(set_to_none=True)
    side(batch).backward()
    optimizer.step()
    side.after_step()


@torch.no_grad()
def equal_conditions(side: nn.Module, batch: Any) -> float:
    """The loss without stochastic depth: the same on both sides."""
    modes = {module: module.training for module in side.modules()}
    loss = float(side.eval()(batch))
    for module, training in modes.items():
        module.training = training
    return loss


def same_drop_path(network: nn.Module, rate: float) -> None:
    """One rate in every block, as ours have it; timm's rises with the depth."""
    import timm

    for block in network.blocks:  # type: ignore[union-attr]
        for name, _ in [*block.named_children()]:
            if name.startswith("drop_path"):
                setattr(block, name, timm.layers.DropPath(rate) if rate else nn.Identity())


def timm_network(case: Case, recipe: Recipe, **options: Any) -> Any:
    from timm.models.vision_transformer import VisionTransformer

    network = VisionTransformer(**case.network, num_classes=0, **options)
    same_drop_path(network, recipe.drop_path)
    return network.train()


class Ours(nn.Module):
    """The loss of a method of the library, from crops as the loader gives them: (B, height, width, 3) uint8."""

    def __init__(self, case: Case, recipe: Recipe, network: Any) -> None:
        super().__init__()
        # Lightly's examples have targets that are not normalised within each patch, and so both sides here.
        recipe = recipe.replace(norm_pixels=False) if recipe.method == "mae" else recipe
        weights = {name: value.clone() for name, value in network.state_dict().items()}
        options = {"heads": case.network["num_heads"], "drop_path": recipe.drop_path, "drop_path_decay": "uniform"}
        trunk: Any = patchloom.load(weights, **options)
        config = PretrainingConfig("random images", labels=None, model=trunk.config, start=object())  # type: ignore[arg-type]
        self.method = find_method(recipe.method)(Setup(config, recipe, trunk, steps_per_epoch=1, steps=_STEPS))
        self.parts = self.method.modules
        self.recipe, self.trunk_ = recipe, trunk
        for name in self.trained():
            self.parts[name].train()

    def trained(self) -> nn.ModuleDict:
        return nn.ModuleDict({name: part for name, part in self.parts.items() if name not in self.method.frozen})

    def forward(self, batch: Any) -> Tensor:
        (loss,) = self.method.losses(batch, _STEP, 0).values()
        return loss.mean()

    def after_step(self) -> None:
        self.method.after_step(_STEP)

    def draw(self, batch: int) -> tuple[Any, Any]:
        """Random images for ours, and the same as lightly's side takes them."""
        preprocessing = self.trunk_.preprocessing
        size = preprocessing.img_size

        def images(height: int, width: int) -> Tensor:
            return torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8)

        if self.recipe.method == "dino":
            local = [images(*self.method.local_size) for _ in range(self.recipe.local_crops)]  # type: ignore[attr-defined]
            crops = (images(*size), images(*size), *local)
            return crops, tuple(to_input(crop, preprocessing).contiguous() for crop in crops)
        patches = self.method.patches  # type: ignore[attr-defined]
        order = torch.stack([torch.as_tensor(patch_order(patches, seed)) for seed in range(batch)])
        whole = images(*size)
        visible = self.method.visible  # type: ignore[attr-defined]
        given = to_input(whole, preprocessing).contiguous(), order[:, :visible], order[:, visible:]
        return {"image": whole, "order": order}, given


class TheirDino(nn.Module):
    """lightly's head, loss and moving average around timm's network, as in its example: a forward pass per crop."""

    def __init__(self, case: Case, recipe: Recipe) -> None:
        from lightly.loss import DINOLoss
        from lightly.models.modules import DINOProjectionHead

        super().__init__()
        self.network = timm_network(case, recipe, dynamic_img_size=True)
        sizes = (recipe.head_hidden, recipe.head_bottleneck, recipe.prototypes)
        self.head = DINOProjectionHead(case.network["embed_dim"], *sizes)
        self.teacher = copy.deepcopy(self.network).requires_grad_(False).eval()
        self.teacher_head = DINOProjectionHead(case.network["embed_dim"], *sizes)  # its weight norm cannot be copied
        self.teacher_head.load_state_dict(self.head.state_dict())
        self.teacher_head.requires_grad_(False)
        temperature = recipe.teacher_temperature
        self.loss = DINOLoss(recipe.prototypes, temperature, temperature, center_momentum=recipe.center_momentum)
        self.momentum = recipe.teacher_momentum

    def forward(self, crops: Sequence[Tensor]) -> Tensor:
        teacher = [self.teacher_head(self.teacher(crop)) for crop in crops[:2]]
        student = [self.head(self.network(crop)) for crop in crops]
        loss: Tensor = self.loss(teacher, student, epoch=0)
        return loss

    def after_step(self) -> None:
        from lightly.models.utils import update_momentum

        update_momentum(self.network, self.teacher, m=self.momentum)
        update_momentum(self.head, self.teacher_head, m=self.momentum)

    @torch.no_grad()
    def give_weights(self, ours: Ours) -> None:
        """Our heads get the weights of this one."""
        layers = [layer for layer in self.head.layers if isinstance(layer, nn.Linear)]
        for name in ("projector", "teacher_projector"):
            head: Any = ours.parts[name]
            mine = [layer for layer in head.mlp if isinstance(layer, nn.Linear)]
            for copied, layer in zip(mine, layers, strict=True):
                copied.load_state_dict(layer.state_dict())
            head.prototypes.weight.copy_(self.head.last_layer.weight)


class TheirMae(nn.Module):
    """lightly's encoder and decoder, as in its example."""

    def __init__(self, case: Case, recipe: Recipe) -> None:
        from lightly.models.modules import MAEDecoderTIMM, MaskedVisionTransformerTIMM

        super().__init__()
        self.network = timm_network(case, recipe)
        self.encoder = MaskedVisionTransformerTIMM(self.network)
        self.patch = case.network["patch_size"]
        self.decoder = MAEDecoderTIMM(
            num_patches=self.network.patch_embed.num_patches, patch_size=self.patch,
            embed_dim=case.network["embed_dim"], decoder_embed_dim=recipe.decoder_dim,
            decoder_depth=recipe.decoder_depth, decoder_num_heads=recipe.decoder_heads,
        )  # fmt: skip
        self.loss = nn.MSELoss()

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        from lightly.models import utils

        images, kept, masked = batch
        class_token = kept.new_zeros(len(kept), 1)
        kept, masked = torch.cat([class_token, kept + 1], dim=1), masked + 1
        encoded = self.decoder.embed(self.encoder.encode(images, idx_keep=kept))
        tokens = utils.repeat_token(self.decoder.mask_token, (len(images), self.encoder.sequence_length))
        tokens = utils.set_at_index(tokens, kept, encoded.type_as(tokens))
        predicted = self.decoder.predict(utils.get_at_index(self.decoder.decode(tokens), masked))
        targets = utils.get_at_index(utils.patchify(images, self.patch), masked - 1)
        loss: Tensor = self.loss(predicted, targets)
        return loss

    def after_step(self) -> None:
        """Nothing follows the update."""

    @torch.no_grad()
    def give_weights(self, ours: Ours) -> None:
        """Our decoder gets the weights of this one, and this one our positions."""
        decoder: PixelDecoder = ours.parts["decoder"]  # type: ignore[assignment]
        names = {
            "project": "decoder_embed", "blocks": "decoder_blocks", "mixing.branches.0.norm": "norm1",
            "mixing.branches.0.fn": "attn", "ffn.branches.0.norm": "norm2", "ffn.branches.0.fn": "mlp",
            "norm.": "decoder_norm.", "predict": "decoder_pred",
        }  # fmt: skip
        theirs = self.decoder.state_dict()
        for name, value in decoder.state_dict().items():
            found = name
            for own, other in names.items():
                found = found.replace(own, other) if own != "norm." or found.startswith(own) else found
            value.copy_(theirs[found])
        self.decoder.decoder_pos_embed[:, 1:] = decoder.positions
