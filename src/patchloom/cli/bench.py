"""`patchloom bench`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchloom.cli.options import device_options
from patchloom.cli.output import out_folder, print_json


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "bench",
        parents=[shared, device_options()],
        help="speed and memory of a model, beside what you would use instead",
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="names of models, see `patchloom models`")
    parser.add_argument("--against", choices=["timm", "published"], help="the peer, measured in turn with ours")
    parser.add_argument("--int8", action="store_true", help="ours with products of bytes: faster, and not exact")
    parser.add_argument("--batch", type=_positive, default=8, help="images at a time for the throughput")
    parser.add_argument("--sizes", type=_positive, nargs="+", metavar="PIXELS", help="image sides, one row each")
    parser.add_argument("--depths", type=_positive, nargs="+", metavar="BLOCKS", help="numbers of blocks, one row each")
    parser.add_argument("--rounds", type=_positive, default=15, help="interleaved rounds; figures are their medians")
    parser.add_argument("--threads", type=_threads, help="default: all cores")
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory, which starts a process a row")
    parser.add_argument("--out", metavar="DIR", help="a folder for the figures' JSON and pictures")
    parser.add_argument(
        "--compare", metavar="JSON", help="fail when a figure is worse than this earlier one's by more than noise"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def _positive(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {word!r}")
    return int(word)


def _threads(word: str) -> int:
    if _positive(word) > (cores := os.cpu_count() or 1):
        raise argparse.ArgumentTypeError(f"this machine has {cores} cores, fewer than {word}")
    return int(word)


def run(options: argparse.Namespace) -> None:
    import torch

    from patchloom.benching.peers import check_case
    from patchloom.benching.records import about_machine, compare, in_a_sentence, keep, read_recorded

    cases = list(_cases(options))
    for name, size, depth in cases:
        check_case(name, options.against, size, depth, options.int8)
    recorded = read_recorded(options.compare) if options.compare else None
    out = out_folder(options.out) if options.out else None
    if out and (out / "bench.json").exists():
        read_recorded(out / "bench.json")  # another's file is not written over
    if options.threads:
        torch.set_num_threads(options.threads)
    about = about_machine(options.device)
    peak, copying = about["gemm_macs_per_s"], about["copy_bytes_per_s"]
    print(in_a_sentence(about, options.rounds), file=sys.stderr)
    rows = []
    for row in _measured(cases, options):
        rows.append(row)
        if not options.json:
            print(_line(row), flush=True)
    if options.json:
        print_json({"about": about, "rows": rows})
    if out:
        keep(rows, about, out / "bench.json")
        _draw(rows, peak, copying, out)
    if recorded is not None:
        compare(rows, recorded)


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, int, int | None]]:
    """Name, image side and depth of every row."""
    from patchloom.models.registry import find_config

    for config in [find_config(name) for name in options.models]:
        for size in options.sizes or [config.img_size[0]]:
            for depth in options.depths or [None]:
                yield config.name, size, depth


def _measured(cases: list[tuple[str, int, int | None]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from patchloom.benching.inference import measure

    for name, size, depth in cases:
        yield measure(
            name, options.against, batch=options.batch, size=size, depth=depth, rounds=options.rounds,
            memory=not options.no_memory, int8=options.int8, device=options.device,
        )  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    line = f"{row['model']:18} {row['size']:4} px, {row['depth']} blocks"
    for who, label in (("ours", "ours"), ("theirs", row["peer"])):
        if side := row.get(who):
            memory = "" if side["memory_mb"] is None else f", {side['memory_mb']:.0f} MB"
            (slow, quick), (least, most) = side["throughput_quartiles"], side["latency_quartiles"]
            line += (
                f"\n  {label:10} {side['throughput']:8.1f} images/s ({slow:.1f} to {quick:.1f}) at batch "
                f"{row['batch']}, {side['latency_ms']:.1f} ms ({least:.1f} to {most:.1f}) for one, "
                f"{side['share']:.0%} of a float32 product's rate{memory}"
            )
    if "ratio" in row:
        line += (
            f"\n  {row['ratio']:.2f} times as fast ({row['low']:.2f} to {row['high']:.2f}), {row['latency_ratio']:.2f} "
            f"for one image; logits differ by {row['difference']:.0e}"
        )
    return line


def _draw(rows: list[dict[str, Any]], peak: float, copying: float, out: Path) -> None:
    from patchloom.benching.charts import draw_roofline, draw_scaling

    draw_roofline(rows, peak, copying, out / "roofline.png")
    for along in ("size", "depth"):
        if len({row[along] for row in rows}) > 1:
            draw_scaling(rows, along, out / f"{along}.png")
