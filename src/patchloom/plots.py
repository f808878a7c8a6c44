"""Figures for people; matplotlib is imported when one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from patchloom.errors import PatchloomError, errors_in_writing
from patchloom.install import needed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to no window."""
    with needed("Figures need matplotlib", "figures"):
        from matplotlib.figure import Figure
    # Figure itself instead of pyplot, which keeps every figure in memory and may open windows.
    return Figure(figsize=(width, height), layout="constrained")


def check_figure_path(path: Path) -> None:
    """Refuse a file that no figure can be written to; called before long work too."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PatchloomError(f"A figure is a .png, .svg or .pdf file, not {path.name!r}.")
    if not path.parent.is_dir():
        raise PatchloomError(f"{path} cannot be written: there is no folder {path.parent}.")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as .png, .svg or .pdf, by the suffix of the path."""
    check_figure_path(path)
    with errors_in_writing(path):
        figure.savefig(path, dpi=120)
