"""`patchloom export`: a verified file for another program."""

from __future__ import annotations

import argparse
from typing import Any

from patchloom.cli.output import JSON_HELP, MODEL_HELP, add_command, add_device, print_json


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "export",
        shared,
        "export to ONNX, OpenVINO or PyTorch, or to weights in other layouts, and verify the result",
        [
            "patchloom export runs/birds --to onnx --out birds.onnx",
            "patchloom export deit_tiny.fb_in1k --to openvino --int8 --with-preprocessing --out deit.xml",
        ],
    )
    group = parser.add_argument_group("input and output")
    group.add_argument("model", metavar="FROM", help=MODEL_HELP)
    group.add_argument(
        "--to",
        metavar="FORMAT",
        required=True,
        help="output format: onnx, openvino, torch, safetensors, timm or official",
    )
    group.add_argument("--out", metavar="FILE", required=True, help="file to write")
    group.add_argument("--base", metavar="FROM", help="base weights of a delta")
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    group = parser.add_argument_group("content of the file")
    group.add_argument(
        "--int8", action="store_true", help="store weights in 8 bits, for onnx and openvino (default: float32)"
    )
    group.add_argument(
        "--with-preprocessing",
        action="store_true",
        help="include the normalisation; the input is uint8 pixels (height, width, 3) (default: normalised float32)",
    )
    group = parser.add_argument_group("verification")
    group.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="largest difference of logits, relative to the largest logit (default: 1e-4); with --int8, largest "
        "fraction of images whose predicted class changes (default: 0.1)",
    )
    group.add_argument(
        "--images",
        metavar="DIR",
        help="images to compare on (default: the validation images of the run, or two sample photos)",
    )
    add_device(group, "cpu", "for the logits to compare the file with")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Export and print the report.

    Whatever cannot be verified is not written: see `patchloom.exporting.export`.
    """
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
    print(f"{report.file}: {report.bytes / 1e6:.1f} MB{', replaces an earlier export' if report.replaced else ''}")
    print(
        f"Verified on {report.images} {report.unit}: logits differ by at most {report.difference:.1e} of the largest "
        f"logit; {report.agreement:.1%} of the predicted {'classes' if report.unit == 'images' else 'tokens'} agree."
    )
