"""A real `patchloom serve` in a process of its own, and a client of the standard library."""

from __future__ import annotations

import http.client
import io
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import patchloom
from conftest import stir
from patchloom.serve.images import count_scans

CLASSES = ("ant", "bee", "cat", "dog", "eel", "fox")


def save_models(folder: Path) -> dict[str, Path]:
    """A CaiT and a PatchConvNet with one query a class, tiny, with weights that make every picture another answer."""
    paths = {}
    for seed, (name, options) in enumerate({"cait_nano": {}, "patchconvnet_nano": {"queries": "per_class"}}.items()):
        torch.manual_seed(seed)
        model = stir(patchloom.create_model(name, num_classes=6, img_size=32, depth=2, **options), 0.5)
        model.class_names = CLASSES
        paths[name] = folder / f"{name.removesuffix('_nano')}.safetensors"
        patchloom.save(model, paths[name])
    return paths


def picture(seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "PNG", mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def with_scans(size: tuple[int, int], scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated until there are so many."""
    file = io.BytesIO()
    Image.new("L", size, 90).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (scans - count_scans(data)) + b"\xff\xd9"


def multipart(*files: bytes, field: str = "file", name: str = "image.png") -> tuple[bytes, dict[str, str]]:
    mark = "mark-0123456789"
    head = f'--{mark}\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n\r\n'
    body = b"".join(head.encode() + data + b"\r\n" for data in files) + f"--{mark}--\r\n".encode()
    return body, {"Content-Type": f"multipart/form-data; boundary={mark}"}


@dataclass
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """Every error is a sentence in JSON, and tells nothing of the inside."""
        assert list(self.json) == ["error"], self.body[:200]
        assert not re.search(r"Traceback|site-packages|\.py\b|0x[0-9a-f]{6}", self.json["error"])
        return self.json["error"]


@dataclass
class Server:
    port: int
    process: subprocess.Popen[bytes]
    said: Path
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused while it was sending: the answer is there
                connection.request(method, path, body, {**self.headers, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()})
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, *files: bytes, **options: str) -> Answer:
        body, headers = multipart(*files, **options)
        return self.ask("POST", path, body, headers)

    def memory(self) -> float:
        """Resident megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def begin_upload(server: Server, length: int, sent: bytes = b"") -> socket.socket:
    """A connection that has announced an upload to predict of so many bytes, and sent some."""
    lines = {"Host": "localhost", "Content-Length": str(length), **server.headers, **multipart(b"")[1]}
    head = "POST /api/predict HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    client.sendall(head.encode() + b"\r\n" + sent)
    return client


@contextmanager
def serving(*words: object, code: int = 0) -> Iterator[Server]:
    """Started, and stopped by SIGTERM: it must end with code 0, or `code`, and without a traceback."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as said:
        command = [sys.executable, "-m", "patchloom", "serve", *map(str, words), "--port", "0"]
        process = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            server = Server(_port(process, Path(said.name)), process, Path(said.name))
            while server.get("/readyz").status != 200:
                time.sleep(0.05)
            yield server
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert process.wait(30) == code, server.said.read_text()[-2000:]
            assert "Traceback" not in server.said.read_text()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], said: Path) -> int:
    limit = time.time() + 120
    while True:
        text = said.read_text()
        if found := re.search(r"Serving .* at http://[^ ]*:(\d+) ", text):
            return int(found[1])
        assert process.poll() is None, f"the server ended: {text[-2000:]}"
        assert time.time() < limit, "the server did not start"
        time.sleep(0.05)
