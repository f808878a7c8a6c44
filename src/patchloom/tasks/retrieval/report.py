"""The report of an embedding: its accuracy by neighbours, and held-out images with their nearest neighbours."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

from patchloom.data.sources import Item, spread
from patchloom.inference.neighbours import nearest
from patchloom.models.complexity import complexity
from patchloom.tasks.classification.report import thumbnail
from patchloom.training.report import Section, epoch_records
from patchloom.training.run import Run

if TYPE_CHECKING:
    from patchloom.tasks.retrieval.task import Retrieval

QUERIES = 8  # held-out images that are shown
SHOWN = 8  # neighbours of each
CHARTS: dict[str, dict[str, str]] = {
    "loss": {"training": "train_loss"},
    "kNN accuracy": {"held out": "knn", "averaged": "ema_knn"},
    "learning rate": {"": "lr"},
}


def retrieval_sections(
    run: Run, task: Retrieval, network: Any, items: Tensor, queries: Tensor, held_out: dict[str, Any] | None
) -> tuple[str, list[Section]]:
    """The headline, and queries with their neighbours. `items` (N, D) and `queries` (Q, D) are unit vectors of the
    training images and of the held-out ones; without any, training images are the queries."""
    return _headline(run, task, network, held_out), [("Queries and their neighbours", _gallery(task, items, queries))]


def _headline(run: Run, task: Retrieval, network: Any, held_out: dict[str, Any] | None) -> str:
    records, cells = epoch_records(run), []
    if held_out is not None:
        column = f" of {task.supervision.column}" if task.supervision.column else ""
        name = f"kNN accuracy{column} on {held_out['count']} held-out images, k = {held_out['k']}"
        cells.append((f"{held_out['knn']:.2%}", name))
    cells += [(f"{value:.4f}", f"{name} loss") for name, value in (records[-1]["losses"] if records else {}).items()]
    cost = complexity(network)
    figures = "".join(f"<div><b>{value}</b><span class=soft>{escape(name)}</span></div>" for value, name in cells)
    title = f"{network.config.trunk.name} on {run.settings['data']}"
    labels = f"labels of {task.supervision.column}" if task.supervision.column else "no labels of the data"
    return (
        f"<h1>{escape(title)}</h1><div class=figures>{figures}</div><p class=soft>Recipe "
        f"{escape(run.settings['recipe_name'])}, {task.recipe.duration}, loss {escape('+'.join(task.terms.losses))}, "
        f"{escape(labels)}; embeddings of {network.config.dim} dimensions; {cost.params / 1e6:.2f} million parameters."
        "</p>"
    )


def _gallery(task: Retrieval, items: Tensor, queries: Tensor) -> str:
    """A row of pictures per query; a neighbour of another class is marked."""
    own = not len(task.split.held_out)
    asked = task.split.train if own else task.split.held_out
    shown = spread(range(len(asked)), QUERIES)
    vectors = (items if own else queries)[shown]
    found = nearest(vectors, items, min(SHOWN, len(items) - own), shown if own else None)
    rows = []
    for query, scores, places in zip(shown, found.scores.tolist(), found.places.tolist(), strict=True):
        figures = [_figure(task, asked[query], "query", None)]
        for score, place in zip(scores, places, strict=True):
            figures.append(_figure(task, task.split.train[place], f"cosine {score:.3f}", asked[query]))
        rows.append(f"<div class=photos>{''.join(figures)}</div>")
    note = "The first picture of a row is a query, the others are the nearest training images"
    note += "; classes other than the query's are marked." if task.source.labelled else "."
    return f"<p>{note}</p>{'<hr>'.join(rows)}"


def _figure(task: Retrieval, item: Item, caption: str, query: Item | None) -> str:
    name = ""
    if task.source.labelled:
        other = query is not None and item.label != query.label
        name = f"<span{' class=bad' if other else ''}>{escape(task.source.class_names[item.label])}</span> "
    return (
        f'<figure><img alt="{escape(item.key)}" src="{thumbnail(task.source, item)}"><figcaption>{name}{caption}<br>'
        f"<span class=soft>{escape(item.key)}</span></figcaption></figure>"
    )
