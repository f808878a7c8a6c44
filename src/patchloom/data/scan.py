"""Find the images that cannot be decoded, before a long run meets them."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from PIL import Image

from patchloom.console import Console
from patchloom.data.decoding import UnreadableImage
from patchloom.data.images import NOTE
from patchloom.data.own import TensorImage
from patchloom.data.sources import Item, Source
from patchloom.errors import PatchloomError
from patchloom.text import count, some

Progress = Callable[[int, int], None]
_Result = TypeVar("_Result")
_GLANCE = 64  # pixels per side
_SCANNED = 64  # images between two looks at the clock
_BATCH = 256  # images handed to the threads at a time: a million waiting tasks would take gigabytes


def find_unreadable(
    source: Source,
    items: Iterable[Item],
    progress: Progress | None = None,
    workers: int = 2,
    glances: dict[str, bytes] | None = None,
) -> dict[str, str]:
    """The keys that cannot be decoded, each with the true reason. Every image is decoded fully, in threads.

    Images whose values were scaled to 8 bits by a choice of ours are counted in the notes of the source. `glances`
    receives the `glance` of every other key.

    Args:
        progress: called with (images done, images in all).
        workers: threads.
    """
    scaled: list[str] = []

    def inspect(item: Item) -> str | None:
        try:
            image = source.read(item)
            if note := image.info.get(NOTE):
                scaled.append(f"{item.key}: {note}")
            if glances is not None:
                glances[item.key] = glance(image)
        except TensorImage:
            return None  # used as it is; the network checks its shape
        except PatchloomError as error:
            return reason_of(error)
        return None

    found = in_threads(inspect, items, progress, workers)
    source.notes += scaled_notes(scaled)
    return {item.key: reason for item, reason in found if reason is not None}


def scan(
    source: Source,
    items: Sequence[Item],
    console: Console,
    workers: int = 2,
    seconds: float = math.inf,
    glances: dict[str, bytes] | None = None,
) -> dict[str, str]:
    """What `find_unreadable` finds, with its progress on the console. After `seconds` the other images are taken as
    they are."""

    def progress(done: int, of: int) -> None:
        console.progress(f"reading images: {done} of {of}")

    deadline = time.monotonic() + seconds
    found: dict[str, str] = {}
    size = len(items) if seconds == math.inf else _SCANNED
    for start in range(0, len(items), max(1, size)):
        if time.monotonic() > deadline:
            console.say(f"Only the first {start} of {len(items)} images were read to find damaged ones.")
            break
        found |= find_unreadable(source, items[start : start + size], progress, workers, glances)
    return found


def scaled_notes(scaled: list[str]) -> list[str]:
    """One sentence on the images with more than 8 bits whose range had to be chosen."""
    if not scaled:
        return []
    return [f"{count(len(scaled), 'image')} with float or 32-bit values: {some(sorted(scaled), 3)}"]


def pixel_digest(image: Image.Image) -> bytes:
    """The same for images of equal size and pixels, however they were encoded."""
    # The size too: 2 x 8 and 4 x 4 images can have the same bytes.
    digest = hashlib.sha256(repr(image.size).encode())
    digest.update(image.tobytes())
    return digest.digest()


def glance(image: Image.Image) -> bytes:
    """A digest of a few pixels, which is fast: the same for equal images, and sometimes for different ones."""
    return pixel_digest(image.resize((_GLANCE, _GLANCE), Image.Resampling.NEAREST))


def reason_of(error: Exception) -> str:
    """Why an image cannot be read, without its name where the error tells them apart."""
    return error.reason if isinstance(error, UnreadableImage) else str(error) or "there is not enough memory"


def in_threads(
    function: Callable[[Item], _Result], items: Iterable[Item], progress: Progress | None = None, workers: int = 2
) -> list[tuple[Item, _Result]]:
    """Each item with what the function gives for it, in order; Pillow decodes outside Python's lock."""
    todo = list(items)
    done: list[tuple[Item, _Result]] = []
    with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        warnings.filterwarnings("ignore", category=UserWarning, module="PIL")  # what is damaged but can be read
        # Pillow only warns of a possible decompression bomb; here it makes the image unreadable.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for start in range(0, len(todo), _BATCH):
            batch = todo[start : start + _BATCH]
            done += zip(batch, pool.map(function, batch), strict=True)
            if progress:
                progress(len(done), len(todo))
    return done


def report_skipped(bad: Mapping[str, str], console: Console, strict: bool) -> None:
    """Print the files that are left out, with the reasons; with `strict` they are an error."""
    listed = [f"  {key}: {reason}" for key, reason in bad.items()]
    if strict:
        raise PatchloomError(f"{count(len(bad), 'file')} cannot be read:", *listed)
    console.say(f"{count(len(bad), 'unreadable file')} skipped:", *listed)
