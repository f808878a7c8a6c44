"""The picture steps in C++: pixel by pixel those of Pillow, which is their plain form."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from patchloom.data import native
from patchloom.data.decoding import decode
from patchloom.data.images import to_image
from patchloom.data.loader import Samples
from patchloom.data.mixing import normalise
from patchloom.data.order import Order, Steps
from patchloom.data.sources import FileSource, Item
from patchloom.data.transforms import Augment, OneView, pad_and_crop, simple_random_crop
from patchloom.data.workers import load_batches
from patchloom.kernels import libraries

BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if reason := native.why_not():
        pytest.skip(f"{reason} The C++ picture steps are untested.")


def noise(height: int, width: int, seed: int = 0, harsh: bool = False) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return (pixels & 128) // 128 * np.uint8(255) if harsh else pixels


def rgbx(pixels: np.ndarray) -> np.ndarray:
    return np.concatenate([pixels, np.full((*pixels.shape[:2], 1), 77, np.uint8)], axis=2)


side = st.integers(1, 300)


@settings(max_examples=150, deadline=None)
@given(side, side, st.integers(1, 240), st.integers(1, 240), st.sampled_from([BICUBIC, BILINEAR]), st.booleans())
def test_resizing_is_pillows(
    height: int, width: int, to_height: int, to_width: int, how: Image.Resampling, harsh: bool
) -> None:
    pixels = noise(height, width, harsh=harsh)
    want = np.asarray(Image.fromarray(pixels).resize((to_width, to_height), how))
    for form in (pixels, rgbx(pixels)):
        assert np.array_equal(native.resize(form, (to_height, to_width), how)[..., :3], want)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 60), st.integers(1, 60))
def test_an_area_reads_nothing_around_it(top: int, left: int, height: int, width: int) -> None:
    pixels = noise(101, 103)
    want = Image.fromarray(pixels).crop((left, top, left + width, top + height)).resize((48, 64), BICUBIC)
    for form in (pixels, rgbx(pixels)):
        area = form[top : top + height, left : left + width]
        assert np.array_equal(native.resize(area, (64, 48), BICUBIC)[..., :3], np.asarray(want))


@pytest.mark.parametrize("factor", [0.0, 0.7, 0.9999, 1.0, 1.0001, 1.3, 2.0])
def test_every_value_blends_with_every_mean_as_pillow_does(factor: float) -> None:
    """Contrast: 256 values beside so many of one value that the mean is near it, for each such value."""
    seen = set()
    for filler in range(256):
        values = np.concatenate([np.arange(256), np.full(256 * 64, filler)]).astype(np.uint8)
        pixels = np.repeat(values.reshape(65, 256, 1), 3, axis=2)
        want = ImageEnhance.Contrast(Image.fromarray(pixels)).enhance(factor)
        assert native.pack(native.enhance(rgbx(pixels), ImageEnhance.Contrast, factor)).tobytes() == want.tobytes()
        seen.add(int(pixels.mean() + 0.5))
    assert len(seen) >= 252


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 2), st.sampled_from(sorted(native.ENHANCERS, key=str)))
def test_enhancers_are_pillows(seed: int, factor: float, enhancer: type) -> None:
    pixels = noise(37, 53, seed)
    want = enhancer(Image.fromarray(pixels)).enhance(factor)
    assert native.pack(native.enhance(rgbx(pixels), enhancer, factor)).tobytes() == want.tobytes()


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.one_of(st.floats(0.1, 2), st.floats(2, 120)), st.booleans())
def test_blurring_is_pillows(height: int, width: int, sigma: float, harsh: bool) -> None:
    pixels = noise(height, width, harsh=harsh)
    want = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(sigma))
    assert native.pack(native.blur(rgbx(pixels), sigma)).tobytes() == want.tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70))
def test_grey_solarised_and_mirrored_are_pillows(height: int, width: int) -> None:
    pixels = noise(height, width)
    image = Image.fromarray(pixels)
    assert native.pack(native.grey(rgbx(pixels))).tobytes() == ImageOps.grayscale(image).convert("RGB").tobytes()
    assert native.pack(native.solarise(rgbx(pixels))).tobytes() == ImageOps.solarize(image, 128).tobytes()
    assert native.pack(native.mirror(rgbx(pixels))).tobytes() == ImageOps.mirror(image).tobytes()
    assert to_image(rgbx(pixels)).tobytes() == image.tobytes()


def test_grey_of_every_colour_is_pillows() -> None:
    for red in range(0, 256, 5):
        greens, blues = np.mgrid[0:256, 0:256].astype(np.uint8)
        pixels = np.stack([np.full_like(greens, red), greens, blues], axis=2)
        want = ImageOps.grayscale(Image.fromarray(pixels)).convert("RGB")
        assert native.pack(native.grey(rgbx(pixels))).tobytes() == want.tobytes()


@pytest.mark.parametrize("form", [Image.fromarray, rgbx])
def test_the_simple_random_crop_is_that_of_a_reflected_picture(form: type) -> None:
    pixels = noise(90, 70)
    resized = np.asarray(Image.fromarray(pixels).resize((64, int(90 * 64 / 70)), BICUBIC))
    padded = np.pad(resized, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    for seed in range(40):
        draw = random.Random(seed)
        top, left = draw.randint(0, padded.shape[0] - 64), draw.randint(0, padded.shape[1] - 64)
        crop = np.asarray(simple_random_crop(form(pixels), (64, 64), random.Random(seed), BICUBIC))
        assert np.array_equal(crop[..., :3], padded[top : top + 64, left : left + 64])


@pytest.mark.parametrize("form", [Image.fromarray, rgbx])
def test_the_crop_along_one_axis_stays_in_the_middle_of_the_height(form: type) -> None:
    pixels = noise(90, 64)
    padded = np.pad(pixels, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    lefts = set()
    for seed in range(60):
        crop = np.asarray(simple_random_crop(form(pixels), (64, 64), random.Random(seed), BICUBIC, one_axis=True))
        found = [x for x in range(9) if np.array_equal(crop[..., :3], padded[17 : 17 + 64, x : x + 64])]
        assert len(found) == 1
        lefts.update(found)
    assert lefts == set(range(9))


@pytest.mark.parametrize("form", [Image.fromarray, rgbx])
def test_pad_and_crop_is_a_crop_of_the_picture_with_a_black_border(form: type) -> None:
    pixels = noise(32, 32)
    padded = np.pad(pixels, ((4, 4), (4, 4), (0, 0)))
    places = set()
    for seed in range(40):
        crop = np.asarray(pad_and_crop(form(pixels), (32, 32), random.Random(seed), BICUBIC))[..., :3]
        found = [(y, x) for y in range(9) for x in range(9) if np.array_equal(crop, padded[y : y + 32, x : x + 32])]
        assert len(found) == 1
        places.update(found)
    assert len(places) > 20


def test_normalising_is_the_formula() -> None:
    images = torch.from_numpy(np.stack([noise(13, 17, seed) for seed in range(5)]))
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    scale = torch.tensor(std)[:, None, None] * 255
    want = (images.permute(0, 3, 1, 2).float() - torch.tensor(mean)[:, None, None] * 255) / scale
    assert torch.equal(normalise(images, mean, std), want)
    assert torch.equal(normalise(images[:, ::2, :, :], mean, std), want[:, :, ::2])
    assert torch.equal(normalise(images[..., :1], mean[:1], std[:1]), want[:, :1])


AUGMENTS = [
    Augment(augmentation="three", color_jitter=0.3),
    Augment(augmentation="three", color_jitter=0.3, crop="src"),
    Augment(augmentation="three", three_augment=("gray", "blur"), crop="src_axis"),
    Augment(augmentation="three", three_augment=("solarize",), crop="pad"),
    Augment(augmentation="rand", color_jitter=0.4, interpolation="bilinear"),
    Augment(augmentation="none", affine=0.1, color_jitter=1.0, crop_scale=0.5),
]


@pytest.fixture(scope="module")
def photos(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    with tarfile.open(shared / "data" / "photos.tar") as tar:
        tar.extractall(folder, filter="data")
    return sorted(folder.rglob("*.jpg"))


@pytest.mark.parametrize("augment", AUGMENTS, ids=["three", "three src", "src_axis", "pad", "rand", "affine"])
def test_training_images_are_those_of_pillow_alone(
    augment: Augment, photos: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real photos, from the file to the batch, two workers against one process with Pillow alone."""
    paths = photos[::3]
    source = FileSource(paths[0].parents[1], "photos", ["a"], {})
    items = [Item(str(path), 0) for path in paths]
    images = Samples(source, items, OneView(augment, (96, 112)), seed=3)
    order = Order(len(items), 15)
    batches = [batch for batch, _ in load_batches(images, Steps(order, 0, order.steps_per_epoch), 2)]
    monkeypatch.setattr("patchloom.data.native.available", lambda: False)
    monkeypatch.setattr("patchloom.data.jpeg.available", lambda: False)
    plain = [batch for batch, _ in load_batches(images, Steps(order, 0, order.steps_per_epoch), 0)]
    assert len(batches) == len(plain) == 3
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(batches, plain, strict=True))


