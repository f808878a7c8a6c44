"""Search over HTTP: uploads and keys find what `Index` finds, and nothing outside the index can be read."""

from __future__ import annotations

import io
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from photos import keyed, make_photos, save_model
from PIL import Image

import patchloom
from patchloom.errors import PatchloomError
from patchloom.models.embedding import EmbeddingConfig, EmbeddingNetwork
from patchloom.serve.hosting import Hosting
from serving import Server, picture, serving


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    table = make_photos(folder / "photos")
    patchloom.Index.build(save_model(folder / "pets.safetensors"), table, folder / "index", labels=["breed", "species"])
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with serving(root / "pets.safetensors", "--index", root / "index") as running:
        yield running


@pytest.mark.parametrize("condition", ["none", "coarse", "oracle=dog"])
def test_an_upload_finds_what_the_index_finds(server: Server, root: Path, condition: str) -> None:
    file = root / "new.png"
    file.write_bytes(picture(7, (50, 44)))
    want = patchloom.Index.open(root / "index").query(file, 6, condition)[0]
    got = server.post(f"/api/search?k=6&condition={condition}", file.read_bytes()).json
    assert [row["key"] for row in got["results"]] == [row["key"] for row in want["results"]]
    assert [row["labels"] for row in got["results"]] == [row["labels"] for row in want["results"]]
    assert [row["score"] for row in got["results"]] == pytest.approx(
        [row["score"] for row in want["results"]], abs=1e-5
    )
    for column, probabilities in want["knn"].items():
        assert got["knn"][column] == pytest.approx(probabilities, abs=1e-5)
    predicted = server.post("/api/predict", file.read_bytes()).json
    assert {name: got[name] for name in ("version", "model", "digest")} == {
        name: predicted[name] for name in ("version", "model", "digest")
    }
    assert set(got["timings"]) == set(predicted["timings"])


def test_a_key_finds_its_neighbours_without_itself_and_does_not_vote(server: Server, root: Path) -> None:
    index = patchloom.Index.open(root / "index")
    key = "pug/1 é&?.png"
    got = server.ask("POST", keyed("/api/search/key?k=39", key)).json
    vectors = np.asarray(index.contents.vectors, np.float64)
    place = index.contents.keys.index(key)
    cosines = vectors @ vectors[place]
    cosines[place] = -np.inf
    order = np.argsort(-cosines, kind="stable")[:39]
    assert [row["score"] for row in got["results"]] == pytest.approx(cosines[order].tolist(), abs=1e-5)
    assert {row["key"] for row in got["results"]} == set(index.contents.keys) - {key}
    near = order[: index.header.k["breed"]]
    weights = np.exp(cosines[near] / 0.05)
    votes = {
        breed: weights[[index.contents.labels(i)["breed"] == breed for i in near]].sum() / weights.sum()
        for breed in {index.contents.labels(i)["breed"] for i in near}
    }
    assert got["knn"]["breed"] == pytest.approx(votes, abs=1e-4)
    cats = server.ask("POST", keyed("/api/search/key?k=25&condition=oracle%3Dcat", key)).json["results"]
    assert [row["labels"]["species"] for row in cats] == ["cat"] * 20 + ["dog"] * 5
    assert server.ask("POST", keyed("/api/search/key?condition=coarse", key)).status == 200


def test_small_pictures_are_those_of_the_index_and_bounded(server: Server, root: Path) -> None:
    answer = server.get(keyed("/api/search/image", "siamese/0.png"))
    assert (answer.status, answer.headers["content-type"]) == (200, "image/jpeg")
    image = Image.open(io.BytesIO(answer.body))
    assert (image.format, max(image.size)) == ("JPEG", 256)
    small = Image.open(io.BytesIO(server.get(keyed("/api/search/image", "pug/1 é&?.png")).body))
    assert small.size == (40, 30)
    want = Image.open(root / "photos" / "pug" / "1 é&?.png").convert("L")
    # noise: JPEG keeps its luminance and averages its colours
    assert np.abs(np.asarray(small.convert("L"), float) - np.asarray(want, float)).mean() < 10


@pytest.mark.parametrize(
    "key", ["../pets.safetensors", "/etc/passwd", "photos.csv", "siamese/../siamese/0.png", "", "\0", "x" * 4096]
)
def test_only_keys_of_the_index_are_served(server: Server, root: Path, key: str) -> None:
    for method, path in (("GET", "/api/search/image"), ("POST", "/api/search/key")):
        answer = server.ask(method, keyed(path, key))
        assert answer.status == 404
        assert answer.error == "There is no image with this key in the index."
    full = server.get(keyed("/api/search/image", str(root / "photos" / "siamese" / "0.png")))
    assert full.status == 404


