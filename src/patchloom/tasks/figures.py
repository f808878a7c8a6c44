"""Figures for people; matplotlib is imported when one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from patchloom.errors import PatchloomError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PatchloomError("Figures need matplotlib: pip install 'patchloom[figures]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PatchloomError(f"A figure is a .png, .svg or .pdf file, not {path.name!r}.")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise PatchloomError(f"{path} cannot be written: {error.strerror or error}.") from error
