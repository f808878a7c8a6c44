"""The service under load over loopback, beside the network alone in a process.

    python benchmarks/serving.py [--model deit_tiny] [--seconds 20] [--rounds 5] [--clients 32] [--soak SECONDS]
        [--json FILE]

Alone: batches of ready pixels through the network, in this process, with as many threads as the server has. Served:
JPEGs over keep-alive connections, decoded, resized, batched and answered. Rounds of both alternate; the share is the
ratio of their medians. The clients are threads of this process with bodies built beforehand, and take their part of
the same cores. p99 at half load: requests come at random moments (Poisson), half as many as were served at most; a
request's time counts from the moment it was due. The soak watches the resident memory of the server.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

import patchloom
from patchloom.data.samples import find_samples
from patchloom.inference.predict import class_probabilities

_MARK = b"0123456789abcdef"
BETWEEN_BURSTS = 0.05  # seconds; the answers of one batch are closer together


def request(image: bytes) -> bytes:
    """A whole HTTP request with its body, ready to be sent again and again."""
    part = b'\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    body = b"--" + _MARK + part + image + b"\r\n--" + _MARK + b"--\r\n"
    head = (
        f"POST /api/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: multipart/form-data; boundary={_MARK.decode()}\r\n\r\n"
    )
    return head.encode() + body


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, what: bytes) -> int:
        """The status code of the answer, which is read whole."""
        self.socket.sendall(what)
        data = self.socket.recv(65536)
        while b"\r\n\r\n" not in data:
            data += self.socket.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        missing = int(re.search(rb"content-length: (\d+)", head)[1]) - len(body)  # type: ignore[index]
        while missing > 0:
            missing -= len(self.socket.recv(missing))
        return int(head[9:12])


def in_threads(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def saturate(port: int, what: bytes, clients: int, seconds: float) -> float:
    """Images a second when every client asks again as soon as it is answered.

    Answers come in bursts, a batch at a time: the rate is that from the end of the first burst to the last answer, or a
    window that cuts batches in two would count too few.
    """
    until, answered = time.perf_counter() + seconds, []

    def ask() -> None:
        client = Client(port)
        while time.perf_counter() < until:
            if client.send(what) == 200:
                answered.append(time.perf_counter())

    in_threads(clients, ask)
    answered.sort()
    first = next((i for i in range(1, len(answered)) if answered[i] - answered[i - 1] > BETWEEN_BURSTS), 1)
    return (len(answered) - first) / (answered[-1] - answered[first - 1])


def at_rate(port: int, what: bytes, clients: int, rate: float, seconds: float) -> tuple[list[float], int]:
    """Seconds from when each request was due to its answer, at random moments; and how many were not answered 200."""
    draw, due, begun = random.Random(0), SimpleQueue(), time.perf_counter() + 0.2
    moment = 0.0
    while (moment := moment + draw.expovariate(rate)) < seconds:
        due.put(begun + moment)
    latencies: list[float] = []
    refused: list[int] = []

    def ask() -> None:
        client = Client(port)
        while not due.empty():
            try:
                when = due.get(block=False)
            except Exception:  # another client took the last one
                return
            time.sleep(max(0.0, when - time.perf_counter()))
            status = client.send(what)
            (latencies if status == 200 else refused).append(time.perf_counter() - when)

    in_threads(clients, ask)
    return latencies, len(refused)


def alone(network: Any, batch: int, seconds: float) -> float:
    """Images a second of the network by itself."""
    pixels = np.random.default_rng(0).integers(0, 256, (batch, *network.config.img_size, 3), dtype=np.uint8)
    begun, count = time.perf_counter(), 0
    while (now := time.perf_counter()) - begun < seconds:
        class_probabilities(network, pixels)
        count += batch
    return count / (now - begun)


@contextmanager
def serving(weights: Path, batch: int) -> Iterator[tuple[int, int]]:
    """The port and the process id of a server of its own."""
    command = [sys.executable, "-m", "patchloom", "serve", str(weights), "--port", "0", "--max-batch", str(batch)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r":(\d+) ", line)
        if not found:
            raise SystemExit(f"The server did not start: {line}{process.stderr.read()}")
        while socket.socket().connect_ex(("127.0.0.1", int(found[1]))):
            time.sleep(0.05)
        yield int(found[1]), process.pid
    finally:
        process.terminate()
        process.wait()


def memory(pid: int) -> float:
    """Resident megabytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def soak(port: int, pid: int, what: bytes, seconds: float) -> dict[str, float]:
    """Resident memory while 8 clients ask without pause: the mean of the second tenth and of the last."""
    seen: list[float] = []
    load = threading.Thread(target=saturate, args=(port, what, 8, seconds))
    load.start()
    while load.is_alive():
        seen.append(memory(pid))
        load.join(max(0.1, seconds / 200))
    tenth = len(seen) // 10
    return {
        "seconds": seconds,
        "mb_early": statistics.mean(seen[tenth : 2 * tenth]),
        "mb_late": statistics.mean(seen[-tenth:]),
        "mb_peak": max(seen),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    network = patchloom.create_model(options.model).eval()
    fused = patchloom.fuse(network)
    what = request(find_samples()["china"].data)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "network.safetensors"
        patchloom.save(network, weights)
        with serving(weights, options.batch) as (port, pid):
            saturate(port, what, options.clients, 3), alone(fused, options.batch, 3)  # warm up
            own, served = [], []
            for _ in range(options.rounds):
                own.append(alone(fused, options.batch, options.seconds))
                served.append(saturate(port, what, options.clients, options.seconds))
                print(f"alone {own[-1]:.1f}, served {served[-1]:.1f} images per second", flush=True)
            rate = statistics.median(served) / 2
            latencies, refused = at_rate(port, what, options.clients, rate, 2 * options.seconds)
            cuts = statistics.quantiles(latencies, n=100)
            found = {
                "model": options.model, "threads": torch.get_num_threads(), "batch": options.batch,
                "alone": own, "served": served, "share": statistics.median(served) / statistics.median(own),
                "half_load": {"rate": rate, "p50_ms": 1000 * cuts[49], "p99_ms": 1000 * cuts[98], "refused": refused},
            }  # fmt: skip
            if options.soak:
                found["soak"] = soak(port, pid, what, options.soak)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="deit_tiny")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--soak", type=float, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options)
    print(f"share of the network's own throughput: {found['share']:.1%}")
    half = found["half_load"]
    print(f"at {half['rate']:.1f} images per second: p50 {half['p50_ms']:.0f} ms, p99 {half['p99_ms']:.0f} ms")
    if "soak" in found:
        print(
            "soak of {seconds:.0f} s: {mb_early:.1f} MB early, {mb_late:.1f} late, {mb_peak:.1f} peak".format(
                **found["soak"]
            )
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
