"""Figures of explanations. Nothing is computed here; matplotlib is imported on use."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from patchloom.explaining.maps import central_patches
from patchloom.install import needed
from patchloom.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from patchloom.explaining.explanation import Explanation

SHOWN = 0.1  # classes above this probability are listed, and have their own map
MASS = 0.6  # share of a map that the thresholded image keeps, as in DINO; CaiT Fig. 5 states no rule
INCH = 2.2  # side of one panel, in inches


def draw_explanation(explanation: Explanation) -> Figure:
    """Draw the input, overlays, thresholded maps and classes, then all heads, or the rows of ResMLP."""
    across = 1 + max(2, len(explanation.maps))
    width = across * INCH
    rows = {name: row_picture(values) for name, values in explanation.rows.items() if len(values) > 1}
    pooled = {name: values for name, values in explanation.rows.items() if len(values) == 1}  # of a class-MLP
    sections = [(2 * INCH + 1.0, partial(_draw_maps, explanation=explanation, across=across))]
    for title, tiles, word, signed in (
        ("attention of the class token, every head of every layer", explanation.heads, "head", False),
        ("weights of the class-MLP", pooled, "row", True),
    ):
        if tiles:
            mosaic = Mosaic(tiles, word)
            draw = partial(_draw_mosaic, title=title, tiles=mosaic, signed=signed)
            sections.append((mosaic.height(width - 1) + 0.9, draw))
    if rows:
        title = f"rows of A, of the central patches{_near_zero(explanation)}"
        down = -(-len(rows) // across)
        sections.append((down * (INCH + 0.2) + 0.5, partial(_draw_rows, title=title, rows=rows, across=across)))
    heights = [height for height, _ in sections]
    figure = new_figure(width, sum(heights))
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (_, draw) in zip(parts, sections, strict=True):
        draw(part)
    return figure


def _near_zero(explanation: Explanation) -> str:
    """The sparsity of the cross-patch matrix A, and of B and C of the FFN."""
    blocks = list(explanation.sparsity.values())
    shares = {name: np.mean([block[name] for block in blocks if name in block] or [0]) for name in "ABC"}
    return f"; near zero: {shares['A']:.0%} of A, {shares['B']:.0%} of B, {shares['C']:.0%} of C"


def _draw_maps(part: Any, explanation: Explanation, across: int) -> None:
    panels = part.subplots(2, across)
    for panel in panels.flat:
        panel.set_axis_off()
    panels[0][0].imshow(explanation.image)
    panels[0][0].set_title(explanation.model, fontsize=9, parse_math=False)
    _draw_classes(panels[1][0], explanation)
    for column, name in enumerate(explanation.maps, 1):
        panels[0][column].imshow(explanation.overlays[name])
        panels[0][column].set_title(_short(name, 32), fontsize=9, parse_math=False)
        panels[1][column].imshow(thresholded(explanation.image, explanation.grids[name]))
        if name in explanation.faithfulness:
            panels[1][column].set_title(_score_lines(explanation.faithfulness[name]), fontsize=6)


def _score_lines(scores: dict[str, Any]) -> str:
    lines = [scores["verdict"]]
    for name in ("deletion", "insertion"):
        random = scores["random"][name]
        lines.append(f"{name} {scores[name]:.2f} (random {random['mean']:.2f} ± {random['std']:.2f})")
    return "\n".join(lines)


def _draw_classes(panel: Any, explanation: Explanation) -> None:
    """The classes above 10 %, or the best one, as bars with their names."""
    likely = [row for row in explanation.predictions if row["probability"] > SHOWN] or explanation.predictions[:1]
    panel.set(xlim=(0, 1), ylim=(max(5.2, len(likely)), -0.8))
    for place, row in enumerate(likely):
        panel.barh(place + 0.25, row["probability"], height=0.3, color="#4c6ea8")
        panel.text(
            0, place, f"{_short(row['class'])}  {row['probability']:.0%}", fontsize=8, va="bottom", parse_math=False
        )


def _short(name: str, most: int = 26) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def overlay(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The grey image in [0, 1] times the map (H, W), in the colours of cividis, (H, W, 3) uint8 (CaiT D.2).

    Raises PatchloomError if matplotlib is missing.
    """
    with needed("Overlays need matplotlib", "figures"):
        from matplotlib import colormaps
    # Luma weights of ITU-R 601.
    grey = image @ np.array([0.299, 0.587, 0.114]) / 255
    return colormaps["cividis"](grey * values, bytes=True)[..., :3]


def strongest(grid: np.ndarray) -> np.ndarray:
    """The smallest set of patches with 60 % of the sum of a map, (grid height, grid width) bool; empty for zeros."""
    flat = grid.astype(np.float64).ravel()
    order = np.argsort(-flat, kind="stable")
    held = flat[order].cumsum()
    # 1 - 1e-9: sums that reach the share exactly, but for rounding, count as having reached it.
    count = int(np.searchsorted(held, MASS * held[-1] * (1 - 1e-9))) + 1 if held[-1] > 0 else 0
    keep = np.zeros(flat.size, bool)
    keep[order[:count]] = True
    return keep.reshape(grid.shape)


