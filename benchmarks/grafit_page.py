"""docs/results/grafit.md, from the rows of benchmarks/grafit.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """A row of Table 2.7: its name, the losses, and the figures of the thesis: kNN, mAP by condition; None: none."""

    name: str
    losses: tuple[str, ...]
    cifar100: tuple[float | None, ...]
    imagenet: tuple[float | None, ...]


METHODS = {
    "grafit_baseline": Method("baseline (CE)", ("ce",), (71.8, 42.5, 43.1, None), (54.7, 22.7, 24.4, None)),
    "snca_plus": Method("SNCA+", ("knn",), (72.2, 35.9, 41.4, None), (55.4, 31.8, 32.9, None)),
    "grafit_fc": Method("Grafit FC", ("knn", "inst"), (75.6, 53.6, 55.0, None), (69.1, 41.7, 44.4, None)),
    "grafit": Method("Grafit", ("knn", "inst"), (77.7, 52.9, 55.7, 59.3), (69.1, 39.4, 42.9, 47.2)),
}
FIGURES = ("knn", "map_none", "map_coarse", "map_oracle")

PAGE = """# Grafit: fine-grained search from coarse labels

This page compares [Grafit](../grafit.md) with its baselines on small real data, after training on coarse labels alone, beside the thesis's Table 2.7.

`python benchmarks/grafit.py DATA VIT --seeds {seeds}`, {date}, torch {torch}, one thread.
{partial}
The queries are the held-out images and the collection is the training split. kNN accuracy and mAP are those of the fine labels, which training does not see, in %: mean and
standard deviation over the seeds. *coarse* ranks by Eq. 2.5 with the predicted coarse class, *oracle* with the true one first. *kNN coarse* is the accuracy on the
labels that were learned.
{cases}
## Beside the thesis

Table 2.7 has the same rows for ResNet-50 after 600 epochs, kNN / mAP without condition / coarse / oracle:

| method | CIFAR-100, 20 to 100 classes | ImageNet, 127 to 1000 classes |
| :-- | :-- | :-- |
{thesis}

{order}
{clusters}"""  # noqa: E501

PARTIAL = """
**This page is incomplete: {done} of {planned} runs are measured. The same command adds the others.**
"""

CASE = """
## {title}

{what}

| method | kNN | mAP | mAP, coarse | mAP, oracle | kNN coarse | seeds |
| :-- | --: | --: | --: | --: | --: | --: |
{rows}
"""

CLUSTERS = """
## Finer classes by clustering

[`search split`](../search.md) clusters the training images inside every coarse class. The table compares the clusters with the fine classes: adjusted Rand index (1 for the same
classes, 0 for chance) and purity. *k-means on the frozen network* is the same clustering of the weights' own vectors.

| data | vectors | number of clusters | found in each class | adjusted Rand index | purity |
| :-- | :-- | --: | :-- | --: | --: |
{rows}
"""  # noqa: E501


def page(rows: Sequence[Row], cases: Mapping[str, Any], seeds: int) -> str:
    searched = [row for row in rows if row["part"] == "search"]
    clustered = [row for row in rows if row["part"] == "clusters"]
    trained = [row["model"] for row in searched if row["method"] in METHODS]
    done = len(trained)
    planned = len(METHODS) * sum(min(seeds, case.most_seeds) for case in cases.values())
    return PAGE.format(
        partial=PARTIAL.format(done=done, planned=planned) if done < planned else "",
        seeds=seeds,
        date=time.strftime("%Y-%m-%d"),
        torch=torch.__version__,
        cases="".join(_case(name, cases[name], searched) for name in cases if name in trained),
        thesis="\n".join(
            f"| {method.name} | {_thesis(method.cifar100)} | {_thesis(method.imagenet)} |"
            for method in METHODS.values()
        ),
        order=_order(searched, cases),
        clusters=CLUSTERS.format(rows="\n".join(map(_cluster_row, clustered))) if clustered else "",
    )


def _of(rows: Iterable[Row], name: str, method: str | None = None) -> list[Row]:
    return [row for row in rows if row["model"] == name and method in (None, row["method"])]


def _case(name: str, case: Any, rows: Sequence[Row]) -> str:
    of_case = _of(rows, name)
    names = {"frozen": "before training", **{key: method.name for key, method in METHODS.items()}}
    table = [
        f"| {shown} | " + " | ".join(_mean(found, key) for key in (*FIGURES, "knn_coarse")) + f" | {len(found)} |"
        for method, shown in names.items()
        if (found := _of(of_case, name, method))
    ]
    first = of_case[0]
    what = case.describe(first["collection"], first["queries"], max(row["epochs"] for row in of_case))
    return CASE.format(title=case.title, rows="\n".join(table), what=what)


def _mean(rows: Sequence[Row], key: str) -> str:
    values = [100 * row[key] for row in rows]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _thesis(figures: Sequence[float | None]) -> str:
    return " / ".join("–" if figure is None else f"{figure:.1f}" for figure in figures)


def _order(rows: Sequence[Row], cases: Mapping[str, Any]) -> str:
    """Whether the thesis's order came out, case by case."""
    lines = []
    for name, case in cases.items():
        best = {
            method: {key: statistics.mean(row[key] for row in found) for key in FIGURES}
            for method in METHODS
            if (found := _of(rows, name, method))
        }
        if len(best) == len(METHODS):
            lines.append(f"- {case.title}: {_comparison(best)}.")
    head = "The thesis's order is Grafit above SNCA+ and above the baseline. Here, by the means over the seeds:\n\n"
    return head + "\n".join(lines) + "\n" if lines else ""


def _comparison(best: Mapping[str, Mapping[str, float]]) -> str:
    said = []
    for key, shown in (("knn", "kNN"), ("map_none", "mAP"), ("map_coarse", "mAP under the coarse condition")):
        others = {method: best[method][key] for method in ("grafit_baseline", "snca_plus")}
        above = [METHODS[method].name for method, value in others.items() if best["grafit"][key] > value]
        below = [METHODS[method].name for method in others if METHODS[method].name not in above]
        text = f"above {' and '.join(above)}" if above else ""
        text += (", " if above and below else "") + (f"not above {' and '.join(below)}" if below else "")
        said.append(f"{shown} of Grafit is {text}")
    return "; ".join(said)


def _cluster_row(row: Row) -> str:
    vectors = "k-means on the frozen network" if row["method"] == "frozen" else METHODS[row["method"]].name
    each = ", ".join(f"{name} {number}" for name, number in list(row["each"].items())[:2])
    more = " ..." if len(row["each"]) > 2 else ""
    asked = "auto" if row["clusters"] is None else row["clusters"]
    return f"| {row['model']} | {vectors} | {asked} | {each}{more} | {row['ari']:.3f} | {row['purity']:.3f} |"
