"""What lies among the images of people and attackers: FIFOs, devices, endless files, formats that need a package."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from patchloom import PatchloomError
from patchloom.data.check import check_data
from patchloom.data.images import NOTE, read_image, to_rgb
from patchloom.data.listing import label_by_name
from patchloom.data.opening import open_source
from patchloom.data.scan import find_unreadable
from patchloom.install import pip_install

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def photo(shade: int = 99) -> Image.Image:
    ramp = np.add.outer(np.arange(32), np.arange(40)).astype(np.uint8)
    return Image.fromarray(np.stack([ramp, ramp // 2 + shade // 2, np.full_like(ramp, shade)], axis=2))


def classes(root: Path) -> Path:
    for i, name in enumerate(("ant", "bee")):
        (root / name).mkdir(parents=True)
        photo(90 * i).save(root / name / "good.png")
    return root


def test_what_is_not_a_regular_file_is_named_and_left_aside(tmp_path: Path) -> None:
    root = classes(tmp_path)
    os.mkfifo(root / "ant" / "pipe.png")
    (root / "bee" / "zero.jpg").symlink_to("/dev/zero")
    (root / "bee" / "loop.jpg").symlink_to("loop.jpg")
    source = open_source(root)
    assert [item.key for item in source.items()] == ["ant/good.png", "bee/good.png", "bee/loop.jpg"]
    assert "2 files skipped, not regular files: ant/pipe.png, bee/zero.jpg." in source.notes
    assert "symbolic links" in find_unreadable(source, source.items())["bee/loop.jpg"]


def test_a_manifest_names_what_cannot_be_read(tmp_path: Path) -> None:
    root = classes(tmp_path)
    os.mkfifo(root / "pipe.png")
    with open(root / "huge.png", "wb") as file:
        file.truncate(1 << 40)
    rows = ["path,label", "ant/good.png,ant", "bee/good.png,bee", "pipe.png,ant", "/dev/zero,bee", "huge.png,bee"]
    (root / "list.csv").write_text("\n".join(rows))
    source = open_source(root / "list.csv")
    bad = find_unreadable(source, source.items())
    assert {key: reason.split(",")[0] for key, reason in bad.items()} == {
        "pipe.png": "it is a FIFO",
        "/dev/zero": "it is a device",
        "huge.png": "it has 1",
    }
    (root / "list.csv").write_text("path,label\nant/good.png,ant\nbee/go\0od.png,bee")
    with pytest.raises(PatchloomError, match="line 3: there is a NUL byte"):
        open_source(root / "list.csv")


def test_links_and_devices_in_shards_are_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i, kind in enumerate((tarfile.REGTYPE, tarfile.FIFOTYPE, tarfile.SYMTYPE)):
            file = io.BytesIO()
            photo(i).save(file, "PNG")
            for name, content in ((f"{i}.png", file.getvalue()), (f"{i}.cls", b"ant")):
                member = tarfile.TarInfo(name)
                member.type, member.linkname = kind, "/dev/zero"
                member.size = len(content) if kind == tarfile.REGTYPE else 0
                tar.addfile(member, io.BytesIO(content))
    source = open_source(f"wds:{tmp_path}")
    assert len(source.items()) == 1
    assert any(note.startswith("4 files skipped, not regular files: a.tar/1.png") for note in source.notes)


def test_names_that_name_nothing_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for where, words in (("", "empty name"), ("a\0b", "NUL"), (tmp_path / "pipe.csv", "nor a regular file")):
        with pytest.raises(PatchloomError, match=words):
            open_source(where)
    with pytest.raises(PatchloomError, match="several classes named 'ant'"):
        label_by_name("hf:data", {"label": ["ant", "bee", "ant"]}, {"all": [("0", ("ant",))]})


def test_heic_and_avif_photos_are_read(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    classes(tmp_path)
    heif.register_heif_opener()
    photo().save(tmp_path / "ant" / "IMG_1.HEIC", "HEIF", quality=95)
    if features.check("avif"):
        photo().save(tmp_path / "ant" / "a.avif", quality=95)
    (tmp_path / "bee" / "torn.heic").write_bytes(HEIC + bytes(200))
    source = open_source(tmp_path)
    assert find_unreadable(source, source.items()) == {
        "bee/torn.heic": "a HEIF photo that pillow-heif cannot read: it is damaged"
    }
    for item in source.items()[:3]:
        if not item.key.endswith("png"):
            assert np.abs(np.asarray(source.read(item), int) - np.asarray(photo(), int)).mean() < 6, item.key


def test_photos_that_need_a_package_are_counted_with_the_command(tmp_path: Path) -> None:
    root = classes(tmp_path)
    for name in ("ant/IMG_1.HEIC", "ant/IMG_2.heic", "cow/IMG_3.heif"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(HEIC + bytes(200))
    code = f"""
