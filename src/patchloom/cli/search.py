"""`patchloom search`: build an index of images, query it, change it, classify by it and evaluate rankings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from patchloom.cli.output import DATA_HELP, JSON_HELP, MODEL_HELP, add_command, add_device, print_json, table
from patchloom.terminal import print_lines

if TYPE_CHECKING:
    from patchloom.search.index import Index

LABELS_HELP = "label columns, in any number: names separated by spaces or commas"
CONDITION_HELP = "none (cosine), coarse (by the query's coarse probabilities, Eq. 2.5)"


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "search",
        argparse.ArgumentParser(add_help=False),
        "build an index of images, search it by similarity and classify by it",
        [
            "patchloom search build runs/birds birds/ --out birds.index",
            "patchloom search query birds.index photo.jpg --gallery found.html",
        ],
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        _add_build,
        _add_query,
        _add_add,
        _add_remove,
        _add_classify,
        _add_evaluate,
        _add_split,
        _add_matrix,
        _add_analyse,
    ):
        add(parts, shared)


def _add_build(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "build",
        shared,
        "embed all images of a data set and write an index",
        [
            "patchloom search build runs/birds birds/ --out birds.index",
            "patchloom search build runs/pets pets.csv --out pets.index --labels breed species --kind hnsw",
            "patchloom search build vit.safetensors photos/ --out photos.index model.heads=3 mean=0.5 std=0.5",
        ],
        usage="patchloom search build WEIGHTS DATA --out INDEX [options] [key=value ...]",
    )
    group = parser.add_argument_group("weights and data")
    group.add_argument("weights", metavar="WEIGHTS", help=MODEL_HELP)
    group.add_argument("data", metavar="DATA", help=DATA_HELP)
    group.add_argument("--labels", metavar="COLUMN", nargs="+", help=f"{LABELS_HELP} (default: those of class folders)")
    group.add_argument("--split", metavar="NAME", help="split of the data, or several as train+val (default: all)")
    group = parser.add_argument_group("index")
    group.add_argument("--out", metavar="INDEX", required=True, help="folder to write the index to")
    group.add_argument(
        "--kind",
        default="exact",
        help="exact, or approximate neighbours by faiss: hnsw (a graph) or ivf (clusters) (default: exact)",
    )
    group.add_argument("--resume", action="store_true", help="continue an interrupted build of this index")
    group.add_argument("--batch", metavar="N", type=int, default=64, help="images per batch (default: 64)")
    group.add_argument("--workers", metavar="N", type=int, default=0, help="processes that read images (default: 0)")
    add_device(group)
    parser.set_defaults(run=build, settings=[])


def _add_images(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("index and images")
    group.add_argument("index", metavar="INDEX", help="folder of an index")
    group.add_argument("images", metavar="IMAGE", nargs="+", help="image files, folders or glob patterns")
    group.add_argument(
        "--weights",
        metavar="WEIGHTS",
        help="weights the index was built with, if they have moved (default: from where the index remembers them)",
    )
    add_device(group)
    return group


def _add_query(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "query",
        shared,
        "find the most similar images of an index",
        [
            "patchloom search query pets.index photo.jpg -k 20",
            "patchloom search query pets.index photo.jpg --condition oracle=cat --gallery found.html",
        ],
    )
    _add_images(parser)
    group = parser.add_argument_group("ranking")
    group.add_argument("-k", type=int, default=10, metavar="N", help="number of results (default: 10)")
    group.add_argument(
        "--condition",
        default="none",
        metavar="C",
        help=f"{CONDITION_HELP} or oracle=NAME (images of the class NAME first) (default: none)",
    )
    group.add_argument("--coarse", metavar="COLUMN", help="column of the coarse classes (default: the trained one)")
    group = parser.add_argument_group("output")
    group.add_argument("--gallery", metavar="FILE.html", help="also write a page with the pictures, in one file")
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=query)


def _add_add(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "add",
        shared,
        "add images to an index, without training",
        ["patchloom search add pets.index pugs/ --label breed=pug --label species=dog"],
    )
    group = _add_images(parser)
    group.add_argument(
        "--label", metavar="COLUMN=NAME", action="append", default=[], help="label of all these images, repeatable"
    )
    parser.set_defaults(run=add)


def _add_remove(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "remove",
        shared,
        "remove images from an index",
        ["patchloom search remove pets.index train/pug/pug_1.jpg"],
    )
    parser.add_argument("index", metavar="INDEX", help="folder of an index")
    parser.add_argument("keys", metavar="KEY", nargs="+", help="keys of images, as the results show them")
    parser.set_defaults(run=remove)


def _add_classify(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "classify",
        shared,
        "classify images by their nearest neighbours in an index",
        ["patchloom search classify pets.index photo.jpg --labels breed"],
    )
    _add_images(parser)
    group = parser.add_argument_group("classification")
    group.add_argument("--labels", metavar="COLUMN", required=True, help="label column with the classes")
    group.add_argument(
        "-k", type=int, metavar="N", help="number of neighbours (default: 10 to 30, by leave-one-out on the index)"
    )
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=classify)


def _add_evaluate(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "evaluate",
        shared,
        "measure mAP and kNN accuracy: held-out images as queries, training images as collection",
        [
            "patchloom search evaluate runs/pets pets.csv --labels breed species",
            "patchloom search evaluate runs/pets pets.csv --labels breed --condition coarse --json",
        ],
        usage="patchloom search evaluate WEIGHTS DATA --labels COLUMN... [options] [key=value ...]",
    )
    group = parser.add_argument_group("weights and data")
    group.add_argument("weights", metavar="WEIGHTS", help=MODEL_HELP)
    group.add_argument("data", metavar="DATA", help=DATA_HELP)
    group.add_argument("--labels", metavar="COLUMN", nargs="+", help=f"{LABELS_HELP} (default: that of class folders)")
    add_device(group)
    group = parser.add_argument_group("ranking")
    group.add_argument(
        "--condition",
        default="none",
        metavar="C",
        help=f"{CONDITION_HELP} or oracle (images of the query's coarse class first) (default: none)",
    )
    group.add_argument("--coarse", metavar="COLUMN", help="column of the coarse classes (default: the trained one)")
    group.add_argument("-k", type=int, metavar="N", help="neighbours for kNN (default: by leave-one-out)")
    group.add_argument("--workers", metavar="N", type=int, default=0, help="processes that read images (default: 0)")
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=evaluate, settings=[])


def _add_split(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "split",
        shared,
        "propose finer classes: clusters of the images inside every class",
        [
            "patchloom search split pets.index --labels species --out finer.csv --gallery sheets.html",
            "patchloom search split pets.index --labels species --clusters 12 --out finer.csv --truth breed",
        ],
    )
    parser.add_argument("index", metavar="INDEX", help="folder of an index")
    parser.add_argument("--labels", metavar="COLUMN", required=True, help="column of the classes to split")
    parser.add_argument(
        "--clusters",
        metavar="N",
        default="auto",
        help="clusters in every class, or auto: the largest number whose clusters are stable (default: auto)",
    )
    parser.add_argument("--truth", metavar="COLUMN", help="column to compare with: adjusted Rand index and purity")
    parser.add_argument("--out", metavar="FILE.csv", required=True, help="manifest to write, with the new column")
    parser.add_argument("--column", metavar="NAME", default="cluster", help="name of the new column (default: cluster)")
    parser.add_argument("--gallery", metavar="FILE.html", help="also write a page with a contact sheet per cluster")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=split)


def _add_matrix(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "matrix",
        shared,
        "compare runs that were trained on different levels of labels, on every level",
        ["patchloom search matrix runs/species runs/breed --data pets.csv --labels species breed --out matrix"],
    )
    _add_runs(parser)
    parser.add_argument(
        "--labels", metavar="COLUMN", nargs="+", required=True, help="levels to test on, coarse to fine"
    )
    parser.add_argument("--condition", default="none", metavar="C", help="none, coarse or oracle (default: none)")
    parser.set_defaults(run=matrix)


def _add_analyse(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "analyse",
        shared,
        "measure what embeddings keep of fine labels: separability, linear classifier, PCA energy, t-SNE",
        ["patchloom search analyse runs/grafit runs/ce --data pets.csv --fine breed --coarse species --out analysis"],
    )
    _add_runs(parser)
    parser.add_argument("--fine", metavar="COLUMN", required=True, help="column of the fine labels")
    parser.add_argument("--coarse", metavar="COLUMN", required=True, help="column of the coarse labels")
    parser.add_argument("--count", metavar="N", type=int, help="training images to use, evenly spread (default: all)")
    parser.add_argument("--shown", metavar="N", type=int, default=500, help="images in the t-SNE plot (default: 500)")
    parser.set_defaults(run=analyse)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=MODEL_HELP)
    parser.add_argument("--data", metavar="DATA", required=True, help=DATA_HELP)
    parser.add_argument("--out", metavar="DIR", help="folder for the JSON file and the figures")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def build(options: argparse.Namespace) -> None:
    """Build and print what was built."""
    from patchloom.console import Console
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
    answers = index.query(_images(options.images), options.k, options.condition, coarse=options.coarse)
    if options.gallery is not None:
        from patchloom.search.gallery import write_gallery

        write_gallery(index, answers, options.gallery, title=f"Neighbours in {options.index}")
    if options.json:
        print_json(answers)
        return
    for answer in answers:
        rows = [
            (
                f"{rank}",
                f"{result['score']:.4f}",
                result["key"],
                ", ".join(str(v) for v in result["labels"].values() if v),
            )
            for rank, result in enumerate(answer["results"], 1)
        ]
        print_lines(answer["query"], *(f"  {line}" for line in table(rows, right=(0, 1))))
        for column, found in answer["knn"].items():
            print_lines(f"  {column}: {_likely(found)}")
    if options.gallery is not None:
        print_lines(f"Wrote {options.gallery}")


def add(options: argparse.Namespace) -> None:
    """Add and print what changed."""
    from patchloom.console import Console
    from patchloom.errors import PatchloomError
    from patchloom.text import count

    labels = {}
    for word in options.label:
        column, equals, name = word.partition("=")
        if not (column and equals and name):
            raise PatchloomError(f"--label is COLUMN=NAME, not {word!r}.")
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
    from patchloom.console import Console
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
    from patchloom.console import Console
    from patchloom.search import splitting
    from patchloom.search.index import Index

    index = Index.open(options.index)
    clusters = splitting.parse_clusters(options.clusters)
    found, about = splitting.split_index(
        index, options.labels, clusters=clusters, truth=options.truth, console=Console(sys.stderr)
    )
    rows = splitting.write_manifest(index, found, options.out, options.column)
    if options.gallery is not None:
        splitting.write_sheets(index, found, options.gallery)
    if options.json:
        print_json({**about, "column": options.column, "file": options.out, "rows": rows})
        return
    scores = ("ARI", "purity") if options.truth is not None else ()
    head = (options.labels, "images", "clusters", "stability", *scores, "")
    print_lines(*table([head, *splitting.summary_rows(about["classes"])], right=range(1, len(head) - 1)))
    if scores:
        print_lines(
            f"All: adjusted Rand index {about['ari']:.3f}, purity {about['purity']:.3f} against {options.truth}."
        )
    print_lines(f"Wrote {options.out}: {rows} images, column {options.column!r}.")


def matrix(options: argparse.Namespace) -> None:
    """Evaluate every run and print the matrix."""
    from patchloom.console import Console
    from patchloom.search import granularity

    found = granularity.granularity(
        options.runs, options.data, options.labels, condition=options.condition, device=options.device,
        console=Console(sys.stderr),
    )  # fmt: skip
    _print_study(options, found, granularity.table_rows, granularity.write_matrix)


def analyse(options: argparse.Namespace) -> None:
    """Analyse every run and print a table."""
    from patchloom.console import Console
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
