"""The arguments of `patchloom search`; search_commands.py has what the commands do."""

from __future__ import annotations

import argparse
from typing import Any

from patchloom.cli import search_commands
from patchloom.cli.output import DATA_HELP, JSON_HELP, MODEL_HELP, add_command, add_device

LABELS_HELP = "one or more label columns, separated by spaces or commas"
CONDITION_HELP = "none (cosine), coarse (by the query's coarse probabilities, Eq. 2.5)"


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "search",
        argparse.ArgumentParser(add_help=False),
        "build an index of images, find similar images and classify images with it",
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
            "patchloom search build runs/pets pets.csv --out pets.index --labels breed species --kind hnsw",
            "patchloom search build vit.safetensors photos/ --out photos.index model.heads=3 mean=0.5 std=0.5",
        ],
        usage="patchloom search build WEIGHTS DATA --out INDEX [options] [key=value ...]",
    )
    group = parser.add_argument_group("weights and data")
    group.add_argument("weights", metavar="WEIGHTS", help=MODEL_HELP)
    group.add_argument("data", metavar="DATA", help=DATA_HELP)
    group.add_argument(
        "--labels", metavar="COLUMN", nargs="+", help=f"{LABELS_HELP} (default: the classes of class folders)"
    )
    group.add_argument(
        "--split", metavar="NAME", help="split of the data, or several joined as train+val (default: all)"
    )
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
    parser.set_defaults(run=search_commands.build, settings=[])


def _add_images(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("index and images")
    group.add_argument("index", metavar="INDEX", help="folder of an index")
    group.add_argument("images", metavar="IMAGE", nargs="+", help="image files, folders or glob patterns")
    group.add_argument(
        "--weights",
        metavar="WEIGHTS",
        help="weights that the index was built with, if they have moved (default: the path stored in the index)",
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
    group.add_argument(
        "--coarse",
        metavar="COLUMN",
        help="column of the coarse classes (default: the one that the model was trained on)",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--gallery", metavar="FILE.html", help="also write a web page that shows the images, as a single file"
    )
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=search_commands.query)


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
        "--label", metavar="COLUMN=NAME", action="append", default=[], help="label of all added images, repeatable"
    )
    parser.set_defaults(run=search_commands.add)


def _add_remove(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "remove",
        shared,
        "remove images from an index",
        ["patchloom search remove pets.index train/pug/pug_1.jpg"],
    )
    parser.add_argument("index", metavar="INDEX", help="folder of an index")
    parser.add_argument("keys", metavar="KEY", nargs="+", help="keys of images, as `search query` prints them")
    parser.set_defaults(run=search_commands.remove)


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
        "-k",
        type=int,
        metavar="N",
        help="number of neighbours (default: chosen from 10 to 30 by leave-one-out on the index)",
    )
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=search_commands.classify)


def _add_evaluate(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "evaluate",
        shared,
        "measure mAP and kNN accuracy, with the training images as the collection and held-out images as queries",
        [
            "patchloom search evaluate runs/pets pets.csv --labels breed species",
            "patchloom search evaluate runs/pets pets.csv --labels breed --condition coarse --json",
        ],
        usage="patchloom search evaluate WEIGHTS DATA --labels COLUMN... [options] [key=value ...]",
    )
    group = parser.add_argument_group("weights and data")
    group.add_argument("weights", metavar="WEIGHTS", help=MODEL_HELP)
    group.add_argument("data", metavar="DATA", help=DATA_HELP)
    group.add_argument(
        "--labels", metavar="COLUMN", nargs="+", help=f"{LABELS_HELP} (default: the classes of class folders)"
    )
    add_device(group)
    group = parser.add_argument_group("ranking")
    group.add_argument(
        "--condition",
        default="none",
        metavar="C",
        help=f"{CONDITION_HELP} or oracle (images of the query's coarse class first) (default: none)",
    )
    group.add_argument(
        "--coarse",
        metavar="COLUMN",
        help="column of the coarse classes (default: the one that the model was trained on)",
    )
    group.add_argument(
        "-k", type=int, metavar="N", help="number of neighbours for kNN (default: chosen by leave-one-out)"
    )
    group.add_argument("--workers", metavar="N", type=int, default=0, help="processes that read images (default: 0)")
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=search_commands.evaluate, settings=[])


def _add_split(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "split",
        shared,
        "propose finer classes by clustering the images of every class",
        [
            "patchloom search split pets.index --labels species --out finer.csv --gallery sheets.html",
            "patchloom search split pets.index --labels species --clusters 12 --out finer.csv --truth breed",
        ],
    )
    parser.add_argument("index", metavar="INDEX", help="folder of an index")
    group = parser.add_argument_group("clusters")
    group.add_argument("--labels", metavar="COLUMN", required=True, help="column of the classes to split")
    group.add_argument(
        "--clusters",
        metavar="N",
        default="auto",
        help="number of clusters per class, or auto to choose it by the gap statistic (default: auto)",
    )
    group.add_argument(
        "--truth", metavar="COLUMN", help="known classes to compare with, by adjusted Rand index and purity"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="FILE.csv", required=True, help="manifest to write, with the new column")
    group.add_argument("--column", metavar="NAME", default="cluster", help="name of the new column (default: cluster)")
    group.add_argument("--gallery", metavar="FILE.html", help="also write a page with a contact sheet per cluster")
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=search_commands.split)


def _add_matrix(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "matrix",
        shared,
        "evaluate runs that were trained on different label levels, each run on every level",
        ["patchloom search matrix runs/species runs/breed --data pets.csv --labels species breed --out matrix"],
    )
    group = _add_runs(parser)
    group.add_argument("--labels", metavar="COLUMN", nargs="+", required=True, help="levels to test on, coarse to fine")
    group.add_argument("--condition", default="none", metavar="C", help="none, coarse or oracle (default: none)")
    parser.set_defaults(run=search_commands.matrix)


def _add_analyse(parts: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        parts,
        "analyse",
        shared,
        "measure how well embeddings separate fine labels: separability, linear classifier, PCA energy, t-SNE",
        ["patchloom search analyse runs/grafit runs/ce --data pets.csv --fine breed --coarse species --out analysis"],
    )
    group = _add_runs(parser)
    group.add_argument("--fine", metavar="COLUMN", required=True, help="column of the fine labels")
    group.add_argument("--coarse", metavar="COLUMN", required=True, help="column of the coarse labels")
    group.add_argument("--count", metavar="N", type=int, help="training images to use, evenly spread (default: all)")
    group.add_argument("--shown", metavar="N", type=int, default=500, help="images in the t-SNE plot (default: 500)")
    parser.set_defaults(run=search_commands.analyse)


def _add_runs(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Runs, data and output; returns the group of the data."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=MODEL_HELP)
    data = parser.add_argument_group("data")
    data.add_argument("--data", metavar="DATA", required=True, help=DATA_HELP)
    add_device(data)
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="DIR", help="folder for the JSON file and the plots")
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    return data
