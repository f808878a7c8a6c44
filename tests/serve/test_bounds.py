"""What bounds the service, in this process: places, threads, queues, scans, parts, names, origins."""

from __future__ import annotations

import asyncio
import io
import json
import math
import struct
import threading
import time
import zlib
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom import PatchloomError
from patchloom.serve.app import make_app, reload_models
from patchloom.serve.batcher import Batcher
from patchloom.serve.hosting import Hosting
from patchloom.serve.images import check_header, count_scans, decode_upload
from patchloom.serve.refused import Refused
from patchloom.serve.run import _bound
from patchloom.serve.service import Gate, Service
from patchloom.serve.settings import Settings
from patchloom.serve.workers import Workers
from serving import multipart, picture, save_models, with_scans


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    path = save_models(tmp_path_factory.mktemp("models"))["cait_nano"]
    return Service(Hosting([str(path)]), Settings(allowed_hosts=("Models.LAN:8000",)))


def ask(
    service: Service, method: str, path: str, body: bytes = b"", leave: bool = False, **headers: str
) -> tuple[int, Any]:
    """Status and JSON of one request to the application itself; with `leave` the client goes once it has sent it."""
    path, _, query = path.partition("?")
    names = {"host": "127.0.0.1:8000", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in names.items()],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []
    chunks = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if chunks:
            return chunks.pop(0)
        await asyncio.sleep(0.05 if leave else 60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(make_app(service)(scope, receive, send))  # type: ignore[arg-type]
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body) if body.startswith(b"{") else body


def post(service: Service, path: str, data: bytes, leave: bool = False, **headers: str) -> tuple[int, Any]:
    body, kind = multipart(data)
    return ask(service, "POST", path, body, leave, content_type=kind["Content-Type"], **headers)


def occupy(workers: Workers, cost: float = 0.0) -> tuple[Future[Any], threading.Event]:
    """A call that has begun, and the event that lets it end."""
    begun, free = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return free.wait(60)

    future = workers.submit(work, cost)
    assert begun.wait(60)
    return future, free


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    settings = Settings()
    many = with_scans((64, 64), 65)
    assert count_scans(many) == 65 == many.count(b"\xff\xda")
    with pytest.raises(Refused, match="65 scans") as refused:
        check_header(many, settings)
    assert refused.value.status == 422
    check_header(with_scans((64, 64), 64), settings)
    check_header(with_scans((6500, 6500), 20), settings)
    with pytest.raises(Refused, match="30 scans, too many for 6500 x 6500"):
        check_header(with_scans((6500, 6500), 30), settings)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 100}, {"restart_marker_blocks": 1}])
def test_scans_are_counted_in_scans_not_in_what_else_a_file_holds(options: dict[str, Any]) -> None:
    image = Image.open(io.BytesIO(picture(size=(90, 70))))
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x010E] = "\xff\xda" * 90
    image.save(file, "JPEG", exif=exif.tobytes() + b"\xff\xda" * 90, **options)
    scans = count_scans(file.getvalue())
    assert scans == (1 if "progressive" not in options else 10)
    assert count_scans(file.getvalue() + b"\xff\xda\x00\x08" * 90) == scans  # after the end: a film, a second frame


def test_threads_give_up_what_waits_and_are_not_waited_for_long() -> None:
    workers = Workers(1, "test")
    running, free = occupy(workers)
    waiting = [workers.submit(lambda: 1) for _ in range(5)]
    begun = time.monotonic()
    workers.close(0.1)
    assert time.monotonic() - begun < 5
    assert all(future.cancelled() for future in waiting)
    assert workers.submit(lambda: 1).cancelled()
    assert workers.busy
    free.set()
    assert running.result(10)
    limit = time.monotonic() + 10
    while workers.busy:
        assert time.monotonic() < limit


def test_urgent_calls_go_first_and_an_error_ends_no_thread() -> None:
    workers, order = Workers(1, "test"), []
    _, free = occupy(workers)
    later = [workers.submit(partial(order.append, "slow"), cost=math.inf) for _ in range(2)]
    failing = workers.submit(lambda: 1 / 0)
    sooner = [workers.submit(partial(order.append, "quick")) for _ in range(2)]
    assert workers.ahead(urgent=True) == (4, 0)
    assert workers.ahead(urgent=False) == (4, 2)
    free.set()
    for future in (*later, *sooner):
        future.result(10)
    assert order == ["quick", "quick", "slow", "slow"]
    assert isinstance(failing.exception(10), ZeroDivisionError)
    workers.close(5)


