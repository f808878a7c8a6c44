"""The report of a classifier: accuracy, confusion matrix, metrics per class and the most confident errors."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from patchloom.data.own import TensorImage
from patchloom.data.sources import Item, Source
from patchloom.models.complexity import complexity
from patchloom.models.network import Network
from patchloom.pages import data_url
from patchloom.svg import NUMBERED, heat_map, most_confused
from patchloom.tasks.classification.metrics import Scores
from patchloom.training.report import Section, epoch_records
from patchloom.training.run import Run

MISTAKES = 24
CHARTS: dict[str, dict[str, str]] = {
    "loss": {"training": "train_loss", "held out": "loss", "averaged": "ema_loss"},
    "top-1": {"held out": "top1", "averaged": "ema_top1"},
    "learning rate": {"": "lr"},
}


def classification_sections(
    run: Run, source: Source, items: Sequence[Item], scores: Scores | None, network: Network
) -> tuple[str, list[Section]]:
    """The headline, and what follows the curves; without held-out images there are no scores."""
    sections: list[Section] = []
    if scores is not None:
        sections = [
            ("Confusion", _confusion(scores)),
            ("Classes", _classes(scores)),
            ("The most confident errors", _mistakes(source, items, scores)),
        ]
    return _headline(run, scores, network, epoch_records(run)), sections


def _headline(run: Run, scores: Scores | None, network: Network, records: list[dict[str, Any]]) -> str:
    summary, cost = scores.summary() if scores else None, complexity(network)
    cells = "".join(f"<div><b>{value}</b><span class=soft>{name}</span></div>" for value, name in _shown(summary))
    steps = run.settings.get("steps")
    length = f"{run.settings['epochs']} epochs" if steps is None else f"{steps} steps"
    judged = "No image was held out."
    if summary is not None:
        # Runs that average their weights are judged by the averaged ones.
        best = max((row.get("ema_top1", row["top1"]) for row in records), default=summary["top1"])
        kind = "averaged" if records and "ema_top1" in records[-1] else "raw"
        judged = f"The metrics are those of the {kind} weights after the last epoch; the best epoch had {best:.2%}."
    return (
        f"<h1>{escape(network.config.name)} on {escape(str(run.settings['data']))}</h1><div class=figures>{cells}</div>"
        f"<p class=soft>Recipe {escape(run.settings['recipe_name'])}, {length}; "
        f"{cost.params / 1e6:.2f} million parameters, {cost.macs / 1e6:.0f} million MACs at "
        f"{network.config.img_size[0]} x {network.config.img_size[1]} pixels. {judged}</p>"
    )


def _shown(summary: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The large numbers at the top and what each is."""
    if summary is None:
        return []
    low, high = summary["top1_interval"]
    label = f"top-1 on {summary['count']} held-out images; 95 % interval {low:.1%} to {high:.1%}"
    return [
        (f"{summary['top1']:.2%}", label),
        (f"{summary['top5']:.2%}", "top-5"),
        (f"{summary['loss']:.4f}", "cross-entropy"),
        (f"{summary['ece']:.2%}", "calibration error"),
    ]


def _confusion(scores: Scores) -> str:
    """A heat map, of the most confused classes if there are many; from 21 classes on, also the most frequent errors."""
    table, names = scores.confusion(), scores.class_names
    shown = most_confused(table)
    note = ""
    if len(shown) < len(names):
        note = f"<p class=soft>The {len(shown)} of {len(names)} classes with most errors.</p>"
    # Shares are of all images of a label, also of those predicted as a class that is not shown.
    drawn = heat_map(table[np.ix_(shown, shown)], [names[i] for i in shown], table.sum(axis=1)[shown])
    return f"{note}{drawn}{_frequent_errors(table, names) if len(names) > NUMBERED else ''}"


def _frequent_errors(table: np.ndarray, names: Sequence[str]) -> str:
    wrong = [(int(table[i, j]), escape(names[i]), escape(names[j])) for i, j in np.argwhere(table) if i != j]
    rows = "".join(f"<tr><td class=n>{n}<td>{a}<td>{b}" for n, a, b in sorted(wrong, reverse=True)[:30])
    return f"<h3>Most frequent errors</h3><table><tr><th class=n>images<th>label<th>prediction</tr>{rows}</table>"


def _classes(scores: Scores) -> str:
    per_class = sorted(scores.summary()["per_class"].items(), key=lambda pair: pair[1]["top1"])
    rows = "".join(
        f"<tr><td>{escape(name)}<td class=n>{row['top1']:.1%}<td class=n>{row['count']}" for name, row in per_class
    )
    return f"<table><tr><th>class<th class=n>top-1<th class=n>images</tr>{rows}</table>"


def _mistakes(source: Source, items: Sequence[Item], scores: Scores) -> str:
    wrong = np.flatnonzero(scores.predicted != scores.labels)
    if not len(wrong):
        return "<p>None: every held-out image was classified as labelled.</p>"
    # The errors that the network is surest of: often these are wrong labels.
    most_confident = wrong[np.argsort(-scores.confidence[wrong])][:MISTAKES]
    figures = []
    for i in most_confident:
        prediction, label = (escape(scores.class_names[j]) for j in (scores.predicted[i], scores.labels[i]))
        figures.append(
            f"<figure>{_picture(source, items[i])}<figcaption>"
            f"<span class=bad>{prediction}</span> {scores.confidence[i]:.0%}, is {label}<br>"
            f"<span class=soft>{escape(items[i].key)}</span></figcaption></figure>"
        )
    note = f"{len(wrong)} of {len(scores.labels)} images are wrong: the prediction, its probability and the label."
    return f"<p>{note}</p><div class=photos>{''.join(figures)}</div>"


def _picture(source: Source, item: Item) -> str:
    """An image as HTML; nothing for a tensor of a user's own dataset."""
    try:
        return f'<img alt="{escape(item.key)}" src="{thumbnail(source, item)}">'
    except TensorImage:
        return ""


def thumbnail(source: Source, item: Item) -> str:
    """A small JPEG of an image, as a data URL."""
    image = source.read(item)
    # Images are put into the page itself, so they must be small.
    image.thumbnail((128, 128))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return data_url(buffer.getvalue(), "image/jpeg")