def test_without_the_library_pillow_does_the_same() -> None:
    """In a process where the switch is off: the same pixels, and the reason as a sentence."""
    code = (
        "import numpy as np; from PIL import Image; from patchloom.data import native\n"
        "from patchloom.data.transforms import Augment\n"
        "pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)\n"
        "augment = Augment(augmentation='three', color_jitter=0.3)\n"
        "outs = [augment(Image.fromarray(pixels), (64, 64), seed) for seed in range(12)]\n"
        "import hashlib; print(native.why_not()); print(hashlib.sha256(np.stack(outs).tobytes()).hexdigest())"
    )
    said = {}
    for value in ("0", "1"):
        environment = {**os.environ, libraries.SWITCH: value}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        said[value] = run.stdout.split("\n")[:2]
    assert said["0"][0] == f"{libraries.SWITCH}=0 switches the C++ kernels off."
    assert said["1"][0] == "None"
    assert said["0"][1] == said["1"][1]


def test_a_pillow_with_other_pixels_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native._unequal_steps() == []
    monkeypatch.setattr(native, "_box_radius", lambda sigma: sigma)
    assert all(name.startswith("blur") for name in native._unequal_steps())
    assert native._unequal_steps()


def test_a_picture_that_is_no_file_takes_the_same_steps() -> None:
    image = Image.fromarray(noise(70, 90))
    augment = Augment(augmentation="three", color_jitter=0.3)
    pixels = rgbx(np.asarray(image))
    assert all(np.array_equal(augment(image, (48, 48), seed), augment(pixels, (48, 48), seed)) for seed in range(20))


