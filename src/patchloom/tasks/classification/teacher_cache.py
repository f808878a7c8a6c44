"""The logits of teachers on disk, for runs that show them the same images again."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom import temporary
from patchloom.errors import errors_in_writing
from patchloom.reading import read_file
from patchloom.temporary import sync

_DIGEST = hashlib.sha256().digest_size
_MOST = 1 << 30  # bytes of the logits of one step


class TeacherCache:
    """The logits of teachers, one file per step and process: with the key, a step decides images, augmentation and
    mixing.

    A file that is missing, damaged or of another shape is computed again, so the cache can be deleted at any time.
    """

    def __init__(self, folder: Path, key: Any, say: Callable[[str], None] = lambda _: None) -> None:
        self.say = say
        name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
        self.folder = folder / name
        with errors_in_writing(f"--cache {folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.sweep(self.folder, r"\d+-\d+\.npy")

    def read(self, step: int, rank: int, shape: tuple[int, int]) -> Tensor | None:
        """The logits of a step; None if they are missing or damaged: then the teachers compute them."""
        path = self._path(step, rank)
        try:
            content = read_file(path, _MOST)
        except OSError:
            return None
        data, mark = content[:-_DIGEST], content[-_DIGEST:]
        try:
            if hashlib.sha256(data).digest() != mark:
                raise ValueError("its digest does not fit its content")
            # allow_pickle=False: a cache may come from elsewhere, and a pickle can run code.
            logits = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        except ValueError:
            self.say(f"{path} is damaged: the teachers compute step {step} again.")
            return None
        return torch.from_numpy(logits) if logits.shape == shape else None

    def write(self, step: int, rank: int, logits: Tensor) -> None:
        """An .npy file with the SHA-256 digest of its bytes after it."""
        path, data = self._path(step, rank), io.BytesIO()
        np.lib.format.write_array(data, logits.float().cpu().numpy())
        with errors_in_writing(f"--cache {self.folder}"):
            # Two runs may share a cache: each writes under a name of its own, and a rename replaces the file whole.
            aside = temporary.own_name(path)
            aside.write_bytes(data.getvalue() + hashlib.sha256(data.getvalue()).digest())
            sync(aside)
            aside.rename(path)

    def _path(self, step: int, rank: int) -> Path:
        return self.folder / f"{step:08d}-{rank}.npy"
