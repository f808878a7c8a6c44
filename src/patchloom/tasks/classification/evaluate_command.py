"""`patchloom evaluate` and `patchloom predict` for classifiers. Heavy imports are inside the functions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patchloom.console import Console
from patchloom.errors import PatchloomError, check_choice
from patchloom.reading import read_json
from patchloom.tasks.commands import Output, Tool, add_reading_arguments, require_data, require_images

_FLAGS = {"shown": "data"}  # options whose attribute has another name than the flag


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add_reading_arguments(parser)
    group = parser.add_argument_group("classifiers, data and test crop")
    group.add_argument("--labels", metavar="COLUMN", help="label column of a CSV file")
    group.add_argument(
        "--class-map",
        metavar="FILE.json",
        help="JSON file that maps class names of the data to class names or indices of the model",
    )
    group.add_argument(
        "--real",
        metavar="FILE.json",
        help="evaluate on ImageNet's reassessed labels: JSON file with a list of labels per image",
    )
    group.add_argument(
        "--crop-ratio",
        action=_Values,
        kind=float,
        metavar="RATIO",
        help="fraction of the resized image that the test crop covers; several values print one row each",
    )
    group.add_argument(
        "--resolution",
        action=_Values,
        kind=int,
        metavar="PIXELS",
        help="image size (default: that of the model); several values print one row each",
    )
    group = parser.add_argument_group("classifiers, model")
    group.add_argument("--head", help="which head of a distilled model to use: class, distill or both (default: both)")
    group.add_argument(
        "--fusion",
        help="how to combine both heads: logits (their mean) or softmax (sum of the probabilities) (default: logits)",
    )
    group.add_argument("--base", metavar="FROM", help="base weights of a delta")
    group.add_argument(
        "--int8", action="store_true", help="use int8 matrix multiplication: faster, slightly less accurate"
    )
    group = parser.add_argument_group("classifiers, probes")
    group.add_argument("--probe", help="evaluate frozen embeddings instead of the head: linear or knn")
    group.add_argument("--k", type=int, metavar="N", help="number of neighbours for --probe knn (default: 10)")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="temperature of the kNN votes (default: 0.07, as in DINO)"
    )
    group = parser.add_argument_group("classifiers, comparison")
    group.add_argument("--disagreement", nargs="+", metavar="MODEL", help="report how often these models disagree")
    group.add_argument("--data", dest="shown", metavar="DATA", help="images for --disagreement")
    group.add_argument(
        "--figure",
        metavar="FILE.png",
        help="file for a plot of --disagreement, or of several crop ratios or resolutions",
    )


def _add_predict(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("classifiers")
    group.add_argument("--base", metavar="FROM", help="base weights of a delta")
    group.add_argument("--top", type=int, default=5, metavar="N", help="number of classes to print (default: 5)")


class _Values(argparse.Action):
    """One or more numbers. argparse also hands over FROM and DATA where they stand behind the numbers: they become
    what they would be in front of them."""

    def __init__(self, option_strings: Sequence[str], dest: str, kind: type, **options: Any) -> None:
        # nargs="+" takes every word up to the next option, positional ones too; `__call__` gives those back.
        super().__init__(option_strings, dest, **{**options, "nargs": "+"})
        self.kind = kind

    def __call__(self, parser: Any, namespace: argparse.Namespace, words: Any, option: str | None = None) -> None:
        numbers: list[Any] = []
        for i, word in enumerate(words):
            try:
                numbers.append(self.kind(word))
            except ValueError:
                free = [name for name in ("model", "data") if getattr(namespace, name, None) is None]
                # Not even one number, or more words than there are positionals left.
                if not i or len(words) - i > len(free):
                    called = "a whole number" if self.kind is int else "a number"
                    parser.error(f"argument {option}: {word!r} is not {called}")
                for name, given in zip(free, words[i:], strict=False):
                    setattr(namespace, name, given)
                break
        setattr(namespace, self.dest, numbers)


def _evaluate(options: argparse.Namespace) -> Output:
    if not options.probe and (options.k is not None or options.temperature is not None):
        raise PatchloomError("--k and --temperature are settings of --probe knn.")
    swept = _take_sweep(options)
    if options.disagreement:
        return _run_disagreement(options)
    require_data(options)
    if options.probe:
        return _run_probe(options)
    return _run_sweep(options, swept) if swept else _run_scores(options)


def _take_sweep(options: argparse.Namespace) -> str | None:
    """The setting with several values, if there is one; the others become plain values."""
    swept = None
    for name in ("crop_ratio", "resolution"):
        values = getattr(options, name)
        if values is None or len(values) == 1:
            setattr(options, name, values and values[0])
        elif options.probe or options.disagreement:
            what = "--probe" if options.probe else "--disagreement"
            raise PatchloomError(f"{what} cannot be swept: several values of --{name.replace('_', '-')} were given.")
        elif swept:
            raise PatchloomError("--crop-ratio and --resolution cannot both be swept: give one value of one of them.")
        else:
            swept = name
    return swept


def _run_disagreement(options: argparse.Namespace) -> Output:
    from patchloom.plots import check_figure_path
    from patchloom.tasks.classification.agreement import disagreement, disagreement_lines, draw_disagreement

    if options.shown is None or options.model is not None:
        raise PatchloomError("--disagreement takes models and then --data DATA.")
    one_model_only = ("head", "fusion", "base", "probe", "crop_ratio", "resolution", "class_map", "real", "strict")
    _refuse(options, "--disagreement", (*one_model_only, "int8", "workers"))
    if options.figure:
        check_figure_path(Path(options.figure))
    result = disagreement(
        options.disagreement,
        options.shown,
        labels=options.labels,
        split=options.split,
        batch=options.batch,
        device=options.device,
        console=Console(sys.stderr),
    )
    if options.figure:
        draw_disagreement(result, Path(options.figure))
    return Output(result, disagreement_lines(result))


def _refuse(options: argparse.Namespace, what: str, names: Sequence[str]) -> None:
    """Options that would change nothing are an error, not silence."""
    # Compared by identity: 0 is a value that was given, and equals False.
    absent = (None, False)
    present = [name for name in names if not any(getattr(options, name) is value for value in absent)]
    given = [f"--{_FLAGS.get(name, name).replace('_', '-')}" for name in present]
    if given:
        raise PatchloomError(f"{', '.join(given)} cannot be used with {what}.")


def _run_probe(options: argparse.Namespace) -> Output:
    from patchloom.inference.probes import probe

    _refuse(options, "--probe", ("head", "fusion", "class_map", "real", "strict", "int8", "figure", "shown"))
    result = probe(
        options.model,
        options.data,
        options.probe,
        labels=options.labels,
        split=options.split,
        resolution=options.resolution,
        crop_ratio=options.crop_ratio,
        base=options.base,
        batch=options.batch,
        workers=options.workers or 0,
        k=options.k,
        temperature=options.temperature,
        device=options.device,
        console=Console(sys.stderr),
    )
    line = (
        f"{options.probe} probe on {result['trained_on']} embeddings of {result['dim']} numbers: top-1 "
        f"{result['top1']:.2%}, top-5 {result['top5']:.2%} of {result['count']} images"
    )
    return Output(result, [line])


def _run_scores(options: argparse.Namespace) -> Output:
    from patchloom.tasks.classification.evaluate import real_accuracy, scores
    from patchloom.tasks.classification.metrics import interval_text

    _refuse(options, "one evaluation: it draws a sweep or --disagreement", ("figure",))
    given = _score_options(options)
    real = _read_real(options)
    result = scores(options.model, options.data, **given)
    summary = result.summary()
    if real is not None:
        summary |= real_accuracy(result, real)
    lines = [
        f"top-1 {interval_text(summary)}, top-5 {summary['top5']:.2%}",
        f"cross-entropy {summary['loss']:.4f}, calibration error {summary['ece']:.2%}",
    ]
    if "real_top1" in summary:
        lines.append(f"ReaL {summary['real_top1']:.2%} of {summary['real_count']}")
    for name, row in sorted(summary["per_class"].items(), key=lambda pair: pair[1]["top1"]):
        lines.append(f"  {name:24} {row['top1']:8.2%} of {row['count']}")
    return Output({**summary, "confusion": result.confusion().tolist()}, lines)


def _score_options(options: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `patchloom.tasks.classification.evaluate.scores`."""
    _refuse(options, "one model", ("shown",))
    _check_fusion(options)
    return {
        "labels": options.labels,
        "split": options.split,
        "crop_ratio": options.crop_ratio,
        "resolution": options.resolution,
        "head": options.head,
        "fusion": options.fusion or "logits",
        "base": options.base,
        "batch": options.batch,
        "workers": options.workers or 0,
        "strict": options.strict or options.real is not None,  # ReaL counts files by number: none may be left out
        "class_map": read_json(options.class_map) if options.class_map else None,
        "int8": options.int8,
        "device": options.device,
        "imagenet_only": options.real is not None,
        "console": Console(sys.stderr),
    }


