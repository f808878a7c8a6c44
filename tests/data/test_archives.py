"""Sets in torchvision's layouts, in tar shards and on disk by Hugging Face give the same images and names."""

from __future__ import annotations

import io
import json
import pickle
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import patchloom.compat  # noqa: F401 - before torchvision
from patchloom import PatchloomError
from patchloom.data.opening import open_source
from patchloom.data.scan import find_unreadable
from patchloom.data.sources import Item, Source
from patchloom.data.splits import Splits, split_source

DIGITS = np.round(load_digits().images * (255 / 16)).astype(np.uint8)


def picture(number: int = 0) -> Image.Image:
    return Image.fromarray(DIGITS[number]).convert("RGB")


def encoded(number: int = 0) -> bytes:
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return file.getvalue()


def write(path: Path, number: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(number))


def named(source: Source, split: str = "all") -> dict[str, str]:
    return {item.key: source.class_names[item.label] for item in source.splits[split]}


def same(source: Source, item: Item, number: int) -> bool:
    return np.array_equal(np.asarray(source.read(item))[:, :, 0], DIGITS[number])


@pytest.mark.parametrize(
    ("where", "library"), [("torchvision:CIFAR10:.", "torchvision"), ("wds:.", "webdataset"), ("hf:.", "datasets")]
)
def test_a_missing_library_is_named(where: str, library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision.datasets" if library == "torchvision" else library, None)
    with pytest.raises(PatchloomError, match=f"pip install {library}"):
        open_source(where)


# --- torchvision


def torchvision() -> None:
    pytest.importorskip("torchvision", reason="torchvision's layouts are read by torchvision")


def test_food101(tmp_path: Path) -> None:
    torchvision()
    root = tmp_path / "food-101"
    lists = {"train": {"waffles": [1, 2], "apple_pie": [3]}, "test": {"waffles": [4], "apple_pie": []}}
    (root / "meta").mkdir(parents=True)
    for split, classes in lists.items():
        names = {name: [f"{name}/{number}" for number in numbers] for name, numbers in classes.items()}
        (root / "meta" / f"{split}.json").write_text(json.dumps(names))
        for name, numbers in classes.items():
            for number in numbers:
                write(root / "images" / name / f"{number}.jpg", number)
    source = open_source(f"torchvision:Food101:{tmp_path}")
    assert source.class_names == ("apple_pie", "waffles")
    assert list(source.splits) == ["train", "test"]
    assert named(source, "test") == {"food-101/images/waffles/4.jpg": "waffles"}
    assert same(source, source.splits["test"][0], 4)
    assert source.path(source.splits["test"][0]) == root / "images" / "waffles" / "4.jpg"
    assert len(split_source(source).held_out) == 1


def test_stanford_cars(tmp_path: Path) -> None:
    torchvision()
    savemat = pytest.importorskip("scipy.io", reason="the set's lists are .mat files").savemat
    root = tmp_path / "stanford_cars"
    (root / "devkit").mkdir(parents=True)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": np.array(["Audi", "Fiat"], dtype=object)})
    kind = [("fname", object), ("class", object)]
    lists = {root / "devkit" / "cars_train_annos.mat": "train", root / "cars_test_annos_withlabels.mat": "test"}
    for path, split in lists.items():
        savemat(path, {"annotations": np.array([("1.jpg", 2), ("2.jpg", 1)], dtype=kind)})
        for number in (1, 2):
            write(root / f"cars_{split}" / f"{number}.jpg", number)
    source = open_source(f"torchvision:StanfordCars:{tmp_path}")
    assert source.class_names == ("Audi", "Fiat")
    assert named(source, "train") == {
        "stanford_cars/cars_train/1.jpg": "Fiat",
        "stanford_cars/cars_train/2.jpg": "Audi",
    }
    assert find_unreadable(source, source.items()) == {}


def test_imagenet_has_two_cranes(tmp_path: Path) -> None:
    torchvision()
    names = {"n01": ("crane",), "n02": ("crane",), "n03": ("tench", "Tinca tinca")}
    torch.save((names, []), tmp_path / "meta.bin")
    for number, wnid in enumerate(names):
        write(tmp_path / "train" / wnid / "a.JPEG", number)
        write(tmp_path / "val" / wnid / "a.JPEG", number)
    source = open_source(f"torchvision:ImageNet:{tmp_path}")
    assert source.class_names == ("crane (n01)", "crane (n02)", "tench, Tinca tinca")
    assert list(source.splits) == ["train", "val"]
    assert same(source, source.splits["val"][2], 2)


def test_inaturalist_2021(tmp_path: Path) -> None:
    torchvision()
    names = [f"{number:05d}_Animalia_A_B_C_D_E_species{number}" for number in range(2)]
    for version in ("2021_train_mini", "2021_valid"):
        for number, name in enumerate(names):
            write(tmp_path / version / name / "a.jpg", number)
    source = open_source(f"torchvision:INaturalist:{tmp_path}")
    assert source.class_names == tuple(names)
    assert list(source.splits) == ["train", "val"]
    assert named(source, "val")[f"2021_valid/{names[1]}/a.jpg"] == names[1]


def inaturalist(root: Path, year: str, splits: dict[str, list[str]]) -> str:
    for split, names in splits.items():
        for name in names:
            write(root / year / name)
        images = [{"id": number, "file_name": f"train_val{year}/{name}"} for number, name in enumerate(names)]
        (root / f"{split}{year}.json").write_text(json.dumps({"images": images, "annotations": []}))
    return f"torchvision:INaturalist:{root}"


@pytest.mark.parametrize("year", ["2018", "2019"])
def test_inaturalist_is_split_by_its_annotations(year: str, tmp_path: Path) -> None:
    torchvision()
    splits = {"train": ["Aves/0/a.jpg", "Aves/0/c.jpg", "Plantae/1/a.jpg"], "val": ["Aves/0/b.jpg", "Plantae/1/b.jpg"]}
    where = inaturalist(tmp_path, year, splits)
    write(tmp_path / year / "Aves" / "0" / "unnamed.jpg")
    source = open_source(where)
    assert {split: [item.key for item in items] for split, items in source.splits.items()} == {
        split: [f"{year}/{name}" for name in names] for split, names in splits.items()
    }
    assert [item.label for item in source.splits["train"]] == [0, 0, 1]
    assert "1 image without an annotation skipped." in source.notes
    (tmp_path / f"val{year}.json").write_text("{}")
    with pytest.raises(PatchloomError, match=rf"val{year}.json cannot be read as annotations"):
        open_source(where)
    (tmp_path / f"val{year}.json").unlink()
    with pytest.raises(PatchloomError, match=rf"lacks val{year}.json"):
        open_source(where)
    (tmp_path / f"train{year}.json").unlink()
    assert list(open_source(where).splits) == ["all"]


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_cifar(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision()
    from torchvision import datasets

    kind = getattr(datasets, name)
    monkeypatch.setattr(kind, "_check_integrity", lambda self: True)  # it compares with the real set's checksums
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    labels, meta = ("labels", "label_names") if name == "CIFAR10" else ("fine_labels", "fine_label_names")
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    for file, _ in [*kind.train_list, *kind.test_list]:
        (folder / file).write_bytes(pickle.dumps({"data": pixels, labels: [0, 1, 2, 1]}))
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps({meta: ["cat", "dog", "emu"]}))
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)
    source = open_source(f"torchvision:{name}:{tmp_path}")
    assert source.class_names == ("cat", "dog", "emu")
    assert len(source.splits["train"]) == 4 * len(kind.train_list)
    assert source.splits["test"][3] == Item("test/3", 1)
    expected = pixels[3].reshape(3, 32, 32).transpose(1, 2, 0)
    assert np.array_equal(np.asarray(source.read(Item("test/3", 1))), expected)
    assert np.array_equal(np.asarray(pickle.loads(pickle.dumps(source)).read(Item("train/3", 1))), expected)