@pytest.mark.parametrize(
    "query",
    ["k=0", "k=-1", "k=101", "k=1e3", "k=many", "k=", "condition=fine", "condition=", "condition=oracle",
     "condition=oracle%3D", "condition=oracle%3Dgiraffe", "condition=coarse%3Dcat", "condition=%00", "condition=%ff",
     "condition=" + "c" * 401, "key=" + "x" * 4097],
)  # fmt: skip
def test_wrong_parameters_are_refused_with_a_sentence(server: Server, query: str) -> None:
    if not query.startswith("key"):
        assert server.post(f"/api/search?{query}", picture()).status == 422
        query = f"{query}&key=pug/0.png"
    answer = server.ask("POST", f"/api/search/key?{query}")
    assert answer.status == 422
    assert answer.error.startswith("Invalid parameter ")
    assert answer.error.endswith(".")


def test_random_parameters_never_fail_inside(server: Server) -> None:
    rng = random.Random(3)
    words = ("none", "coarse", "oracle=cat", "oracle", "1", "-1", "nan", "é", "\0", "%", "&", "=", "../", "pug/0.png")

    def text() -> str:
        return quote("".join(rng.choice(words) for _ in range(rng.randrange(4))), safe="")

    paths = [f"/api/search/key?key={text()}&k={text()}&condition={text()}" for _ in range(150)]
    paths += [f"/api/search/key?key=pug/0.png&k={rng.randrange(1, 101)}&condition={text()}" for _ in range(150)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda path: server.ask("POST", path), paths))
    assert {answer.status for answer in answers} <= {200, 404, 422}
    assert all(answer.error for answer in answers if answer.status != 200)
    assert any(answer.status == 200 for answer in answers)


def test_uploads_are_bounded_like_those_of_predictions(server: Server, root: Path) -> None:
    assert server.post("/api/search", b"no image").status == 415
    assert server.post("/api/search", picture()[:200]).status == 422
    assert server.post("/api/search", picture(), field="other").status == 422
    assert server.ask("POST", "/api/search", b"", {"Content-Type": "text/plain"}).status == 415
    assert server.get("/api/search").status == 405
    assert server.post("/api/search", picture(), picture()).status == 200  # the first file, as for explanations
    limits = ("--max-bytes", 5000, "--max-pixels", 2000, "--token", "open sesame")
    with serving(root / "pets.safetensors", "--index", root / "index", *limits) as small:
        for method, path in (("POST", "/api/search/key?key=x"), ("GET", "/api/search/image?key=x")):
            assert small.ask(method, path).status == 401
        small.headers["Authorization"] = "Bearer open sesame"
        assert small.post("/api/search", picture(size=(60, 60))).status == 413
        # 40 x 30 pixels and 3.7 kB are within the limits of uploads, 900 x 600 are not
        assert small.get("/api/search/image?key=pug/0.png").status == 200
        answer = small.get("/api/search/image?key=siamese/0.png")
        assert (answer.status, answer.error.endswith(".")) == (404, True)


def test_many_clients_get_their_own_neighbours(server: Server) -> None:
    images = [picture(seed) for seed in range(24)]
    alone = [server.post("/api/search?k=3", data).json["results"] for data in images]
    with ThreadPoolExecutor(12) as pool:
        together = [
            answer.json["results"] for answer in pool.map(lambda data: server.post("/api/search?k=3", data), images)
        ]
    assert together == alone


def test_the_index_is_described(server: Server) -> None:
    assert server.get("/api/models").json["index"] == {
        "model": "pets", "images": 40, "kind": "exact", "columns": ["breed", "species"], "coarse": "species",
    }  # fmt: skip
    paths = server.get("/openapi.json").json["paths"]
    assert {"/api/search", "/api/search/key", "/api/search/image"} <= set(paths)
    page = server.get("/docs").body.decode()
    assert "/api/search/key" in page
    assert "/api/search?k=5" in page


def test_a_pictures_file_that_is_gone_is_named_and_still_found(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "photos", tmp_path / "photos")
    patchloom.Index.build(root / "pets.safetensors", tmp_path / "photos" / "photos.csv", tmp_path / "index")
    (tmp_path / "photos" / "pug" / "0.png").unlink()
    (tmp_path / "photos" / "pug" / "2.png").write_text("not an image")
    with serving(root / "pets.safetensors", "--index", tmp_path / "index") as server:
        for key in ("pug/0.png", "pug/2.png"):
            answer = server.get(f"/api/search/image?key={key}")
            assert (answer.status, "picture of this image" in answer.error) == (404, True)
            assert server.ask("POST", f"/api/search/key?key={key}").status == 200
        assert server.get("/api/models").json["index"]["coarse"] is None
        refused = server.post("/api/search?condition=coarse", picture())
        assert (refused.status, "--coarse" in refused.error) == (422, True)


