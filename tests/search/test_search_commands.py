"""`patchloom search` on the command line: the JSON, the gallery, the messages, and evaluation against scikit-learn."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import searching
from PIL import Image
from searching import World, save_network
from sklearn.metrics import average_precision_score

import patchloom
from patchloom import PatchloomError
from patchloom.cli.main import main
from patchloom.search.evaluation import evaluate_search

world, built, index = searching.world, searching.built, searching.index


def printed(capsys: Any, *words: Any) -> Any:
    main([str(word) for word in words])
    return json.loads(capsys.readouterr().out)


def refused(capsys: Any, *words: Any, mentions: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 2
    assert mentions in capsys.readouterr().err


def test_query_and_classify_print_what_python_returns(world: World, built: Path, capsys) -> None:
    from patchloom import Index

    files = world.files(world.test)[:3]
    answers = printed(capsys, "search", "query", built, *files, "-k", 4, "--json")
    assert answers == Index.open(built).query(files, 4)
    assert [answer["query"] for answer in answers] == [str(file) for file in files]
    assert {key for answer in answers for key in answer} == {"query", "results", "knn"}
    assert {key for result in answers[0]["results"] for key in result} == {"key", "score", "labels"}
    rows = printed(capsys, "search", "classify", built, *files, "--labels", "fine", "--json")
    assert rows == Index.open(built).classify(files, "fine")
    assert set(rows[0]) == {"query", "k", "probabilities"}
    main(["search", "classify", str(built), str(files[0]), "--labels", "fine"])
    assert f"k = {rows[0]['k']} (chosen by leave-one-out" in capsys.readouterr().out
    main(["search", "query", str(built), str(files[0]), "-k", "2"])
    assert answers[0]["results"][0]["key"] in capsys.readouterr().out


def test_build_add_and_remove(world: World, tmp_path: Path, capsys) -> None:
    out = tmp_path / "index"

    def printed(*words: Any) -> str:
        main(["search", *map(str, words)])
        return capsys.readouterr().out

    assert "70 images" in printed("build", world.weights, world.collection, "--out", out, "--labels", "fine,coarse")
    added = printed("add", out, *world.files(world.test), "--label", "fine=new", "--label", "coarse=fish")
    assert "20 added, 0 replaced, 0 unchanged; 90 images" in added
    removed = printed("remove", out, world.test[0]["path"], world.files(world.test)[1])
    assert "2 images removed, 88 left" in removed
    refused(capsys, "search", "remove", out, "nothing.png", mentions="'nothing.png'")
    twice = ["search", "add", out, world.files(world.test)[0], "--label", "fine=a", "--label", "fine=b"]
    refused(capsys, *twice, mentions="twice")


def test_the_gallery_has_every_picture_inside(world: World, built: Path, tmp_path: Path, capsys) -> None:
    page = tmp_path / "seen.html"
    query = world.files(world.test)[0]
    main(["search", "query", str(built), str(query), "-k", "6", "--gallery", str(page)])
    assert f"Wrote {page}" in capsys.readouterr().out
    text = page.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", text.split("<body>")[1].split("<script>")[0])
    assert not re.search(r"https?://", text.split("<script>")[0])
    shown = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
        for data in re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", text)
    ]
    assert len(shown) == 7
    assert (shown[0] == np.asarray(Image.open(query))).all()
    for result, pixels in zip(_results(built, query), shown[1:], strict=True):
        assert (pixels == np.asarray(Image.open(world.root / result["key"]))).all()
        assert result["labels"]["fine"] in text


def _results(built: Path, query: Path) -> list[dict[str, Any]]:
    from patchloom import Index

    return Index.open(built).query(query, 6)[0]["results"]


def test_frames_have_the_colour_of_the_finest_level_that_agrees() -> None:
    from patchloom.search.gallery import COLOURS, NONE, frame

    truth = {"fine": "cod", "coarse": "fish"}
    assert frame({"fine": "cod", "coarse": "fish"}, truth, ["fine", "coarse"]) == COLOURS[0]
    assert frame({"fine": "eel", "coarse": "fish"}, truth, ["fine", "coarse"]) == COLOURS[1]
    assert frame({"fine": "rose", "coarse": None}, truth, ["fine", "coarse"]) == NONE


def test_bare_weights_take_what_their_file_does_not_say(world: World, tmp_path: Path, capsys) -> None:
    """mean, std and heads reach the embeddings and are remembered by the index."""
    import patchloom

    model = patchloom.load(world.weights)
    patchloom.save(model, tmp_path / "described.safetensors")
    from safetensors.torch import load_file, save_file

    save_file(load_file(tmp_path / "described.safetensors"), tmp_path / "bare.safetensors")
    heads = model.config.heads
    hints = (f"model.heads={heads}", "mean=0.5", "std=0.5")
    main(
        [
            *map(str, ("search", "build", tmp_path / "bare.safetensors", world.collection, "--out", tmp_path / "i")),
            *hints,
        ]
    )
    capsys.readouterr()
    about = json.loads((tmp_path / "i" / "index.json").read_text())
    assert about["preprocessing"]["mean"] == [0.5] * 3
    assert about["model"]["hints"]["heads"] == heads
    got = printed(capsys, "search", "query", tmp_path / "i", world.files(world.train)[3], "-k", 1, "--json")
    assert got[0]["results"][0]["score"] > 0.9999
    refused(
        capsys, "search", "build", world.weights, world.collection, "--out", tmp_path / "x", "men=0.5", mentions="mean"
    )


def mean_ap(scores: np.ndarray, labels: list[str], truth: list[str]) -> float:
    return float(
        np.mean(
            [average_precision_score([name == t for name in labels], row) for row, t in zip(scores, truth, strict=True)]
        )
    )


def test_evaluate_is_scikit_learns_average_precision_for_every_level_and_condition(
    world: World, tmp_path: Path, capsys
) -> None:
    cosines = world.cosines(world.test)
    labels = {name: [row[name] for row in world.train] for name in ("fine", "coarse")}
    truth = {name: [row[name] for row in world.test] for name in ("fine", "coarse")}
    got = printed(capsys, "search", "evaluate", world.weights, world.table, "--labels", "fine", "coarse", "--json")
    assert list(got["levels"]) == ["fine", "coarse"]
    for name, entry in got["levels"].items():
        assert set(entry) == {"map", "knn", "k", "queries", "collection"}
        assert (entry["queries"], entry["collection"]) == (20, 70)
        assert entry["map"] == pytest.approx(mean_ap(cosines, labels[name], truth[name]), abs=1e-3)
        right = [
            max(p := _knn(row, labels[name], entry["k"]), key=p.get) == true
            for row, true in zip(cosines, truth[name], strict=True)
        ]
        assert entry["knn"] == pytest.approx(np.mean(right), abs=1e-9)
    same = np.array([[name == true for name in labels["coarse"]] for true in truth["coarse"]])
    oracle = printed(
        capsys, "search", "evaluate", world.weights, world.table, "--labels", "fine", "--condition", "oracle",
        "--coarse", "coarse", "--json",
    )  # fmt: skip
    assert oracle["levels"]["fine"]["map"] == pytest.approx(
        mean_ap(cosines + 4 * same, labels["fine"], truth["fine"]), abs=1e-3
    )
    # without --labels coarse and --coarse, the column is found by the classes of the network
    found = evaluate_search(world.weights, world.table, ["fine", "coarse"], condition="coarse")
    import patchloom

    rows = patchloom.predict(world.weights, world.files(world.test))
    odds = []
    for row in rows:
        p = {one["class"]: min(max(one["probability"], 1e-4), 1 - 1e-4) for one in row["predictions"]}
        odds.append([math.log(p[name] / (1 - p[name])) for name in labels["coarse"]])
    want = mean_ap(cosines + np.array(odds), labels["fine"], truth["fine"])
    assert found["levels"]["fine"]["map"] == pytest.approx(want, abs=1e-3)
    assert found["coarse"] == "coarse"


def _knn(cosines: np.ndarray, labels: list[str], k: int) -> dict[str, float]:
    near = np.argsort(-cosines, kind="stable")[:k]
    weights = np.exp(cosines[near] / 0.05)
    return {name: weights[[labels[i] == name for i in near]].sum() for name in {labels[i] for i in near}}


def test_evaluate_refuses_what_it_cannot_measure(world: World, tmp_path: Path, capsys) -> None:
    evaluate = ("search", "evaluate", world.weights)
    refused(capsys, *evaluate, world.table, "--labels", "colour", mentions="colour")
    refused(capsys, *evaluate, world.table, mentions="--labels")
    refused(capsys, *evaluate, world.table, "--labels", "fine", "--condition", "orcale", mentions="oracle")
    other = save_network(tmp_path / "other.safetensors", classes=("a", "b"))
    refused(
        capsys,
        "search",
        "evaluate",
        other,
        world.table,
        "--labels",
        "fine",
        "--condition",
        "coarse",
        mentions="--coarse",
    )


@pytest.mark.parametrize("k", [0, -3, 71])
def test_evaluate_refuses_a_k_that_the_collection_has_not(k: int, world: World) -> None:
    with pytest.raises(PatchloomError, match="between 1 and 70"):
        evaluate_search(world.weights, world.table, "fine", k=k)


def test_a_coarse_column_can_stand_in_for_the_one_that_was_trained_on(world: World, tmp_path: Path) -> None:
    network = patchloom.load(world.weights)
    network.label_column = "coarse"
    patchloom.save(network, tmp_path / "trained.safetensors")
    rows = [
        {"path": str(world.root / row["path"]), "fine": row["fine"], "other": row["coarse"], "split": row["split"]}
        for row in world.train + world.test
    ]
    table = searching.write_table(tmp_path / "renamed.csv", rows)
    want = evaluate_search(tmp_path / "trained.safetensors", world.table, "fine", condition="coarse")
    got = evaluate_search(tmp_path / "trained.safetensors", table, "fine", condition="coarse", coarse="other")
    assert got == {**want, "coarse": "other"}
    both = evaluate_search(
        tmp_path / "trained.safetensors", table, ["fine", "other"], condition="coarse", coarse="other"
    )
    assert both["levels"]["fine"] == want["levels"]["fine"]
    with pytest.raises(PatchloomError, match=r"trained on 'coarse'.*fine.*--coarse"):
        evaluate_search(tmp_path / "trained.safetensors", table, "fine", condition="coarse")


def test_an_own_split_of_a_plain_folder_is_evaluated(world: World) -> None:
    got = evaluate_search(world.weights, world.root / "train")
    assert list(got["levels"]) == ["label"]
    assert got["levels"]["label"]["queries"] + got["levels"]["label"]["collection"] == 70


def test_a_class_that_only_queries_have_counts_as_not_found(world: World, tmp_path: Path, capsys) -> None:
    rows = [row for row in world.train if row["fine"] != "cod"] + world.test
    table = searching.write_table(world.root / "without_cod.csv", rows)
    entry = printed(capsys, "search", "evaluate", world.weights, table, "--labels", "fine", "--json")["levels"]["fine"]
    items = [row for row in world.train if row["fine"] != "cod"]
    cosines = world.cosines(world.test, items)
    precisions = [
        average_precision_score([item["fine"] == row["fine"] for item in items], scores) if row["fine"] != "cod" else 0
        for row, scores in zip(world.test, cosines, strict=True)
    ]
    assert entry["queries"] == len(world.test)
    assert entry["map"] == pytest.approx(np.mean(precisions), abs=1e-6)


@pytest.mark.parametrize(
    ("option", "value", "mentions"),
    [("--batch", 0, "batch must be at least 1, not 0"), ("--workers", -1, "workers=-1: from 0 to 512 processes")],
)
def test_build_refuses_batches_and_workers_that_cannot_be(
    option: str, value: int, mentions: str, world: World, tmp_path: Path, capsys
) -> None:
    words = ("search", "build", world.weights, world.collection, "--out", tmp_path / "index", option, value)
    refused(capsys, *words, mentions=mentions)
    assert not (tmp_path / "index").exists()
