"""The index: what it finds, against brute force in float64 over the network itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searching
from PIL import Image
from searching import World, content, picture, save_network

import patchloom
from patchloom import Index, PatchloomError
from patchloom.search.storage import read_header

world, built, index = searching.world, searching.built, searching.index


def knn(cosines: np.ndarray, labels: list[str], k: int) -> dict[str, float]:
    """Eq. 2.6 for one query, written plainly."""
    near = np.argsort(-cosines, kind="stable")[:k]
    weights = np.exp(cosines[near] / 0.05)
    return {
        name: float(weights[[labels[i] == name for i in near]].sum() / weights.sum())
        for name in {labels[i] for i in near}
    }


def differ(one: dict[str, float], other: dict[str, float]) -> float:
    return max(abs(one.get(name, 0) - other.get(name, 0)) for name in {*one, *other})


def test_scores_are_the_cosines_of_the_networks_embeddings(world: World, built: Path) -> None:
    answers = Index.open(built).query(world.files(world.test), k=len(world.train))
    for answer, row in zip(answers, world.cosines(world.test), strict=True):
        scores = {result["key"]: result["score"] for result in answer["results"]}
        assert [scores[item["path"]] for item in world.train] == pytest.approx(row, abs=1e-5)
        shown = [result["score"] for result in answer["results"]]
        assert shown == sorted(shown, reverse=True)
        labels = {result["key"]: result["labels"] for result in answer["results"]}
        assert all(labels[item["path"]] == {name: item[name] for name in ("fine", "coarse")} for item in world.train)


def test_knn_and_classify_are_eq_2_6_with_the_k_of_leave_one_out(world: World, built: Path) -> None:
    index, cosines = Index.open(built), world.cosines(world.test)
    within = world.cosines(world.train)
    np.fill_diagonal(within, -2)
    queries = index.query(world.files(world.test))
    for column in ("fine", "coarse"):
        labels = [row[column] for row in world.train]
        right = {
            k: np.mean(
                [max(p := knn(row, labels, k), key=p.get) == true for row, true in zip(within, labels, strict=True)]
            )
            for k in (10, 15, 20, 25, 30)
        }
        assert index.leave_one_out(column) == pytest.approx(right)
        rows = index.classify(world.files(world.test), column)
        assert right[rows[0]["k"]] == max(right.values())
        for row, query, cosine in zip(rows, queries, cosines, strict=True):
            want = knn(cosine, labels, row["k"])
            assert differ(row["probabilities"], want) < 1e-4
            assert differ(query["knn"][column], want) < 1e-4
    assert differ(index.classify(world.files(world.test)[0], "fine", k=3)[0]["probabilities"],
                  knn(cosines[0], [row["fine"] for row in world.train], 3)) < 1e-4  # fmt: skip


def test_the_coarse_condition_is_eq_2_5_with_the_softmax_of_a_classifier(world: World, built: Path) -> None:
    files = world.files(world.test)[:6]
    answers = Index.open(built).query(files, k=len(world.train), condition="coarse")
    predicted = patchloom.predict(world.weights, files)
    for answer, row, cosines in zip(answers, predicted, world.cosines(world.test[:6]), strict=True):
        p = {entry["class"]: min(max(entry["probability"], 1e-4), 1 - 1e-4) for entry in row["predictions"]}
        want = {
            item["path"]: cosine + math.log(p[item["coarse"]] / (1 - p[item["coarse"]]))
            for item, cosine in zip(world.train, cosines, strict=True)
        }
        assert {result["key"]: result["score"] for result in answer["results"]} == pytest.approx(want, abs=1e-4)


def test_the_coarse_condition_uses_the_neighbours_where_the_network_is_not_a_classifier_of_the_column(
    world: World, built: Path
) -> None:
    index = Index.open(built)
    labels = [row["fine"] for row in world.train]
    answer = index.query(world.files(world.test)[3], len(labels), "coarse", coarse="fine")[0]
    cosines = world.cosines(world.test[3:4])[0]
    p = knn(cosines, labels, read_header(built).k["fine"])
    clamped = {name: min(max(p.get(name, 0), 1e-4), 1 - 1e-4) for name in labels}
    want = {
        item["path"]: cosine + math.log(clamped[item["fine"]] / (1 - clamped[item["fine"]]))
        for item, cosine in zip(world.train, cosines, strict=True)
    }
    assert {result["key"]: result["score"] for result in answer["results"]} == pytest.approx(want, abs=2e-3)


def test_the_oracle_puts_its_class_first(world: World, built: Path) -> None:
    index = Index.open(built)
    answer = index.query(world.files(world.test)[0], len(world.train), "oracle=fish")[0]
    kinds = [result["labels"]["coarse"] for result in answer["results"]]
    assert kinds == ["fish"] * 28 + ["flower"] * 42
    for part in (answer["results"][:28], answer["results"][28:]):
        scores = [result["score"] for result in part]
        assert scores == sorted(scores, reverse=True)
    with pytest.raises(PatchloomError, match="nobody"):
        index.query(world.files(world.test)[0], condition="oracle=nobody")
    with pytest.raises(PatchloomError, match=r"--condition.*coarse"):
        index.query(world.files(world.test)[0], condition="corse")


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_an_approximate_index_finds_nearly_what_the_exact_one_finds(kind: str, world: World, tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="approximate indexes did not run: no faiss")
    index = Index.build(world.weights, world.table, tmp_path / kind, labels="fine", kind=kind)
    exact = Index.build(world.weights, world.table, tmp_path / "exact", labels="fine")
    assert index.header.approximate["recall"] >= 0.9
    found, true = (
        [{result["key"] for result in answer["results"]} for answer in one.query(world.files(world.test))]
        for one in (index, exact)
    )
    assert np.mean([len(a & b) / 10 for a, b in zip(found, true, strict=True)]) >= 0.9
    index.add(world.files(world.train)[0].with_name("0.png"), {"fine": "other"})  # unchanged content, another label
    Image.new("RGB", (40, 32), "red").save(tmp_path / "red.png")
    index.add(tmp_path / "red.png", {"fine": "red"})
    again = Index.open(tmp_path / kind)
    assert again.query(tmp_path / "red.png", 1)[0]["results"][0]["labels"] == {"fine": "red"}
    again.remove(str(tmp_path / "red.png"))
    assert len(again) == len(exact)
    assert again.query(tmp_path / "red.png", 1)[0]["results"][0]["score"] < 0.9999


def test_a_class_that_only_the_index_knows_is_predicted_and_gone_with_its_images(
    world: World, index: Path, tmp_path: Path
) -> None:
    generator, opened = np.random.default_rng(9), Index.open(index)
    before = opened.query(world.files(world.test), k=20)
    files = []
    for i in range(31):  # as many as the largest k, and one more to ask with
        picture(11, generator).save(tmp_path / f"{i}.png")
        files.append(tmp_path / f"{i}.png")
    assert opened.add(files[:30], {"fine": "lily"}) == {"added": 30, "replaced": 0, "unchanged": 0}
    answer = opened.query(files[30], k=5)[0]
    assert max(answer["knn"]["fine"], key=answer["knn"]["fine"].get) == "lily"
    assert "lily" in opened.classify(files[30], "fine")[0]["probabilities"]
    new = [key for i, key in enumerate(opened.contents.keys) if opened.contents.labels(i)["fine"] == "lily"]
    # without a coarse label they do not vote there, and come last under the condition
    assert answer["results"][0]["labels"] == {"fine": "lily", "coarse": None}
    assert sum(answer["knn"]["coarse"].values()) == pytest.approx(1)
    ranked = opened.query(files[30], len(opened), condition="coarse")[0]["results"]
    assert all(math.isfinite(result["score"]) for result in ranked)
    assert opened.remove(new) == 30
    assert opened.query(world.files(world.test), k=20) == before
    assert "lily" not in opened.columns["fine"].names


def test_unchanged_files_are_not_embedded_again_and_changed_ones_are(
    world: World, index: Path, tmp_path: Path, monkeypatch
) -> None:
    opened = Index.open(index)
    file = tmp_path / "one.png"
    picture(2, np.random.default_rng(5)).save(file)
    opened.add(file, {"fine": "iris"})
    score = opened.query(file, 1)[0]["results"][0]["score"]
    before = content(index)
    calls: list[int] = []
    from patchloom.search import changes

    plain = changes.embed_pixels
    monkeypatch.setattr(changes, "embed_pixels", lambda *a: calls.append(1) or plain(*a))
    assert opened.add(file, {"fine": "iris"})["unchanged"] == 1
    assert content(index) == before
    assert opened.add(file, {"fine": "rose", "coarse": "flower"})["unchanged"] == 1  # only its labels
    assert not calls
    assert opened.query(file, 1)[0]["results"][0]["labels"] == {"fine": "rose", "coarse": "flower"}
    picture(4, np.random.default_rng(6)).save(file)
    assert opened.add(file) == {"added": 0, "replaced": 1, "unchanged": 0}
    assert calls == [1]
    found = opened.query(file, 1)[0]["results"][0]
    assert (found["key"], found["labels"]["fine"]) == (str(file), "rose")
    assert found["score"] == pytest.approx(1, abs=1e-5) == pytest.approx(score, abs=1e-5)
    assert len(opened) == len(world.train) + 1


def test_pictures_in_memory_can_be_asked_for_and_added(world: World, index: Path) -> None:
    opened = Index.open(index)
    image = Image.open(world.files(world.test)[0])
    got = opened.query([image], 3)[0]
    want = opened.query(world.files(world.test)[0], 3)[0]
    assert got["results"] == want["results"]
    new = picture(7, np.random.default_rng(1))
    opened.add(new, {"fine": " seven "})  # spaces around it are dropped, as in manifests
    assert opened.query(new, 1)[0]["results"][0]["labels"]["fine"] == "seven"


def test_bad_input_is_refused_and_changes_nothing(world: World, index: Path, tmp_path: Path) -> None:
    opened, before = Index.open(index), content(index)
    (tmp_path / "words.jpg").write_text("not an image")
    good = world.files(world.test)[0]
    for call, message in (
        (lambda: opened.query(tmp_path / "words.jpg"), "words.jpg"),
        (lambda: opened.query(tmp_path / "absent.jpg"), "absent.jpg"),
        (lambda: opened.query(good, 0), "at least 1"),
        (lambda: opened.query([]), "No image was given"),
        (lambda: opened.classify(good, "colour"), r"colour.*fine, coarse"),
        (lambda: opened.classify(good, "fine", 71), "between 1 and 70"),
        (lambda: opened.add([good, tmp_path / "words.jpg"]), "words.jpg"),
        (lambda: opened.add(good, {"fien": "rose"}), "Did you mean 'fine'"),
        (lambda: opened.add(good, {"fine": " "}), "COLUMN=NAME"),
        (lambda: opened.add(good, {"fine": 3}), "not int"),
        (lambda: opened.add(good, "fine=rose"), "not str"),
        (lambda: opened.query(good, 1.5), "whole number"),
        (lambda: opened.query(good, None), "whole number"),
        (lambda: opened.classify(good, "fine", "3"), "whole number"),
        (lambda: opened.classify(good, None), "not NoneType"),
        (lambda: opened.query(good, condition=None), "not NoneType"),
        (lambda: opened.remove(3), "not int"),
        (lambda: opened.remove(["train/cod/0.png", 3]), "not int"),
        (lambda: Index.open(None), "not NoneType"),
        (lambda: Index.build(world.weights, world.table, None), "not NoneType"),
        (lambda: Index.build(world.weights, world.table, tmp_path / "x", labels=3), "not int"),
        (lambda: opened.query(good, coarse="colour"), "no label column 'colour'"),
        (lambda: Index.build(world.weights, world.table, tmp_path / "x", batch=0), "at least 1"),
        (lambda: Index.build(world.weights, world.table, tmp_path / "x", workers=-1), "workers=-1"),
        (lambda: Index.build(world.weights, world.table, world.table / "x"), "cannot be written"),
        (lambda: opened.remove(["train/cod/0.png", "no-such-key.png"]), "no-such-key.png"),
        (lambda: opened.remove(list(opened.contents.keys)), "all images"),
        (lambda: Index.open(tmp_path / "nowhere"), "not an index"),
        (lambda: Index.build(world.weights, world.table, index), "exists already"),
        (lambda: Index.build(world.weights, world.table, tmp_path / "x", labels="colour"), "colour"),
        (lambda: Index.build(world.weights, world.table, tmp_path / "x", kind="hsnw"), "hsnw"),
    ):
        with pytest.raises(PatchloomError, match=message):
            call()
    assert content(index) == before
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("device", ["nonsense", "cpu:3", 3, ["cpu"]])
def test_a_device_that_is_not_there_is_refused_when_an_index_is_opened(index: Path, device: Any) -> None:
    with pytest.raises(PatchloomError, match="Choose from: auto, cpu"):
        Index.open(index, device=device)


def test_damage_and_newer_versions_are_noticed(index: Path) -> None:
    whole = content(index)
    for name, data in whole.items():
        path = index / name
        for damaged in (data[: len(data) * 3 // 4], data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]):
            path.write_bytes(damaged)
            with pytest.raises(PatchloomError, match=r"damaged|cannot be read as JSON"):
                Index.open(index)
        path.unlink()
        with pytest.raises(PatchloomError, match=r"missing|not an index"):
            Index.open(index)
        path.write_bytes(data)
    about = json.loads((index / "index.json").read_text())
    (index / "index.json").write_text(json.dumps({**about, "version": 999}))
    with pytest.raises(PatchloomError, match=r"999.*newer patchloom"):
        Index.open(index)


def test_other_weights_are_refused(world: World, tmp_path: Path) -> None:
    weights, query = save_network(tmp_path / "model.safetensors"), world.files(world.test)[0]
    index = Index.build(weights, world.collection, tmp_path / "index", labels="fine")
    before = index.query(query)
    assert Index.open(tmp_path / "index", weights=world.weights).query(query) == before  # the same, elsewhere
    save_network(weights, seed=1)
    for options in ({}, {"weights": weights}):
        with pytest.raises(PatchloomError, match="other weights"):
            Index.open(tmp_path / "index", **options).query(query)
    with pytest.raises(PatchloomError, match="other weights"):
        Index.open(tmp_path / "index", weights=patchloom.load(weights))
    weights.unlink()
    with pytest.raises(PatchloomError, match=r"not at .* any more"):
        Index.open(tmp_path / "index").query(query)


def test_unreadable_images_are_left_out_with_a_message(world: World, tmp_path: Path, capsys) -> None:
    from patchloom.console import Console

    for name, rows in (("rose", world.train[:3]), ("cod", world.train[-3:])):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i, file in enumerate(world.files(rows)):
            (tmp_path / "data" / name / f"{i}.png").write_bytes(file.read_bytes())
    (tmp_path / "data" / "rose" / "1.png").write_bytes(b"damaged")
    index = Index.build(world.weights, tmp_path / "data", tmp_path / "index", console=Console())
    assert "rose/1.png" in capsys.readouterr().out
    assert sorted(index.contents.keys) == ["cod/0.png", "cod/1.png", "cod/2.png", "rose/0.png", "rose/2.png"]
    for key in index.contents.keys:
        assert index.query(tmp_path / "data" / key, 1)[0]["results"][0]["score"] > 0.9999
    assert set(index.columns) == {"label"}


def test_an_index_that_left_out_images_keeps_its_vectors_when_it_changes(world: World, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for i, file in enumerate(world.files(world.train[:6])):
        (data / "rose").mkdir(parents=True, exist_ok=True)
        (data / "rose" / f"{i}.png").write_bytes(file.read_bytes() if i != 3 else b"damaged")
    index = Index.build(world.weights, data, tmp_path / "index")
    for change in (lambda: index.add(world.files(world.test)[0]), lambda: index.remove("rose/0.png")):
        kept = dict(zip(index.contents.keys, index.contents.vectors.copy(), strict=True))
        change()
        for key, vector in zip(index.contents.keys, index.contents.vectors, strict=True):
            assert key not in kept or np.array_equal(vector, kept[key])


def test_a_file_can_be_removed_by_its_path_and_k_may_be_of_numpy(world: World, index: Path) -> None:
    opened, file = Index.open(index), world.files(world.train)[0]
    assert opened.query(file, np.int64(3)) == opened.query(file, 3)
    assert json.dumps(opened.classify(file, "fine", np.int64(3)))
    assert opened.remove(file) == 1
    assert opened.remove(world.files(world.train)[1:3]) == 2
    assert not {row["path"] for row in world.train[:3]} & set(opened.contents.keys)


def test_embed_gives_the_vectors_of_the_network(world: World) -> None:
    got = patchloom.embed(world.weights, world.files(world.test))
    got = got / np.linalg.norm(got, axis=1, keepdims=True)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got @ got.T, world.cosines(world.test, world.test), atol=1e-5)
