"""Plots of the analyses of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from patchloom.explaining.figures import layer_label
from patchloom.plots import new_figure, save_figure
from patchloom.tasks.classification.agreement import draw_disagreement

CLASSES = 20  # at most this many fit into a legend


def draw_analysis(analysis: dict[str, Any], folder: Path) -> list[Path]:
    """Write one plot per analysis into a folder; analyses without results are left out. Returns the files."""
    models = analysis["models"]
    written = [
        draw(models, folder / f"{name}.png")
        for name, needed, draw in (
            ("layerscale", "scales", _draw_scales),
            ("sparsity", "sparsity", _draw_sparsity),
            ("branch_norms", "branch_norms", _draw_norms),
            ("norms_by_epoch", "norms_by_epoch", _draw_norms_by_epoch),
            ("embeddings", "embeddings", _draw_embeddings),
        )
        if any(entry.get(needed) for entry in models.values())
    ]
    if "disagreement" in analysis:
        draw_disagreement(analysis["disagreement"], folder / "disagreement.png")
        written.append(folder / "disagreement.png")
    return written


def by_kind(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Group values of branches by kind: {"mixing": {"block 1": ...}, "ffn": {...}}."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        kind = "ffn" if ".ffn." in name else "mixing"
        found.setdefault(kind, {})[layer_label(name)] = value
    return found


def _panels(count: int, width: float = 5.0, height: float = 3.4) -> tuple[Any, Any]:
    figure = new_figure(width * count, height)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _lines(panel: Any, kinds: dict[str, dict[str, float]], title: str, ylabel: str) -> None:
    """Plot one line per kind of branch over the layers."""
    for kind, values in kinds.items():
        panel.plot(range(len(values)), list(values.values()), marker="o", markersize=3, label=kind)
    labels = max(kinds.values(), key=len)
    # At most about twelve labels fit below a panel.
    every = max(1, len(labels) // 12)
    panel.set_xticks(range(0, len(labels), every), list(labels)[::every], rotation=45, ha="right", fontsize=7)
    panel.set_ylabel(ylabel)
    panel.set_title(title, fontsize=9, parse_math=False)
    _plain(panel.legend(fontsize=7))


def _draw_scales(models: dict[str, Any], path: Path) -> Path:
    """The mean absolute scale of every branch, on a logarithmic axis."""
    shown = {name: entry for name, entry in models.items() if entry["scales"]}
    figure, panels = _panels(len(shown))
    for panel, (name, entry) in zip(panels, shown.items(), strict=True):
        means = {branch: values["mean"] for branch, values in entry["scales"].items()}
        _lines(panel, by_kind(means), _title(name, entry), "mean |LayerScale|")
        # A logarithmic axis cannot show a scale that is exactly 0, as at a zero initialisation.
        if min(means.values()) > 0:
            panel.set_yscale("log")
    return _save(figure, path)


def _draw_sparsity(models: dict[str, Any], path: Path) -> Path:
    """The share of weights near zero in the cross-patch matrices and in those of the FFN (thesis Fig. 4.3)."""
    shown = {name: entry for name, entry in models.items() if entry["sparsity"]}
    figure, panels = _panels(len(shown))
    for panel, (name, entry) in zip(panels, shown.items(), strict=True):
        kinds: dict[str, dict[str, float]] = {}
        for block, shares in entry["sparsity"].items():
            for kind, share in shares.items():
                kinds.setdefault(kind, {})[layer_label(block)] = share
        _lines(panel, kinds, _title(name, entry), "weights below 5 % of the largest")
        panel.set_ylim(0, 1)
    return _save(figure, path)


def _draw_norms(models: dict[str, Any], path: Path) -> Path:
    """The norm of the output of every branch relative to its input (thesis Fig. 3.6)."""
    figure, panels = _panels(len(models))
    for panel, (name, entry) in zip(panels, models.items(), strict=True):
        _lines(panel, by_kind(entry["branch_norms"]), _title(name, entry), "norm of branch / norm of input")
    return _save(figure, path)


def _draw_norms_by_epoch(models: dict[str, Any], path: Path) -> Path:
    """Relative branch norms by layer and epoch, as logged during training; one panel per kind of branch."""
    rows = [
        (name, kind, entry["norms_by_epoch"])
        for name, entry in models.items()
        if entry.get("norms_by_epoch")
        for kind in by_kind(entry["norms_by_epoch"][0]["norms"])
    ]
    figure, panels = _panels(len(rows))
    for panel, (name, kind, logged) in zip(panels, rows, strict=True):
        # (epochs, branches), drawn with epochs across.
        table = np.array([list(by_kind(row["norms"])[kind].values()) for row in logged])
        shown = panel.imshow(table.T, aspect="auto", cmap="cividis", origin="lower")
        epochs = [row["epoch"] for row in logged]
        every = max(1, len(epochs) // 10)
        panel.set_xticks(range(0, len(epochs), every), epochs[::every])
        panel.set(xlabel="epoch", ylabel="branch")
        panel.set_title(f"{_title(name, models[name])}: {kind}", fontsize=9, parse_math=False)
        figure.colorbar(shown, ax=panel, label="norm of branch / norm of input")
    return _save(figure, path)


def _draw_embeddings(models: dict[str, Any], path: Path) -> Path:
    """PCA energy of all models in one panel, then one panel with the t-SNE of each."""
    figure, panels = _panels(1 + len(models))
    for name, entry in models.items():
        energy = entry["embeddings"]["pca_energy"]
        panels[0].plot(range(1, len(energy) + 1), energy, label=_title(name, entry))
    panels[0].set(xscale="log", ylim=(0, 1.02), xlabel="principal components", ylabel="share of the variance")
    _plain(panels[0].legend(fontsize=7))
    for panel, (name, entry) in zip(panels[1:], models.items(), strict=True):
        places, labels = np.array(entry["embeddings"]["tsne"]), entry["embeddings"]["labels"]
        names = list(dict.fromkeys(labels))
        points = panel.scatter(*places.T, c=[names.index(label) for label in labels], cmap="tab20", s=8)
        if len(names) <= CLASSES:
            handles = points.legend_elements(num=None)[0]
            _plain(panel.legend(handles, names, fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5)))
        panel.set_title(f"t-SNE, {_title(name, entry)}", fontsize=9, parse_math=False)
        panel.set_axis_off()
    return _save(figure, path)


def _plain(legend: Any) -> None:
    """Show dollar signs in names as they are, not as formulas."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _title(name: str, entry: dict[str, Any]) -> str:
    return f"{entry['model']} ({Path(name).name})"


def _save(figure: Any, path: Path) -> Path:
    save_figure(figure, path)
    return path
