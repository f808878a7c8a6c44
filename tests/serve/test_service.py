"""The service as clients see it, over a real port."""

from __future__ import annotations

import base64
import io
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.weights.files import digest
from serving import CLASSES, Server, begin_upload, multipart, picture, save_models, serving


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[Server]:
    with serving(*models.values()) as running:
        yield running


def chances(predictions: list[dict]) -> dict[str, float]:
    return {row["class"]: row["probability"] for row in predictions}


def test_predictions_are_those_of_predict(server: Server, models: dict[str, Path], tmp_path: Path) -> None:
    for seed, kind in enumerate(("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")):
        data = picture(seed, (50 - seed, 37), kind)
        (tmp_path / "image").write_bytes(data)
        for name in ("cait", "patchconvnet"):
            want = patchloom.predict(models[f"{name}_nano"], tmp_path / "image", top=6)[0]["predictions"]
            got = server.post(f"/api/predict?model={name}&top=6", data).json
            assert got["model"] == name
            assert chances(got["predictions"]) == pytest.approx(chances(want), abs=1e-5)
            assert set(got["timings"]) == {"upload_ms", "decode_ms", "queue_ms", "model_ms", "total_ms", "batch"}


def test_concurrent_requests_share_batches_and_keep_their_own_answers(server: Server) -> None:
    images = [picture(seed) for seed in range(48)]
    alone = [server.post("/api/predict", data).json for data in images]
    assert {answer["timings"]["batch"] for answer in alone} == {1}
    with ThreadPoolExecutor(24) as pool:
        together = [answer.json for answer in pool.map(lambda data: server.post("/api/predict", data), images)]
    assert max(answer["timings"]["batch"] for answer in together) > 1
    for one, other in zip(alone, together, strict=True):
        assert chances(other["predictions"]) == pytest.approx(chances(one["predictions"]), abs=1e-5)
    assert len({answer["predictions"][0]["probability"] for answer in alone}) == len(images)


def test_explanations_are_those_of_explain(server: Server, models: dict[str, Path]) -> None:
    data = picture(7)
    for name in ("cait", "patchconvnet"):
        want = patchloom.explain(patchloom.load(models[f"{name}_nano"]), Image.open(io.BytesIO(data)), target="dog")
        got = server.post(f"/api/explain?model={name}&target=dog", data).json
        assert got["target"] == "dog"
        assert np.array_equal(_pixels(got["image"]), want.image)
        assert [shown["name"] for shown in got["maps"]] == list(want.maps)
        for shown in got["maps"]:
            assert np.abs(_pixels(shown["png"]) / 255 - want.maps[shown["name"]]).max() < 1 / 255
        assert {layer["name"]: len(layer["heads"]) for layer in got["layers"]} == {
            layer: len(heads) for layer, heads in want.heads.items()
        }
        for shown in want.faithfulness:
            figures = got["faithfulness"][shown]
            assert figures["verdict"] == want.faithfulness[shown]["verdict"]
            assert figures["deletion"] == pytest.approx(want.faithfulness[shown]["deletion"], abs=1e-5)


def _pixels(png: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))).astype(float)


def test_maps_and_classes_that_there_are_not_are_refused_in_words(server: Server) -> None:
    for query, mentions in {
        "maps=cross-patch": "cait_nano does not support the map 'cross-patch'",
        "maps=saliency": "Unknown value 'saliency'",
        "target=cow": "has no class 'cow'",
    }.items():
        answer = server.post(f"/api/explain?{query}", picture())
        assert answer.status == 422
        assert mentions in answer.error
    answer = server.post("/api/predict?model=ciat", picture())
    assert answer.status == 404
    assert "Did you mean 'cait'?" in answer.error