def test_costly_calls_leave_a_thread_to_urgent_ones_and_cheaper_ones_go_first() -> None:
    workers, order = Workers(2, "test", reserved=1), []
    _, free = occupy(workers, cost=1.0)
    for cost in (3.0, 0.5):
        workers.submit(partial(order.append, cost), cost)
    assert workers.submit(lambda: "done").result(10) == "done"
    assert order == []
    free.set()
    workers.submit(lambda: 1, cost=9.0).result(10)
    assert order == [0.5, 3.0]
    workers.close(5)


def test_decoding_ends_when_its_time_is_over() -> None:
    """Chunks that Pillow walks through one by one, after the pixels or before them."""
    png, kind = picture(), b"teSt"
    chunk = struct.pack(">I", 0) + kind + struct.pack(">I", zlib.crc32(kind))
    settings = Settings(decode_timeout=0.2)
    late, early = png[:-12] + chunk * 10**6 + png[-12:], png[:33] + chunk * 10**6 + png[33:]
    assert check_header(late, settings) > 0 == check_header(png, settings)
    begun = time.monotonic()
    with pytest.raises(Refused, match="too long to decode"):
        decode_upload(late, settings)
    with pytest.raises(Refused, match="too long to decode"):
        check_header(early, settings)
    assert time.monotonic() - begun < 2  # several seconds each
    assert decode_upload(png, settings).size == (40, 30)


def test_a_place_is_free_when_no_thread_has_the_data() -> None:
    gate, workers = Gate(4, 100), Workers(1, "test")
    with gate.admit() as place:
        place.take(60, 1)
        running, free = occupy(workers)
        place.hold(running)
        waiting = place.hold(workers.submit(lambda: 1))
    assert (gate.inside, gate.bytes) == (1, 60)
    assert waiting.cancel()
    assert workers.ahead(urgent=False) == (1, 0)
    assert not running.cancel()
    assert (gate.inside, gate.bytes) == (1, 60)
    free.set()
    running.result(10)
    limit = time.monotonic() + 10
    while gate.inside:
        assert time.monotonic() < limit
    assert gate.bytes == 0
    workers.close(5)


def test_an_explanation_that_nobody_waits_for_leaves_the_queue(service: Service) -> None:
    running, free = occupy(service.explainer)
    for _ in range(3):
        assert post(service, "/api/explain", picture(), leave=True)[0] == 400
        assert service.explaining.inside == 0
        assert service.explainer.ahead(urgent=False) == (1, 0)
    free.set()
    running.result(10)


def test_what_would_come_too_late_is_refused_at_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    running, free = occupy(service.explainer, cost=math.inf)
    monkeypatch.setitem(service.pace, True, 100.0)
    assert post(service, "/api/explain", picture(), leave=True) == (
        503, {"error": "The service is busy: about 100 s of work are queued."}
    )  # fmt: skip
    monkeypatch.setitem(service.pace, True, 80.0)
    assert post(service, "/api/explain", picture(), leave=True)[0] == 400  # it waited until the client went
    monkeypatch.setitem(service.pace, True, 1000.0)
    free.set()
    running.result(10)
    assert post(service, "/api/explain?maps=rollout", picture())[0] == 200  # nothing before it: tried, however slow
    assert service.pace[True] < 1000


def test_an_image_is_cut_once(tmp_path: Path) -> None:
    model = patchloom.load(save_models(tmp_path)["cait_nano"])
    model.preprocessing = replace(model.preprocessing, crop_ratio=0.7)
    patchloom.save(model, tmp_path / "tight.safetensors")
    service = Service(Hosting([str(tmp_path / "tight.safetensors")]), Settings())
    data = picture(3, (70, 50))
    want = patchloom.explain(model, Image.open(io.BytesIO(data)), maps=["rollout"], faithfulness=False)
    status, got = post(service, "/api/explain?maps=rollout&faithfulness=false", data)
    assert status == 200
    assert [row["probability"] for row in got["predictions"]] == pytest.approx(
        [row["probability"] for row in want.predictions], abs=1e-5
    )
    assert service.hosting.default.network.preprocessing.crop_ratio == 0.7


def test_a_body_cannot_announce_two_lengths(service: Service) -> None:
    assert post(service, "/api/predict", picture(), content_length="5", transfer_encoding="chunked")[0] == 400
    assert post(service, "/api/predict", picture(), transfer_encoding="chunked")[0] == 200


