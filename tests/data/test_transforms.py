"""Augmentations: what the facts say of each, and that every draw is a function of the seed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from patchloom.data.randomness import seed_of, seeded_globals
from patchloom.data.transforms import (
    Augment,
    _posterize,
    jitter,
    one_of_three,
    random_resized_crop,
    simple_random_crop,
    small_affine,
)

BICUBIC = Image.Resampling.BICUBIC


def photo(width: int = 96, height: int = 72) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([rows * 2, columns * 2, (rows + columns) % 255], axis=-1).astype(np.uint8))


@pytest.mark.parametrize("augmentation", ["rand", "auto", "trivial", "three", "none"])
@pytest.mark.parametrize("crop", ["rrc", "src"])
def test_a_seed_decides_everything_and_touches_nothing(augmentation: str, crop: str) -> None:
    augment = Augment(augmentation=augmentation, crop=crop, color_jitter=0.3, affine=0.1)
    images = [augment(photo(), (32, 48), seed) for seed in range(20)]
    assert all(image.shape == (32, 48, 3) and image.dtype == np.uint8 for image in images)
    assert len({image.tobytes() for image in images}) > 15
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.random(), np.random.random(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert np.array_equal(augment(photo(), (32, 48), 7), images[7])
    assert (random.random(), np.random.random(), torch.rand(1).item()) == before


def test_the_random_resized_crop_has_the_published_areas_and_aspects() -> None:
    """Read off a picture whose pixels say where they come from."""
    areas, aspects, image = [], [], photo(120, 120)
    for seed in range(400):
        box = np.asarray(random_resized_crop(image, (120, 120), random.Random(seed), Image.Resampling.NEAREST)).astype(
            float
        )
        height, width = np.ptp(box[:, 0, 0]) / 2 + 1, np.ptp(box[0, :, 1]) / 2 + 1
        areas.append(height * width / 120**2)
        aspects.append(width / height)
    assert 0.06 < min(areas) < 0.12
    assert 0.95 < max(areas) <= 1
    assert 0.42 < np.mean(areas) < 0.56  # U(0.08, 1), but large ones often do not fit their aspect
    assert 0.7 < min(aspects) < 0.8
    assert 1.25 < max(aspects) < 1.45
    kept = np.asarray(random_resized_crop(image, (120, 120), random.Random(0), BICUBIC, 0.9)).astype(float)
    assert np.ptp(kept[:, 0, 0]) > 170


def test_the_simple_random_crop_shifts_by_at_most_four_pixels() -> None:
    image = photo(96, 64)
    seen = set()
    for seed in range(100):
        crop = np.asarray(simple_random_crop(image, (64, 64), random.Random(seed), BICUBIC))
        assert crop.shape == (64, 64, 3)
        seen.add(crop[8, 8].tobytes())
    assert len(seen) > 50
    assert simple_random_crop(photo(3, 3), (4, 4), random.Random(0), BICUBIC).size == (4, 4)


def test_three_augment_is_exactly_one_of_three_each_a_third() -> None:
    image = photo()
    grey, solar = ImageOps.grayscale(image).convert("RGB"), ImageOps.solarize(image, 128)
    counts = {"grey": 0, "solar": 0, "blur": 0}
    for seed in range(600):
        out = one_of_three(image, random.Random(seed)).tobytes()
        counts["grey" if out == grey.tobytes() else "solar" if out == solar.tobytes() else "blur"] += 1
    assert all(160 < count < 240 for count in counts.values())


def test_jitter_stays_in_its_range_and_has_no_hue() -> None:
    grey = Image.new("RGB", (4, 4), (100, 100, 100))
    values = [jitter(grey, random.Random(seed), 0.3).getpixel((0, 0)) for seed in range(200)]
    assert all(len(set(value)) == 1 for value in values)
    assert 65 <= min(value[0] for value in values) < 75
    assert 125 < max(value[0] for value in values) <= 135


def test_small_moves_keep_a_plain_image_and_the_middle() -> None:
    plain = Image.new("RGB", (16, 16), (9, 80, 200))
    assert small_affine(plain, random.Random(3), 0.2).tobytes() == plain.tobytes()
    dot = Image.new("RGB", (33, 33))
    dot.paste((255, 255, 255), (14, 14, 19, 19))
    for seed in range(50):
        moved = np.asarray(small_affine(dot, random.Random(seed), 0.1))[..., 0]
        rows, columns = np.nonzero(moved > 100)
        assert abs(rows.mean() - 16) <= 0.1 * 33 + 1
        assert abs(columns.mean() - 16) <= 0.1 * 33 + 1


def test_posterize_to_no_bits_is_black() -> None:
    assert _posterize(photo(), 0).getextrema() == ((0, 0), (0, 0), (0, 0))
    assert _posterize(photo(), 8).tobytes() == photo().tobytes()


def test_flips_happen_half_of_the_time_or_never() -> None:
    image = photo(32, 32)
    for flip, low, high in ((0.5, 70, 130), (0.0, 0, 0), (1.0, 200, 200)):
        augment = Augment(flip=flip, crop_scale=1.0)
        mirrored = 0
        for seed in range(200):
            out = augment(image, (32, 32), seed).astype(int)
            mirrored += out[16, 0, 1] > out[16, -1, 1]
        assert low <= mirrored <= high


def test_seeds_differ_for_near_inputs() -> None:
    assert len({seed_of(a, b, c) for a in range(10) for b in range(10) for c in range(10)}) == 1000
    assert seed_of(1, "order") != seed_of(1, "image")
    with seeded_globals(5):
        first = random.random(), np.random.random(), torch.rand(1).item()
    with seeded_globals(5):
        assert (random.random(), np.random.random(), torch.rand(1).item()) == first


@pytest.mark.parametrize("native_pixels", [True, False])
def test_the_padded_crop_is_a_window_of_the_image_in_black(
    native_pixels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native_pixels:
        monkeypatch.setattr("patchloom.data.native.available", lambda: False)
    pixels = np.random.default_rng(0).integers(1, 256, (32, 32, 3), np.uint8)
    padded = np.pad(pixels, ((4, 4), (4, 4), (0, 0)))
    windows = {padded[y : y + 32, x : x + 32].tobytes() for y in range(9) for x in range(9)}
    augment = Augment(crop="pad", flip=0)
    seen = {augment(Image.fromarray(pixels), (32, 32), seed).tobytes() for seed in range(800)}
    assert seen <= windows
    assert len(seen) > 75


def test_src_axis_moves_along_x_only() -> None:
    rows = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None, None], (64, 64, 3)).copy()
    assert len({Augment(crop="src_axis", flip=0)(Image.fromarray(rows), (64, 64), s).tobytes() for s in range(40)}) == 1
    across = Image.fromarray(rows.transpose(1, 0, 2).copy())
    assert len({Augment(crop="src_axis", flip=0)(across, (64, 64), s).tobytes() for s in range(200)}) == 9


@pytest.mark.parametrize("names", [("gray",), ("blur",), ("solarize", "gray")])
def test_three_augment_draws_from_the_named_parts_only(names: tuple[str, ...]) -> None:
    image = photo(32, 32)
    results = [np.asarray(one_of_three(image.copy(), random.Random(seed), names)) for seed in range(30)]
    grey = sum(bool((result[..., 0] == result[..., 2]).all()) for result in results)
    assert (grey == 30) if names == ("gray",) else (grey == 0) if names == ("blur",) else (5 < grey < 25)