def test_mistakes_with_torchvision_are_named(tmp_path: Path) -> None:
    torchvision()
    with pytest.raises(PatchloomError, match="Did you mean 'CIFAR10'"):
        open_source("torchvision:CIFAR1:/data")
    with pytest.raises(PatchloomError, match="needs the folder"):
        open_source("torchvision:CIFAR10")
    with pytest.raises(PatchloomError, match="needs the folder"):
        open_source(f"torchvision:INaturalist:{tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()
    for name in ("CIFAR10", "Flowers102", "Food101", "StanfordCars"):
        with pytest.raises(PatchloomError, match=f"cannot open {name}.*downloads nothing"):
            open_source(f"torchvision:{name}:{tmp_path}")
    for name in ("INaturalist", "ImageNet"):
        with pytest.raises(PatchloomError, match=f"no part of {name}"):
            open_source(f"torchvision:{name}:{tmp_path}")
    with pytest.raises(PatchloomError, match="no label columns"):
        open_source(f"torchvision:CIFAR10:{tmp_path}", labels="fine")


# --- shards


def shard(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def webdataset() -> None:
    pytest.importorskip("webdataset", reason="the names of shards are expanded by webdataset")


def shards(root: Path, stem: str = "shards") -> Path:
    for number in range(4):
        files = {}
        for index in range(3):
            files[f"{number}{index}.png"] = encoded(3 * number + index)
            files[f"{number}{index}.cls"] = str(index + 8).encode()
        shard(root / f"{stem}-{number:03d}.tar", files)
    return root


def test_shards_are_read_at_random(tmp_path: Path) -> None:
    webdataset()
    source = open_source(f"wds:{shards(tmp_path)}/shards-{{000..003}}.tar")
    assert source.class_names == ("8", "9", "10")
    assert len(source.splits["all"]) == 12
    for number in (7, 0, 11, 3):
        item = source.splits["all"][number]
        assert item == Item(f"shards-{number // 3:03d}.tar/{number // 3}{number % 3}.png", number % 3)
        assert same(source, item, number)
    assert source.path(source.splits["all"][0]) is None
    again = pickle.loads(pickle.dumps(source))
    assert again.fingerprint() == source.fingerprint() == open_source(f"wds:{tmp_path}").fingerprint()
    assert same(again, again.splits["all"][5], 5)
    part = open_source(f"wds:{tmp_path}/shards-{{001..002}}.tar")
    assert len(part.splits["all"]) == 6


def test_the_names_of_shards_may_say_the_split(tmp_path: Path) -> None:
    webdataset()
    shards(tmp_path, "flowers-train")
    shards(tmp_path, "flowers-val")
    source = open_source(f"wds:{tmp_path}")
    assert {name: len(items) for name, items in source.splits.items()} == {"train": 12, "val": 12}
    split = split_source(source, Splits("val", "train"))
    assert all("train" in item.key for item in split.held_out)
    assert len(split.train) == 12


def test_json_labels_and_long_names(tmp_path: Path) -> None:
    webdataset()
    long = "x" * 150
    labels = json.dumps({"label": "Käfer", "genus": "Apis"}).encode()
    files = {"a/1.seg.png": encoded(1), "a/1.json": labels, f"{long}.jpg": encoded(2), f"{long}.json": labels}
    shard(tmp_path / "0.tar", {**files, "__meta__.json": b"{}", "alone.cls": b"3"})
    source = open_source(f"wds:{tmp_path / '0.tar'}")
    assert source.class_names == ("Käfer",)
    assert [item.key for item in source.splits["all"]] == ["0.tar/a/1.seg.png", f"0.tar/{long}.jpg"]
    assert same(source, source.splits["all"][1], 2)
    assert any("without an image" in note for note in source.notes)
    assert open_source(f"wds:{tmp_path}", labels="genus").class_names == ("Apis",)
    with pytest.raises(PatchloomError, match="no label column 'family'; columns: label, genus"):
        open_source(f"wds:{tmp_path}", labels="family")


def test_mistakes_with_shards_are_named(tmp_path: Path) -> None:
    webdataset()
    with pytest.raises(PatchloomError, match=r"no \.tar files"):
        open_source(f"wds:{tmp_path}")
    with pytest.raises(PatchloomError, match=r"shards-000\.tar does not exist"):
        open_source(f"wds:{tmp_path}/shards-{{000..001}}.tar")
    shard(tmp_path / "a" / "0.tar", {"1.png": encoded(1)})
    with pytest.raises(PatchloomError, match=r"The sample 1 of .* has no label"):
        open_source(f"wds:{tmp_path / 'a'}")
    cut = shards(tmp_path / "b") / "shards-002.tar"
    cut.write_bytes(cut.read_bytes()[:2000])
    with pytest.raises(PatchloomError, match=r"shards-002\.tar cannot be read as a tar file"):
        open_source(f"wds:{tmp_path / 'b'}")
    with pytest.raises(PatchloomError, match="needs a path"):
        open_source("wds:")


def test_a_bad_image_in_a_shard_is_named(tmp_path: Path) -> None:
    webdataset()
    shard(tmp_path / "0.tar", {"1.png": encoded(1)[:90], "1.cls": b"0", "2.png": encoded(2), "2.cls": b"0"})
    source = open_source(f"wds:{tmp_path}")
    found = find_unreadable(source, source.items())
    assert list(found) == ["0.tar/1.png"]
    assert "truncated" in found["0.tar/1.png"]


# --- Hugging Face


def saved(folder: Path, numbers: list[int], labels: list[object], kind: object, **more: list[object]) -> object:
    datasets = pytest.importorskip("datasets", reason="its folders are read by datasets")
    features = {"image": datasets.Image(), "label": kind, **{name: datasets.Value("string") for name in more}}
    rows = {"image": [{"bytes": encoded(n), "path": None} for n in numbers], "label": labels, **more}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def test_a_saved_dict_of_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="its folders are read by datasets")
    kind = datasets.ClassLabel(names=["zebra", "ant", "none"])
    train, val = saved(tmp_path, [1, 2, 3], [0, 1, 0], kind), saved(tmp_path, [4, 5], [1, -1], kind)
    datasets.DatasetDict({"train": train, "validation": val, "extra": val}).save_to_disk(tmp_path / "set")
    source = open_source(f"hf:{tmp_path / 'set'}")
    assert source.class_names == ("zebra", "ant", "none")
    assert named(source, "train") == {"train/0": "zebra", "train/1": "ant", "train/2": "zebra"}
    assert source.splits["val"] == [Item("val/0", 1)]
    assert split_source(source, Splits("train+val", hold_out="none")).train == [
        *source.splits["train"],
        *source.splits["val"],
    ]
    assert same(source, source.splits["val"][0], 4)
    again = pickle.loads(pickle.dumps(source))
    assert same(again, again.splits["train"][2], 3)
    notes = " ".join(source.notes)
    assert "extra" in notes
    assert "1 images of val without a label" in notes
    assert "without images: none" in notes


def test_a_saved_table_with_columns_to_choose_from(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="its folders are read by datasets")
    table = saved(tmp_path, [1, 2, 3], [10, 9, 9], datasets.Value("int64"), genus=["a", "b", "a"])
    table.save_to_disk(tmp_path / "set")
    assert open_source(f"hf:{tmp_path / 'set'}").class_names == ("9", "10")
    assert open_source(f"hf:{tmp_path / 'set'}", labels="genus").class_names == ("a", "b")
    with pytest.raises(PatchloomError, match=r"no label column 'family'.*label, genus"):
        open_source(f"hf:{tmp_path / 'set'}", labels="family")
    with pytest.raises(PatchloomError, match="is not a folder"):
        open_source(f"hf:{tmp_path / 'none'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PatchloomError, match="save_to_disk"):
        open_source(f"hf:{tmp_path / 'empty'}")
