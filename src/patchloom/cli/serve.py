"""`patchloom serve`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from patchloom.cli.options import device_options


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "serve", parents=[shared, device_options()], help="a web page and an HTTP service for models"
    )
    parser.add_argument(
        "models", metavar="FROM", nargs="+", help="runs, exports, files of weights, published tags; NAME=FROM names one"
    )
    parser.add_argument("--base", help="of deltas: the weights that they were made from, held in memory once")
    parser.add_argument("--int8", action="store_true", help="predict with products of bytes: faster, and not exact")
    parser.add_argument("--host", help="the address to listen at (default 127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, help="default 8000; 0 takes any that is free")
    parser.add_argument("--token", help="ask for this bearer token (better in the variable PATCHLOOM_TOKEN)")
    parser.add_argument(
        "--allow-host", dest="allowed_hosts", action="append", metavar="NAME", help="a name that clients call it by"
    )
    parser.add_argument("--max-bytes", type=int, help="of one upload (default 20000000)")
    parser.add_argument("--max-pixels", type=int, help="of one image (default 50000000)")
    parser.add_argument("--max-batch", type=int, help="images that the network sees at once (default 16)")
    parser.add_argument("--max-queue", type=int, help="predictions under way before it answers 503 (default 256)")
    parser.add_argument("--max-explanations", type=int, help="explanations under way (default 16)")
    parser.add_argument("--max-queue-bytes", type=int, help="of all uploads under way (default 256000000)")
    parser.add_argument("--timeout", type=float, help="seconds of a prediction (default 30)")
    parser.add_argument("--explain-timeout", type=float, help="seconds of an explanation (default 180)")
    parser.add_argument("--upload-timeout", type=float, help="seconds of an upload (default 30)")
    parser.add_argument("--min-upload-rate", type=float, help="bytes per second of an upload (default 4000)")
    parser.add_argument("--max-files", type=int, help="images in one request to predict (default 32)")
    parser.add_argument("--decoders", type=int, help="threads that decode large images (default: cores, 2 to 4)")
    parser.add_argument("--decode-timeout", type=float, help="seconds to decode one image (default 10)")
    parser.add_argument("--max-connections", type=int, help="open connections (default 1000, or what files allow)")
    parser.add_argument(
        "--idle-timeout", type=float, help="seconds of a connection without a complete request head (default 10)"
    )
    parser.set_defaults(run=run_serve)


def run_serve(options: argparse.Namespace) -> None:
    from dataclasses import fields

    from patchloom.errors import PatchloomError
    from patchloom.install import install_hint
    from patchloom.serve.settings import Settings

    given = {field.name: getattr(options, field.name, None) for field in fields(Settings)}
    given["token"] = given["token"] or os.environ.get("PATCHLOOM_TOKEN") or None
    given["allowed_hosts"] = tuple(given["allowed_hosts"] or ())
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    try:
        from patchloom.serve.run import serve
    except ImportError as error:
        raise PatchloomError(f"serve needs {error.name}, which is not installed: {install_hint('serve')}") from error
    serve(options.models, settings, options.base, options.int8, options.device)
