"""Approximate neighbours on vectors that repeat, as duplicate images do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom import Index
from patchloom.inference.neighbours import nearest, normalise
from patchloom.search import changes
from patchloom.search.approximate import Approximate
from patchloom.search.building import write_rest
from patchloom.search.storage import Contents, Header

pytest.importorskip("faiss", reason="approximate indexes did not run: no faiss")


def repeated(each: int, groups: int, others: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    vectors = np.repeat(generator.normal(size=(groups, 16)), each, axis=0)
    return normalise(np.concatenate([vectors, generator.normal(size=(others, 16))])).numpy()


def test_recall_counts_a_duplicate_of_a_neighbour_as_that_neighbour() -> None:
    """Which of 60 equal images are among the 10 nearest is arbitrary: finding others of them is no miss."""
    settings = Approximate.build("hnsw", repeated(60, 5, 100)).settings
    assert (settings["recall"], settings["width"]) == (1, 64)


def test_recall_counts_what_is_missed() -> None:
    vectors = repeated(1, 0, 3000)
    built = Approximate.build("ivf", vectors)
    built._set_width(1)
    queries = np.arange(1000) * 3
    true, found = nearest(vectors[queries], vectors, 10).places, built.search(vectors[queries], 10).places
    hits = np.mean([len({*a} & {*b}) / 10 for a, b in zip(true.tolist(), found.tolist(), strict=True)])
    assert hits < 0.9
    assert built._recall(vectors) == pytest.approx(hits, abs=1e-3)


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_a_query_has_k_neighbours_where_faiss_reaches_fewer(kind: str, tmp_path: Path) -> None:
    vectors = repeated(400, 1, 50)  # one cluster of ivf has 400 vectors, the others have few
    np.save(tmp_path / "vectors-1.npy", vectors)
    keys = [str(i) for i in range(len(vectors))]
    header = Header(kind, *vectors.shape, {}, {}, {}, {})
    write_rest(tmp_path, header, Contents(vectors, keys, keys, {}), "vectors-1.npy")
    answers = Index.open(tmp_path).query_vectors(vectors[-20:], 100)
    true = nearest(vectors[-20:], vectors, 100).scores
    for answer, best in zip(answers, true, strict=True):
        assert len({result["key"] for result in answer["results"]}) == 100
        scores = np.array([result["score"] for result in answer["results"]])
        assert (scores > -1.001).all()
        assert (scores <= best.numpy() + 1e-5).all()


def test_an_add_that_fails_leaves_the_open_index_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph grows in memory before anything is written: the index must not go on with it."""
    network = patchloom.create_model("resmlp_nano", num_classes=10, img_size=16, depth=1)
    index = Index.build(network, "digits", tmp_path / "index", split="val", kind="hnsw")
    index.load()
    new = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    before = index.query(new, 5)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(changes, "write_vectors", fail)
    with pytest.raises(OSError, match="No space"):
        index.add(new)
    assert index.query(new, 5) == before
