"""Loading beside timm: real JPEGs to the float batch a network takes, 3-Augment at 224, whole epochs in turn.

    python benchmarks/loading.py FOLDER [--images 2048] [--workers 2] [--rounds 7] [--json FILE] [--compare FILE]

FOLDER has a folder of JPEGs for each class; its images are repeated up to `--images`. Starting and ending the workers
is part of an epoch on both sides.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator

import PIL

import script
from patchloom.benching.timing import ratio
from patchloom.compat import import_timm
from patchloom.data import jpeg, native
from patchloom.data.loader import Samples
from patchloom.data.mixing import normalise
from patchloom.data.opening import open_source
from patchloom.data.order import Order, Steps
from patchloom.data.transforms import Augment, OneView
from patchloom.data.workers import load_batches
from patchloom.models.preprocessing import Preprocessing

HOW = Preprocessing()
Epoch = Callable[[], int]  # runs through a loader; the number of images seen


def theirs(folder: str, options: argparse.Namespace) -> Epoch:
    """timm's loader with its own 3-Augment, colour jitter 0.3, random resized crop and flip, to normalised floats."""
    from timm.data import ImageDataset, create_loader

    class Repeated(ImageDataset):
        def __len__(self) -> int:
            return options.images

        def __getitem__(self, place: int) -> object:
            return super().__getitem__(place % len(self.reader))

    loader = create_loader(
        Repeated(folder),
        input_size=(3, options.size, options.size),
        batch_size=options.batch,
        is_training=True,
        auto_augment="3a",
        color_jitter=0.3,
        interpolation="bicubic",
        mean=HOW.mean,
        std=HOW.std,
        num_workers=options.workers,
        use_prefetcher=False,
        persistent_workers=False,
    )
    return lambda: sum(len(images) for images, _ in loader)


def ours(folder: str, options: argparse.Namespace, pixels: str) -> Epoch:
    source = open_source(folder)
    items = source.items()
    items = [items[i % len(items)] for i in range(options.images)]
    augment = Augment(augmentation="three", color_jitter=0.3, pixels=pixels)
    view = OneView(augment, (options.size, options.size))
    images = Samples(source, items, view, seed=0, fast=augment.pixels == "fast")
    order = Order(len(items), options.batch)

    def epoch() -> int:
        steps = Steps(order, 0, order.steps_per_epoch)
        batches = (normalise(batch, HOW.mean, HOW.std) for batch, _ in load_batches(images, steps, options.workers))
        return sum(len(batch) for batch in batches)

    return epoch


def seconds_of(epoch: Epoch) -> tuple[float, float]:
    """Wall-clock and processor seconds an image; the processor's of this process and of the workers it has ended."""
    start, before = time.perf_counter(), _processor_seconds()
    seen = epoch()
    return (time.perf_counter() - start) / seen, (_processor_seconds() - before) / seen


def _processor_seconds() -> float:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, who))


Clocks = dict[str, dict[str, list[float]]]  # "wall" and "cpu" -> loader -> seconds an image of each round


def measure(contenders: dict[str, Epoch], rounds: int) -> Clocks:
    """Every contender once a round, in turn, after one round that does not count."""
    clocks: Clocks = {clock: {name: [] for name in contenders} for clock in ("wall", "cpu")}
    for i in range(rounds + 1):
        for name, epoch in contenders.items():
            for clock, seconds in zip(clocks.values(), seconds_of(epoch), strict=True):
                if i:
                    clock[name].append(seconds)
    return clocks


def row(name: str, peer: str, clocks: Clocks, options: argparse.Namespace) -> dict[str, float | str]:
    """Medians in milliseconds an image, and how many times faster than the peer by the wall clock and by CPU time."""
    result: dict[str, float | str] = {"model": name, "peer": peer, "batch": options.batch, "size": options.size}
    for clock, prefix in (("wall", ""), ("cpu", "cpu_")):
        middle, low, high = ratio(clocks[clock], peer, name)
        result |= {f"{clock}_ms": statistics.median(clocks[clock][name]) * 1e3}
        result |= {f"{prefix}ratio": middle, f"{prefix}low": low, f"{prefix}high": high}
    return result


def measured(options: argparse.Namespace) -> Iterator[dict[str, float | str]]:
    timm = import_timm()
    contenders = {
        "timm": theirs(options.folder, options),
        "exact": ours(options.folder, options, "exact"),
        "fast": ours(options.folder, options, "fast"),
    }
    print(
        f"{options.images} images of {options.size} from {options.folder}, {options.workers} workers, batch "
        f"{options.batch}; timm {timm.__version__}, Pillow {PIL.__version__}; load {os.getloadavg()[0]:.1f}\n"
        f"picture steps: {native.why_not() or 'C++'}; JPEGs by {'simplejpeg' if jpeg.available() else 'Pillow'}"
    )
    clocks = measure(contenders, options.rounds)
    peer = next(iter(contenders))
    print(f"{'loader':12} {'wall ms':>8} {'ratio':>6}  {'quartiles':11}   {'CPU ms':>7} {'ratio':>6}  quartiles")
    for r in (row(name, peer, clocks, options) for name in contenders):
        print(
            f"{r['model']:12} {r['wall_ms']:8.3f} {r['ratio']:6.2f}  {r['low']:.2f} - {r['high']:.2f}"
            f"   {r['cpu_ms']:7.3f} {r['cpu_ratio']:6.2f}  {r['cpu_low']:.2f} - {r['cpu_high']:.2f}"
        )
        yield r
    print(f"load afterwards {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    parser = script.parser(__doc__, rounds=7, threads=1)
    parser.add_argument("folder")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    script.run(parser.parse_args(), measured)
