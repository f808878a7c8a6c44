"""`patchloom bench`: speed and memory of models."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchloom.cli.output import JSON_HELP, add_command, add_device, out_folder, print_json
from patchloom.errors import PatchloomError


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        "bench",
        shared,
        "measure the speed and memory of models, optionally compared with timm or the published code",
        [
            "patchloom bench deit_small --against timm",
            "patchloom bench deit_tiny cait_xxs24 --sizes 224 384 --out bench --compare earlier/bench.json",
        ],
    )
    group = parser.add_argument_group("models")
    group.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="model names (see `patchloom models`), timm:NAME, or run folders, exported models, weight files and tags",
    )
    group.add_argument(
        "--against", choices=["timm", "published"], help="implementation to compare with; both are measured in turn"
    )
    group.add_argument(
        "--int8",
        action="store_true",
        help="use int8 matrix multiplication: faster, slightly less accurate",
    )
    group.add_argument(
        "--sizes",
        type=_positive,
        nargs="+",
        metavar="PIXELS",
        help="image sizes to measure, one row per size (default: the model's)",
    )
    group.add_argument(
        "--depths",
        type=_positive,
        nargs="+",
        metavar="BLOCKS",
        help="numbers of blocks to measure, one row per number (default: the model's)",
    )
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--batch", metavar="N", type=_positive, default=8, help="images per batch for the throughput (default: 8)"
    )
    group.add_argument(
        "--rounds",
        metavar="N",
        type=_positive,
        default=15,
        help="number of interleaved rounds; results are medians (default: 15)",
    )
    group.add_argument("--threads", metavar="N", type=_threads, help="number of threads (default: all cores)")
    group.add_argument(
        "--no-memory",
        action="store_true",
        help="skip the measurement of memory, which starts one process per row",
    )
    add_device(group)
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="DIR", help="folder for bench.json and plots")
    group.add_argument(
        "--compare",
        metavar="JSON",
        help="earlier bench.json to compare with; fail if a metric is worse by more than the noise",
    )
    group.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=run)


def _positive(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {word!r}")
    return int(word)


def _threads(word: str) -> int:
    if _positive(word) > (cores := os.cpu_count() or 1):
        raise argparse.ArgumentTypeError(f"this machine has {cores} cores, fewer than {word}")
    return int(word)


def run(options: argparse.Namespace) -> None:
    """Measure, print and compare. All cases are checked before the first is measured."""
    import torch

    from patchloom.benching.peers import check_case
    from patchloom.benching.records import compare, describe_machine, describe_run, read_records, write_records
    from patchloom.devices import choose_device

    cases = list(_cases(options))
    for name, size, depth in cases:
        check_case(name, options.against, size, depth, options.int8)
    recorded = read_records(options.compare) if options.compare else None
    device = choose_device(options.device)  # before the folder of --out is made
    out = out_folder(options.out) if options.out else None
    if out and (out / "bench.json").exists():
        read_records(out / "bench.json")  # refuses to overwrite a file that is not ours
    if options.threads:
        # Before the machine is described: its rates are those of as many threads.
        torch.set_num_threads(options.threads)
    machine = describe_machine(device)
    peak, copying = machine["gemm_macs_per_s"], machine["copy_bytes_per_s"]
    print(describe_run(machine, options.rounds), file=sys.stderr)
    rows = []
    for row in _measured(cases, options):
        rows.append(row)
        if not options.json:
            # Row by row: a long series shows its first results at once.
            print(_line(row), flush=True)
    if options.json:
        print_json({"about": machine, "rows": rows})
    if out:
        write_records(rows, machine, out / "bench.json")
        _draw(rows, peak, copying, out)
    if recorded is not None:
        compare(rows, recorded)


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, int, int | None]]:
    """Name, image side and depth of every row."""
    from patchloom.benching.peers import case_config

    # All names are resolved first, so that a wrong one costs no measurement.
    for name, config in [(name, case_config(name)) for name in options.models]:
        if config.kind != "image":
            raise PatchloomError(f"{config.name} is a network of {config.kind}: bench measures networks of images.")
        for size in options.sizes or [config.img_size[0]]:
            for depth in options.depths or [None]:
                yield name, size, depth


def _measured(cases: list[tuple[str, int, int | None]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from patchloom.benching.inference import measure

    for name, size, depth in cases:
        yield measure(
            name, options.against, batch=options.batch, size=size, depth=depth, rounds=options.rounds,
            memory=not options.no_memory, int8=options.int8, device=options.device,
        )  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    line = f"{row['model']:18} {row['size']:4} px" + (f", {row['depth']} blocks" if row["depth"] is not None else "")
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
        known = [row for row in rows if row[along] is not None]
        if len({row[along] for row in known}) > 1:
            draw_scaling(known, along, out / f"{along}.png")
