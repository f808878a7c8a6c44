"""What the benchmarks beside timm share: options, the first line, figures kept and compared."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from patchloom.benching.records import compare, describe_machine, describe_run, read_records, write_records
from patchloom.errors import PatchloomError

T = TypeVar("T")


def parser(doc: str, rounds: int, threads: int = 2) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc.split("\n")[0])
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--threads", type=int, default=threads)
    made.add_argument("--json", type=Path, help="keep the figures here")
    made.add_argument(
        "--compare", type=Path, help="figures kept earlier: fail when one got worse by more than the noise"
    )
    return made


def in_a_fresh_process(function: Callable[..., T], *given: Any, **options: Any) -> T:
    """Call it where no earlier case has changed what the allocator does."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(torch.set_num_threads, torch.get_num_threads()).result()
        return pool.submit(function, *given, **options).result()


def run(options: argparse.Namespace, measure: Callable[[argparse.Namespace], Iterable[dict[str, Any]]]) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    try:
        recorded = read_records(options.compare) if options.compare else None
        machine = describe_machine()
        print(describe_run(machine, options.rounds), flush=True)
        rows = list(measure(options))
        if options.json:
            write_records(rows, machine, options.json)
        if recorded is not None:
            compare(rows, recorded)
    except PatchloomError as error:
        sys.exit(str(error))
