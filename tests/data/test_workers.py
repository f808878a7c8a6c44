"""Worker processes that read images: errors arrive as they are, losses are noticed, nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.data.loader import eval_batches
from patchloom.data.opening import open_source
from patchloom.data.workers import load_batches
from patchloom.errors import PatchloomError
from patchloom.models.preprocessing import Preprocessing

SIZE = Preprocessing((8, 8))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for i in range(40):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i, 0, 0)).save(path)
    return tmp_path / "photos"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_one_message_whatever_the_workers(workers: int, photos: Path) -> None:
    source = open_source(photos)
    (photos / "a" / "20.png").unlink()
    with pytest.raises(PatchloomError) as caught:
        list(eval_batches(source, range(40), source.items(), SIZE, 4, workers))
    assert "20.png cannot be read" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert not multiprocessing.active_children()  # though the error still holds what was running


def test_a_killed_worker_is_noticed_where_batches_are_read(photos: Path) -> None:
    source = open_source(photos)
    batches = eval_batches(source, [0] * 4000, source.items(), SIZE, 4, 2)
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    time.sleep(0.2)  # no error here, between two batches
    with pytest.raises(
        PatchloomError, match=r"worker process .* ended unexpectedly: .* fewer than 2 workers .* `workers: 0`"
    ):
        list(batches)
    assert not multiprocessing.active_children()


class Huge:
    """A dataset whose sample needs more memory than there is."""

    def __getitem__(self, key: int) -> np.ndarray:
        return np.empty(1 << 60, np.uint8)


@pytest.mark.parametrize("workers", [0, 2])
def test_too_little_memory_is_an_error_of_reading_whatever_the_workers(workers: int) -> None:
    with pytest.raises(PatchloomError, match=r"not enough memory to read images.* `workers: 0`"):
        list(load_batches(Huge(), [[0], [1]], workers))  # type: ignore[arg-type]
    with pytest.raises(PatchloomError, match="not enough memory to read images"):
        list(load_batches([0, 1], [[0], [1]], workers, lambda _: torch.empty(1 << 60)))  # type: ignore[arg-type]


LOSING = """
import multiprocessing, os, resource, signal, sys, time
from patchloom.data.workers import load_batches
from patchloom.errors import PatchloomError

def killing():
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    time.sleep(0.5)
    yield from [[0]] * 100

def failing():
    raise KeyError("no batch")
    yield

def full():
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 14, 9999))
    return [[0]] * 100

try:
    list(load_batches([0], {sampler}(), {workers}))
except (PatchloomError, KeyError) as error:
    kept = error
    assert not multiprocessing.active_children()
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.parametrize(
    ("sampler", "workers", "message"),
    [
        ("killing", 2, "PatchloomError: .*(could not be started|ended unexpectedly).*`workers: 0`"),
        ("failing", 2, "KeyError: 'no batch'"),
        ("full", 8, "PatchloomError: 8 processes .* could not be started: .*Too many open files.*`workers: 0`"),
    ],
)
def test_workers_that_are_lost_while_they_begin_leave_none_to_wait_for(
    sampler: str, workers: int, message: str
) -> None:
    program = LOSING.format(sampler=sampler, workers=workers)
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(message, done.stderr)


def test_a_batch_that_cannot_be_sent_is_not_waited_for() -> None:
    """As with a full /dev/shm; here it cannot be pickled."""
    program = """
from patchloom.data.workers import load_batches
list(load_batches([0, 1], [[0], [1]], 1, lambda _: lambda: 0))
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert "cannot send the images that it read" in done.stderr
    assert "PatchloomError: A worker process that reads images ended unexpectedly" in done.stderr


class Reset:
    """A batch whose transfer fails."""

    def __reduce__(self) -> tuple[object, ...]:
        return _reset, ()


def _reset() -> None:
    raise ConnectionResetError(104, "Connection reset by peer")


def _reset_and_end(_: list[object]) -> Reset:
    threading.Timer(0.3, os._exit, (1,)).start()
    return Reset()


def test_a_worker_whose_connection_ends_before_its_process_is_noticed(photos: Path) -> None:
    with pytest.raises(PatchloomError, match="ended unexpectedly"):
        list(load_batches([0, 1], [[0], [1]], 1, _reset_and_end))  # type: ignore[arg-type]


def test_a_process_that_stops_reading_ends(photos: Path) -> None:
    """Its workers ignore SIGTERM, and multiprocessing would wait for them at exit."""
    program = f"""
import sys
from patchloom.data.loader import eval_batches
from patchloom.data.opening import open_source
from patchloom.models.preprocessing import Preprocessing
source = open_source({str(photos)!r})
kept = eval_batches(source, [0] * 4000, source.items(), Preprocessing((8, 8)), 4, 2)
next(kept)
sys.exit(5)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (5, "")


@pytest.mark.parametrize("workers", [100_000, -1])
def test_an_absurd_number_of_workers_is_refused(workers: int, photos: Path) -> None:
    source = open_source(photos)
    with pytest.raises(PatchloomError, match=f"workers={workers}: from 0 to 512"):
        eval_batches(source, range(40), source.items(), SIZE, 4, workers)
