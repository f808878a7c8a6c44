"""What the service refuses: without a token, too large, too many, too slow."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from serving import Server, begin_upload, multipart, picture, save_models, serving

TOKEN = "a token of some length"
LIMITS = ["--max-bytes", "200000", "--max-pixels", "100000", "--max-explanations", "1", "--upload-timeout", "1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = save_models(tmp_path_factory.mktemp("models"))
    with serving(models["cait_nano"], *LIMITS, "--token", TOKEN) as running:
        running.headers = {"Authorization": f"Bearer {TOKEN}"}
        yield running


def test_the_token_guards_all_but_the_page_and_the_state(server: Server) -> None:
    for path in ("/api/models", "/api/samples", "/metrics"):
        assert server.get(path).status == 200
        for wrong in ("", "Bearer", "Bearer other", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer é"):
            answer = server.get(path, Authorization=wrong.encode("latin-1").decode("latin-1"))
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "token" in answer.error
    for path in ("/", "/style.css", "/healthz", "/readyz"):
        assert server.get(path, Authorization="").status == 200
    body, headers = multipart(picture())
    assert server.ask("POST", "/api/predict", body, {**headers, "Authorization": ""}).status == 401


def test_who_has_the_token_may_reload(server: Server) -> None:
    before = server.post("/api/predict", picture()).json["predictions"]
    assert server.ask("POST", "/api/reload", headers={"Authorization": ""}).status == 401
    assert server.ask("POST", "/api/reload").json["models"][0]["name"] == "cait"
    assert server.post("/api/predict", picture()).json["predictions"] == before


def test_too_many_bytes_are_refused_while_they_come(server: Server) -> None:
    before = server.memory()
    assert server.post("/api/predict", bytes(60_000_000)).status == 413
    body, headers = multipart(bytes(30_000_000))
    chunks = (body[i : i + 65536] for i in range(0, len(body), 65536))
    answer = server.ask("POST", "/api/predict", chunks, headers)  # chunked: no length is announced
    assert answer.status == 413
    assert "0.2 MB" in answer.error
    assert server.memory() < before + 20
    assert server.post("/api/predict", bytes(190_000)).status == 415


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_too_many_pixels_are_refused_in_every_format(kind: str, server: Server) -> None:
    for size, status in {(320, 312): 200, (320, 313): 413}.items():
        file = io.BytesIO()
        Image.new("1" if kind not in ("JPEG", "WEBP") else "L", size).save(file, kind)
        assert server.post("/api/predict", file.getvalue()).status == status


def test_bombs_are_refused_from_their_headers(server: Server) -> None:
    before = server.memory()
    header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    assert server.post("/api/predict", b"\x89PNG\r\n\x1a\n" + chunk).status in (413, 415)
    large = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(large, "PNG")
    assert server.post("/api/predict", large.getvalue()).status == 413
    webp = b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\x3f\0" * 2 + bytes(8)  # 16384 x 16384
    assert server.post("/api/predict", webp).status == 413
    assert server.memory() < before + 30


def test_a_thin_line_does_not_grow_into_a_bomb(server: Server) -> None:
    """Resized by its shorter side, a line of 90 000 x 1 pixels would have 92 million."""
    file = io.BytesIO()
    Image.new("1", (90_000, 1)).save(file, "PNG")
    answer = server.post("/api/predict", file.getvalue())
    assert answer.status == 422
    assert "100 times as long" in answer.error


def test_formats_that_are_not_named_are_refused(server: Server) -> None:
    for kind in ("PPM", "ICO", "PDF", "EPS", "TGA", "JPEG2000"):
        assert server.post("/api/predict", picture(kind=kind)).status == 415
    assert server.post("/api/predict", b'<svg xmlns="http://www.w3.org/2000/svg"/>').status == 415


def test_what_is_too_much_is_refused_at_once_and_told_when_to_come_back(server: Server) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: server.post("/api/explain", picture(i)), range(24)))
    codes = [answer.status for answer in answers]
    assert set(codes) == {200, 503}
    refused = [answer for answer in answers if answer.status == 503]
    assert all(int(answer.headers["retry-after"]) > 0 and "busy" in answer.error for answer in refused)
    assert server.post("/api/explain", picture()).status == 200


def test_a_slow_upload_is_not_waited_for(server: Server) -> None:
    body, _ = multipart(picture())
    begun = time.monotonic()
    with begin_upload(server, len(body), body[:100]) as client:
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - begun < 8
    assert server.post("/api/predict", picture()).status == 200


def test_a_client_that_goes_away_leaves_nothing_behind(server: Server) -> None:
    body, _ = multipart(picture())
    for cut in (0, 100, len(body)):
        begin_upload(server, len(body), body[:cut]).close()
    limit = time.monotonic() + 10
    left = ("patchloom_predicting 0.0", "patchloom_upload_bytes 0.0")
    while not all(gauge in (metrics := server.get("/metrics").body.decode()) for gauge in left):
        assert time.monotonic() < limit, metrics
    assert 'status="500"' not in metrics