def test_names_that_are_not_utf8_and_sources_without_files(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    (folder / name).write_bytes(picture(1))
    (folder / "other.png").write_bytes(picture(2))
    (folder / "odd.csv").write_text("path\nother.png\n")
    index = patchloom.Index.build(root / "pets.safetensors", folder / "odd.csv", tmp_path / "index")
    index.add([folder / name])
    with serving(root / "pets.safetensors", "--index", tmp_path / "index") as server:
        keys = [row["key"] for row in server.post("/api/search", picture(1)).json["results"]]
        assert keys[0].endswith("caf\\udce9.png")
        assert server.get(keyed("/api/search/image", keys[0])).status == 200
    digits = patchloom.Index.build(
        root / "pets.safetensors", "digits", tmp_path / "digits", split="val", labels="label"
    )
    with serving(root / "pets.safetensors", "--index", tmp_path / "digits", "--coarse", "label") as server:
        key = digits.contents.keys[3]
        assert Image.open(io.BytesIO(server.get(keyed("/api/search/image", key)).body)).format == "JPEG"
        assert server.ask("POST", keyed("/api/search/key?condition=coarse", key)).status == 200


def test_a_reload_reads_the_index_again(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    shutil.copytree(root / "index", folder)
    with serving(root / "pets.safetensors", "--index", folder) as server:
        patchloom.Index.open(folder).remove([f"pug/{i}.png" for i in (0, 2, 3, 4)])
        assert server.post("/api/search", picture()).status == 200
        server.process.send_signal(signal.SIGHUP)
        limit = time.monotonic() + 30
        while server.get("/api/models").json["index"]["images"] != 36:
            assert time.monotonic() < limit, server.said.read_text()
            time.sleep(0.05)
        assert server.ask("POST", "/api/search/key?key=pug/0.png").status == 404
        (folder / "index.json").write_text("{}")
        server.process.send_signal(signal.SIGHUP)
        while "not reloaded" not in server.said.read_text():
            assert time.monotonic() < limit
            time.sleep(0.05)
        assert server.post("/api/search", picture()).status == 200


def test_an_index_of_another_model_is_refused_before_the_port_opens(root: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other.safetensors", seed=1)
    command = [sys.executable, "-m", "patchloom", "serve", str(other), "--index", str(root / "index"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr[-800:]
    assert "was built with other weights" in done.stderr
    assert "Serving" not in done.stderr
    assert "Traceback" not in done.stderr


def test_an_index_that_cannot_be_served_is_refused_with_the_reason(root: Path, tmp_path: Path) -> None:
    def refused(reason: str, index: Path | None, coarse: str | None = None) -> None:
        with pytest.raises(PatchloomError, match=reason):
            Hosting([str(root / "pets.safetensors")], index=index and str(index), coarse=coarse)

    refused("is not an index", tmp_path / "nowhere")
    cut = Path(shutil.copytree(root / "index", tmp_path / "cut"))
    vectors = next(cut.glob("vectors-*"))
    vectors.write_bytes(vectors.read_bytes()[:-50])
    refused("is damaged", cut)
    newer = Path(shutil.copytree(root / "index", tmp_path / "newer"))
    about = json.loads((newer / "index.json").read_text())
    (newer / "index.json").write_text(json.dumps({**about, "version": 99}))
    refused("update patchloom", newer)
    refused("no label column 'colour'", root / "index", "colour")
    refused("--index", None, "species")


def test_one_of_several_models_may_be_that_of_the_index(root: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other.safetensors", seed=1)
    with serving(other, root / "pets.safetensors", "--index", root / "index") as server:
        assert server.post("/api/search", picture()).json["model"] == "pets"
        assert server.post("/api/predict", picture()).json["model"] == "other"


def test_pixels_that_cannot_be_written_are_searched_without_a_warning(root: Path) -> None:
    hosted = Hosting([str(root / "pets.safetensors")], index=str(root / "index")).index
    height, width = hosted.model.network.preprocessing.img_size
    pixels = np.full((height, width, 3), 90, np.uint8)
    want = hosted.query(pixels, 3, "none")
    pixels.flags.writeable = False  # as decoded images often are; torch warns of them once per process
    torch.set_warn_always(True)
    try:
        assert hosted.query(pixels, 3, "none") == want
    finally:
        torch.set_warn_always(False)


def test_a_model_without_a_classifier_is_for_search_alone(root: Path, tmp_path: Path) -> None:
    trunk = patchloom.load(root / "pets.safetensors")
    config = EmbeddingConfig(trunk=trunk.config, trunk_dim=trunk.config.dim, projector="fc", dim=16, num_classes=2)
    patchloom.save(EmbeddingNetwork(config, trunk).eval(), tmp_path / "grafit.safetensors")
    table = root / "photos" / "photos.csv"
    patchloom.Index.build(tmp_path / "grafit.safetensors", table, tmp_path / "index", labels="species")
    with serving(tmp_path / "grafit.safetensors", "--index", tmp_path / "index") as server:
        for route in ("predict", "explain"):
            answer = server.post(f"/api/{route}", picture())
            assert (answer.status, "has no classifier" in answer.error) == (422, True)
        assert server.get("/api/models").json["models"][0]["classes"] == []
        assert len(server.post("/api/search?k=3", picture()).json["results"]) == 3