def test_what_machines_ask(server: Server) -> None:
    first, second = server.get("/api/models").json["models"]
    assert (first["name"], second["name"]) == ("cait", "patchconvnet")
    assert first["classes"] == list(CLASSES)
    assert first["image_size"] == [32, 32]
    assert "class-attention" in first["maps"]
    assert (first["per_class"], second["per_class"]) == (False, True)
    assert server.get("/healthz").json == {"status": "ok"}
    assert server.get("/readyz").json == {"status": "ready"}
    server.post("/api/predict", picture())
    metrics = server.get("/metrics").body.decode()
    assert 'patchloom_requests_total{route="/api/predict",status="200"}' in metrics
    assert "patchloom_batch_images_bucket" in metrics
    paths = server.get("/openapi.json").json["paths"]
    assert {"/api/predict", "/api/explain", "/api/models", "/healthz", "/readyz", "/metrics"} <= set(paths)
    upload = paths["/api/predict"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert upload["properties"]["file"]["items"]["format"] == "binary"


def test_several_files_are_answered_in_order_with_an_error_in_the_place_of_a_broken_one(server: Server) -> None:
    files = [picture(1), b"no image", picture(2, kind="JPEG"), picture(3)[:90], picture(4)]
    answer = server.post("/api/predict?top=6&model=patchconvnet", *files)
    assert answer.status == 200
    results = answer.json["results"]
    for data, result in zip(files, results, strict=True):
        alone = server.post("/api/predict?top=6&model=patchconvnet", data)
        if alone.status == 200:
            assert chances(result["predictions"]) == pytest.approx(chances(alone.json["predictions"]), abs=1e-5)
            assert set(result["timings"]) == set(alone.json["timings"])
        else:
            assert result == {"error": alone.error}
    assert ["error" in result for result in results] == [False, True, False, True, False]
    cut_off = multipart(*files)[0][:-40]
    assert server.ask("POST", "/api/predict", cut_off, multipart(b"")[1]).error.endswith("it ends within a file.")


def test_every_answer_says_which_code_and_weights_gave_it(server: Server, models: dict[str, Path]) -> None:
    first, second = (server.get(f"/version?model={name}").json for name in ("cait", "patchconvnet"))
    assert server.get("/version").json == first
    assert first["version"] == patchloom.__version__
    assert first["digest"] == digest("", patchloom.load(models["cait_nano"]).state_dict()) != second["digest"]
    for path, files in {"/api/predict": 1, "/api/predict?top=1": 2, "/api/explain?faithfulness=false": 1}.items():
        answer = server.post(path, *[picture()] * files).json
        assert {key: answer[key] for key in first} == first
    listed = server.get("/api/models").json
    assert listed["version"] == patchloom.__version__
    assert [model["digest"] for model in listed["models"]] == [first["digest"], second["digest"]]


def test_the_api_has_a_page_that_needs_nothing_else(server: Server) -> None:
    answer = server.get("/docs")
    page = answer.body.decode()
    assert answer.headers["content-type"].startswith("text/html")
    assert "<script" not in page
    assert "//" not in "".join(re.findall(r'(?:href|src)="([^"]*)"', page))
    for path, methods in server.get("/openapi.json").json["paths"].items():
        for method in methods:
            assert f"<h2><code>{method.upper()} {path}</code></h2>" in page
    marks = set(re.findall(r'id="([^"]*)"', page))
    for link in set(re.findall(r'href="([^"]*)"', page)):
        assert link[1:] in marks if link.startswith("#") else server.get(f"/{link.removeprefix('./')}").status == 200


def test_samples_are_images_that_can_be_sent_back(server: Server) -> None:
    samples = server.get("/api/samples").json["samples"]
    assert {"china", "flower", "digit-0"} <= {sample["name"] for sample in samples}
    for sample in samples:
        image = server.get(f"/api/samples/{sample['name']}")
        assert image.headers["content-type"].startswith("image/")
        assert server.post("/api/predict", image.body).status == 200


def test_every_error_is_json_and_every_answer_has_the_security_headers(server: Server) -> None:
    answers = {
        404: [server.get("/nothing"), server.get("/api/samples/..%2f..%2fetc%2fpasswd"), server.get("/%2e%2e/app.py")],
        405: [server.get("/api/predict"), server.ask("DELETE", "/")],
        422: [
            server.post("/api/predict?top=0", picture()),
            server.post("/api/predict", picture(), field="image"),
            server.post("/api/predict", picture()[:200]),
            server.post("/api/predict", b""),
        ],
        415: [server.post("/api/predict", b"hello" * 99), server.ask("POST", "/api/predict", b"{}")],
        400: [
            server.ask("POST", "/api/predict", b"junk", {"Content-Type": "multipart/form-data; boundary=x"}),
            server.get("/", Host="attacker.example"),
            server.get("/api/models", Host=""),
        ],
        403: [
            server.ask("POST", "/api/predict", b"", {"Sec-Fetch-Site": "cross-site"}),
            server.ask("POST", "/api/reload"),
        ],
    }
    for status, several in answers.items():
        for answer in several:
            assert answer.status == status, answer.body[:200]
            assert answer.error.endswith((".", "?"))
    for answer in (server.get("/"), server.get("/app.js"), server.get("/healthz"), answers[404][0]):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert not any(name.startswith("access-control") for name in answer.headers)
        assert "server" not in answer.headers


def test_names_of_this_machine_are_known(server: Server) -> None:
    for name in ("localhost", "127.0.0.1", f"localhost:{server.port}", "[::1]:8000"):
        assert server.get("/healthz", Host=name).status == 200


def test_a_signal_ends_it_with_code_zero_after_what_is_under_way(models: dict[str, Path]) -> None:
    with serving(models["cait_nano"]) as server, ThreadPoolExecutor(8) as pool:
        slow = [pool.submit(server.post, "/api/explain", picture(i)) for i in range(4)]
        quick = [pool.submit(server.post, "/api/predict", picture(i)) for i in range(4)]
        while "patchloom_explaining 4.0" not in server.get("/metrics").body.decode():
            assert not all(job.done() for job in slow)
            time.sleep(0.005)
        server.process.send_signal(signal.SIGINT)
        assert [job.result().status for job in (*slow, *quick)] == [200] * 8
        assert server.process.wait(20) == 0


def test_a_second_signal_ends_it_at_once(models: dict[str, Path]) -> None:
    with serving(models["cait_nano"], code=3) as server:
        body, _ = multipart(picture())
        with begin_upload(server, len(body), body[:50]):
            while "patchloom_upload_bytes 50.0" not in server.get("/metrics").body.decode():
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(1)  # it waits for the upload
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(5)
        assert "second signal" in server.said.read_text()
        assert "every request" not in server.said.read_text()


def test_reloading_drops_no_request_and_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    models = save_models(tmp_path)
    data = picture(3)
    with serving(f"it={models['cait_nano']}") as server, ThreadPoolExecutor(4) as pool:
        before = server.post("/api/predict", data).json["predictions"]
        models["cait_nano"].rename(tmp_path / "kept")
        models["cait_nano"].write_bytes(b"damaged")
        server.process.send_signal(signal.SIGHUP)
        while "not reloaded" not in server.said.read_text():
            assert server.post("/api/predict", data).json["predictions"] == before
        models["patchconvnet_nano"].rename(models["cait_nano"])
        hammering = [pool.submit(server.post, "/api/predict", data) for _ in range(200)]
        server.process.send_signal(signal.SIGHUP)
        assert {job.result().status for job in hammering} == {200}
        while "Reloaded" not in server.said.read_text():
            time.sleep(0.02)
        assert server.post("/api/predict", data).json["predictions"] != before
        assert server.get("/api/models").json["models"][0]["architecture"] == "patchconvnet_nano"


@pytest.mark.parametrize(
    ("words", "mentions"),
    [
        (["nowhere/at/all"], "nowhere/at/all"),
        (["MODEL", "--port", "TAKEN"], "port TAKEN cannot be used"),
        (["MODEL", "--port", "70000"], "65535"),
        (["MODEL", "--token", "short"], "at least 8"),
        (["MODEL", "--max-batch", "0"], "max_batch must be more than 0"),
    ],
)
def test_wrong_use_is_one_sentence(words: list[str], mentions: str, models: dict[str, Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        stand_in = {"MODEL": str(models["cait_nano"]), "TAKEN": str(taken.getsockname()[1])}
        command = [sys.executable, "-m", "patchloom", "serve", *(stand_in.get(word, word) for word in words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert mentions.replace("TAKEN", stand_in["TAKEN"]) in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_service_without_an_index_has_no_search(server: Server) -> None:
    assert server.post("/api/search", picture()).status == 404
    assert server.get("/api/models").json["index"] is None
