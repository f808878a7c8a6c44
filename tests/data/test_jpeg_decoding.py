"""JPEGs decoded by simplejpeg: the pixels of Pillow, or Pillow's own word."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from patchloom.data import jpeg
from patchloom.data.decoding import UnreadableImage, decode, decode_picture
from patchloom.data.transforms import Augment

pytestmark = pytest.mark.skipif(
    not jpeg.available(), reason="no simplejpeg, or Pillow has another libjpeg: decoding by it is untested"
)


def scene(height: int, width: int, seed: int = 0) -> Image.Image:
    """Edges, slopes and noise, so that transform and upsampling both show."""
    rows, columns = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(seed).integers(0, 60, (height, width, 3))
    slopes = np.stack([rows * 3 % 196, columns * 2 % 196, (rows * columns) % 196], axis=2)
    return Image.fromarray((slopes + noise).astype(np.uint8))


def encoded(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)  # type: ignore[arg-type]
    return file.getvalue()


@contextmanager
def pillow_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpeg, "available", lambda: False)
        yield


def outcome(data: bytes) -> bytes | str:
    """The pixels, or the error."""
    try:
        image = decode(data, "photo")
    except UnreadableImage as error:
        return str(error)
    return f"{image.mode} {image.size}".encode() + image.tobytes()


def assert_as_pillow(data: bytes) -> None:
    ours = outcome(data)
    with pillow_alone():
        assert outcome(data) == ours


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(1, 100),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
    st.booleans(),
)
def test_plain_photos_have_pillows_pixels(
    height: int, width: int, quality: int, subsampling: int, progressive: bool, grey: bool
) -> None:
    image = scene(height, width)
    data = encoded(
        image.convert("L") if grey else image, quality=quality, subsampling=subsampling, progressive=progressive
    )
    assert isinstance(decode_picture(data, "photo"), np.ndarray)
    assert_as_pillow(data)


def test_other_kinds_are_left_to_pillow() -> None:
    image = scene(40, 56)
    kinds = [encoded(image.convert("CMYK")), encoded(image, keep_rgb=True)]
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        kinds.append(encoded(image, exif=exif))
    for data in kinds:
        assert isinstance(decode_picture(data, "photo"), Image.Image)
        assert_as_pillow(data)
    exif[0x0112] = 1
    upright = encoded(image, exif=exif)
    assert isinstance(decode_picture(upright, "photo"), np.ndarray)
    assert_as_pillow(upright)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.booleans())
def test_damage_is_judged_as_pillow_judges_it(data: st.DataObject, progressive: bool) -> None:
    whole = encoded(scene(48, 40), progressive=progressive)
    start = data.draw(st.integers(0, len(whole)))
    kind = data.draw(st.sampled_from(["cut", "flip", "drop", "more"]))
    if kind == "cut":
        broken = whole[:start]
    elif kind == "flip":
        broken = whole[:start] + bytes(byte ^ 0x55 for byte in whole[start : start + 3]) + whole[start + 3 :]
    elif kind == "drop":
        broken = whole[:start] + whole[start + 5 :]
    else:
        broken = whole + b"\0" * 40
    assert_as_pillow(broken)


@pytest.mark.parametrize("name", ["photos.tar", "coco128.tar", "flowers128.tar"])
def test_real_photos_have_pillows_pixels(name: str, shared: Path) -> None:
    seen = 0
    with tarfile.open(shared / "data" / name) as tar:
        for member in tar:
            if member.name.endswith(".jpg") and seen < 200:
                file = tar.extractfile(member)
                assert file is not None
                assert_as_pillow(file.read())
                seen += 1
    assert seen >= 128


@pytest.mark.parametrize(("sides", "by"), [((200, 300), 1), ((448, 600), 2), ((900, 1000), 4), ((1800, 1801), 8)])
def test_fast_decodes_no_smaller_than_the_crop_needs(sides: tuple[int, int], by: int) -> None:
    data = encoded(scene(*sides))
    photo = decode_picture(data, "photo", fast=True)
    assert isinstance(photo, jpeg.Encoded)
    area = photo.area((0, 0, sides[1], sides[0]), (224, 224))
    assert area.shape == (-(-sides[0] // by), -(-sides[1] // by), 4)
    small = photo.area((10, 20, 110, 100), (224, 224))
    assert small.shape == (80, 100, 4)


def test_fast_is_near_to_exact_and_draws_alike() -> None:
    """A smooth photo, so that what differs is the decoding and not where the crop was taken."""
    rows, columns = np.mgrid[0:600, 0:800]
    smooth = np.stack([rows / 600, columns / 800, (rows + columns) / 1400], axis=2) * 255
    data = encoded(Image.fromarray(smooth.astype(np.uint8)), quality=95)
    exact, fast = (Augment(augmentation="three", color_jitter=0.3, pixels=pixels) for pixels in ("exact", "fast"))
    differences = []
    for seed in range(30):
        want = exact(decode_picture(data, "photo"), (64, 64), seed).astype(int)
        got = fast(decode_picture(data, "photo", fast=True), (64, 64), seed).astype(int)
        differences.append(np.abs(want - got).mean())
    assert 0 < np.median(differences) < 3


def test_fast_leaves_to_pillow_what_is_not_plain() -> None:
    torn = encoded(scene(300, 300))[:3000]
    with pytest.raises(UnreadableImage, match="photo cannot be read"):
        Augment(pixels="fast")(decode_picture(torn, "photo", fast=True), (32, 32), 0)
    file = io.BytesIO()
    scene(50, 60).save(file, "PNG")
    png = file.getvalue()
    assert np.array_equal(
        Augment(pixels="fast")(decode_picture(png, "photo", fast=True), (32, 32), 5),
        Augment()(decode_picture(png, "photo"), (32, 32), 5),
    )


def test_fast_is_the_same_with_pillows_steps() -> None:
    photo = decode_picture(encoded(scene(500, 700)), "photo", fast=True)
    augment = Augment(augmentation="three", color_jitter=0.3, pixels="fast", crop_scale=0.5)
    ours = [augment(photo, (64, 64), seed) for seed in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchloom.data.native.available", lambda: False)
        assert all(np.array_equal(image, augment(photo, (64, 64), seed)) for seed, image in enumerate(ours))
