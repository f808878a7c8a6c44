"""`patchloom models`: the table of models."""

from __future__ import annotations

import argparse
from typing import Any

from patchloom.cli.output import JSON_HELP, add_command, print_json, table
from patchloom.terminal import print_lines

_RECOMMENDED = (
    ("deit_small", "fine-tune on your photos: `patchloom finetune deit_small.fb_in1k DATA`"),
    ("deit_tiny", "the same, three times faster on a CPU: `patchloom finetune deit_tiny.fb_in1k DATA`"),
    ("deit_nano", "train from scratch on images of up to 64 pixels: `patchloom train DATA`"),
)
LARGER = 384  # the second resolution of the papers


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "models",
        shared,
        "list the models with their size, cost and published weights",
        ["patchloom models", "patchloom models 'cait_*' --json"],
    )
    parser.add_argument(
        "pattern", nargs="?", default="*", help="name or shell pattern, such as 'cait_*' (default: all)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the table of models."""
    rows = model_rows(options.pattern)
    if options.json:
        print_json(rows)
        return
    recommended = [*table([("recommended", ""), *_RECOMMENDED]), ""] if options.pattern == "*" else []
    print_lines(*recommended, *_table(rows))


def model_rows(pattern: str) -> list[dict[str, Any]]:
    """One row per model: cost at its default resolution, and at 384 pixels if the patch size divides them.

    `weights` are the tags of its published weights; `load` and `finetune` accept NAME.TAG.
    """
    from patchloom.models.complexity import complexity
    from patchloom.models.config import PatchConfig
    from patchloom.models.registry import Entry, Paper, entries, find_config  # torch is imported only here
    from patchloom.weights.catalogue import PUBLISHED

    rows = []
    found = entries(pattern, kind=None)
    if not found:
        # A name that the table does not list may still be a model, such as timm:NAME; else find_config refuses it.
        found = [Entry(find_config(pattern), Paper("not in a table"))]
    for entry in found:
        config = entry.config
        if config.kind != "image":
            rows.append(_row_without_images(entry))
            continue
        cost = complexity(config)
        row = {
            "name": config.name,
            "family": config.family,
            "params": cost.params,
            "macs": cost.macs,
            "activations": cost.activations,
            "resolution": config.img_size[0],
            "weights": list(PUBLISHED.get(config.name, ())),
            "source": entry.paper.source,
        }
        if isinstance(config, PatchConfig) and LARGER % config.patch_size == 0:
            larger = complexity(config, LARGER)
            row["at_384"] = {"params": larger.params, "macs": larger.macs, "activations": larger.activations}
        rows.append(row)
    return rows


def _row_without_images(entry: Any) -> dict[str, Any]:
    """A network for text: its cost depends on the lengths of the sequences, so only the parameters are counted."""
    import torch

    from patchloom.models.registry import build

    # Parameters are counted without memory.
    with torch.device("meta"):
        params = sum(parameter.numel() for parameter in build(entry.config).parameters())
    unknown = dict.fromkeys(("macs", "activations", "resolution"))
    row = {"name": entry.config.name, "family": entry.config.family, "params": params, **unknown}
    return {**row, "weights": [], "source": entry.paper.source}


def _table(rows: list[dict[str, Any]]) -> list[str]:
    numbers = ("params", "pixels", "MACs", "activations", "MACs at 384", "activations")
    head = ("model", *numbers, "published weights", "source")
    return table([head, *(_cells(row) for row in rows)], right=range(1, 1 + len(numbers)))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def cost(at: dict[str, Any] | None) -> tuple[str, str]:
        known = at is not None and at["macs"] is not None
        return (f"{at['macs'] / 1e9:.2f}G", f"{at['activations'] / 1e6:.1f}M") if at and known else ("-", "-")

    return (
        row["name"],
        f"{row['params'] / 1e6:.2f}M",
        str(row["resolution"] or "-"),
        *cost(row),
        *cost(row.get("at_384")),
        ", ".join(row["weights"]) or "-",
        row["source"],
    )
