"""Checkpoints: whole or absent, checked when written and when read, written beside training.

One safetensors file each, `step-00001234.safetensors`: the tensors of the state, and as metadata the rest of it as
JSON with a SHA-256 digest over all; of a sharded network a folder, `step-00001234.shards`, that every process writes
its part of. All are written aside, synced, read back, then renamed. The last two are kept, and `best`, a second name
of the one with the best metric.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from patchloom.errors import PatchloomError, StoppedError
from patchloom.reading import parse_json
from patchloom.temporary import sync
from patchloom.training.sharding import is_sharded
from patchloom.weights.files import CHECKPOINT_KEY, digest, kept_checkpoints, write_tensors
from patchloom.weights.shards import SUFFIX, begin_shards, check_shards, read_shards, seal_shards

_TEMPORARY = re.compile(rf"tmp-(\d+|best)(\.safetensors|{re.escape(SUFFIX)})")


@dataclass
class State:
    """All that is needed to resume a run: tensors by name, and plain JSON."""

    tensors: dict[str, Tensor]
    info: dict[str, Any]

    @property
    def sharded(self) -> bool:
        """Whether every process holds a part of some tensor."""
        return any(is_sharded(tensor) for tensor in self.tensors.values())


class Checkpoints:
    """The checkpoints of one run.

    Training and writing overlap: `save` copies the state and returns, one thread writes it. At most one write is
    pending; `save`, `wait` and `check` raise its error.
    """

    KEPT = 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._group: Any = None  # of the processes that write shards
        self._buffers: dict[str, Tensor] = {}  # kept from one save to the next: fresh memory costs more than the copy

    def save(self, state: State, best: bool = False) -> None:
        """Write the present state in the background; an error of the previous write is raised here.

        A sharded state is saved by all processes together, any other by the first."""
        self.wait()
        if state.sharded:
            # The writer thread gathers errors while training all-reduces gradients: the two need separate groups.
            self._group = self._group or dist.new_group(backend="gloo")  # training keeps its own
            aside = self._aside(state, SUFFIX)
            written = begin_shards(aside, state.tensors, self._group)
            self._pending = self._writer.submit(self._finish_shards, written, state, aside, best)
        else:
            snapshot = State(self._snapshot(state.tensors), dict(state.info))
            self._pending = self._writer.submit(self._write, snapshot, best)

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Get the memory for snapshots of these tensors in the background, so that the first save need not wait."""
        self.wait()
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self._pending = self._writer.submit(self._allocate, shapes)

    def _allocate(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        for name, (shape, dtype) in shapes.items():
            self._buffers[name] = torch.zeros(shape, dtype=dtype)

    def _snapshot(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            # Copied here, in the training thread: the next step changes the tensors while the file is being written.
            buffer.copy_(tensor.detach())
        return {name: self._buffers[name] for name in tensors}

    def release(self) -> None:
        """Finish writing and free the memory of snapshots: a finished run keeps none."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._buffers.clear()

    def wait(self) -> None:
        """Wait until what was saved is on the disk."""
        if self._pending is not None:
            # Cleared first, so that an error is raised once and the next save works.
            pending, self._pending = self._pending, None
            pending.result()

    def check(self) -> None:
        """Raise the error of the pending write, if it has failed already."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def newest(self, say: Callable[[str], None]) -> Path | None:
        """The last whole checkpoint, or None. A damaged one is reported, and the one before it is used."""
        for path in sorted(self.folder.glob("tmp-*")):  # what a killed process was writing
            if _TEMPORARY.fullmatch(path.name):
                _remove(path)
        damaged = []
        for path in reversed(kept_checkpoints(self.folder)):
            try:
                if path.suffix == SUFFIX:
                    check_shards(path)
                else:
                    read_checkpoint(path)
                return path
            except PatchloomError as error:
                damaged.append(path.name)
                say(f"{error} The checkpoint before it is used.")
                # Renamed rather than deleted: it may be all that is left, and it must not be counted among the two that
                # are kept.
                path.rename(path.with_name(f"damaged-{path.name}"))
        damaged = damaged or [path.name for path in self.folder.glob("damaged-*")]
        if damaged:
            raise PatchloomError(f"Every checkpoint in {self.folder} is damaged: {', '.join(damaged)}.")
        return None

    def _aside(self, state: State, suffix: str) -> Path:
        return self.folder / f"tmp-{state.info['step']:08d}{suffix}"

    def _write(self, state: State, best: bool) -> None:
        aside = self._aside(state, ".safetensors")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_checkpoint(aside, state)
            # Read back before anything older is deleted: a disk that returns other bytes is noticed while the last good
            # checkpoint is still there.
            read_checkpoint(aside)
            self._place(aside, best)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise self._failed(aside, error) from error

    def _finish_shards(self, written: Future[Any], state: State, aside: Path, best: bool) -> None:
        """The first process seals what all have written. If one of them failed, all raise an error."""
        from torch.distributed.checkpoint import CheckpointException  # loaded already, by `begin_shards`

        problem: str | None = None
        try:
            written.result()
            if dist.get_rank() == 0:
                seal_shards(aside, state.info, state.tensors)
                check_shards(aside)
                self._place(aside, best)
        except (Exception, CheckpointException) as error:  # of any kind: every process must raise it
            problem = _brief(error)
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=self._group)
        problem = next((text for text in problems if text is not None), None)
        if problem is not None:
            raise self._failed(aside, problem)

    def _failed(self, aside: Path, error: Exception | str) -> StoppedError:
        with suppress(OSError):
            _remove(aside)
        kept = kept_checkpoints(self.folder)
        left = f" The last good one is {kept[-1].name}." if kept else ""
        step = int(aside.stem.removeprefix("tmp-"))
        return StoppedError(f"The checkpoint of step {step} could not be written to {self.folder}: {error}.{left}")

    def _place(self, aside: Path, best: bool) -> None:
        """Rename a checkpoint from its temporary name, and delete those older than the last two."""
        path = aside.with_name(aside.name.replace("tmp", "step", 1))
        # Before the rename, while it still has its temporary name: killed in between, `best` is new and whole, and the
        # step is written again after a resume.
        if best:
            self._name_best(aside)
        if path.is_dir():  # a rename cannot replace a folder: for a moment both are there
            second = path.with_name(f"{path.stem}+{path.suffix}")
            if second.is_dir():  # of a process that was killed here: the newer of the two
                _remove(path)
                os.replace(second, path)
            os.replace(aside, second)
            _remove(path)
            aside = second
        os.replace(aside, path)
        for same in self.folder.glob(f"{path.stem.rstrip('+')}.*"):  # of the other kind
            if same.suffix != path.suffix:
                _remove(same)
        # The rename itself is on the disk only when its folder is. Older checkpoints go after that.
        sync(self.folder)
        for old in kept_checkpoints(self.folder)[: -self.KEPT]:
            _remove(old)

    def _name_best(self, aside: Path) -> None:
        second, best = (self.folder / f"{name}{aside.suffix}" for name in ("tmp-best", "best"))
        _remove(second)
        if aside.is_dir():
            shutil.copytree(aside, second, copy_function=_link)
            _remove(best)
        else:
            _link(aside, second)
        os.replace(second, best)
        for other in self.folder.glob("best.*"):
            if other != best:
                _remove(other)


def _brief(error: BaseException) -> str:
    """One line: of an error of several processes, the first one's own."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if failures else error
    return str(first).strip().splitlines()[-1] if str(first).strip() else type(first).__name__


def _link(source: str | Path, target: str | Path) -> None:
    """A second name; a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    """A checkpoint, file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_checkpoint(path: Path, state: State) -> None:
    """Write a state to `path`; the digest covers the names, shapes and bytes of all tensors and the JSON."""
    info = json.dumps(state.info)
    write_tensors(path, state.tensors, {CHECKPOINT_KEY: info, "sha256": digest(info, state.tensors)})


def read_checkpoint(path: Path, empty: Callable[[str, torch.Size], Tensor | None] | None = None) -> State:
    """A checkpoint; a file is checked against its digest. Shards are read into what `empty` gives.

    Args:
        path: a .safetensors file or a folder of shards.
        empty: for shards, (name, full shape) -> the tensor to read into, or None to skip it.

    Raises:
        PatchloomError: the checkpoint is damaged or cannot be read.
    """
    if path.suffix == SUFFIX:
        return State(*read_shards(path, empty))
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        info = metadata[CHECKPOINT_KEY]
        if metadata["sha256"] != digest(info, tensors):
            raise ValueError("its digest does not fit its content")
        return State(tensors, parse_json(info))
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise PatchloomError(f"The checkpoint {path.name} is damaged: {error}.") from error
