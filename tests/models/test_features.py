"""Outputs of single blocks, masked and kept patches, positions on call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patchloom
from conftest import assert_close, stir
from patchloom.errors import PatchloomError
from patchloom.models.patch_network import PatchNetwork

VITS = ["deit_nano", "deit3_nano", "cait_nano"]
FAMILIES = [*VITS, "resmlp_nano", "patchconvnet_nano"]


def make(name: str, **options: Any) -> PatchNetwork:
    model = stir(patchloom.create_model(name, **{"num_classes": 5, "depth": 3, **options}), 0.5).eval()
    assert isinstance(model, PatchNetwork)
    return model.requires_grad_(False)


def images(batch: int = 2, size: tuple[int, int] = (32, 32)) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))


def outputs_of_blocks(model: PatchNetwork, x: Tensor) -> list[Tensor]:
    """What hooks on the blocks see."""
    seen: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, out: seen.append(out)) for block in model.blocks]
    model.features(x)
    for hook in hooks:
        hook.remove()
    return [out.flatten(1, 2) if out.ndim == 4 else out for out in seen]


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_are_what_each_block_puts_out(name: str) -> None:
    model, x = make(name), images()
    want = outputs_of_blocks(model, x)
    got = model.features(x, blocks=[2, 0, -1])
    for features, i in zip(got, (2, 0, 2), strict=True):
        assert_close(features.tokens, want[i], 1e-6)
        assert features.grid.shape == (2, 96, 8, 8)
        assert torch.equal(features.grid[:, :, 1, 3], features.patches[:, 11])


def test_later_blocks_are_not_computed() -> None:
    model = make("deit_nano")
    model.blocks[2].register_forward_hook(lambda *_: pytest.fail("block 2 was computed"))
    assert len(model.features(images(), blocks=[1])) == 1
    assert len(model.features(images(), blocks=(i for i in (0, 1)))) == 2  # type: ignore[arg-type]


def test_prefix_tokens_are_in_the_layout_from_the_block_on_that_they_join() -> None:
    late = make("deit_nano", class_token_at=1)
    assert [f.layout.prefix for f in late.features(images(), blocks=[0, 1, 2])] == [0, 1, 1]
    assert [f.layout.prefix for f in make("cait_nano").features(images(), blocks=[0, 2])] == [0, 0]
    both = make("deit_nano", distilled=True).features(images(), blocks=[0])[0]
    assert both.prefix.shape == (2, 2, 96)


@pytest.mark.parametrize("blocks", [[3], [-4], [], 1, ["0"]])
def test_blocks_that_are_not_there_are_refused(blocks: Any) -> None:
    with pytest.raises(PatchloomError, match="3 of them"):
        make("deit_nano").features(images(), blocks=blocks)


@pytest.mark.parametrize("name", VITS)
def test_kept_patches_are_those_of_a_network_that_never_had_the_others(name: str) -> None:
    """Attention without the dropped tokens is attention whose scores for them are minus infinity."""
    model, x = make(name), images()
    keep = torch.stack([torch.randperm(64)[:20] for _ in range(2)])
    sizes: list[int] = []
    model.blocks[1].register_forward_hook(lambda _, given, __: sizes.append(given[0].shape[1]))
    got = model.features(x, keep=keep)
    prefix = got.layout.prefix
    assert got.tokens.shape == (2, prefix + 20, 96)
    assert sizes == [20 + (prefix if model.join_at == 0 else 0)]
    embedded = model.embed_patches(x, got.layout)
    assert embedded.shape == (2, 64, 96)
    picked = torch.stack([row[index] for row, index in zip(embedded, keep, strict=True)])
    want = model.norm(model.aggregate(model.trunk(picked, got.layout), prefix))
    assert_close(got.tokens, want, 1e-6)
    assert torch.equal(got.kept, keep)
    with pytest.raises(PatchloomError, match="20 of 64 patches"):
        _ = got.grid


@pytest.mark.parametrize("name", VITS)
def test_the_order_of_kept_patches_is_theirs_alone(name: str) -> None:
    """Tokens carry their positions, so a permutation of `keep` permutes the tokens and leaves the prefix."""
    model, x, order = make(name), images(), torch.randperm(64)
    want, got = model.features(x), model.features(x, keep=order.expand(2, 64))
    assert_close(got.prefix, want.prefix, 1e-5)
    assert_close(got.patches, want.patches[:, order], 1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("resmlp_nano", "every pair of patches"), ("patchconvnet_nano", "whole map")],
)
def test_families_that_need_every_patch_refuse_keep(name: str, reason: str) -> None:
    with pytest.raises(PatchloomError, match=reason):
        make(name).features(images(), keep=torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize(
    "keep",
    [torch.zeros(2, 3), torch.zeros(1, 3).long(), torch.zeros(2, 0).long(), torch.full((2, 3), 64), [[0], [1]]],
)
def test_wrong_indices_are_refused(keep: Any) -> None:
    with pytest.raises(PatchloomError, match="patch indices"):
        make("deit_nano").features(images(), keep=keep)


@pytest.mark.parametrize("name", FAMILIES)
def test_masked_patches_are_not_seen(name: str) -> None:
    options = {"stem": "linear"} if name == "patchconvnet_nano" else {}  # its own stem overlaps
    model, x = make(name, **options), images()
    mask = torch.zeros(2, 64, dtype=torch.bool)
    mask[:, 9:30] = True
    other = x.clone()
    where = mask.view(2, 1, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3).expand_as(x)
    other[where] = torch.randn(int(where.sum()))
    assert not torch.equal(model.features(x).tokens, model.features(other).tokens)
    assert torch.equal(model.features(x, mask=mask).tokens, model.features(other, mask=mask).tokens)
    nothing = torch.zeros_like(mask)
    assert torch.equal(model.features(x, mask=nothing).tokens, model.features(x).tokens)


def test_the_mask_token_stands_in_for_an_embedding_and_learns() -> None:
    model, x = make("deit_nano"), images()
    token = nn.Parameter(torch.randn(96))
    mask = torch.rand(2, 64) < 0.4
    layout = model.token_layout
    got = model.embed_patches(x, layout) * ~mask[..., None] + (token + model.positions[:, 1:]) * mask[..., None]
    want = model.norm(model.trunk(got, layout))
    features = model.features(x, mask=mask, mask_token=token)
    assert_close(features.tokens, want.detach(), 1e-6)
    features.patches[mask].square().mean().backward()
    assert float(token.grad.abs().max()) > 0
    assert_close(
        model.features(x, mask=mask, mask_token=torch.zeros(1, 1, 96)).tokens, model.features(x, mask=mask).tokens, 0
    )


@pytest.mark.parametrize("mask", [torch.zeros(2, 64), torch.zeros(2, 63).bool(), torch.zeros(1, 64).bool(), "all"])
def test_wrong_masks_are_refused(mask: Any) -> None:
    with pytest.raises(PatchloomError, match=r"bool tensor \(2, 64\)"):
        make("deit_nano").features(images(), mask=mask)
    with pytest.raises(PatchloomError, match="96 numbers"):
        make("deit_nano").features(images(), mask=torch.ones(2, 64).bool(), mask_token=torch.zeros(95))


@pytest.mark.parametrize("options", [{}, {"distilled": True}])
@pytest.mark.parametrize("name", VITS)
def test_another_size_is_what_loading_at_that_size_gives(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = make(name, **options)
    patchloom.save(model, tmp_path / "a.safetensors")
    for size in ((48, 40), (16, 64)):
        x = images(2, size)
        loaded = patchloom.load(tmp_path / "a.safetensors", img_size=size)
        with torch.no_grad():
            assert_close(model(x), loaded(x), 1e-6)
            assert_close(patchloom.fuse(model)(x), loaded(x), 1e-5)
        assert model.features(x).layout[1:] == (size[0] // 4, size[1] // 4)


def test_resized_positions_get_gradients() -> None:
    model = make("deit_nano").requires_grad_(True)
    model(images(1, (48, 40))).sum().backward()
    assert model.positions is not None
    assert float(model.positions.grad.abs().min(dim=-1).values.max()) > 0


def test_half_precision_resizes_in_float32() -> None:
    model, size = make("deit_nano"), (12, 10)
    want = model.patch_positions(size).bfloat16()
    stored = model.positions.data.bfloat16()
    half = make("deit_nano").bfloat16()
    half.positions.data = stored
    assert half.patch_positions(size).dtype == torch.bfloat16
    assert_close(half.patch_positions(size).float(), want.float(), 1e-2)


@pytest.mark.parametrize("name", VITS)
def test_a_fused_copy_takes_masks_kept_patches_and_sizes_but_has_no_blocks(name: str) -> None:
    model, x = make(name), images()
    fused = patchloom.fuse(model)
    keep, mask = torch.arange(5, 25).expand(2, 20), torch.rand(2, 64) < 0.5
    assert_close(fused.features(x, keep=keep).tokens, model.features(x, keep=keep).tokens, 1e-5)
    assert_close(fused.features(x, mask=mask).tokens, model.features(x, mask=mask).tokens, 1e-5)
    with pytest.raises(PatchloomError, match="network that it was made from"):
        fused.features(x, blocks=[0])


def _leak(stem: str, norm: str, training: bool, where: str) -> float:
    """How far visible tokens of the stem move when the pixels of masked patches change."""
    torch.manual_seed(2)
    model = patchloom.create_model(
        "deit_nano", img_size=32, patch_size=8, depth=2, stem=stem, stem_norm=norm, num_classes=2
    )
    for buffer in model.stem.buffers():  # statistics of BatchNorm that are not 0 and 1
        buffer.copy_(buffer + buffer.is_floating_point() * 0.3)
    model.train(training)
    x, mask = torch.randn(4, 3, 32, 32), torch.rand(4, 16) < 0.4
    pixels = mask.view(4, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
    changed = torch.where(pixels, torch.randn_like(x), x)
    with torch.no_grad():
        if where == "stem":
            found = [model.stem(images)[~mask] for images in (x, changed)]
        else:
            found = [model.features(images, mask=mask, mask_token=torch.ones(96)).tokens for images in (x, changed)]
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize("where", ["stem", "network"])
@pytest.mark.parametrize(
    ("stem", "norm", "training"),
    [
        ("linear", "batch", True),
        ("hmlp", "batch", False),
        ("hmlp", "layer", False),
        ("hmlp", "layer", True),
    ],
)
def test_masking_after_a_stem_without_overlap_equals_masking_before_it(
    stem: str, norm: str, training: bool, where: str
) -> None:
    """ "Three things", section 5: nothing of a masked patch reaches the tokens of others."""
    assert _leak(stem, norm, training, where) <= 1e-6


@pytest.mark.parametrize("where", ["stem", "network"])
@pytest.mark.parametrize(("stem", "norm", "training"), [("conv", "batch", False), ("hmlp", "batch", True)])
def test_convolutions_that_overlap_and_statistics_of_a_batch_let_masked_patches_through(
    stem: str, norm: str, training: bool, where: str
) -> None:
    assert _leak(stem, norm, training, where) > 1e-3
