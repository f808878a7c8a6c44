"""`patchloom serve`: models behind an HTTP port."""

from __future__ import annotations

import argparse
import os
from typing import Any

from patchloom.cli.output import MODEL_HELP, add_command, add_device
from patchloom.errors import PatchloomError


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "serve",
        shared,
        "serve models over HTTP, with a web page",
        [
            "patchloom serve birds=runs/birds deit_tiny.fb_in1k --host 0.0.0.0 --port 8080 --token SECRET-TOKEN",
            "patchloom serve runs/birds --index birds.index",
        ],
    )
    parser.add_argument("models", metavar="FROM", nargs="+", help=f"{MODEL_HELP}; NAME=FROM gives the model this name")
    group = parser.add_argument_group("models")
    group.add_argument("--base", metavar="FROM", help="base weights of the deltas, kept in memory once")
    group.add_argument(
        "--int8",
        action="store_true",
        help="use int8 matrix multiplication: faster, slightly less accurate",
    )
    add_device(group)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--index", metavar="INDEX", help="index to find similar images in, from `patchloom search build`"
    )
    group.add_argument(
        "--coarse",
        metavar="COLUMN",
        help="label column of the coarse condition (default: the one that the model was trained on)",
    )
    _add_access(parser.add_argument_group("address and access"))
    _add_limits(parser.add_argument_group("limits (requests beyond them are refused)"))
    _add_timeouts(parser.add_argument_group("timeouts"))
    parser.set_defaults(run=run_serve)


def _add_access(group: Any) -> None:
    group.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1, this machine only)")
    group.add_argument("--port", metavar="N", type=int, help="port to listen on, 0 for any free port (default: 8000)")
    group.add_argument("--token", help="require this bearer token (default: the variable PATCHLOOM_TOKEN, or none)")
    group.add_argument(
        "--allow-host",
        dest="allowed_hosts",
        action="append",
        metavar="NAME",
        help="accept requests to this host name, repeatable (default: any; on loopback, only names of this machine)",
    )


def _add_limits(group: Any) -> None:
    for flag, text in (
        ("--max-bytes", "bytes per file (default: 20000000)"),
        ("--max-pixels", "pixels per image (default: 50000000)"),
        ("--max-files", "files per prediction request (default: 32)"),
        ("--max-batch", "images per batch (default: 16)"),
        ("--max-queue", "images of all prediction requests in progress (default: 256)"),
        ("--max-queue-bytes", "bytes of all uploads in progress (default: 256000000)"),
        ("--max-explanations", "explanations in progress (default: 16)"),
        ("--max-connections", "open connections (default: 1000, or as many as the limit of open files allows)"),
        ("--decoders", "threads that decode large images (default: the number of cores, at least 2 and at most 4)"),
    ):
        group.add_argument(flag, metavar="N", type=int, help=text)
    group.add_argument(
        "--min-upload-rate", metavar="RATE", type=float, help="minimum bytes per second of an upload (default: 4000)"
    )


def _add_timeouts(group: Any) -> None:
    for flag, text in (
        ("--timeout", "seconds per prediction (default: 30)"),
        ("--explain-timeout", "seconds per explanation (default: 180)"),
        ("--upload-timeout", "seconds per uploaded file (default: 30)"),
        ("--decode-timeout", "seconds to decode an image (default: 10)"),
        ("--idle-timeout", "seconds without a complete request head before a connection is closed (default: 10)"),
    ):
        group.add_argument(flag, metavar="SECONDS", type=float, help=text)


def run_serve(options: argparse.Namespace) -> None:
    """Serve until a signal."""
    from dataclasses import fields

    from patchloom.install import install_hint
    from patchloom.serve.settings import Settings

    # options that were not set are left out, so that Settings alone defines the defaults
    values = {field.name: getattr(options, field.name, None) for field in fields(Settings)}
    # The environment is the safer place: other users can read the arguments of a process.
    values["token"] = values["token"] or os.environ.get("PATCHLOOM_TOKEN") or None
    values["allowed_hosts"] = tuple(values["allowed_hosts"] or ())
    settings = Settings(**{name: value for name, value in values.items() if value is not None})
    try:
        # Settings are checked first: they need none of the optional packages.
        from patchloom.serve.run import serve
    except ImportError as error:
        raise PatchloomError(f"serve needs {error.name}, which is not installed: {install_hint('serve')}") from error
    serve(
        options.models, settings, options.base, options.int8, options.device, index=options.index, coarse=options.coarse
    )
