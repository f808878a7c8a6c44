"""`patchloom explain`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patchloom.cli.options import device_options
from patchloom.cli.output import out_folder, print_json
from patchloom.terminal import print_lines


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "explain", parents=[shared, device_options()], help="where a model looks, and whether that means anything"
    )
    parser.add_argument("model", metavar="FROM", help="a run, an export, a file of weights, a published tag")
    parser.add_argument(
        "images", metavar="IMAGE", nargs="*", help="files, folders, glob patterns; with --model-only, more models"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder for the figures")
    parser.add_argument("--map", dest="maps", metavar="NAME", action="append", help="a map, instead of all; repeatable")
    parser.add_argument(
        "--target", metavar="CLASS", help="the class to explain, by name or index; default: the likeliest"
    )
    parser.add_argument(
        "--top",
        metavar="K",
        type=int,
        help="maps of the K best classes, for models with one query per class; default: of every class above 10 %%",
    )
    parser.add_argument("--model-only", action="store_true", help="analyse the model itself, without images to explain")
    parser.add_argument("--data", metavar="DATA", help="of --model-only: images for embeddings, norms and agreement")
    parser.add_argument("--labels", help="of --data: the label column of a CSV manifest")
    parser.add_argument("--split", choices=["train", "val", "test", "all"], help="of --data")
    parser.add_argument(
        "--count", metavar="N", type=int, help="of --data: number of images for PCA energy and t-SNE (default: 500)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    _run_models(options) if options.model_only else _run_pictures(options)


def _run_models(options: argparse.Namespace) -> None:
    from patchloom.console import Console
    from patchloom.data.decoding import EXTENSIONS
    from patchloom.errors import PatchloomError
    from patchloom.explaining.analyses import analyse
    from patchloom.explaining.charts import draw_analysis

    if options.maps or options.target or options.top is not None:
        raise PatchloomError("--map, --target and --top are for images; --model-only explains none.")
    models = [options.model, *options.images]
    if pictures := [name for name in options.images if Path(name).suffix.lower() in EXTENSIONS]:
        raise PatchloomError(
            f"--model-only takes models after FROM; {pictures[0]} is an image. Images go to --data DATA."
        )
    data = {"labels": options.labels, "split": options.split, "count": options.count, "device": options.device}
    found = analyse(models, options.data, **data, console=Console(sys.stderr))
    out = out_folder(options.out)
    with _writing(out):
        (out / "analysis.json").write_text(json.dumps(found, indent=1) + "\n")
        written = [out / "analysis.json", *draw_analysis(found, out)]
    if options.json:
        print_json(found)
        return
    for path in written:
        print_lines(str(path))


def _run_pictures(options: argparse.Namespace) -> None:
    from patchloom.errors import PatchloomError
    from patchloom.explaining.explanation import check_top, find_class
    from patchloom.explaining.maps import check_maps
    from patchloom.inference.models import open_model
    from patchloom.inference.predict import expand_images
    from patchloom.plots import new_figure

    if not options.images:
        raise PatchloomError("explain needs images, patchloom explain FROM IMAGE... --out DIR, or --model-only.")
    if options.data is not None:
        raise PatchloomError("--data is for --model-only; images to explain stand after FROM.")
    if options.count is not None:
        raise PatchloomError("--count is for --model-only --data DATA; images to explain are all explained.")
    network = open_model(options.model, device=options.device)
    maps = check_maps(network, options.maps)
    check_top(network, options.top)
    if options.target is not None:
        find_class(network, options.target)
    new_figure(1, 1)  # where matplotlib is missing, this says so before anything is computed
    out = out_folder(options.out)
    rows: list[dict[str, Any]] = []
    for path in [path for given in options.images for path in expand_images(given)]:  # before figures stand there too
        rows.append(_explain_one(network, path, out, maps=maps, target=options.target, top=options.top))
        if not options.json:
            _say(rows[-1])
    if options.json:
        print_json(rows)
    bad = [row for row in rows if "error" in row]
    if bad:
        for row in bad if options.json else ():
            print_lines(f"patchloom: {row['error']}", file=sys.stderr)
        raise PatchloomError(f"{len(bad)} of {len(rows)} images could not be explained.")


def _explain_one(network: Any, path: Path, out: Path, **asked: Any) -> dict[str, Any]:
    from patchloom.errors import PatchloomError
    from patchloom.explaining.explanation import explain
    from patchloom.plots import save_figure

    try:
        found = explain(network, path, **asked)
    except PatchloomError as error:
        return {"path": str(path), "error": str(error)}
    figure = _free_name(out, path.stem)
    save_figure(found.figure, figure)
    return {"path": str(path), "figure": str(figure), **found.to_json()}


def _free_name(folder: Path, stem: str) -> Path:
    """A name for a figure under which nothing stands: neither a picture of the user nor an earlier figure."""
    path, number = folder / f"{stem}.explained.png", 1
    while os.path.lexists(path):
        number += 1
        path = folder / f"{stem}-{number}.explained.png"
    return path


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    from patchloom.errors import PatchloomError

    try:
        yield
    except OSError as error:
        raise PatchloomError(f"{error.filename or path} cannot be written: {error.strerror or error}.") from error


def _say(row: dict[str, Any]) -> None:
    from patchloom.explaining.figures import SHOWN

    if "error" in row:
        print_lines(f"patchloom: {row['error']}", file=sys.stderr)
        return
    likely = [one for one in row["predictions"] if one["probability"] > SHOWN] or row["predictions"][:1]
    classes = ", ".join(f"{one['class']} {one['probability']:.1%}" for one in likely)  # all above 10 % (CaiT D.2)
    print_lines(f"{row['path']}: {classes} -> {row['figure']}")
    for name, figures in row["faithfulness"].items():
        chance = figures["random"]["deletion"]
        print(
            f"  {name:24} {figures['verdict']}: deletion {figures['deletion']:.3f}, insertion "
            f"{figures['insertion']:.3f}, random {chance['mean']:.3f} ± {chance['std']:.3f}"
        )
