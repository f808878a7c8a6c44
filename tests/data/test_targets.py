"""Targets of items: a class, several label columns, or none."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import pickle
import tarfile
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.data.check import check_data
from patchloom.data.levels import parents
from patchloom.data.opening import open_source
from patchloom.data.sources import Item, Source
from patchloom.data.splits import split_source
from patchloom.errors import PatchloomError

ROWS = [
    ("a.png", "Apis", "mellifera", "train"),
    ("b.png", "Apis", "cerana", "train"),
    ("c.png", "Bombus", "terrestris", "train"),
    ("d.png", "Apis", "mellifera", "val"),
]


def image(path: Path, shade: int = 7) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 6), (shade, 0, 0)).save(path)


def manifest(folder: Path, rows: list[tuple[str, ...]] = ROWS, header: str = "path,genus,species,split") -> Path:
    with open(folder / "list.csv", "w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])
    for number, row in enumerate(rows):
        image(folder / row[0], number)
    return folder / "list.csv"


def names(source: Source, split: str, column: str) -> dict[str, str]:
    return {item.key: source.columns[column][item.target[column]] for item in source.splits[split]}


@pytest.mark.parametrize("labels", ["genus,species", "genus, species", ["genus", "species"], ("genus", "species")])
def test_several_columns_give_one_index_per_column(labels: str | list[str], tmp_path: Path) -> None:
    source = open_source(manifest(tmp_path), labels=labels)
    assert source.columns == {"genus": ("Apis", "Bombus"), "species": ("cerana", "mellifera", "terrestris")}
    assert source.class_names == ("Apis", "Bombus")
    assert source.splits["train"][0] == Item("a.png", {"genus": 0, "species": 1})
    assert names(source, "train", "species") == {row[0]: row[2] for row in ROWS[:3]}
    assert names(source, "val", "genus") == {"d.png": "Apis"}
    assert [item.label for item in source.splits["train"]] == [0, 0, 1]
    assert len({item for items in source.splits.values() for item in items}) == 4  # items with dicts have a hash


def test_one_column_of_several_is_the_source_of_that_column_alone(tmp_path: Path) -> None:
    both = open_source(manifest(tmp_path), labels="genus,species")
    for column in ("genus", "species"):
        alone, chosen = open_source(tmp_path / "list.csv", labels=column), both.with_labels(column)
        assert (chosen.class_names, chosen.splits, chosen.columns) == (alone.class_names, alone.splits, alone.columns)
        assert chosen.fingerprint() == alone.fingerprint() != both.fingerprint()
    with pytest.raises(PatchloomError, match=r"no label column 'specis'. Did you mean 'species'"):
        both.with_labels("specis")
    with pytest.raises(PatchloomError, match="no label column 'order'"):
        open_source(tmp_path / "list.csv", labels="genus,order")


def test_classes_in_another_order_keep_the_other_columns(tmp_path: Path) -> None:
    source = open_source(manifest(tmp_path), labels="genus,species")
    turned = source.in_order(["Bombus", "Apis"])
    for split in source.splits:
        for column in source.columns:
            assert names(turned, split, column) == names(source, split, column)
    assert turned.class_names == ("Bombus", "Apis")
    assert turned.fingerprint() == source.fingerprint()


def test_a_column_name_may_hold_a_comma(tmp_path: Path) -> None:
    path = manifest(tmp_path, [("a.png", "x", "1"), ("b.png", "y", "2")], "path,label,year")
    path.write_text(path.read_text().replace("label", '"one,two"'))
    assert open_source(path, labels="one,two").class_names == ("x", "y")


def test_the_fingerprint_of_classes_is_that_of_earlier_versions(tmp_path: Path) -> None:
    """Written out here: runs of earlier versions are resumed by it."""
    source = open_source(manifest(tmp_path), labels="genus")
    rows = sorted((row[3], row[0], row[1], str((tmp_path / row[0]).stat().st_size)) for row in ROWS)
    want = hashlib.sha256("".join("\0".join(row) + "\n" for row in rows).encode()).hexdigest()
    assert source.fingerprint() == want


def test_targets_of_any_kind_change_the_fingerprint() -> None:
    targets = [None, "mask.png", "another.png", [[0, 0, 4, 5]], [[0, 0, 4, 6]], {"caption": "a bee"}]
    marks = [Source("x", (), {"all": [Item("a", target)]}).fingerprint() for target in targets]
    assert len(set(marks)) == len(marks)
    item = Item("a", "mask.png")
    assert pickle.loads(pickle.dumps(item)) == item
    with pytest.raises(PatchloomError, match=r"The image a has no class; its target is 'mask.png'"):
        _ = item.label


def test_parents_of_classes_and_conflicts(tmp_path: Path) -> None:
    source = open_source(manifest(tmp_path), labels="genus,species")
    assert parents(source, "species", "genus") == [0, 0, 1]
    assert parents(source, "genus", "genus") == [0, 1]
    conflict = [*ROWS, ("e.png", "Bombus", "mellifera", "train")]
    wanted = "'mellifera' of species lies in more than one class of genus: 'Apis' .a.png. and 'Bombus' .e.png."
    with pytest.raises(PatchloomError, match=wanted):
        parents(open_source(manifest(tmp_path, conflict), labels="genus,species"), "species", "genus")
    with pytest.raises(PatchloomError, match="no label column 'order'"):
        parents(source, "species", "order")


@pytest.mark.parametrize("places", [["1.png", "2.png"], ["x.png", "deep/y.png", "deep/er/z.png"]])
def test_folders_without_classes(places: list[str], tmp_path: Path) -> None:
    for place in places:
        image(tmp_path / place)
    source = open_source(tmp_path, targets="none")
    assert source.splits == {"all": [Item(place) for place in sorted(places)]}
    assert (source.class_names, source.columns, source.labelled) == ((), {}, False)
    assert not any("skipped" in note for note in source.notes)
    assert source.read(source.items()[0]).size == (6, 6)
    assert check_data(source)["count"] == len(places)


def test_a_flat_folder_needs_to_be_asked_for(tmp_path: Path) -> None:
    image(tmp_path / "1.png")
    with pytest.raises(PatchloomError, match="no class folders"):
        open_source(tmp_path)
    with pytest.raises(PatchloomError, match=r"Unknown targets 'mask'. Choose from: class, none."):
        open_source(tmp_path, targets="mask")
    (tmp_path / "1.png").unlink()
    with pytest.raises(PatchloomError, match="is an empty folder"):
        open_source(tmp_path, targets="none")


def test_splits_without_classes(tmp_path: Path) -> None:
    for place in ("train/1.png", "train/2.png", "val/3.png"):
        image(tmp_path / place)
    source = open_source(tmp_path, targets="none")
    assert source.splits == {"train": [Item("train/1.png"), Item("train/2.png")], "val": [Item("val/3.png")]}


def test_classes_that_are_there_are_kept(tmp_path: Path) -> None:
    for place in ("ant/1.png", "bee/2.png"):
        image(tmp_path / place)
    with_classes, asked = open_source(tmp_path), open_source(tmp_path, targets="none")
    assert asked.splits == with_classes.splits
    assert asked.class_names == ("ant", "bee")
    image(tmp_path / "stray.png")
    assert [item.key for item in open_source(tmp_path, targets="none").items()] == [
        "ant/1.png", "bee/2.png", "stray.png",
    ]  # fmt: skip
    assert [item.key for item in open_source(tmp_path).items()] == ["ant/1.png", "bee/2.png"]


def test_validation_classes_that_training_lacks_do_not_matter_without_labels(tmp_path: Path) -> None:
    for place in ("train/ant/1.png", "val/bee/2.png"):
        image(tmp_path / place)
    with pytest.raises(PatchloomError, match="train lacks"):
        open_source(tmp_path)
    assert open_source(tmp_path, targets="none").splits["val"] == [Item("val/bee/2.png")]


def test_without_classes_a_fifth_is_held_out_by_the_hash_of_the_key(tmp_path: Path) -> None:
    keys = [f"{number:02d}.png" for number in range(23)]
    for key in keys:
        image(tmp_path / key)
    split = split_source(open_source(tmp_path, targets="none"))
    by_hash = sorted(keys, key=lambda key: hashlib.sha256(key.encode()).digest())
    assert {item.key for item in split.held_out} == set(by_hash[: 23 // 5])
    assert len(split.train) == 19


def test_manifests_without_labels(tmp_path: Path) -> None:
    path = manifest(tmp_path, [("a.png",), ("b.png",)], "path")
    assert open_source(path, targets="none").splits == {"all": [Item("a.png"), Item("b.png")]}
    with pytest.raises(PatchloomError, match="must say which column"):
        open_source(path)
    one = manifest(tmp_path, [("a.png", "x"), ("b.png", "y")], "path,label")
    assert open_source(one, targets="none").class_names == ("x", "y")
    gaps = open_source(manifest(tmp_path, [("a.png", "x"), ("b.png", "")], "path,label"), targets="none")
    assert gaps.splits == {"all": [Item("a.png"), Item("b.png")]}
    assert "1 row without a value for 'label': the labels are not used." in gaps.notes
    several = open_source(manifest(tmp_path), targets="none")
    assert not several.labelled
    assert "none was chosen with --labels" in several.notes[0]
    assert open_source(tmp_path / "list.csv", labels="genus", targets="none").class_names == ("Apis", "Bombus")
    with pytest.raises(PatchloomError, match="no value for 'label'"):
        open_source(manifest(tmp_path, [("a.png", "x"), ("b.png", "")], "path,label"), labels="label", targets="none")


def tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def test_shards_with_several_columns_or_none(tmp_path: Path) -> None:
    pytest.importorskip("webdataset", reason="the names of shards are expanded by webdataset")
    image(tmp_path / "x.png")
    pixels = (tmp_path / "x.png").read_bytes()
    rows = [{"genus": "Apis", "species": "mellifera"}, {"genus": "Bombus", "species": "terrestris"}]
    labelled = {f"{i}.{end}": data for i, row in enumerate(rows) for end, data in (("png", pixels), ("json", row))}
    tar(tmp_path / "s.tar", {k: v if isinstance(v, bytes) else json.dumps(v).encode() for k, v in labelled.items()})
    source = open_source(f"wds:{tmp_path}/s.tar", labels="species,genus")
    assert source.columns == {"species": ("mellifera", "terrestris"), "genus": ("Apis", "Bombus")}
    assert [item.target for item in source.items()] == [{"species": 0, "genus": 0}, {"species": 1, "genus": 1}]
    tar(tmp_path / "bare.tar", {"0.png": pixels, "0.cls": b"3", "1.png": pixels})
    with pytest.raises(PatchloomError, match=r"sample 1 .* has no label"):
        open_source(f"wds:{tmp_path}/bare.tar")
    bare = open_source(f"wds:{tmp_path}/bare.tar", targets="none")
    assert [item.target for item in bare.items()] == [None, None]
    assert "1 sample without a label: no labels are used." in bare.notes


def test_hugging_face_sets_with_several_columns_or_none(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="reads data sets on disk")
    image(tmp_path / "x.png")
    pixels = {"bytes": (tmp_path / "x.png").read_bytes(), "path": None}
    fine = datasets.ClassLabel(names=["rose", "oak", "fir"])
    features = datasets.Features(image=datasets.Image(), fine=fine, coarse=datasets.Value("string"))
    table = {"image": [pixels] * 3, "fine": [2, 1, 0], "coarse": ["tree", "tree", "flower"]}
    datasets.Dataset.from_dict(table, features=features).save_to_disk(tmp_path / "set")
    source = open_source(f"hf:{tmp_path / 'set'}", labels=["coarse", "fine"])
    assert source.columns == {"coarse": ("flower", "tree"), "fine": ("rose", "oak", "fir")}
    assert [item.target["fine"] for item in source.items()] == [2, 1, 0]
    assert parents(source, "fine", "coarse") == [0, 1, 1]
    datasets.Dataset.from_dict({"image": [pixels]}, features=datasets.Features(image=datasets.Image())).save_to_disk(
        tmp_path / "bare"
    )
    assert open_source(f"hf:{tmp_path / 'bare'}", targets="none").items() == [Item("all/0")]


def test_the_levels_of_cifar_100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("patchloom.compat")  # before torchvision
    pytest.importorskip("torchvision", reason="it reads the set")
    from torchvision import datasets

    kind = datasets.CIFAR100
    monkeypatch.setattr(kind, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    entry = {"data": np.zeros((3, 3072), np.uint8), "fine_labels": [2, 0, 1], "coarse_labels": [1, 0, 1]}
    for file, _ in [*kind.train_list, *kind.test_list]:
        (folder / file).write_bytes(pickle.dumps(entry))
    meta = {"fine_label_names": ["rose", "oak", "fir"], "coarse_label_names": ["flower", "tree"]}
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps(meta))
    where = f"torchvision:CIFAR100:{tmp_path}"
    assert [item.target for item in open_source(where, "coarse").splits["test"]] == [1, 0, 1]
    assert open_source(where, "fine").splits == open_source(where).splits
    both = open_source(where, "coarse,fine")
    assert both.columns == {"coarse": ("flower", "tree"), "fine": ("rose", "oak", "fir")}
    assert both.splits["train"][0] == Item("train/0", {"coarse": 1, "fine": 2})
    assert parents(both, "fine", "coarse") == [0, 1, 1]
    with pytest.raises(PatchloomError, match=r"no label column 'corse'. Did you mean 'coarse'"):
        open_source(where, "corse")


def test_the_levels_of_inaturalist(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="it reads the set")
    ranks = ["Animalia_Arthropoda_Insecta_Hymenoptera_Apidae_Apis_mellifera",
             "Animalia_Arthropoda_Insecta_Hymenoptera_Apidae_Bombus_terrestris"]  # fmt: skip
    for version in ("2021_train", "2021_valid"):
        for number, name in enumerate(ranks):
            image(tmp_path / version / f"{number:05d}_{name}" / "1.png")
    where = f"torchvision:INaturalist:{tmp_path}"
    source = open_source(where, "family,genus,species")
    assert (source.columns["family"], source.columns["genus"]) == (("Apidae",), ("Apis", "Bombus"))
    assert source.columns["species"] == open_source(where).class_names
    assert [item.target["genus"] for item in source.splits["val"]] == [0, 1]
    assert parents(source, "genus", "family") == [0, 0]
    with pytest.raises(PatchloomError, match="no label column 'super'"):
        open_source(where, "super")
    for place in ("2018/Birds/0/a.png", "2018/Fish/1/b.png"):
        image(tmp_path / "old" / place)
    old = open_source(f"torchvision:INaturalist:{tmp_path / 'old'}", "super")
    assert old.class_names == ("Birds", "Fish")


def test_images_with_targets_that_are_not_classes_are_held_out_as_one_class() -> None:
    items = [Item(f"{i}.png", f"{i}.mask.png") for i in range(10)]
    split = split_source(Source("masks", (), {"all": items}))
    assert [len(split.train), len(split.held_out)] == [8, 2]