def test_an_upload_takes_up_what_has_arrived(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture()
    gate = Gate(2, 1_000_000)
    monkeypatch.setattr(service, "predicting", gate)
    gate.bytes = gate.max_bytes - 2 * len(data)
    for announced in ("5000", "20000000"):
        assert post(service, "/api/predict", data, content_length=announced)[0] == 200
    gate.bytes = gate.max_bytes - len(data)  # less than the body, which has a frame around the file
    assert post(service, "/api/predict", data)[0] == 503
    assert (gate.inside, gate.bytes) == (0, gate.max_bytes - len(data))


def test_the_number_of_parts_is_bounded(service: Service) -> None:
    part = b'--mark\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n'
    file = b'--mark\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + picture() + b"\r\n"
    kind = "multipart/form-data; boundary=mark"
    assert ask(service, "POST", "/api/predict", part * 15 + file + b"--mark--", content_type=kind)[0] == 200
    status, answer = ask(service, "POST", "/api/explain", part * 16 + file + b"--mark--", content_type=kind)
    assert (status, answer["error"]) == (400, "A body can have at most 16 parts.")
    status, answer = ask(service, "POST", "/api/predict", file + part * 5000, content_type=kind)
    assert (status, answer["error"]) == (400, "A body can have at most 47 parts.")
    status, answer = ask(service, "POST", "/api/predict", file * 33 + b"--mark--", content_type=kind)
    assert (status, answer["error"]) == (413, "A request can have at most 32 files.")
    long = b"--mark\r\n" + b"A: b\r\n" * 9000 + b"\r\n" + file
    assert ask(service, "POST", "/api/predict", long, content_type=kind)[0] == 400


def test_pages_of_other_sites_cannot_post(service: Service) -> None:
    for origin, status in {
        "http://127.0.0.1:8000": 200,
        "HTTP://127.0.0.1:8000": 200,
        "http://127.0.0.1:9000": 403,
        "http://evil.example": 403,
        "null": 403,
        "": 403,
    }.items():
        assert post(service, "/api/predict", picture(), origin=origin)[0] == status, origin
    assert post(service, "/api/predict", picture(), host="localhost", origin="http://localhost:80")[0] == 200
    assert post(service, "/api/predict", picture(), sec_fetch_site="cross-site")[0] == 403
    assert post(service, "/api/predict", picture())[0] == 200


def test_names_are_compared_without_case_and_port(service: Service) -> None:
    for name, status in {"models.lan": 200, "MODELS.lan:9": 200, "other.lan": 400}.items():
        assert ask(service, "GET", "/healthz", host=name)[0] == status
    assert Settings(allowed_hosts=("FE80::1",)).knows_host("fe80::1")


def test_monitors_may_ask_for_heads(service: Service) -> None:
    assert [ask(service, "HEAD", path)[0] for path in ("/", "/healthz", "/readyz")] == [200] * 3


@pytest.mark.parametrize(
    ("settings", "mentions"),
    [
        ({"explain_timeout": float("inf")}, "explain_timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"max_pixels": 90_000_000}, "89478485"),
        ({"token": " a long token"}, "no space at its ends"),
        ({"allowed_hosts": ("",)}, "allowed_hosts"),
        ({"host": " "}, "127.0.0.1 for this machine"),
        ({"decoders": 10**6}, "decoders must be more than 0 and at most 256, not 1000000"),
        ({"max_files": 10**6}, "max_files"),
        ({"max_connections": 0}, "max_connections"),
    ],
)
def test_settings_that_could_not_work_are_refused(settings: dict[str, Any], mentions: str) -> None:
    with pytest.raises(PatchloomError, match=mentions):
        Settings(**settings)


@pytest.mark.parametrize("host", ["é.é..", "no such name", "x" * 300])
def test_an_address_that_cannot_be_is_one_sentence(host: str) -> None:
    with pytest.raises(PatchloomError, match="port 0 cannot be used: "):
        _bound(Settings(host=host, port=0))


def test_an_answer_that_cannot_be_counted_is_given_and_the_next_too(service: Service) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no room")

    batcher = Batcher(4, 0.0, fail)
    for _ in range(2):
        batcher.expect()
        assert batcher.submit(service.hosting.default, np.zeros((32, 32, 3), np.uint8)).result(60).batch == 1
    batcher.close(10)


def test_whatever_a_reload_raises_the_old_models_stay(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = service.hosting.models

    def fail() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(service.hosting, "_load", fail)
    assert not asyncio.run(reload_models(service))
    assert service.hosting.models is before
    assert "not reloaded: MemoryError('no room')" in capsys.readouterr().err
    assert b'patchloom_reloads_total{outcome="failed"} 1.0' in service.metrics.text()


def test_uploads_to_explain_are_counted_too(service: Service) -> None:
    held: Future[None] = Future()
    with service.explaining.admit() as place:
        place.take(1234)
        place.hold(held)
    assert b"patchloom_upload_bytes 1234.0" in service.metrics.text()
    held.set_result(None)
    assert b"patchloom_upload_bytes 0.0" in service.metrics.text()
