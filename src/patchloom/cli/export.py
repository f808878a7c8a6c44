"""`patchloom export`."""

from __future__ import annotations

import argparse
from typing import Any

from patchloom.cli.options import device_options
from patchloom.cli.output import print_json


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "export",
        parents=[shared, device_options("cpu", "the logits that the file is compared with")],
        help="a checked file for another program",
    )
    parser.add_argument("model", metavar="FROM", help="a run, an export, a file of weights, a published tag")
    parser.add_argument(
        "--to", metavar="FORMAT", required=True, help="onnx, openvino, torch, safetensors, timm or official"
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="the file to write")
    parser.add_argument("--int8", action="store_true", help="of onnx and openvino: weights in 8 bits")
    parser.add_argument(
        "--with-preprocessing", action="store_true", help="take uint8 pixels, height x width x 3, and normalise inside"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="refuse past this difference of logits, as a part of the largest (default 1e-4); with --int8, past this "
        "part of images whose likeliest class is another (default 0.1)",
    )
    parser.add_argument(
        "--images", metavar="DIR", help="images to compare on; default: what the run held out, or some photos"
    )
    parser.add_argument("--base", help="of a delta: the weights that it was made from")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from patchloom.exporting import export

    report = export(
        options.model,
        options.to,
        options.out,
        options.int8,
        options.with_preprocessing,
        options.tolerance,
        images=options.images,
        base=options.base,
        device=options.device,
    )
    if options.json:
        print_json(report.to_json())
        return
    print(f"{report.file}: {report.bytes / 1e6:.1f} MB{', in the place of an earlier file' if report.replaced else ''}")
    print(
        f"On {report.images} images its logits differ by at most {report.difference:.1e} of the largest one; "
        f"{report.agreement:.1%} have the same likeliest class."
    )
