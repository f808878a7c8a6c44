"""What a data set holds, and what is wrong with it: one report, plain JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from shlex import quote
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.decoding import decode, open_header
from patchloom.data.images import NOTE
from patchloom.data.scan import Progress, in_threads, pixel_digest, reason_of, scaled_notes
from patchloom.data.sources import Item, Source
from patchloom.data.splits import Split, split_source
from patchloom.errors import PatchloomError
from patchloom.text import count

SHOWN = 10  # pairs of duplicates before the rest is counted
ACROSS = "duplicate images on both sides of the split"
_NEAR = 2  # bits of 64 in which the hashes of near duplicates may differ
# Two differing bits touch at most two of the three parts, so the third one is equal.
_PARTS = ((0, 22), (22, 21), (43, 21))  # start and width; hashes that differ in two bits agree in one of three parts
_MANY = 1000  # hashes that share a part, from which on not all are compared with all


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is kept of one image: a few hundred bytes, so that millions fit into memory."""

    key: str
    split: str
    label: int | None
    width: int
    height: int
    mode: str
    pixels: bytes  # sha256
    perceptual: int  # difference hash
    note: str | None  # how values were scaled to 8 bits


def check_data(source: Source, progress: Progress | None = None, workers: int = 2) -> dict[str, Any]:
    """Every image is decoded. The report is plain JSON; images go by their keys in the source.

    `duplicates` are pairs of equal pixels on both sides of a split (that of the data, or the one that training would
    make), `duplicates_within` pairs on one side, `near_duplicates` pairs that look almost the same.

    Args:
        progress: called with (images done, images in all).
        workers: threads; Pillow decodes outside Python's lock.
    """
    facts, unreadable = _inspect_all(source, progress, workers)
    counts = Counter(fact.label for fact in facts)
    per_class = {name: counts[label] for label, name in enumerate(source.class_names)}
    filled = [count for count in per_class.values() if count]
    sides = _sides(source)
    across, within = duplicates((fact.key, sides[fact.split, fact.key], fact.pixels) for fact in facts)
    return {
        "data": source.where,
        "count": len(facts),
        "classes": per_class,
        "splits": {split: sum(fact.split == split for fact in facts) for split in source.splits},
        "sizes": {"width": _range([f.width for f in facts]), "height": _range([f.height for f in facts])},
        "modes": dict(sorted(Counter(fact.mode for fact in facts).items())),
        "unreadable": unreadable,
        "duplicates": across,
        "duplicates_within": within,
        "near_duplicates": near_duplicates([(f.key, f.perceptual, f.pixels) for f in facts]),
        "imbalance": round(max(filled) / min(filled), 3) if filled else None,
        "notes": [*source.notes, *scaled_notes([f"{fact.key}: {fact.note}" for fact in facts if fact.note])],
    }


def _inspect_all(source: Source, progress: Progress | None, workers: int) -> tuple[list[_Facts], list[dict[str, str]]]:
    places = [(split, item) for split, items in source.splits.items() for item in items]

    def inspect(item: Item) -> tuple[int, int, str, bytes, int, str | None] | str:
        try:
            return _inspect(source, item)
        except PatchloomError as error:
            return reason_of(error)

    facts, unreadable = [], []
    seen = in_threads(inspect, (item for _, item in places), progress, workers)
    for (split, item), (_, found) in zip(places, seen, strict=True):
        if isinstance(found, str):
            unreadable.append({"path": item.key, "reason": found})
        else:
            label = item.label if source.labelled else None
            facts.append(_Facts(item.key, split, label, *found))
    return facts, unreadable


def _inspect(source: Source, item: Item) -> tuple[int, int, str, bytes, int, str | None]:
    """Width, height, mode of the file, digest of the pixels, difference hash, and a note on scaled values."""
    data = source.data(item)
    image = source.read(item) if data is None else decode(data, item.key)
    # The mode of the file, such as L or CMYK: decoding has made RGB of it.
    mode = image.mode if data is None else open_header(data).mode
    return image.width, image.height, mode, pixel_digest(image), difference_hash(image), image.info.get(NOTE)


def difference_hash(image: Image.Image) -> int:
    """64 bits: whether each of 8 x 8 points is brighter than its right neighbour in a grey miniature of 9 x 8."""
    # BOX averages all pixels of a cell, so that noise and re-encoding hardly change the bits.
    small = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    return int.from_bytes(np.packbits(small[:, :-1] > small[:, 1:]).tobytes(), "big")


def _range(values: list[int]) -> dict[str, float] | None:
    return {"min": min(values), "median": median(values), "max": max(values)} if values else None