def _check_fusion(options: argparse.Namespace) -> None:
    from patchloom.tasks.classification.metrics import FUSIONS

    if options.fusion is None:
        return
    check_choice("--fusion", options.fusion, FUSIONS)
    if options.head != "both":
        raise PatchloomError("--fusion combines the two heads of a distilled model: give --head both with it.")


def _run_sweep(options: argparse.Namespace, setting: str) -> Output:
    from patchloom.plots import check_figure_path
    from patchloom.tasks.classification.sweep import draw_sweep, sweep, sweep_text

    if options.figure:
        check_figure_path(Path(options.figure))
    given = _score_options(options)
    values = given.pop(setting)
    real = _read_real(options)
    rows = sweep(options.model, options.data, setting, values, real=real, **given)
    if options.figure:
        draw_sweep(rows, Path(options.figure))
    return Output({"sweep": rows}, sweep_text(rows).splitlines())


def _read_real(options: argparse.Namespace) -> Any:
    """The labels of --real, checked before the first image is read."""
    from patchloom.tasks.classification.evaluate import check_real_labels

    if options.real is None:
        return None
    labels = read_json(options.real)
    check_real_labels(labels, f"--real {options.real}")
    return labels


def _predict(options: argparse.Namespace) -> Output:
    from patchloom.inference.predict import predict

    require_images(options)
    rows = predict(options.model, options.inputs, top=options.top, base=options.base, device=options.device)
    return predictions_output(rows)


def predictions_output(rows: Sequence[Mapping[str, Any]]) -> Output:
    """The rows of `predict`, one line per image."""
    lines = []
    for row in rows:
        classes = ", ".join(f"{p['class']} {p['probability']:.1%}" for p in row.get("predictions", ()))
        note = f" ({row['note']})" if "note" in row else ""
        lines.append(f"{row['path']}: {row.get('error') or classes}{note}")
    # Some unreadable images among many are not an error of the command.
    failed = all("error" in row for row in rows)
    return Output(rows, lines, "No image could be classified; the reasons are given above." if failed else None)


EVALUATE = Tool(_add_evaluate, _evaluate)
PREDICT = Tool(_add_predict, _predict)
