"""What connections may take up: idle, slow, refused, too many, and images that are expensive to decode."""

from __future__ import annotations

import resource
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from serving import Server, begin_upload, multipart, picture, save_models, serving, with_scans

LIMITS = [
    "--idle-timeout",
    "1",
    "--max-connections",
    "12",
    "--max-queue",
    "6",
    "--decoders",
    "1",
    "--max-bytes",
    "2000000",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(save_models(tmp_path_factory.mktemp("models"))["cait_nano"], *LIMITS) as running:
        yield running


def connect(server: Server, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    client.sendall(sent)
    return client


def read_all(client: socket.socket) -> bytes:
    """What comes until the server closes the connection, which it must."""
    pieces = []
    with suppress(ConnectionResetError):
        while piece := client.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def test_a_connection_without_a_complete_head_ends(server: Server) -> None:
    """Silent from the start, in the middle of a head that grows slowly, or silent after an answer."""
    begun = time.monotonic()
    with connect(server) as silent, connect(server, b"GET / HTTP/1.1\r\n") as slow, connect(server) as used:
        used.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with suppress(ConnectionError):
            for _ in range(6):
                slow.sendall(b"X-Slow: yes\r\n")
                time.sleep(0.3)
        assert read_all(silent) == read_all(slow) == b""
        assert read_all(used).endswith(b'{"status":"ok"}')
    assert 1 <= time.monotonic() - begun < 5


def test_a_request_that_is_worked_on_is_not_idle(server: Server) -> None:
    body, _ = multipart(picture())
    with begin_upload(server, len(body), body[:100]) as client:
        time.sleep(1.5)
        client.sendall(body[100:])
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_idle_connections_give_way_and_busy_ones_do_not(server: Server) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connect(server, b"GET /healthz HTTP/1.1\r\nX-Slow: "))
        begun = time.monotonic()
        assert server.get("/healthz").status == 200
        assert time.monotonic() - begun < 0.9
    body, _ = multipart(picture())
    with ExitStack() as stack:
        uploads = [stack.enter_context(begin_upload(server, len(body), body[:100])) for _ in range(12)]
        time.sleep(0.2)
        answer = server.get("/healthz")
        assert answer.status == 503
        assert "too many connections" in answer.error
        assert answer.headers["retry-after"] == "1"
        for upload in uploads[:3]:
            upload.sendall(body[100:])
            assert upload.recv(65536).startswith(b"HTTP/1.1 200")


def test_uploads_that_are_announced_and_not_sent_keep_nobody_out(server: Server) -> None:
    with ExitStack() as stack:
        for _ in range(8):  # more than may be predicted at once, and of all the bytes that there may be
            stack.enter_context(begin_upload(server, 60_000_000))
        time.sleep(0.2)
        assert server.post("/api/predict", picture()).status == 200
        assert "patchloom_upload_bytes 0.0" in server.get("/metrics").body.decode()


def test_an_upload_has_a_least_rate(server: Server) -> None:
    body, _ = multipart(bytes(1_000_000))
    begun = time.monotonic()
    with begin_upload(server, len(body), body[:4000]) as client:
        client.settimeout(0.3)
        answer = b""
        while not answer and time.monotonic() < begun + 15:
            with suppress(TimeoutError):
                client.sendall(b"0" * 300)
                answer = client.recv(65536)
        answer += read_all(client)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"slower than 4000 bytes per second" in answer
    assert time.monotonic() - begun < 10


def test_a_client_that_sends_everything_before_it_reads_is_told_why_it_is_refused(server: Server) -> None:
    body, headers = multipart(bytes(60_000_000))
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/api/predict", body, headers)
    with pytest.raises(urllib.error.HTTPError, match="413") as refused:
        urllib.request.urlopen(request, timeout=30)
    assert b"at most 2 MB" in refused.value.read()


def test_little_more_is_read_of_an_upload_that_was_refused(server: Server) -> None:
    """It is answered at once, and its connection is closed after 128 MB and what the kernels on both sides hold."""
    length, chunk = 400_000_000, bytes(1 << 20)
    with begin_upload(server, length, multipart(b"")[0][:60]) as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 413")
        sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < length:
                client.sendall(chunk)
                sent += len(chunk)
    assert 100_000_000 < sent < 180_000_000


def test_expensive_images_do_not_hold_up_a_cheap_one(server: Server) -> None:
    large = with_scans((6500, 6500), 14)  # most of a second each
    with ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(server.post, "/api/predict", large) for _ in range(3)]
        while "patchloom_predicting 3.0" not in server.get("/metrics").body.decode():
            assert not slow[0].done()
            time.sleep(0.02)
        assert server.post("/api/predict", picture()).status == 200
        assert sum(job.done() for job in slow) <= 1
        assert [job.result().status for job in slow] == [200] * 3


def test_accepting_fails_quietly_and_recovers(tmp_path: Path) -> None:
    with serving(save_models(tmp_path)["cait_nano"]) as server, ExitStack() as stack:
        pid = server.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files, before[1]))
        for _ in range(20):
            stack.enter_context(connect(server))
        time.sleep(2.5)
        assert server.said.read_text().count("cannot accept connections") == 1
        assert len(server.said.read_text()) < 1000
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert server.get("/healthz").status == 200


def test_malformed_requests_do_not_fill_the_log(server: Server) -> None:
    before = server.said.read_text()
    for _ in range(5):
        with connect(server, b"\x16\x03\x01 not http\r\n\r\n") as client:
            assert read_all(client).startswith(b"HTTP/1.1 400")
    assert server.said.read_text() == before
