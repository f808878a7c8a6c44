"""Data as people keep it is read with the right labels, or refused in a sentence that names what is wrong."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile
from sklearn.datasets import load_digits

from patchloom import PatchloomError
from patchloom.data.decoding import UnreadableImage, decode
from patchloom.data.opening import open_source
from patchloom.data.scan import find_unreadable
from patchloom.data.sources import Item, Source
from patchloom.data.splits import Splits, split_source

DIGITS = np.round(load_digits().images * (255 / 16)).astype(np.uint8)


def picture(number: int = 0, side: int = 8) -> Image.Image:
    return Image.fromarray(DIGITS[number]).resize((side, side), Image.Resampling.NEAREST).convert("RGB")


def write(path: Path, number: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(number).save(path)
    return path


def folder(root: Path, **classes: int) -> Path:
    """Class folders with so many images each."""
    number = 0
    for name, count in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            write(root / name / f"{index:03d}.png", number)
            number += 1
    return root


def named(source: Source, split: str = "all") -> dict[str, str]:
    return {item.key: source.class_names[item.label] for item in source.splits[split]}


# --- digits


def test_digits_are_the_real_ones_with_a_fixed_fifth_held_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    source = open_source("digits")
    assert source.class_names == tuple("0123456789")
    assert not source.flips
    assert {name: len(items) for name, items in source.splits.items()} == {"train": 1438, "val": 359}
    labels = load_digits().target
    for item in source.items():
        assert labels[int(item.key)] == item.label
    item = source.splits["val"][0]
    assert source.read(item).mode == "RGB"
    assert np.array_equal(np.asarray(source.read(item))[:, :, 0], DIGITS[int(item.key)])
    assert source.path(item) is None
    assert source.fingerprint() == "f1eedf41a880f3b7966e4cf1fb47601b45796725aaaf478de4b74895d24899cd"
    split = split_source(source)
    assert (len(split.train), len(split.held_out)) == (1438, 359)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(PatchloomError, match="pip install scikit-learn"):
        open_source("digits")


# --- folders


def test_class_folders(tmp_path: Path) -> None:
    folder(tmp_path, cat=3, dog=2)
    write(tmp_path / "cat" / "nested" / "deep" / "x.JPEG")
    source = open_source(tmp_path)
    assert source.class_names == ("cat", "dog")
    assert source.flips
    keys = [item.key for item in source.splits["all"]]
    assert keys == ["cat/000.png", "cat/001.png", "cat/002.png", "cat/nested/deep/x.JPEG", "dog/000.png", "dog/001.png"]
    assert [item.label for item in source.splits["all"]] == [0, 0, 0, 0, 1, 1]
    assert source.path(Item("dog/000.png", 1)) == tmp_path / "dog" / "000.png"
    assert np.array_equal(np.asarray(source.read(Item("dog/000.png", 1)))[:, :, 0], DIGITS[3])
    assert source.notes == []


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Val"])
def test_labels_go_by_name_where_val_lacks_a_class(tmp_path: Path, val: str) -> None:
    folder(tmp_path / "train", ant=2, bee=2, cow=2)
    folder(tmp_path / val, bee=1, cow=2)
    folder(tmp_path / "test", cow=1)
    source = open_source(tmp_path)
    assert list(source.splits) == ["train", "val", "test"]
    assert named(source, "val") == {
        f"{val}/bee/000.png": "bee",
        f"{val}/cow/000.png": "cow",
        f"{val}/cow/001.png": "cow",
    }
    split = split_source(source)
    assert split.held_out == source.splits["val"]
    assert "split val" in split.summary


def test_test_is_held_out_where_there_is_no_val(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=2)
    folder(tmp_path / "test", ant=1)
    assert split_source(open_source(tmp_path)).held_out == [Item("test/ant/000.png", 0)]


def test_classes_that_train_lacks_are_named(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=2)
    folder(tmp_path / "val", ant=1, wasp=1)
    with pytest.raises(PatchloomError, match="val has 1 class that train lacks: 'wasp'"):
        open_source(tmp_path)


def test_a_class_may_be_called_train_beside_others(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path, train=2, plane=1))
    assert source.class_names == ("plane", "train")


def test_two_folders_for_one_split_are_refused(tmp_path: Path) -> None:
    for name in ("train", "val", "valid"):
        folder(tmp_path / name, ant=1)
    with pytest.raises(PatchloomError, match="val and valid"):
        open_source(tmp_path)


def test_hidden_things_and_leftovers_are_no_data(tmp_path: Path) -> None:
    folder(tmp_path, ant=2)
    write(tmp_path / ".cache" / "a.png")
    write(tmp_path / "__MACOSX" / "a.png")
    write(tmp_path / "ant" / ".thumbs" / "a.png")
    write(tmp_path / "ant" / "._000.png")
    (tmp_path / "ant" / "notes.txt").write_text("x")
    write(tmp_path / "stray.png")
    source = open_source(tmp_path)
    assert source.class_names == ("ant",)
    assert len(source.splits["all"]) == 2
    notes = " ".join(source.notes)
    assert ".txt" in notes
    assert "stray.png" in notes
    assert "one class only" in notes


def test_a_folder_without_images_is_reported_and_not_a_class(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path / "plain", ant=2, bee=0, cow=1))
    assert source.class_names == ("ant", "cow")
    assert {item.label for item in source.splits["all"]} == {0, 1}
    assert "1 folder without images, not taken as a class: bee." in source.notes
    for split in ("train", "val"):
        folder(tmp_path / "split" / split, ant=2, bee=0, cow=1)
    assert open_source(tmp_path / "split").class_names == ("ant", "cow")


def test_unicode_names(tmp_path: Path) -> None:
    write(tmp_path / "Käfer" / "ünï 虫.png")
    write(tmp_path / "猫" / "🐈.png", 3)
    source = open_source(tmp_path)
    assert source.class_names == ("Käfer", "猫")
    assert find_unreadable(source, source.items()) == {}
    assert len(source.fingerprint()) == 64


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    folder(tmp_path, ant=2)
    os.rename(tmp_path / "ant" / "000.png", os.path.join(os.fsencode(tmp_path), b"ant", b"\xff.png"))
    source = open_source(tmp_path)
    assert find_unreadable(source, source.items()) == {}
    assert len(source.fingerprint()) == 64
    assert len(split_source(source).held_out) == 1


def test_links_do_not_loop_and_name_nothing_twice(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", ant=2, bee=2)
    elsewhere = folder(tmp_path / "elsewhere", cow=2)
    (data / "ant" / "up").symlink_to(data)
    (data / "ant" / "self").symlink_to(data / "ant")
    (data / "ant" / "sideways").symlink_to(data / "bee")
    (data / "alias").symlink_to(data / "bee")
    (data / "loop").symlink_to(tmp_path)
    (data / "cow").symlink_to(elsewhere / "cow")
    (data / "bee" / "linked.png").symlink_to(elsewhere / "cow" / "000.png")
    source = open_source(data)
    assert source.class_names == ("ant", "bee", "cow")
    assert [item.key for item in source.splits["all"]] == [
        *("ant/000.png", "ant/001.png", "bee/000.png", "bee/001.png", "bee/linked.png", "cow/000.png", "cow/001.png"),
    ]
    assert sum("not followed" in note for note in source.notes) == 5


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    folder(tmp_path, ant=1)
    (tmp_path / "ant" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    source = open_source(tmp_path)
    assert find_unreadable(source, source.items()) == {"ant/gone.png": "No such file or directory"}


def test_mistakes_show_what_was_found_and_what_is_expected(tmp_path: Path) -> None:
    def message(where: Path) -> str:
        with pytest.raises(PatchloomError) as caught:
            open_source(str(where))
        assert "FOLDER/CLASS/image.jpg" in str(caught.value)
        return str(caught.value)

    (tmp_path / "photos").mkdir()
    assert "empty folder" in message(tmp_path / "photos")
    assert "'photos'" in message(tmp_path / "fotos")
    write(tmp_path / "photos" / "1.png")
    assert "has 1 image, such as 1.png, but no class folders" in message(tmp_path / "photos")
    assert "not a CSV manifest" in message(tmp_path / "photos" / "1.png")
    write(tmp_path / "flat" / "train" / "1.png")
    write(tmp_path / "flat" / "val" / "1.png")
    assert "train/1.png" in message(tmp_path / "flat")
    (tmp_path / "words" / "ant").mkdir(parents=True)
    (tmp_path / "words" / "ant" / "a.txt").write_text("x")
    assert "no images in class folders; it has ant/" in message(tmp_path / "words")
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "0.tar").write_bytes(b"")
    assert f"wds:{tmp_path / 'tars'}" in message(tmp_path / "tars")


def test_labels_belong_to_manifests(tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="only a CSV manifest"):
        open_source(folder(tmp_path, ant=1), labels="genus")
    # the name that runs record for the labels of such data
    assert open_source(tmp_path, labels="label").class_names == ("ant",)


# --- the split


@pytest.mark.parametrize(("count", "held"), [(1, 0), (2, 1), (4, 1), (5, 1), (10, 2), (255, 51), (256, 51)])
def test_a_fifth_of_each_class_is_held_out(tmp_path: Path, count: int, held: int) -> None:
    split = split_source(open_source(folder(tmp_path, ant=count, bee=10)))
    assert sum(item.label == 0 for item in split.held_out) == held
    assert sum(item.label == 1 for item in split.held_out) == 2
    assert len(split.train) + len(split.held_out) == count + 10
    assert not set(split.train) & set(split.held_out)


def test_the_split_does_not_hang_on_place_or_order(tmp_path: Path) -> None:
    first = folder(tmp_path / "first", ant=20, bee=20)
    second = tmp_path / "far" / "away" / "second"
    for path in sorted(first.rglob("*.png"), reverse=True):
        copy = second / path.relative_to(first)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    one, two = open_source(first), open_source(second)
    assert split_source(one) == split_source(two)
    assert one.fingerprint() == two.fingerprint()


def test_training_images_are_never_called_held_out(tmp_path: Path) -> None:
    split = split_source(open_source(folder(tmp_path, ant=1)))
    assert (split.train, split.held_out) == ([Item("ant/000.png", 0)], [])
    assert "none is held out" in split.summary


def test_train_alone_is_split(tmp_path: Path) -> None:
    split = split_source(open_source(folder(tmp_path / "train", ant=10).parent))
    assert (len(split.train), len(split.held_out)) == (8, 2)


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path / "val", ant=2).parent)
    assert list(source.splits) == ["val"]
    with pytest.raises(PatchloomError, match="no training images; it has val"):
        split_source(source)


# --- what every source does


def test_without_leaves_images_out_and_keeps_labels(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path, ant=1, bee=2))
    less = source.without(["ant/000.png"])
    assert less.class_names == source.class_names
    assert less.splits == {"all": [Item("bee/000.png", 1), Item("bee/001.png", 1)]}
    assert len(source.splits["all"]) == 3
    assert less.fingerprint() != source.fingerprint()


def test_the_fingerprint_changes_with_names_labels_and_sizes(tmp_path: Path) -> None:
    seen = {open_source(folder(tmp_path, ant=2, bee=2)).fingerprint()}
    (tmp_path / "ant" / "000.png").rename(tmp_path / "ant" / "x.png")
    seen.add(open_source(tmp_path).fingerprint())
    (tmp_path / "ant" / "x.png").rename(tmp_path / "bee" / "x.png")
    seen.add(open_source(tmp_path).fingerprint())
    (tmp_path / "bee" / "x.png").write_bytes((tmp_path / "bee" / "x.png").read_bytes() + b"more")
    seen.add(open_source(tmp_path).fingerprint())
    assert len(seen) == 4


@pytest.mark.parametrize("kind", ["digits", "folder"])
def test_sources_can_be_pickled(tmp_path: Path, kind: str) -> None:
    source = open_source("digits" if kind == "digits" else folder(tmp_path, ant=2))
    again = pickle.loads(pickle.dumps(source))
    item = source.items()[0]
    assert again.splits == source.splits
    assert again.flips == source.flips
    assert again.read(item).tobytes() == source.read(item).tobytes()


# --- manifests


def manifest(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_text(text, encoding=encoding)
    return path


TWO = "path,genus,species\na.png,Apis,mellifera\nb.png,Apis,cerana\nsub/c.png,Bombus,terrestris\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_manifest_with_two_label_columns(tmp_path: Path, encoding: str) -> None:
    for name in ("a.png", "b.png", "sub/c.png"):
        write(tmp_path / name)
    where = manifest(tmp_path / "bees.csv", TWO, encoding)
    assert open_source(where, labels="genus").class_names == ("Apis", "Bombus")
    source = open_source(where, labels="species")
    assert source.class_names == ("cerana", "mellifera", "terrestris")
    assert named(source) == {"a.png": "mellifera", "b.png": "cerana", "sub/c.png": "terrestris"}
    assert find_unreadable(source, source.items()) == {}
    with pytest.raises(PatchloomError, match=r"--labels COLUMN.*genus, species"):
        open_source(where)
    for wrong in ("genera", "path"):
        with pytest.raises(PatchloomError, match=f"no label column '{wrong}'.*Label columns: genus, species"):
            open_source(where, labels=wrong)


def test_a_manifest_with_splits_and_quotes(tmp_path: Path) -> None:
    text = 'path,label,split\n"a, b.png",cat,train\n\n2.png,dog,Train\n3.png,dog,validation\n4.png,cat,test\n'
    source = open_source(manifest(tmp_path / "m.CSV", text))
    assert {name: len(items) for name, items in source.splits.items()} == {"train": 2, "val": 1, "test": 1}
    assert named(source, "train") == {"a, b.png": "cat", "2.png": "dog"}


def test_absolute_paths_inside_the_folder_are_the_same_keys(tmp_path: Path) -> None:
    write(tmp_path / "here" / "a.png")
    outside = write(tmp_path / "b.png")
    text = f"path,label\n{tmp_path / 'here' / 'a.png'},x\n{outside},y\n./c.png,x\n"
    source = open_source(manifest(tmp_path / "here" / "m.csv", text))
    assert [item.key for item in source.splits["all"]] == [outside.as_posix(), "a.png", "c.png"]
    assert find_unreadable(source, source.items()) == {"c.png": "No such file or directory"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\na.png,\n", "line 2: no value for 'label'"),
        ("path,label\na.png,x\n,y\n", "line 3: no value for 'path'"),
        ("path,label,split\na.png,x,\n", "line 2: no value for 'split'"),
        ("path,label,split\na.png,x,dev\n", "line 2: split 'dev'"),
        ("path,label\na.png\n", "line 2: 1 value for 2 columns"),
        ("path,label\na.png,x\n./a.png,y\n", "a.png is 'x' in line 2 and 'y' in line 3"),
        ("path,label,label\na.png,x,y\n", "'label' more than once"),
        ("file,label\na.png,x\n", "no column `path`.*file, label"),
        ("path\na.png\n", "Columns: none"),
        ("path,label\n", "no rows"),
        ("", "no column `path`"),
        ("path,label,split\na.png,x,train\nb.png,y,val\n", "train lacks: 'y'"),
    ],
)
def test_mistakes_in_a_manifest_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PatchloomError, match=message):
        open_source(manifest(tmp_path / "m.csv", text))


def test_a_repeated_row_counts_once(tmp_path: Path) -> None:
    source = open_source(manifest(tmp_path / "m.csv", "path,label\na.png,x\na.png,x\nb.png,y\n"))
    assert len(source.splits["all"]) == 2
    assert "1 row repeated an earlier one and counted once." in source.notes


def test_bytes_that_are_no_text_are_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_bytes(b"\xff\xd8\xff\xe0" * 20)
    with pytest.raises(PatchloomError, match="UTF-8"):
        open_source(tmp_path / "m.csv")


# --- what image files are like


def test_every_kind_of_image_becomes_upright_rgb(tmp_path: Path) -> None:
    at = tmp_path / "x"
    at.mkdir()
    tall = picture(3, 16).crop((0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = 6
    tall.save(at / "turned.jpg", exif=exif)
    tall.convert("CMYK").save(at / "cmyk.jpg")
    Image.fromarray(np.full((8, 16), 40000, np.uint16)).save(at / "16bit.png")
    tall.quantize(8).save(at / "palette.png")
    tall.quantize(8).save(at / "clear.png", transparency=bytes(range(8)))
    tall.convert("RGBA").save(at / "alpha.webp")
    tall.convert("LA").save(at / "grey.png")
    tall.convert("1").save(at / "bits.tif")
    tall.save(at / "frames.gif", save_all=True, append_images=[picture(5, 16)] * 3)
    tall.save(at / "wrong ending.gif", format="PNG")
    source = open_source(tmp_path)
    assert len(source.splits["all"]) == 10
    for item in source.splits["all"]:
        image = source.read(item)
        assert image.mode == "RGB"
        assert image.size == ((8, 16) if "turned" in item.key else (16, 8))
    assert np.abs(np.asarray(source.read(Item("x/frames.gif", 0))).astype(int) - np.asarray(tall)).max() < 3
    assert np.asarray(source.read(Item("x/16bit.png", 0)))[0, 0].tolist() == [155] * 3


def damaged(root: Path) -> dict[str, str]:
    """Bad files beside good ones; for each, a word of its reason."""
    folder(root, ant=3, bee=3)
    big = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for name in ("half.jpg", "half.png", "half.gif", "half.bmp", "half.webp"):
        path = root / "ant" / name
        big.save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (root / "ant" / "empty.jpg").touch()
    (root / "bee" / "page.png").write_text("<html>not found</html>")
    big.save(root / "bee" / "vector.eps")
    (root / "bee" / "vector.eps").rename(root / "bee" / "vector.jpg")
    Image.new("1", (10_000, 9_000)).save(root / "bee" / "bomb.png")
    Image.new("1", (20_000, 9_500)).save(root / "bee" / "bomb2.png")
    (root / "bee" / "start.jpg").write_bytes(b"\xff\xd8\xff")
    return {
        **{f"ant/half.{kind}": "truncated" for kind in ("jpg", "png", "gif", "bmp")},
        "ant/half.webp": "decoder",
        "ant/empty.jpg": "the file is empty",
        "bee/page.png": "starts with b'<html>",
        "bee/vector.jpg": "not an image",
        "bee/bomb.png": "90000000",
        "bee/bomb2.png": "190000000",
        "bee/start.jpg": "not an image",
    }


def test_exactly_the_bad_files_are_found_with_their_reasons(tmp_path: Path) -> None:
    expected = damaged(tmp_path)
    source = open_source(tmp_path)
    seen: list[tuple[int, int]] = []
    found = find_unreadable(source, source.items(), lambda done, total: seen.append((done, total)))
    assert found.keys() == expected.keys()
    for key, word in expected.items():
        assert word in found[key], (key, found[key])
        assert "BytesIO" not in found[key]
    assert seen[-1] == (17, 17)
    assert find_unreadable(source.without(found), source.without(found).items()) == {}
    with pytest.raises(PatchloomError, match=r"ant/half\.jpg cannot be read as an image: image file is truncated"):
        source.read(Item("ant/half.jpg", 0))


@pytest.mark.filterwarnings("default")
def test_a_decompression_bomb_is_an_error_where_pillow_would_warn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    item = open_source(folder(tmp_path, ant=1)).items()[0]
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(PatchloomError, match="8 x 8 pixels are more"):
        open_source(tmp_path).read(item)


def test_an_error_of_any_kind_in_a_decoder_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("bytes")

    data = write(tmp_path / "a.png").read_bytes()
    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    with pytest.raises(UnreadableImage, match=r"a\.png cannot be read as an image: IndexError: bytes") as caught:
        decode(data, "a.png")
    assert pickle.loads(pickle.dumps(caught.value)).reason == "IndexError: bytes"


@pytest.mark.parametrize("library", ["torchvision.datasets", "webdataset", "datasets", "timm"])
def test_truncated_images_stay_errors_whatever_is_imported(library: str) -> None:
    import_module("patchloom.compat")
    pytest.importorskip(library, reason="only what is installed can change Pillow")
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    folder(tmp_path, ant=1, bee=1)
    (tmp_path / "bee").chmod(0)
    try:
        with pytest.raises(PatchloomError, match="bee cannot be read: Permission denied"):
            open_source(tmp_path)
    finally:
        (tmp_path / "bee").chmod(0o700)


# --- splits on request


def three_splits(root: Path, form: str) -> str:
    """Six images of two classes: 3 to train on, 1 of val, 2 of test."""
    places = ["train/ant/0", "train/bee/0", "train/bee/1", "val/ant/0", "test/ant/0", "test/bee/0"]
    for place in places:
        path = root / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    if form == "folder":
        return str(root)
    rows = [f"{place}.png,{place.split('/')[1]},{place.split('/')[0]}" for place in places]
    (root / "list.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    return str(root / "list.csv")


@pytest.mark.parametrize("form", ["folder", "manifest"])
@pytest.mark.parametrize(
    ("train", "test", "counts", "names"),
    [
        (None, None, (3, 1), ("train", "val")),
        ("train+val", None, (4, 2), ("train+val", "test")),
        ("train", "val+test", (3, 3), ("train", "val+test")),
        (None, "validation", (3, 1), ("train", "val")),
        ("test", "train", (2, 3), ("test", "train")),
    ],
)
def test_splits_are_chosen_by_name(
    form: str, train: str | None, test: str | None, counts: object, names: object, tmp_path: Path
) -> None:
    source = open_source(three_splits(tmp_path, form))
    split = split_source(source, Splits(train, test))
    assert (len(split.train), len(split.held_out)) == counts
    assert (split.train_name, split.test_name) == names
    assert not {item.key for item in split.train} & {item.key for item in split.held_out}
    assert split_source(source, Splits(split.train_name, split.test_name)) == split


def test_an_unknown_split_is_refused_with_those_there_are(tmp_path: Path) -> None:
    source = open_source(three_splits(tmp_path, "folder"))
    for asked in (Splits("training"), Splits("train+extra"), Splits(None, "dev")):
        with pytest.raises(PatchloomError, match=r"no split '(training|extra|dev)'; it has train, val, test"):
            split_source(source, asked)
    with pytest.raises(PatchloomError, match="trained on and tested on"):
        split_source(source, Splits("train+val", "val"))


def test_a_share_of_each_class_is_held_out_or_none(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path, ant=10, bee=20))
    tenth = split_source(source, Splits(hold_out="0.1"))
    assert sorted(item.label for item in tenth.held_out) == [0, 1, 1]
    assert len(tenth.train) == 27
    assert split_source(source, Splits(hold_out=0.2)).held_out == split_source(source).held_out
    everything = split_source(source, Splits(hold_out="none"))
    assert (len(everything.train), everything.held_out) == (30, [])
    for wrong in ("some", "1", "-0.1", 1.5, "0", "nan"):
        with pytest.raises(PatchloomError, match="--hold-out is none or a fraction"):
            Splits(hold_out=wrong)
    with pytest.raises(PatchloomError, match="exclude each other"):
        Splits(test="val", hold_out=0.1)


def test_data_with_a_validation_split_holds_out_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="has its own split val"):
        split_source(open_source(three_splits(tmp_path, "folder")), Splits(hold_out="none"))
