"""`evaluate` and `predict` for pre-trained trunks: probes of their embeddings. Neither has a head to ask."""

from __future__ import annotations

from os import PathLike
from typing import Any

from patchloom.console import Console
from patchloom.devices import Device
from patchloom.errors import PatchloomError
from patchloom.inference.models import Model
from patchloom.inference.probes import probe as run_probe


def evaluate(
    model: Model,
    data: str | PathLike[str],
    *,
    probe: str = "knn",
    k: int | None = None,
    temperature: float | None = None,
    labels: str | None = None,
    split: str | None = None,
    crop_ratio: float | None = None,
    resolution: int | None = None,
    batch: int = 128,
    workers: int = 0,
    device: Device = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """The accuracy of a probe that the training images fit, on held-out images: see `patchloom.inference.probes`.

    probe   "knn", by the `k` nearest (20) weighted by exp(cosine / `temperature`) (0.07), or "linear"
    """
    neighbours = (20 if k is None else k) if probe == "knn" else k
    return run_probe(
        model, data, probe, labels=labels, split=split, resolution=resolution, crop_ratio=crop_ratio, batch=batch,
        workers=workers, k=neighbours, temperature=temperature, device=device, console=console,
    )  # fmt: skip


def predict(model: Model, *_: Any, **__: Any) -> list[dict[str, Any]]:
    """Refused: a trunk knows no classes."""
    raise PatchloomError(
        f"{model} was pre-trained without labels and has no classes to predict: `patchloom finetune {model} DATA` "
        f"trains a classifier from it, `patchloom.embed` and `patchloom search build` use its features."
    )
