"""Photos become inputs as torchvision's evaluation transforms would make them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import patchloom.compat  # noqa: F401 - before torchvision
from patchloom import PatchloomError
from patchloom.data.decoding import UnreadableImage, decode
from patchloom.data.images import as_picture, prepare, read_image, resize_and_crop, to_batch, to_input
from patchloom.models.preprocessing import Preprocessing


def picture(width: int, height: int) -> Image.Image:
    generator = np.random.default_rng(0)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (256, 256), (100, 80), (1000, 90), (321, 214)])
@pytest.mark.parametrize(("size", "ratio"), [(224, 0.875), (224, 0.9), (384, 1.0), (32, 0.95)])
def test_equals_torchvision(width: int, height: int, size: int, ratio: float) -> None:
    from torchvision import transforms as T

    how = Preprocessing((size, size), crop_ratio=ratio)
    image = picture(width, height)
    resize = T.Resize(int(size / ratio), T.InterpolationMode.BICUBIC)
    theirs = T.Compose([resize, T.CenterCrop(size), T.ToTensor(), T.Normalize(how.mean, how.std)])
    assert torch.allclose(prepare(image, how)[0], theirs(image), atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 400), st.integers(20, 400), st.sampled_from([0.875, 0.9, 1.0]), st.sampled_from([32, 56]))
def test_sizes_are_those_of_torchvision(width: int, height: int, ratio: float, size: int) -> None:
    """321 x 214 at 256 must be 384 wide, not 383: the order of integer divisions counts."""
    test_equals_torchvision(width, height, size, ratio)


def test_rectangles_cover_the_middle() -> None:
    out = prepare(picture(300, 200), Preprocessing((64, 96), crop_ratio=1.0))
    assert out.shape == (1, 3, 64, 96)
    assert out.is_contiguous()


def test_modes_and_rotation_become_upright_rgb(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    picture(40, 20).save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == (20, 40)
    for mode in ("L", "LA", "P", "RGBA", "1", "I;16"):
        Image.new(mode, (8, 8)).save(tmp_path / "mode.png")
        assert read_image(tmp_path / "mode.png").mode == "RGB"
    Image.new("CMYK", (8, 8)).save(tmp_path / "cmyk.jpg")
    assert read_image(tmp_path / "cmyk.jpg").mode == "RGB"


def test_sixteen_bits_are_scaled_not_cut(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 0x8080, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert set(np.asarray(read_image(tmp_path / "deep.png")).flatten().tolist()) == {0x80}


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [(np.full((4, 4), 30000, np.uint16), 117), (np.full((4, 4), 0.3, np.float32), 77), (np.zeros((4, 4), "f4"), 0)],
)
def test_an_image_of_a_single_value_keeps_its_range(pixels: np.ndarray, expected: int, tmp_path: Path) -> None:
    Image.fromarray(pixels).save(tmp_path / "plain.tiff")
    assert set(np.asarray(read_image(tmp_path / "plain.tiff")).flatten().tolist()) == {expected}


@pytest.mark.parametrize(
    ("low", "high", "kind"), [(-3e38, 3e38, "f4"), (0.0, 1e-40, "f4"), (2**31 - 600, 2**31 - 1, "i4")]
)
def test_any_range_is_scaled_evenly(low: float, high: float, kind: str, tmp_path: Path) -> None:
    steps = np.arange(256).reshape(16, 16) / 255
    Image.fromarray((low + (high - low) * steps).astype(kind)).save(tmp_path / "a.tif")
    pixels = np.asarray(read_image(tmp_path / "a.tif"))[..., 0]
    assert np.abs(pixels.astype(int) - np.arange(256).reshape(16, 16)).max() <= 1


def test_eight_bits_in_wide_pixels_stay_eight_bits(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 0x80, dtype=np.int32)).save(tmp_path / "wide.tiff")
    assert set(np.asarray(read_image(tmp_path / "wide.tiff")).flatten().tolist()) == {0x80}


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "text.png").write_text("not a picture")
    picture(64, 64).save(tmp_path / "whole.jpg")
    (tmp_path / "torn.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:700])
    for name in ("empty.jpg", "text.png", "torn.jpg", "missing.jpg"):
        with pytest.raises(PatchloomError, match=name):
            read_image(tmp_path / name)
    with pytest.raises(PatchloomError, match="1 channels"):
        prepare(picture(8, 8), Preprocessing(mean=(0.5,), std=(0.5,)))


def test_a_thin_line_is_no_photo(tmp_path: Path) -> None:
    """Resized by its shorter side it would grow to 224 x 2 million pixels."""
    Image.new("RGB", (9000, 1)).save(tmp_path / "line.png")
    with pytest.raises(PatchloomError, match="more than 100 times as long as wide: 9000 x 1"):
        read_image(tmp_path / "line.png")
    with pytest.raises(UnreadableImage, match="more than 100 times"):
        decode((tmp_path / "line.png").read_bytes(), "line.png")


def test_a_batch_is_each_picture_cropped_and_normalised() -> None:
    preprocessing = Preprocessing((24, 32), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), crop_ratio=0.9)
    pictures = [picture(50, 40), picture(33, 61)]
    pixels = np.stack([np.asarray(resize_and_crop(one, preprocessing)) for one in pictures])
    want = (pixels / 255 - np.array(preprocessing.mean)) / np.array(preprocessing.std)
    batch = to_batch(pictures, preprocessing, "cpu")
    assert batch.dtype == torch.float32
    np.testing.assert_allclose(batch.numpy(), want.transpose(0, 3, 1, 2), atol=1e-6)
    assert torch.equal(to_input(pixels, preprocessing), batch)
    rgbx = np.asarray(pictures[0].convert("RGBX"))
    assert torch.equal(to_batch([rgbx, pictures[1]], preprocessing), batch)


def test_tensors_are_used_as_they_are() -> None:
    """No resize, no crop, no normalisation."""
    images = torch.randn(2, 5, 7, 9)
    assert torch.equal(to_batch(list(images), Preprocessing((24, 32), mean=(0.5,), std=(0.5,))), images)


def test_images_given_in_python(tmp_path: Path) -> None:
    image = picture(12, 9)
    image.save(tmp_path / "x.png")
    for value in (image, np.asarray(image), tmp_path / "x.png", str(tmp_path / "x.png")):
        given = as_picture(value)
        assert isinstance(given, Image.Image)
        assert given.tobytes() == image.tobytes()
    turned = Image.open(tmp_path / "x.png")
    turned.getexif()[0x0112] = 6
    assert as_picture(turned).size == (9, 12)
    assert as_picture(torch.ones(3, 4, 5, dtype=torch.uint8)).dtype == torch.float32
    kept = torch.randn(1, 4, 5, dtype=torch.float64)
    assert as_picture(kept) is kept


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "not int"),
        (None, "not NoneType"),
        (["a.png"], "not list"),
        (np.zeros((4, 4, 3)), r"\(4, 4, 3\) of float64"),
        (np.zeros((4, 4), np.uint8), r"\(4, 4\) of uint8"),
        (np.zeros((0, 4, 3), np.uint8), r"\(0, 4, 3\)"),
        (torch.zeros(4, 4), r"\(4, 4\)"),
        (Image.new("RGB", (0, 3)), "empty: 0 x 3"),
    ],
)
def test_what_is_not_an_image_is_named(value: object, reason: str) -> None:
    with pytest.raises(PatchloomError, match=reason):
        as_picture(value)