def thresholded(image: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The image, faint outside of the patches with 60 % of the map: (H, W, 3) in [0, 1].

    `grid` is the map with one value per patch: interpolating it and scaling it to [0, 1] would change the share.
    """
    (height, width), (down, across) = image.shape[:2], grid.shape
    # For each pixel the patch it lies in: nearest-neighbour upsampling by indices.
    rows, columns = np.arange(height) * down // height, np.arange(width) * across // width
    keep = strongest(grid)[rows][:, columns, None]
    return np.where(keep, image / 255, 0.85 + 0.15 * image / 255)


def row_picture(rows: np.ndarray) -> np.ndarray:
    """The rows of the central patches as one image (height, width), each at the place of its patch, scaled by its
    largest absolute value and separated by NaN (thesis Fig. 4.2)."""
    height, width = rows.shape[1:]
    framed = np.full((len(rows), height + 1, width + 1), np.nan, np.float32)
    framed[:, :height, :width] = rows / np.maximum(np.abs(rows).max(axis=(1, 2), keepdims=True), 1e-12)
    # (rows down, rows across, height, width) -> (rows down, height, rows across, width): tiles side by side.
    table = framed.reshape(len(central_patches(height)), -1, height + 1, width + 1).swapaxes(1, 2)
    return table.reshape(table.shape[0] * table.shape[1], -1)[:-1, :-1]


def _draw_rows(part: Any, title: str, rows: dict[str, np.ndarray], across: int) -> None:
    """Draw one panel per layer."""
    panels = part.subplots(-(-len(rows) // across), across, squeeze=False).ravel()
    for panel in panels:
        panel.set_axis_off()
    for panel, (name, picture) in zip(panels, rows.items(), strict=False):
        panel.imshow(picture, interpolation="nearest", cmap="RdBu_r", vmin=-1, vmax=1)
        panel.set_title(layer_label(name), fontsize=7)
    part.suptitle(title, fontsize=9)


class Mosaic:
    """All heads (or rows) of all layers as one array, each scaled separately; the longer of the two goes across."""

    def __init__(self, tiles: dict[str, np.ndarray], word: str) -> None:
        most = max(len(rows) for rows in tiles.values())
        height, width = next(iter(tiles.values())).shape[1:]
        self.gap = max(1, max(height, width) // 8)
        table = np.full((len(tiles), most, height + self.gap, width + self.gap), np.nan, np.float32)
        for i, rows in enumerate(tiles.values()):
            for j, values in enumerate(rows):
                table[i, j, :height, :width] = _scaled(values)
        self.down, self.across = [layer_label(name) for name in tiles], [f"{word} {j + 1}" for j in range(most)]
        if len(tiles) > most:
            table, self.down, self.across = table.swapaxes(0, 1), self.across, self.down
        self.array = np.concatenate([np.concatenate(list(row), axis=1) for row in table])[: -self.gap, : -self.gap]

    def height(self, width: float) -> float:
        """The height in inches for a width in inches, with tiles of at most one inch and space for rotated labels."""
        tile = min(1.0, width / len(self.across))
        labels = 0.05 * max(map(len, self.across)) if self.slanted else 0
        return tile * len(self.across) * self.array.shape[0] / self.array.shape[1] + labels

    @property
    def slanted(self) -> bool:
        """Whether the labels along the width must be rotated to fit."""
        return len(self.across) * max(map(len, self.across)) > 70

    def ticks(self, labels: list[str], side: int) -> list[float]:
        """The centres of the tiles along a side."""
        step = (side + self.gap) / len(labels)
        return [i * step + (step - self.gap - 1) / 2 for i in range(len(labels))]


def _scaled(values: np.ndarray) -> np.ndarray:
    """Scale to [0, 1]; values of both signs to [-1, 1], where zero stays zero."""
    low, high = float(values.min()), float(values.max())
    if low < 0:
        return values / max(-low, high)
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _draw_mosaic(part: Any, title: str, tiles: Mosaic, signed: bool) -> None:
    panel = part.subplots()
    colours: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1} if signed else {"cmap": "cividis"}
    panel.imshow(tiles.array, interpolation="nearest", **colours)
    down, across = tiles.array.shape
    panel.set_yticks(tiles.ticks(tiles.down, down), tiles.down, fontsize=7, parse_math=False)
    panel.set_xticks(tiles.ticks(tiles.across, across), tiles.across, fontsize=7, parse_math=False)
    if tiles.slanted:
        panel.tick_params(axis="x", rotation=45)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    part.suptitle(title, fontsize=9)


def layer_label(name: str) -> str:
    """A readable name of a layer: "blocks.3.mixing.branches.1.fn" becomes "block 4, branch 2"."""
    layer, _, which = name.partition(": ")
    found = re.match(r"(blocks|pool)\.(\d+)(?:\.(?:mixing|ffn)\.branches\.(\d+))?", layer)
    if found is None:
        return name
    label = f"{'block' if found[1] == 'blocks' else 'pool'} {int(found[2]) + 1}"
    label += f", branch {int(found[3]) + 1}" if found[3] not in (None, "0") else ""
    return f"{label}, {_short(which)}" if which else label
