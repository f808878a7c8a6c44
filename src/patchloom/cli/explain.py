"""`patchloom explain`: maps and faithfulness of predictions, or analyses of models."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from patchloom.cli.output import JSON_HELP, MODEL_HELP, add_command, add_device, out_folder, print_json
from patchloom.console import Console
from patchloom.errors import PatchloomError, errors_in_writing
from patchloom.temporary import write_json
from patchloom.terminal import print_lines
from patchloom.text import without_nan


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "explain",
        shared,
        "show which image regions drive a prediction, with faithfulness scores",
        [
            "patchloom explain runs/birds photo.jpg --out explained",
            "patchloom explain runs/birds --model-only --data birds/ --out analysis",
        ],
    )
    group = parser.add_argument_group("input and output")
    group.add_argument("model", metavar="FROM", help=MODEL_HELP)
    group.add_argument(
        "images",
        metavar="IMAGE",
        nargs="*",
        help="image files, folders or glob patterns; with --model-only, further models",
    )
    group.add_argument("--out", metavar="DIR", required=True, help="folder for the plots")
    add_device(group)
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    group = parser.add_argument_group("explanation of images")
    group.add_argument(
        "--map", dest="maps", metavar="NAME", action="append", help="map to compute, repeatable (default: all)"
    )
    group.add_argument(
        "--target", metavar="CLASS", help="class to explain, by name or index (default: the most probable)"
    )
    group.add_argument(
        "--top",
        metavar="K",
        type=int,
        help="number of classes that get a map, for models with one query per class (default: all with a probability "
        "above 10 %%)",
    )
    group = parser.add_argument_group("analysis of models")
    group.add_argument("--model-only", action="store_true", help="analyse models instead of images")
    group.add_argument("--data", metavar="DATA", help="images for embeddings, norms and agreement")
    group.add_argument(
        "--labels", metavar="COLUMN", help="label column, if --data is a CSV file (default: the only one)"
    )
    group.add_argument(
        "--split",
        choices=["train", "val", "test", "all"],
        help="part of --data to use (default: the validation images)",
    )
    group.add_argument(
        "--count", metavar="N", type=int, help="number of images of --data for PCA energy and t-SNE (default: 500)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Explain images, or analyse models."""
    _run_models(options) if options.model_only else _run_pictures(options)


def _run_models(options: argparse.Namespace) -> None:
    from patchloom.data.decoding import EXTENSIONS
    from patchloom.explaining.analyses import analyse
    from patchloom.explaining.charts import draw_analysis

    if options.maps or options.target or options.top is not None:
        raise PatchloomError("--map, --target and --top apply to images and cannot be combined with --model-only.")
    models = [options.model, *options.images]
    if pictures := [name for name in options.images if Path(name).suffix.lower() in EXTENSIONS]:
        raise PatchloomError(f"--model-only takes models, but {pictures[0]} is an image. Pass images with --data DATA.")
    data = {"labels": options.labels, "split": options.split, "count": options.count, "device": options.device}
    found = analyse(models, options.data, **data, console=Console(sys.stderr))
    out = out_folder(options.out)
    with errors_in_writing(out / "analysis.json"):
        write_json(out / "analysis.json", without_nan(found))
    written = [out / "analysis.json", *draw_analysis(found, out)]
    if options.json:
        print_json(found)
        return
    for path in written:
        print_lines(str(path))


def _run_pictures(options: argparse.Namespace) -> None:
    from patchloom.explaining.explanation import check_top, find_class
    from patchloom.explaining.maps import check_maps
    from patchloom.inference.models import open_model
    from patchloom.inference.predict import expand_images
    from patchloom.plots import new_figure

    if not options.images:
        raise PatchloomError(
            "explain needs images: patchloom explain FROM IMAGE... --out DIR. To analyse the model, add --model-only."
        )
    if options.data is not None:
        raise PatchloomError("--data requires --model-only. Pass images to explain after FROM.")
    if options.count is not None:
        raise PatchloomError("--count requires --model-only --data DATA.")
    # Model, maps and class are checked once, before the first of many images.
    network = open_model(options.model, device=options.device)
    maps = check_maps(network, options.maps)
    check_top(network, options.top)
    if options.target is not None:
        find_class(network, options.target)
    new_figure(1, 1)  # fails before anything is computed if matplotlib is missing
    out = out_folder(options.out)
    rows: list[dict[str, Any]] = []
    # a list, expanded before the first figure is written: --out may be a folder of images
    for path in [path for pattern in options.images for path in expand_images(pattern)]:
        rows.append(_explain_one(network, path, out, maps=maps, target=options.target, top=options.top))
        if not options.json:
            _print_row(rows[-1])
    if options.json:
        print_json(rows)
    bad = [row for row in rows if "error" in row]
    if bad:
        # Without --json the error was printed as the row appeared.
        for row in bad if options.json else ():
            print_lines(f"patchloom: {row['error']}", file=sys.stderr)
        raise PatchloomError(f"{len(bad)} of {len(rows)} images could not be explained.")


def _explain_one(network: Any, path: Path, out: Path, **options: Any) -> dict[str, Any]:
    from patchloom.explaining.explanation import explain
    from patchloom.plots import save_figure

    try:
        found = explain(network, path, **options)
    except PatchloomError as error:
        return {"path": str(path), "error": str(error)}
    figure = _free_name(out, path.stem)
    save_figure(found.figure, figure)
    return {"path": str(path), "figure": str(figure), **found.to_json()}


def _free_name(folder: Path, stem: str) -> Path:
    """An unused file name for a figure, so that no image of the user and no earlier figure is overwritten."""
    path, number = folder / f"{stem}.explained.png", 1
    while os.path.lexists(path):
        number += 1
        path = folder / f"{stem}-{number}.explained.png"
    return path


def _print_row(row: dict[str, Any]) -> None:
    from patchloom.explaining.figures import SHOWN

    if "error" in row:
        print_lines(f"patchloom: {row['error']}", file=sys.stderr)
        return
    likely = [one for one in row["predictions"] if one["probability"] > SHOWN] or row["predictions"][:1]
    classes = ", ".join(f"{one['class']} {one['probability']:.1%}" for one in likely)  # all above 10 % (CaiT D.2)
    print_lines(f"{row['path']}: {classes} -> {row['figure']}")
    for name, scores in row["faithfulness"].items():
        random = scores["random"]["deletion"]
        print(
            f"  {name:24} {scores['verdict']}: deletion {scores['deletion']:.3f}, insertion "
            f"{scores['insertion']:.3f}, random {random['mean']:.3f} ± {random['std']:.3f}"
        )
