"""MAE's parts by themselves, against plain code and timm: masks, targets, loss, decoder."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import patchloom
from conftest import assert_close, stir
from patchloom.compat import import_timm
from patchloom.data.randomness import sample_seed
from patchloom.layers.positions import grid_sinusoids
from patchloom.tasks.pretraining.decoder import PixelDecoder
from patchloom.tasks.pretraining.patches import (
    gather_patches,
    normalised,
    patch_order,
    pixel_loss,
    to_images,
    to_patches,
    visible_count,
)


def test_patches_are_those_that_the_stem_sees_and_turn_back_into_images() -> None:
    images = torch.randn(2, 3, 8, 12)
    patches = to_patches(images, 4)
    assert patches.shape == (2, 6, 48)
    rows, columns, channels = range(4), range(4), range(3)
    # patch 4 is in the second row of patches and the second column
    expected = [images[1, c, 4 + y, 4 + x] for y in rows for x in columns for c in channels]
    assert torch.equal(patches[1, 4], torch.stack(expected))
    assert torch.equal(to_images(patches, 4, (2, 3)), images)


def test_the_mask_of_a_sample_depends_on_its_seed_alone() -> None:
    seed = sample_seed(3, epoch=2, image=5)
    order = patch_order(49, seed)
    assert np.array_equal(order, patch_order(49, seed))
    assert sorted(order) == list(range(49))
    others = [patch_order(49, sample_seed(*parts)) for parts in ((4, 2, 5), (3, 1, 5), (3, 2, 6))]
    assert not any(np.array_equal(order, other) for other in others)


def test_every_patch_is_masked_equally_often() -> None:
    kept = np.zeros(16)
    for seed in range(4000):
        kept[patch_order(16, seed)[:4]] += 1
    # 1000 expected; 5 standard deviations of a binomial variable
    assert np.abs(kept - 1000).max() < 5 * (4000 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize(
    ("patches", "ratio", "visible"), [(196, 0.75, 49), (16, 0.9, 1), (10, 0.9, 1), (64, 0.2, 51), (16, 0.937, 1)]
)
def test_the_visible_patches_are_those_that_the_ratio_leaves(patches: int, ratio: float, visible: int) -> None:
    assert visible_count(patches, ratio) == visible


def test_at_least_one_patch_is_masked() -> None:
    assert visible_count(16, 0.01) == 15


def test_the_loss_is_the_mean_over_masked_pixels_of_normalised_patches() -> None:
    images, predicted = torch.rand(2, 3, 8, 8) * 3 - 1, torch.randn(2, 2, 48)
    masked = torch.tensor([[2, 0], [1, 3]])
    got = pixel_loss(predicted, normalised(gather_patches(to_patches(images, 4), masked)))
    for b in range(2):
        total = 0.0
        for place, patch in enumerate(masked[b].tolist()):
            top, left = 4 * (patch // 2), 4 * (patch % 2)
            pixels = images[b, :, top : top + 4, left : left + 4].permute(1, 2, 0).flatten().double()
            target = (pixels - pixels.mean()) / (pixels.var() + 1e-6) ** 0.5
            total += float((predicted[b, place] - target).square().mean())
        assert float(got[b]) == pytest.approx(total / 2, rel=1e-5)


def test_predicting_the_mean_has_a_loss_near_one_and_a_flat_image_none() -> None:
    target = normalised(to_patches(torch.randn(4, 3, 16, 16), 8))
    assert_close(pixel_loss(torch.zeros_like(target), target), torch.full((4,), 1 - 1 / 192), 1e-5)
    flat = normalised(to_patches(torch.ones(1, 3, 16, 16), 8))
    assert float(pixel_loss(torch.zeros_like(flat), flat)) == 0


def test_grid_positions_tell_rows_from_columns() -> None:
    table = grid_sinusoids((2, 3), 8)
    assert table.shape == (6, 8)
    assert torch.equal(table[0, :4], table[2, :4])  # the same row
    assert torch.equal(table[1, 4:], table[4, 4:])  # the same column
    assert len({tuple(row.tolist()) for row in table}) == 6


def make_decoder(depth: int) -> PixelDecoder:
    return stir(PixelDecoder(inputs=24, dim=32, depth=depth, heads=4, grid=(2, 3), pixels=12), 0.5).eval()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("prefix", [0, 2])
def test_the_decoder_equals_one_of_timms_blocks_over_all_patches_in_their_places(depth: int, prefix: int) -> None:
    """As the authors write it: every patch in its place, all blocks on all tokens, then the masked patches."""
    decoder = make_decoder(depth)
    order = torch.stack([torch.randperm(6) for _ in range(3)])
    kept, masked = order[:, :2], order[:, 2:]
    tokens = torch.randn(3, prefix + 2, 24)
    with torch.no_grad():
        assert_close(decoder(tokens, kept, masked), plain_decoder(decoder, tokens, kept, masked, depth), 1e-5)


def plain_decoder(
    decoder: PixelDecoder, tokens: torch.Tensor, kept: torch.Tensor, masked: torch.Tensor, depth: int
) -> torch.Tensor:
    prefix = tokens.shape[1] - kept.shape[1]
    embedded = nn.functional.linear(tokens, decoder.project.weight, decoder.project.bias)
    whole = decoder.mask_token.repeat(len(tokens), 6, 1)
    for b in range(len(tokens)):
        for place, patch in enumerate(kept[b].tolist()):
            whole[b, patch] = embedded[b, prefix + place]
    x = torch.cat([embedded[:, :prefix], whole + decoder.positions], dim=1)
    for i in range(depth):
        x = timms_block(decoder.blocks[i])(x)
    x = nn.functional.layer_norm(x, (32,), decoder.norm.weight, decoder.norm.bias, 1e-6)
    x = nn.functional.linear(x, decoder.predict.weight, decoder.predict.bias)[:, prefix:]
    return torch.stack([x[b, masked[b]] for b in range(len(tokens))])


def timms_block(ours: nn.Module) -> nn.Module:
    timm = import_timm()
    norm = partial(nn.LayerNorm, eps=1e-6)
    block = timm.models.vision_transformer.Block(32, 4, qkv_bias=True, norm_layer=norm)
    mixing, ffn = ours.mixing.branches[0], ours.ffn.branches[0]
    parts = {"norm1": mixing.norm, "attn": mixing.fn, "norm2": ffn.norm, "mlp": ffn.fn}
    block.load_state_dict({f"{at}.{name}": t for at, part in parts.items() for name, t in part.state_dict().items()})
    return block.eval()


def test_every_parameter_of_encoder_and_decoder_gets_a_gradient() -> None:
    """Data-parallel training waits for each of them."""
    for name in ("deit_nano", "cait_nano"):
        encoder = patchloom.create_model(name, head="none")
        decoder = PixelDecoder(encoder.config.dim, 32, 1, 4, encoder.config.grid, 12)
        order = torch.randperm(encoder.config.patches)[None].repeat(2, 1)
        kept, masked = order[:, :4], order[:, 4:]
        images = torch.randn(2, 3, *encoder.config.img_size)
        decoder(encoder.features(images, keep=kept).tokens, kept, masked).square().sum().backward()
        lacking = [n for part in (encoder, decoder) for n, p in part.named_parameters() if p.grad is None]
        assert not lacking, f"{name}: no gradient for {lacking}"


def test_the_cost_of_the_encoder_falls_with_the_mask() -> None:
    encoder = patchloom.create_model("deit_small", head="none", depth=2)
    images, order = torch.randn(1, 3, 224, 224), torch.arange(196)[None]
    counted = {}
    for visible in (49, 196):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            encoder.features(images, keep=order[:, :visible])
        counted[visible] = counter.get_total_flops()
    assert counted[49] < 0.35 * counted[196]  # the stem sees all patches
