"""The visual tokenizer: codes of images, and a codebook that follows by moving averages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import patchloom
from patchloom.errors import PatchloomError
from patchloom.models.tokenizer import Codebook, Tokenizer, TokenizerConfig, perplexity
from patchloom.weights.files import write

SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "dim": 16, "depth": 1, "codes": 24, "code_dim": 6}


def make(**options: Any) -> Tokenizer:
    torch.manual_seed(0)
    return Tokenizer(TokenizerConfig(**{**SMALL, **options})).eval()


def images(count: int = 3, *size: int) -> torch.Tensor:
    return torch.randn(count, 3, *(size or (32, 32)), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("patch", [2, 4, 8, 16])
def test_an_image_has_one_code_per_patch_and_codes_give_an_image(patch: int) -> None:
    tokenizer = make(patch_size=patch, img_size=(32, 48))
    x = images(2, 32, 48)
    codes = tokenizer.encode(x)
    assert codes.shape == (2, (32 // patch) * (48 // patch))
    assert 0 <= int(codes.min()) <= int(codes.max()) < 24
    assert tokenizer.decode(codes, x).shape == x.shape
    assert torch.equal(tokenizer(x).codes, codes)


def test_images_of_another_size_are_resized() -> None:
    tokenizer, x = make(), images(2, 64, 64)
    small = F.interpolate(x, (32, 32), mode="bicubic", antialias=True)
    assert torch.equal(tokenizer.encode(x), tokenizer.encode(small))


def test_codes_of_standardised_images_do_not_tell_brightness_and_contrast() -> None:
    tokenizer, x = make(standardise=True), images(20)
    brighter = 1.5 * x + 0.7
    # Not all are the same: a small term keeps blank images from being amplified.
    assert (tokenizer.encode(x) == tokenizer.encode(brighter)).float().mean() > 0.9
    assert (make().encode(x) == make().encode(brighter)).float().mean() < 0.9


def test_what_codes_do_not_tell_is_taken_from_another_image() -> None:
    tokenizer, x = make(standardise=True), images()
    codes = tokenizer.encode(x)
    plain, brighter = tokenizer.decode(codes, x), tokenizer.decode(codes, x + 0.7)
    torch.testing.assert_close(brighter, plain + 0.7, rtol=1e-4, atol=1e-4)


def test_blank_images_are_finite() -> None:
    tokenizer = make(standardise=True)
    blank = torch.zeros(2, 3, 32, 32)
    assert tokenizer(blank).reconstruction.isfinite().all()


def test_gradients_pass_the_codes_straight_through() -> None:
    tokenizer, x = make(), images()
    found = tokenizer(x)
    found.reconstruction.square().sum().backward()
    got = tokenizer.encoder[-2].weight.grad.clone()
    vectors = tokenizer._vectors(x)
    # the derivative by the vectors that the decoder was given, which are those of the codes
    given = tokenizer.codebook.vectors[found.codes].clone().requires_grad_()
    tokenizer._pixels(given).square().sum().backward()
    tokenizer.zero_grad()
    (vectors * given.grad).sum().backward()
    torch.testing.assert_close(tokenizer.encoder[-2].weight.grad, got, rtol=1e-4, atol=1e-5)


def test_the_code_is_the_nearest_vector() -> None:
    codebook = Codebook(50, 7)
    vectors = F.normalize(torch.randn(4, 9, 7), dim=2)
    nearest = torch.cdist(vectors.reshape(-1, 7), codebook.vectors).argmin(dim=1)
    assert torch.equal(codebook(vectors), nearest.view(4, 9))


def test_codes_move_as_averages_of_what_they_stand_for() -> None:
    codebook, decay = Codebook(5, 3), 0.7
    before, usage = codebook.vectors.clone(), codebook.usage.clone()
    vectors = F.normalize(torch.randn(40, 3), dim=1)
    codes = codebook(vectors)
    codebook.move(codebook.sums(codes, vectors), decay)
    for k in range(5):
        own = [vectors[i] for i in range(40) if int(codes[i]) == k]
        want = before[k]
        if own:
            want = F.normalize(decay * before[k] + (1 - decay) * F.normalize(sum(own), dim=0), dim=0)
        torch.testing.assert_close(codebook.vectors[k], want)
        torch.testing.assert_close(codebook.usage[k], decay * usage[k] + (1 - decay) * len(own) / 40)


def test_sums_of_the_parts_of_a_batch_are_those_of_the_whole() -> None:
    codebook = Codebook(5, 3)
    vectors = F.normalize(torch.randn(6, 4, 3), dim=2)
    codes = codebook(vectors)
    parts = [codebook.sums(codes[part], vectors[part]) for part in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(sum(parts), codebook.sums(codes, vectors))


def test_unused_codes_are_found_and_replaced() -> None:
    codebook = Codebook(4, 2)
    codebook.usage.copy_(torch.tensor([0.5, 0.02, 0.48, 0.0]))
    assert codebook.unused(0.1).tolist() == [1, 3]  # an even share is 0.25
    assert codebook.unused(0.0).tolist() == []
    new = F.normalize(torch.randn(2, 2), dim=1)
    codebook.replace(torch.tensor([1, 3]), new)
    assert torch.equal(codebook.vectors[[1, 3]], new)
    assert codebook.unused(0.9).tolist() == []


def test_perplexity_counts_codes_that_are_used_evenly() -> None:
    assert perplexity(torch.tensor([5, 5, 5, 0])) == pytest.approx(3)
    assert perplexity(torch.tensor([9, 0, 0])) == pytest.approx(1)
    assert perplexity(torch.tensor([3, 1])) == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))


def test_a_saved_tokenizer_is_loaded_again_and_is_no_network_for_other_commands(tmp_path: Path) -> None:
    tokenizer = make(standardise=True)
    write(tmp_path / "t.safetensors", tokenizer.state_dict(), {"layout": "patchloom", **tokenizer.metadata()})
    loaded: Any = patchloom.load(tmp_path / "t.safetensors")
    assert loaded.config == tokenizer.config
    x = images()
    assert torch.equal(loaded.encode(x), tokenizer.encode(x))
    with pytest.raises(PatchloomError, match="needs one of images"):
        patchloom.embed(tmp_path / "t.safetensors", [])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"patch_size": 6}, "patch_size"), ({"img_size": 20}, "divisible"), ({"codes": 1}, "codes")],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchloomError, match=message):
        TokenizerConfig(**{**SMALL, **options})


def test_images_of_other_channels_are_refused() -> None:
    with pytest.raises(PatchloomError, match="takes images"):
        make()(torch.randn(2, 1, 32, 32))
