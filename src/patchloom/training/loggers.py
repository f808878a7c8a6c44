"""Copies of the log: for TensorBoard if it is installed, for Weights & Biases with `--log wandb`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from patchloom.errors import PatchloomError
from patchloom.install import pip_install


class Logger(Protocol):
    """A copy of the log elsewhere. `write` gets each record of log.jsonl after it is on the disk."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars by step, in RUN/tensorboard; what a resume writes again replaces what came after its checkpoint."""

    def __init__(self, folder: Path, step: int) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self.writer = writer(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        losses = {f"losses/{name}": value for name, value in record.get("losses", {}).items()}
        for name, value in {**record, **losses}.items():
            # Only floats are curves; counters and names are in the log itself.
            if isinstance(value, float) and name != "time":
                self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """One W&B run, named after the folder; resumed under the same id."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        # Derived from the path, so that a resume finds its run without a file that holds the id.
        name = sha256(str(folder.absolute()).encode()).hexdigest()[:16]
        wandb = import_module("wandb")
        self.run = wandb.init(project="patchloom", id=name, resume="allow", dir=str(folder), config=dict(settings))

    def write(self, record: Mapping[str, Any]) -> None:
        self.run.log({key: value for key, value in record.items() if key != "step"}, step=record["step"])

    def close(self) -> None:
        self.run.finish()


def check_log(where: str | None) -> None:
    """Refuse an unknown logger, or one that is not installed, before a run begins."""
    if where == "wandb" and find_spec("wandb") is None:
        raise PatchloomError(f"--log wandb needs Weights & Biases: {pip_install('wandb')}")
    if where not in (None, "wandb"):
        raise PatchloomError(f"Unknown value {where!r} for log. Choose from: wandb, or leave it out.")


def open_loggers(folder: Path, settings: Mapping[str, Any], step: int) -> list[Logger]:
    """The loggers of a run that continues from `step`; the caller closes them."""
    loggers: list[Logger] = []
    with suppress(ImportError):  # not installed: the log itself has everything
        loggers.append(TensorBoard(folder, step))
    if settings.get("log") == "wandb":
        loggers.append(WeightsAndBiases(folder, settings))
    return loggers