import sys
sys.modules["pillow_heif"] = None  # as where it is not installed
from patchloom.data.decoding import decode
from patchloom.data.opening import open_source
source = open_source({str(root)!r})
print(source.class_names, *source.notes, sep="\\n")
try:
    decode(open({str(root / "ant/IMG_1.HEIC")!r}, "rb").read(), "IMG_1.HEIC")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    command = pip_install("pillow-heif")
    assert done.stdout.splitlines() == [
        "('ant', 'bee')",
        "1 folder without images, not taken as a class: cow.",
        f"2 .heic files skipped. To read them: {command}",
        f"1 .heif file skipped. To read them: {command}",
        f"IMG_1.HEIC cannot be read as an image: a HEIF photo; to read it: {command}",
    ], done.stderr[-1000:]


def test_16_bits_are_scaled_by_what_they_hold() -> None:
    """The whole range as ever; 12 bits stretched with a note; 8 bits as they are, not black."""
    for top, note in ((65535, False), (4095, True), (255, False)):
        values = np.tile(np.linspace(0, top, 64).round().astype(np.uint16), (8, 1))
        image = to_rgb(Image.fromarray(values))
        assert np.abs(np.asarray(image)[..., 0].astype(float) - values.astype(float) * 255 / top).max() <= 1
        assert (NOTE in image.info) is note


def test_a_files_own_note_is_not_ours() -> None:
    image = Image.new("RGB", (4, 4))
    image.info.update({NOTE: "forged", "note": "forged"})
    assert NOTE not in to_rgb(image).info


RAMP = np.tile(np.linspace(0, 1, 64, dtype=np.float32), (8, 1))


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (RAMP, "values from 0 to 1 scaled"),
        (RAMP * 0.01, "values from 0 to 0.01 scaled"),
        (RAMP * 7 - 3, "values from -3 to 4 scaled"),
        ((RAMP * 65535).astype(np.int32), "values from 0 to 65535 scaled"),
        ((RAMP * 4095).astype(np.int32), "values from 0 to 4095 scaled"),
        ((RAMP * 2e9).astype(np.int32), "values from 0 to 2e"),
        ((RAMP * 255).round(), None),
        ((RAMP * 255).round().astype(np.int32), None),
    ],
)
def test_float_and_32_bit_images_keep_their_shades(tmp_path: Path, values: np.ndarray, note: str | None) -> None:
    Image.fromarray(values).save(tmp_path / "deep.tif")
    image = read_image(tmp_path / "deep.tif")
    shades = np.asarray(image)[..., 0].astype(int)
    assert np.abs(shades - RAMP * 255).max() <= 1
    assert image.info.get(NOTE, "").startswith(note or "")
    assert (NOTE in image.info) == (note is not None)


def test_images_without_a_range_are_refused(tmp_path: Path) -> None:
    flat, hole = np.full((8, 8), 1234.5, np.float32), RAMP.copy()
    hole[0, 0] = np.nan
    for values, reason in ((flat, "no range"), (hole, "not finite"), (np.full((8, 8), -3, np.int32), "negative")):
        Image.fromarray(values).save(tmp_path / "odd.tif")
        with pytest.raises(PatchloomError, match=reason):
            read_image(tmp_path / "odd.tif")


def test_training_and_data_check_note_what_was_scaled(tmp_path: Path) -> None:
    root = classes(tmp_path)
    Image.fromarray(RAMP).save(root / "ant" / "deep.tif")
    wanted = "1 image with float or 32-bit values: ant/deep.tif: values from 0 to 1 scaled to 8 bits."
    assert wanted in check_data(open_source(root))["notes"]
    source = open_source(root)
    find_unreadable(source, source.items())
    assert wanted in source.notes