def test_a_broken_photo_is_still_named(tmp_path: Path) -> None:
    Image.fromarray(noise(64, 64)).save(tmp_path / "whole.jpg")
    torn = (tmp_path / "whole.jpg").read_bytes()[:900]
    with pytest.raises(Exception, match=r"torn\.jpg cannot be read"):
        decode(torn, "torn.jpg")


def test_arguments_beyond_a_picture_are_refused() -> None:
    """C++ would read or write beyond the array, or take its bytes for others."""
    good, whole = rgbx(noise(8, 9)), np.arange(8)
    wrong = (good[..., :3], good.astype(np.int16), good[:, ::2], good[0], good[:0], np.zeros((8, 9, 5), np.uint8))
    frozen = good.copy()
    frozen.flags.writeable = False
    for picture in (*wrong, frozen):
        for step in (
            native.mirror,
            native.grey,
            native.solarise,
            lambda x: native.blur(x, 1.0),
            lambda x: native.enhance(x, ImageEnhance.Color, 1.2),
            lambda x: native.take(x, whole, whole),
        ):
            with pytest.raises(ValueError, match="not a step for a picture"):
                step(picture)
    for places in (whole + 5, whole - 1, whole.astype(np.int32), whole[::2], whole[:, None]):
        for rows, columns in ((places, whole), (whole, places)):
            with pytest.raises(ValueError, match="places"):
                native.take(good, rows, columns)
    for sigma in (-1.0, 1e9, float("nan")):
        with pytest.raises(ValueError, match="sigma"):
            native.blur(good, sigma)
    for area, size in ((good[:0], (4, 4)), (good, (0, 4)), (good, (4, -1)), (good.astype(float), (4, 4))):
        with pytest.raises(ValueError, match="not a step for a picture"):
            native.resize(area, size, BICUBIC)
    images, three = torch.zeros(1, 2, 2, 3, dtype=torch.uint8), torch.zeros(3)
    for arguments in ((images.float(), three, three), (images, three[:2], three), (images, three, three.double())):
        with pytest.raises(ValueError, match="not a step for a picture"):
            native.normalise(*arguments)
    with pytest.raises(ValueError, match="not a step for a picture"):
        native.pack(good[..., :3])
