"""Builds and changes that are interrupted, by real signals to real processes: whole or absent, and resumed exactly."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import searching
from searching import World, content, run

import patchloom
from patchloom import Index, PatchloomError
from patchloom.cli.main import main
from patchloom.search import storage
from patchloom.search.columns import conflicts, open_labelled

world, built, index = searching.world, searching.built, searching.index


def interrupted(words: list[object], when: Callable[[], bool], which: int) -> int:
    """Start a command, send it a signal as soon as `when` holds; its exit code (0: it was faster)."""
    command = [sys.executable, "-m", "patchloom", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and not when():
        time.sleep(0.001)
    process.send_signal(which)
    _, said = process.communicate(timeout=60)
    assert b"Traceback" not in said
    return process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_build_is_absent_and_its_resumption_gives_the_same_bytes(
    which: int, world: World, tmp_path: Path
) -> None:
    words = ["search", "build", world.weights, world.table, "--labels", "fine", "coarse", "--batch", 4, "--out"]
    run(*words, tmp_path / "straight")
    expected, resumed = content(tmp_path / "straight"), 0
    for part in ("plan.json", "vectors-1.npy", "progress.json", "items-1.json"):
        out = tmp_path / part
        work = tmp_path / f".{part}.building"
        code = interrupted([*words, out], (work / part).exists, which)
        if out.exists():  # the build was faster
            continue
        assert code in (3, -which)
        assert "--resume" in run("search", "query", out, world.files(world.test)[0], code=2).stderr
        run(*words, out, "--resume")
        assert content(out) == expected
        assert not work.exists()
        resumed += 1
    assert resumed


def test_a_build_resumes_where_it_stopped(world: World, tmp_path: Path, monkeypatch) -> None:
    """In one process: a build that ends after half of its images goes on with the other half alone."""
    from patchloom.search import building

    out, batches, plain = tmp_path / "index", list[int](), building.embed_items

    def counted(*arguments: object, stop: int = 1 << 30):
        for number, found in enumerate(plain(*arguments)):  # type: ignore[arg-type]
            if number == stop:
                raise KeyboardInterrupt
            batches.append(len(found.digests))
            yield found

    monkeypatch.setattr(building, "_FLUSH", 1)
    monkeypatch.setattr(building, "embed_items", lambda *a: counted(*a, stop=5))
    with pytest.raises(KeyboardInterrupt):
        Index.build(world.weights, world.collection, out, labels="fine", batch=8)
    assert not out.exists()
    # written every few batches: with every image in it, a million of them would cost gigabytes of writing
    assert (tmp_path / ".index.building" / "progress.json").stat().st_size < 100
    with pytest.raises(PatchloomError, match=r"interrupted.*--resume"):
        Index.open(out)
    with pytest.raises(PatchloomError, match="differs in data, items"):
        Index.build(world.weights, world.collection, out, labels="coarse", batch=8, resume=True)
    monkeypatch.setattr(building, "embed_items", counted)
    Index.build(world.weights, world.collection, out, labels="fine", batch=8, resume=True)
    assert sum(batches) == len(world.train)
    Index.build(world.weights, world.collection, tmp_path / "straight", labels="fine", batch=8)
    assert content(out) == content(tmp_path / "straight")
    # a complete index stays as it is; without anything to resume, the build begins
    Index.build(world.weights, world.collection, out, labels="fine", batch=8, resume=True)
    Index.build(world.weights, world.collection, tmp_path / "other", labels="fine", batch=8, resume=True)
    with pytest.raises(PatchloomError, match="differs in data: nothing can be resumed"):
        Index.build(world.weights, world.collection, out, labels="coarse", batch=8, resume=True)
    assert content(out) == content(tmp_path / "other")


def test_an_index_that_another_process_built_meanwhile_is_kept(world: World, tmp_path: Path, monkeypatch) -> None:
    from patchloom.search import building

    out, plain = tmp_path / "index", building.open_weights

    def opened_late(*arguments: object):
        monkeypatch.setattr(building, "open_weights", plain)
        Index.build(world.weights, world.collection, out, labels="coarse")
        return plain(*arguments)

    monkeypatch.setattr(building, "open_weights", opened_late)
    with pytest.raises(PatchloomError, match="exists already"):
        Index.build(world.weights, world.collection, out, labels="fine")
    assert set(Index.open(out).columns) == {"coarse"}


@pytest.mark.slow
def test_an_add_that_is_killed_leaves_the_index_as_it_was_or_whole(world: World, index: Path, tmp_path: Path) -> None:
    before, states = Index.open(index).query(world.files(world.test), k=70), set()
    for part in ("write.lock", "vectors-2.npy", "items-2.json", "never"):
        copy = Path(shutil.copytree(index, tmp_path / part))
        words = ["search", "add", copy, *world.files(world.test), "--label", "fine=new"]
        interrupted(words, (copy / part).exists, signal.SIGKILL)
        opened = Index.open(copy)
        assert len(opened) in (70, 90)
        states.add(len(opened))
        if len(opened) == 70:
            assert opened.query(world.files(world.test), k=70) == before
            opened.add(world.files(world.test), {"fine": "new"})
        assert opened.query(world.files(world.test)[0], 1)[0]["results"][0]["labels"]["fine"] == "new"
        assert len(list(copy.glob("vectors-*"))) == 1  # what was left over is swept
    assert states == {70, 90}


@pytest.mark.parametrize("step", ["write_vectors", "write_items", "replace"])
def test_an_add_that_fails_at_any_write_leaves_the_index_as_it_was(
    step: str, world: World, index: Path, monkeypatch
) -> None:
    from patchloom.search import building, changes

    opened, before = Index.open(index), content(index)
    place = {"write_vectors": changes, "write_items": building, "replace": os}[step]

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(place, step, fail)
        with pytest.raises(OSError, match="No space"):
            opened.add(world.files(world.test), {"fine": "new"})
    assert {name: data for name, data in content(index).items() if name in before} == before
    assert len(Index.open(index)) == 70
    opened.add(world.files(world.test), {"fine": "new"})
    assert len(Index.open(index)) == 90
    assert len(content(index)) == len(before)


def test_a_whole_index_of_something_else_is_not_resumed(world: World, built: Path) -> None:
    columns = ["fine", "coarse"]
    assert len(Index.build(world.weights, world.collection, built, labels=columns, resume=True)) == 70
    for data, options in ((world.collection, {"labels": "fine"}), (world.table, {"labels": columns})):
        with pytest.raises(PatchloomError, match="differs in data"):
            Index.build(world.weights, data, built, resume=True, **options)


def test_two_changes_at_a_time_are_refused(index: Path) -> None:
    with storage.locked(index / "write.lock", "it"), pytest.raises(PatchloomError, match="Another process"):
        Index.open(index).remove("train/cod/0.png")


def test_an_open_index_stays_usable_while_another_process_changes_it(world: World, index: Path) -> None:
    opened = Index.open(index)
    before = opened.query(world.files(world.test)[:3], 70)
    Index.open(index).remove("train/cod/0.png")
    assert opened.query(world.files(world.test)[:3], 70) == before
    assert len(Index.open(index)) == 69
    opened.remove("train/cod/1.png")  # on the state of now
    assert len(opened) == 68


def test_splits_and_columns_of_a_build(world: World, tmp_path: Path) -> None:
    index = Index.build(world.weights, world.table, tmp_path / "test", labels=["coarse"], split="test")
    assert sorted(index.contents.keys) == sorted(row["path"] for row in world.test)
    assert set(index.columns) == {"coarse"}
    plain = Index.build(world.weights, world.table, tmp_path / "plain")  # two columns, none chosen
    assert (len(plain), dict(plain.columns)) == (90, {})
    answer = plain.query(world.files(world.test)[0])[0]
    assert answer["knn"] == {}
    assert answer["results"][0]["labels"] == {}
    with pytest.raises(PatchloomError, match="no split 'val'"):
        Index.build(world.weights, world.table, tmp_path / "x", split="val")


def test_digits_are_indexed_without_files(tmp_path: Path) -> None:
    network = patchloom.create_model("resmlp_nano", num_classes=10, img_size=16, depth=1)
    index = Index.build(network, "digits", tmp_path / "digits", split="val")
    key = index.contents.keys[7]
    assert index.query_vectors(index.contents.vectors[7:8], 1)[0]["results"][0]["key"] == key
    from patchloom.search.gallery import Pictures

    assert Pictures(index.header.data).read(key) is not None


def test_a_fine_class_in_two_coarse_classes_is_named(world: World, tmp_path: Path, capsys) -> None:
    rows = [dict(row) for row in world.train]
    rows[0]["coarse"] = "flower"  # a cod
    table = searching.write_table(world.root / "conflict.csv", rows)
    (message,) = conflicts(open_labelled(table, ["fine", "coarse"]))
    assert all(word in message for word in ("cod", "fish", "flower", rows[0]["path"]))
    words = ("search", "build", world.weights, table, "--labels", "fine", "coarse", "--out", tmp_path / "index")
    main([str(word) for word in words])
    assert "cod" in capsys.readouterr().err
    assert conflicts(open_labelled(world.table, ["fine", "coarse"])) == []


def test_columns_that_are_no_levels_are_no_conflict(world: World) -> None:
    rows = [{**row, "camera": f"c{i % 3}"} for i, row in enumerate(world.train)]
    table = searching.write_table(world.root / "cameras.csv", rows)
    assert conflicts(open_labelled(table, ["fine", "camera"])) == []
