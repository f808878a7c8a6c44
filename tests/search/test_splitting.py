"""Proposed classes: clusters that are there are found, and the manifest can be trained on."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import searching
from searching import World
from sklearn.metrics import adjusted_rand_score

import patchloom
from patchloom.cli.main import main
from patchloom.data.opening import open_source
from patchloom.inference.neighbours import normalise
from patchloom.search.splitting import agreement, choose_number, cluster, gaps, split_class, stability

world, built = searching.world, searching.built


def blobs(number: int, each: int = 40, noise: float = 0.08) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(number)
    truth = np.repeat(np.arange(number), each)
    return normalise(np.eye(number, 16)[truth] + noise * generator.normal(size=(len(truth), 16))).numpy(), truth


@pytest.mark.parametrize("number", [2, 5, 12])
def test_clusters_that_are_there_are_found(number: int) -> None:
    vectors, truth = blobs(number)
    assert adjusted_rand_score(truth, cluster(vectors, number)) == pytest.approx(1)
    found = split_class(vectors, np.arange(len(vectors)), None)
    assert found.number == number
    assert found.stability == pytest.approx(1, abs=0.01)
    assert agreement(found.labels, truth) == {"ari": pytest.approx(1), "purity": pytest.approx(1)}


def test_groups_inside_the_classes_do_not_hide_them() -> None:
    """Twelve classes, each of ten groups of alike images: the gap rises to the last number, its bend is at twelve."""
    generator = np.random.default_rng(0)
    classes = np.repeat(np.arange(12), 50)
    vectors = np.eye(12, 48)[classes] + 0.12 * generator.normal(size=(600, 48))
    vectors += np.repeat(0.12 * generator.normal(size=(120, 48)), 5, axis=0)
    vectors = normalise(vectors).numpy()
    found = gaps(vectors)
    assert max(found, key=found.__getitem__) > 12
    assert choose_number(found) == 12


def test_noise_is_not_split() -> None:
    vectors = normalise(np.random.default_rng(0).normal(size=(120, 16))).numpy()
    assert stability(vectors, 4) < 0.5
    found = split_class(vectors, np.arange(120), None)
    assert (found.number, found.stability) == (1, None)
    assert set(found.tried) == {2, 3, 4, 5, 6, 8, 10, 12}
    stretched = 1 + np.random.default_rng(0).normal(size=(180, 64)) * np.linspace(2, 0.1, 64)
    assert choose_number(gaps(normalise(stretched).numpy())) == 1


def test_the_number_is_at_the_bend_of_the_gap() -> None:
    assert choose_number({}) == 1
    assert choose_number({2: -0.1, 4: 0.01}) == 1
    assert choose_number({2: 0.9, 4: 0.5, 8: 0.3}) == 2
    assert choose_number({2: 0.1, 4: 0.5, 8: 0.6, 16: 0.7}) == 4
    assert choose_number({2: 0.01, 4: 0.03, 8: 0.2}) == 8  # no bend: the most


def test_purity_and_rand_index_by_hand() -> None:
    assert agreement(np.array([0, 0, 0, 1, 1]), np.array([2, 2, 1, 1, 1]))["purity"] == pytest.approx(4 / 5)


def test_images_without_a_known_class_are_not_compared() -> None:
    clusters, truth = np.array([0, 0, 0, 1, 1, 0, 1, 1]), np.array([2, 2, 1, 1, 1, -1, -1, -1])
    assert agreement(clusters, truth) == agreement(clusters[:5], truth[:5])
    assert agreement(clusters[5:], truth[5:]) == {"ari": None, "purity": None}


def test_the_manifest_is_a_data_set_with_the_new_column(world: World, built: Path, tmp_path: Path, capsys) -> None:
    out, page = tmp_path / "deep" / "finer.csv", tmp_path / "sheets.html"
    words = ["search", "split", str(built), "--labels", "coarse", "--clusters", "3", "--truth", "fine"]
    main([*words, "--out", str(out), "--gallery", str(page), "--json"])
    about = json.loads(capsys.readouterr().out)
    assert {name: one["clusters"] for name, one in about["classes"].items()} == {"fish": 3, "flower": 3}
    assert 0 <= about["purity"] <= 1
    assert about["rows"] == 70
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert list(rows[0]) == ["path", "fine", "coarse", "cluster"]
    assert {row["cluster"] for row in rows} == {f"{name} {i}" for name in ("fish", "flower") for i in (1, 2, 3)}
    assert all(row["cluster"].startswith(row["coarse"]) for row in rows)
    source = open_source(str(out), "cluster")
    assert all(source.read(item).size == (32, 32) for item in source.items()[:5])
    assert page.read_text().count("<h2>") == 6
    main([*words, "--out", str(out)])
    assert "purity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "mentions"),
    [
        (("--labels", "colour"), "colour"),
        (("--labels", "coarse", "--clusters", "many"), "many"),
        (("--labels", "coarse", "--clusters", "0"), "at least 1"),
        (("--labels", "coarse", "--clusters", "2", "--column", "fine"), "--column"),
        (("--labels", "coarse", "--clusters", "2", "--column", ""), "--column"),
    ],
)
def test_bad_options_are_refused(more: tuple[str, ...], mentions: str, built: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["search", "split", str(built), *more, "--out", str(tmp_path / "x.csv")])
    assert ended.value.code == 2
    assert mentions in capsys.readouterr().err
    assert not (tmp_path / "x.csv").exists()


def test_pictures_that_are_gone_are_grey_boxes(world: World, built: Path, tmp_path: Path) -> None:
    from patchloom import Index
    from patchloom.search.gallery import write_gallery

    index = Index.open(built)
    moved = shutil.move(world.root / "train", tmp_path / "moved")
    try:
        write_gallery(index, index.query_vectors(index.contents.vectors[:1], 3), tmp_path / "page.html")
    finally:
        shutil.move(moved, world.root / "train")
    assert (tmp_path / "page.html").read_text().count("data:image/svg+xml") == 4


def test_a_file_that_a_manifest_cannot_name_is_refused(world: World, tmp_path: Path, capsys) -> None:
    (tmp_path / "photos" / "fish").mkdir(parents=True)
    names = ["a.png", "b.png", os.fsdecode(b"\xff.png")]
    for name, file in zip(names, world.files(world.train), strict=False):
        shutil.copy(file, tmp_path / "photos" / "fish" / name)
    patchloom.Index.build(world.weights, tmp_path / "photos", tmp_path / "index", labels="label")
    words = ["search", "split", str(tmp_path / "index"), "--labels", "label", "--clusters", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--out", str(tmp_path / "x.csv")])
    assert ended.value.code == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "x.csv").exists()