def _sides(source: Source) -> dict[tuple[str, str], str]:
    """The side of a split on which each (split, key) lies; data without one is split as training would split it."""
    sides = {(split, item.key): split for split, items in source.splits.items() for item in items}
    # Duplicates matter across the split that training would make, so the same function makes it here.
    if not {"val", "test"} & set(source.splits) and sides:
        whole = next(iter(source.splits))
        split = split_source(source)
        if split.held_out:
            sides |= {(whole, item.key): "train" for item in split.train}
            sides |= {(whole, item.key): "held out" for item in split.held_out}
    return sides


def duplicates(images: Iterable[tuple[str, str, bytes]]) -> tuple[list[list[str]], list[list[str]]]:
    """Pairs of equal pixels across the sides of a split, and within one; each image beside the first one like it of
    each other side, and of its own. `images` are keys, sides and digests of pixels, in any order."""
    groups: dict[bytes, list[tuple[str, str]]] = defaultdict(list)
    for key, side, pixels in images:
        groups[pixels].append((key, side))
    across, within = [], []
    for group in groups.values():
        sides: dict[str, list[str]] = defaultdict(list)
        for key, side in sorted(group):
            sides[side].append(key)
        within += [[keys[0], key] for keys in sides.values() for key in keys[1:]]
        # the training images come first: each image that is measured on stands beside the one that was trained on
        (first, *_), *others = (keys for _, keys in sorted(sides.items(), key=lambda pair: not _trained(pair[0])))
        across += [[first, key] for keys in others for key in keys]
    return sorted(across), sorted(within)


def _trained(side: str) -> bool:
    return side.startswith("train")


def equal_images(source: Source, split: Split, glances: Mapping[str, bytes]) -> list[str]:
    """A warning that lists images with equal pixels in both splits: with them the accuracy is too high. Only images
    with equal glances are read a second time."""
    sides = {"training": split.train, "held out": split.held_out}
    # A glance is a cheap digest, equal for equal pixels; different images may share one by accident.
    both = {glances.get(item.key) for item in split.train} & {glances.get(item.key) for item in split.held_out}
    both.discard(None)  # images that were not looked at
    across, _ = duplicates(
        (item.key, side, pixel_digest(source.read(item)))
        for side, items in sides.items()
        for item in items
        if glances.get(item.key) in both
    )
    lines = pair_lines(ACROSS, across, f"`patchloom data check {quote(source.where)} --json` lists all")
    return [f"Warning: {lines[0]}", *lines[1:]] if lines else []


def pair_lines(what: str, pairs: list[list[str]], all_of_them: str) -> list[str]:
    """Lines with some pairs of images; `all_of_them` says where to find the others."""
    if not pairs:
        return []
    more = [f"  and {len(pairs) - SHOWN} more ({all_of_them})"] if len(pairs) > SHOWN else []
    return [f"{count(len(pairs), 'pair')} of {what}:", *(f"  {one}  {other}" for one, other in pairs[:SHOWN]), *more]


def near_duplicates(hashes: Iterable[tuple[str, int, bytes]]) -> list[list[str]]:
    """Pairs of names whose hashes differ in at most two bits though their pixels differ.

    Of images with one and the same hash, each is named beside the first. Hashes within two bits agree in at least one
    of three parts, so only those that share a part are compared.
    """
    first: dict[int, tuple[str, bytes]] = {}
    pairs = []
    for name, value, pixels in hashes:
        if value in first and first[value][1] != pixels:
            pairs.append([first[value][0], name])
        first.setdefault(value, (name, pixels))
    return sorted(pairs + [[first[one][0], first[other][0]] for one, other in _near_hashes(list(first))])


def _near_hashes(hashes: list[int]) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for start, width in _PARTS:
        buckets: dict[int, list[int]] = defaultdict(list)
        for value in hashes:
            buckets[value >> start & (1 << width) - 1].append(value)
        others = [bit for bit in range(64) if not start <= bit < start + width]
        for bucket in buckets.values():
            # A set, since a pair that agrees in two parts is found twice.
            found.update(_near_in(sorted(bucket), others))
    return found


def _near_in(bucket: list[int], bits: list[int]) -> Iterator[tuple[int, int]]:
    """Pairs within two of these bits: all with all, or, of many plain images that share a part, by their neighbours."""
    if len(bucket) <= _MANY:
        yield from (pair for pair in combinations(bucket, 2) if (pair[0] ^ pair[1]).bit_count() <= _NEAR)
        return
    values = np.array(bucket, dtype=np.uint64)
    # Flip every choice of one or two of the 42 or 43 other bits and look the result up: about 900 searches per hash
    # instead of a comparison with every hash of a large bucket.
    for chosen in (*combinations(bits, 1), *combinations(bits, _NEAR)):
        near = values ^ np.uint64(sum(1 << bit for bit in chosen))
        at = np.searchsorted(values, near).clip(max=len(values) - 1)
        there = (values[at] == near) & (values < near)
        yield from zip(values[there].tolist(), near[there].tolist(), strict=True)
