"""report.html: one file without network: curves, confusion, classes, the worst mistakes with pictures, the recipe."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from patchloom.data.sources import Item, Source
from patchloom.models.complexity import complexity
from patchloom.models.network import Network
from patchloom.training.evaluation import Scores
from patchloom.training.run import Run, write_text

MISTAKES = 24


def write_report(run: Run, source: Source, items: Sequence[Item], scores: Scores | None, network: Network) -> None:
    """Write the report of a finished run; without held-out images there are no scores."""
    records = [row for row in run.records() if row.get("event") == "epoch"]
    parts = [
        _headline(run, scores, network, records),
        _section("Curves", _curves(records)),
        *(_judged(source, items, scores) if scores else ()),
        _section("Recipe", _recipe(run.settings)),
    ]
    style = (files("patchloom.training") / "report.css").read_text()
    title = escape(f"{network.config.name} on {run.settings['data']}")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{style}</style><body>{''.join(parts)}</body></html>\n"
    )
    write_text(run.folder / "report.html", page)


def _judged(source: Source, items: Sequence[Item], scores: Scores) -> list[str]:
    return [
        _section("Confusion", _confusion(scores)),
        _section("Classes", _classes(scores)),
        _section("The surest mistakes", _mistakes(source, items, scores)),
    ]


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"


def _headline(run: Run, scores: Scores | None, network: Network, records: list[dict[str, Any]]) -> str:
    summary, cost = scores.summary() if scores else None, complexity(network)
    shown = (
        []
        if summary is None
        else [
            (f"{summary['top1']:.2%}", "top-1 on held-out images"),
            (f"{summary['top5']:.2%}", "top-5"),
            (f"{summary['loss']:.4f}", "cross-entropy"),
            (f"{summary['ece']:.2%}", "calibration error"),
            (f"{summary['count']}", "held-out images"),
        ]
    )
    cells = "".join(f"<div><b>{value}</b><span class=soft>{name}</span></div>" for value, name in shown)
    judged = "No image was held out."
    if summary is not None:
        best = max((row.get("ema_top1", row["top1"]) for row in records), default=summary["top1"])
        kind = "averaged" if records and "ema_top1" in records[-1] else "raw"
        judged = f"The figures are those of the {kind} weights after the last epoch; the best epoch had {best:.2%}."
    return (
        f"<h1>{escape(network.config.name)} on {escape(str(run.settings['data']))}</h1><div class=figures>{cells}</div>"
        f"<p class=soft>Recipe {escape(run.settings['recipe_name'])}, {run.settings['epochs']} epochs; "
        f"{cost.params / 1e6:.2f} million parameters, {cost.macs / 1e6:.0f} million MACs at "
        f"{network.config.img_size[0]} x {network.config.img_size[1]} pixels. {judged}</p>"
    )


def _curves(records: list[dict[str, Any]]) -> str:
    if not records:
        return "<p>No epoch was evaluated.</p>"
    charts = [
        ("loss", {"training": "train_loss", "held out": "loss", "averaged": "ema_loss"}),
        ("top-1", {"held out": "top1", "averaged": "ema_top1"}),
        ("learning rate", {"": "lr"}),
    ]
    return f'<div class="curves">{"".join(_chart(title, lines, records) for title, lines in charts)}</div>'


def _chart(title: str, lines: dict[str, str], records: list[dict[str, Any]]) -> str:
    """A line chart as SVG, 320 x 200."""
    width, height, left, bottom = 320, 200, 62, 24
    found = {name: [(row["epoch"], row[key]) for row in records if key in row] for name, key in lines.items()}
    found = {name: points for name, points in found.items() if points}
    values = [value for points in found.values() for _, value in points if np.isfinite(value)]
    if not values:
        return ""
    low, high = min(values), max(values)
    spread, epochs = (high - low) or 1.0, max(records[-1]["epoch"] - records[0]["epoch"], 1)

    def place(epoch: int, value: float) -> str:
        x = left + (epoch - records[0]["epoch"]) / epochs * (width - left - 8)
        return f"{x:.1f},{height - bottom - (value - low) / spread * (height - bottom - 24):.1f}"

    strokes = ("var(--mark)", "var(--bad)", "var(--soft)")
    paths, legend = [], []
    for (name, points), stroke in zip(found.items(), strokes, strict=False):
        line = " ".join(place(*point) for point in points)
        paths.append(f'<polyline points="{line}" fill="none" stroke="{stroke}" stroke-width="1.6"/>')
        legend.append(f'<tspan style="fill:{stroke}">{name} </tspan>')
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="{escape(title)}">'
        f'<text x="{left}" y="12">{escape(title)} {"".join(legend)}</text>'
        f'<path d="M{left} 20V{height - bottom}H{width - 8}" stroke="var(--line)" fill="none"/>'
        f'<text x="{left - 4}" y="28" text-anchor="end">{high:.3g}</text>'
        f'<text x="{left - 4}" y="{height - bottom}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{width - 8}" y="{height - 8}" text-anchor="end">epoch {records[-1]["epoch"]}</text>'
        f"{''.join(paths)}</svg>"
    )


def _confusion(scores: Scores) -> str:
    """A table for few classes, the most frequent confusions for many."""
    table, names = scores.confusion(), [escape(name) for name in scores.class_names]
    if len(names) > 20:
        wrong = [(int(table[i, j]), names[i], names[j]) for i, j in np.argwhere(table) if i != j]
        rows = "".join(f"<tr><td class=n>{n}<td>{a}<td>{b}" for n, a, b in sorted(wrong, reverse=True)[:30])
        return f"<table><tr><th class=n>times<th>label<th>taken for</tr>{rows}</table>"
    head = "".join(f"<th class=n>{name}" for name in names)
    lines = []
    for i, row in enumerate(table):
        shares = 60 * row / max(row.sum(), 1)
        cells = "".join(_cell(n, share, i == j) for j, (n, share) in enumerate(zip(row, shares, strict=True)))
        lines.append(f"<tr><th>{names[i]}{cells}")
    return f"<div class=wide><table><tr><th>label \\ prediction{head}</tr>{''.join(lines)}</table></div>"


def _cell(count: int, percent: float, right: bool) -> str:
    colour = f"color-mix(in srgb, var(--{'mark' if right else 'bad'}) {percent:.0f}%, transparent)"
    return f'<td class=n style="background:{colour}">{count or ""}'


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
    surest = wrong[np.argsort(-scores.confidence[wrong])][:MISTAKES]
    figures = []
    for i in surest:
        said, label = (escape(scores.class_names[j]) for j in (scores.predicted[i], scores.labels[i]))
        figures.append(
            f'<figure><img alt="{escape(items[i].key)}" src="{_thumbnail(source, items[i])}"><figcaption>'
            f"<span class=bad>{said}</span> {scores.confidence[i]:.0%}, is {label}<br>"
            f"<span class=soft>{escape(items[i].key)}</span></figcaption></figure>"
        )
    told = f"{len(wrong)} of {len(scores.labels)} images; what it said, how sure it was, what the label says."
    return f"<p>{told}</p><div class=photos>{''.join(figures)}</div>"


def _thumbnail(source: Source, item: Item) -> str:
    image = source.read(item)
    image.thumbnail((128, 128))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _recipe(settings: dict[str, Any]) -> str:
    sources = settings.get("sources", {})
    rows = "".join(
        f"<tr><td>{escape(key)}<td>{escape(str(value))}<td class=soft>{escape(sources.get(key, ''))}"
        for key, value in settings.items()
        if key not in ("sources", "model", "summary")
    )
    return f"<div class=wide><table><tr><th>setting<th>value<th>where it comes from</tr>{rows}</table></div>"
