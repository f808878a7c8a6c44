"""What the commands of `patchloom search` do with their options: call the public function and print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from patchloom.cli.output import print_json, table
from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.terminal import print_lines

if TYPE_CHECKING:
    from patchloom.search.index import Index


def build(options: argparse.Namespace) -> None:
    """Build and print what was built."""
    from patchloom.search.index import Index

    made = Index.build(
        options.weights, options.data, options.out, labels=options.labels, split=options.split, kind=options.kind,
        resume=options.resume, hints=_hints(options.settings), batch=options.batch, workers=options.workers,
        device=options.device, console=Console(sys.stderr),
    )  # fmt: skip
    header = made.header
    columns = ", ".join(f"{name} ({len(column.names)} classes)" for name, column in made.columns.items())
    lines = [f"{options.out}: {header.count} images, {header.dim} dimensions, {header.kind}"]
    lines += [f"  labels  {columns}"] if columns else []
    if header.approximate:
        lines.append(f"  recall  {header.approximate['recall']:.3f} of the {header.approximate['recall_of']} nearest")
    print_lines(*lines)


def query(options: argparse.Namespace) -> None:
    """Search and print the results."""
    index = _open(options)
    results = index.query(_images(options.images), options.k, options.condition, coarse=options.coarse)
    if options.gallery is not None:
        from patchloom.search.gallery import write_gallery

        write_gallery(index, results, options.gallery, title=f"Neighbours in {options.index}")
    if options.json:
        print_json(results)
        return
    for found in results:
        rows = [
            (
                f"{rank}",
                f"{result['score']:.4f}",
                result["key"],
                ", ".join(str(v) for v in result["labels"].values() if v),
            )
            for rank, result in enumerate(found["results"], 1)
        ]
        print_lines(found["query"], *(f"  {line}" for line in table(rows, right=(0, 1))))
        for column, votes in found["knn"].items():
            print_lines(f"  {column}: {_likely(votes)}")
    if options.gallery is not None:
        print_lines(f"Wrote {options.gallery}")


def add(options: argparse.Namespace) -> None:
    """Add and print what changed."""
    from patchloom.text import count

    labels: dict[str, str] = {}
    for word in options.label:
        column, equals, name = word.partition("=")
        if not (column and equals and name):
            raise PatchloomError(f"--label is COLUMN=NAME, not {word!r}.")
        if column in labels:
            raise PatchloomError(f"--label gives {column} twice: {labels[column]!r} and {name!r}.")
        labels[column] = name
    index = _open(options)
    done = index.add(_images(options.images), labels, console=Console(sys.stderr))
    print_lines(
        f"{options.index}: {done['added']} added, {done['replaced']} replaced, {done['unchanged']} unchanged; "
        f"{count(len(index), 'image')} in all."
    )


def remove(options: argparse.Namespace) -> None:
    """Remove and print what is left."""
    from patchloom.search.index import Index
    from patchloom.text import count

    index = Index.open(options.index)
    removed = index.remove(options.keys)
    print_lines(f"{options.index}: {count(removed, 'image')} removed, {len(index)} left.")


def classify(options: argparse.Namespace) -> None:
    """Classify and print the probabilities."""
    index = _open(options)
    rows = index.classify(_images(options.images), options.labels, options.k)
    if options.json:
        print_json(rows)
        return
    why = "given" if options.k is not None else "chosen by leave-one-out on the index"
    print_lines(f"k = {rows[0]['k']} ({why})")
    print_lines(*(f"{row['query']}: {_likely(row['probabilities'])}" for row in rows))


def evaluate(options: argparse.Namespace) -> None:
    """Evaluate and print one row per column."""
    from patchloom.search.evaluation import evaluate_search

    found = evaluate_search(
        options.weights, options.data, options.labels, condition=options.condition, coarse=options.coarse, k=options.k,
        hints=_hints(options.settings), workers=options.workers, device=options.device, console=Console(sys.stderr),
    )  # fmt: skip
    if options.json:
        print_json(found)
        return
    head = ("labels", "mAP", "kNN", "k", "queries", "collection", "")
    rows = [
        (
            column,
            f"{one['map']:.4f}",
            f"{one['knn']:.4f}",
            str(one["k"]),
            str(one["queries"]),
            str(one["collection"]),
            "",
        )
        for column, one in found["levels"].items()
    ]
    print_lines(*table([head, *rows], right=range(1, 6)))


def split(options: argparse.Namespace) -> None:
    """Cluster, write the manifest and the page, and print a table."""
    from patchloom.search import splitting
    from patchloom.search.index import Index

    index = Index.open(options.index)
    clusters = splitting.parse_clusters(options.clusters)
    found, summary = splitting.split_index(
        index, options.labels, clusters=clusters, truth=options.truth, console=Console(sys.stderr)
    )
    rows = splitting.write_manifest(index, found, options.out, options.column)
    if options.gallery is not None:
        splitting.write_sheets(index, found, options.gallery)
    if options.json:
        print_json({**summary, "column": options.column, "file": options.out, "rows": rows})
        return
    scores = ("ARI", "purity") if options.truth is not None else ()
    head = (options.labels, "images", "clusters", "stability", *scores, "")
    print_lines(*table([head, *splitting.summary_rows(summary["classes"])], right=range(1, len(head) - 1)))
    if scores and summary["ari"] is not None:  # None: no image has a class to compare with
        print_lines(
            f"All: adjusted Rand index {summary['ari']:.3f}, purity {summary['purity']:.3f} against {options.truth}."
        )
    print_lines(f"Wrote {options.out}: {rows} images, column {options.column!r}.")


def matrix(options: argparse.Namespace) -> None:
    """Evaluate every run and print the matrix."""
    from patchloom.search import granularity

    found = granularity.granularity(
        options.runs, options.data, options.labels, condition=options.condition, device=options.device,
        console=Console(sys.stderr),
    )  # fmt: skip
    _print_study(options, found, granularity.table_rows, granularity.write_matrix)


def analyse(options: argparse.Namespace) -> None:
    """Analyse every run and print a table."""
    from patchloom.search import analyses

    found = analyses.analyse_search(
        options.runs, options.data, options.fine, options.coarse, count=options.count, shown=options.shown,
        device=options.device, console=Console(sys.stderr),
    )  # fmt: skip
    _print_study(options, found, analyses.table_rows, analyses.write_analyses)


def _print_study(options: argparse.Namespace, found: Any, rows: Any, write: Any) -> None:
    from patchloom.cli.output import out_folder

    written = write(found, out_folder(options.out)) if options.out is not None else []
    if options.json:
        print_json(found)
        return
    lines = rows(found)
    print_lines(*table(lines, right=range(1, len(lines[0]) - 1)), *map(str, written))


def _open(options: argparse.Namespace) -> Index:
    from patchloom.search.index import Index

    return Index.open(options.index, weights=options.weights, device=options.device)


def _images(words: Sequence[str]) -> list[Any]:
    """The files that the words stand for."""
    from patchloom.inference.predict import expand_images

    return [path for word in words for path in expand_images(word)]


def _hints(settings: Sequence[str]) -> dict[str, Any]:
    """What a file of weights does not say, from words such as model.heads=3 and mean=0.5."""
    from patchloom.recipes.changes import parse_hints

    return parse_hints(settings)


def _likely(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {p:.1%}" for name, p in list(found.items())[:3]) or "no labels"
