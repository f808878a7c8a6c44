"""`export`: a network from anywhere as a checked file for another program."""

from __future__ import annotations

import copy
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from PIL import Image

from patchloom import temporary
from patchloom.errors import PatchloomError
from patchloom.exporting.check import Found, calibration_crops, compare, find_pictures
from patchloom.exporting.formats import FORMATS, Artefact, Format, Request, find_format, make
from patchloom.models.fused import FusedNetwork
from patchloom.models.network import Network, unwrapped
from patchloom.weights.load import load

TOLERANCE = 1e-4  # the largest difference of a logit, as a part of the largest logit
INT8_TOLERANCE = 0.1  # the part of images whose likeliest class may be another
MARK = "patchloom_export"  # in every file that was written here

Source = Network | str | PathLike[str]


@dataclass(frozen=True)
class Report:
    """What was written, and how far it is from its network."""

    format: str
    file: str
    bytes: int  # with the .bin file of OpenVINO
    difference: float  # the largest of any logit, as a part of the largest logit
    agreement: float  # the part of images with the same likeliest class
    tolerance: float  # of the difference; of int8, of 1 - agreement
    images: int
    sizes: tuple[tuple[int, int, int], ...]  # batch, height, width
    replaced: bool  # whether an earlier file of the same kind stood there

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def export(
    model: Source,
    to: str,
    out: str | PathLike[str],
    int8: bool = False,
    with_preprocessing: bool = False,
    tolerance: float | None = None,
    *,
    images: str | PathLike[str] | None = None,
    base: Source | None = None,
) -> Report:
    """Write a network for another program, if what was written computes the same on real images.

    model                a network, or anything that `load` takes
    to                   onnx, openvino, torch (a .pt2 program), safetensors, timm or official
    int8                 of onnx and openvino: weights in 8 bits, of onnx the products with them too
    with_preprocessing   of onnx, openvino and torch: the input is uint8 pixels, normalised inside
    tolerance            the largest allowed difference of a logit as a part of the largest logit, 1e-4 by default; of
                         int8 the part of images whose likeliest class may be another, 0.1 by default
    images               a file, folder or pattern: the images to compare on; by default what a run held out, or photos
                         that installed packages ship
    base                 of a delta: the weights that it was made from
    """
    form = find_format(to, int8, with_preprocessing)
    path = _checked_path(out, to, form)
    _refuse_sources(path, model, base)
    _refuse_other_files(path, to)
    bound = _checked_tolerance(tolerance, int8)
    pictures = find_pictures(images, model)
    request = Request(_network(model, base), int8, with_preprocessing)
    replaced = path.exists()
    try:
        with _draft_folder(path) as folder:
            found = _write_checked(request, to, path, folder, pictures, bound)
            size = _move(folder, path)
    except OSError as error:
        raise PatchloomError(f"{path} cannot be written: {error.strerror or error}.") from error
    return Report(to, str(path), size, found.difference, found.agreement, bound, found.images, found.sizes, replaced)


@contextmanager
def _draft_folder(path: Path) -> Iterator[Path]:
    """A folder beside the file; those of exports that were killed are taken away."""
    folder = temporary.aside(path)
    with temporary.folder(folder):
        yield folder


def _write_checked(
    request: Request, to: str, path: Path, folder: Path, pictures: list[Image.Image], bound: float
) -> Found:
    draft = folder / path.name
    artefact, found = _attempt(request, to, path, draft, pictures)
    if not _is_close(found, bound, request.int8) and FORMATS[to].calibrates and request.int8:
        again = replace(request, calibration=calibration_crops(request.network, pictures))
        second = _attempt(again, to, path, draft, pictures)
        artefact, found = max((artefact, found), second, key=lambda one: one[1].agreement)
    _refuse_wrong(found, path, to, bound, request.int8)
    with _in_a_sentence(f"{path} cannot be written"):
        artefact.write(draft, {**found.to_json(), "tolerance": bound, MARK: to})
    return found


def _attempt(request: Request, to: str, path: Path, draft: Path, pictures: list[Image.Image]) -> tuple[Artefact, Found]:
    """A network in one form, written once, and how far what was written is from it."""
    with _in_a_sentence(f"{path} is not written: {to} does not support this network"):
        artefact = make(request, to)
    with _in_a_sentence(f"{path} cannot be written"):
        artefact.write(draft, {})
    with _in_a_sentence(f"{path} is not written: {to} does not support this network"):
        return artefact, compare(request, artefact.open(draft), pictures)


@contextmanager
def _in_a_sentence(what: str) -> Iterator[None]:
    try:
        yield
    except (PatchloomError, OSError):
        raise
    except Exception as error:  # exporters and runtimes raise errors of every kind
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise PatchloomError(f"{what}: {reason.strip()}") from error


def _network(model: Source, base: Source | None) -> Network:
    """A network of our own on the CPU, to be traced: the caller's stays as it is."""
    network = load(model, base=base) if isinstance(model, str | PathLike) else copy.deepcopy(unwrapped(model))
    if isinstance(network, FusedNetwork):
        raise PatchloomError("A fused copy runs on this machine alone: export the network that it was made from.")
    return network.cpu().float().eval().requires_grad_(False)


def _checked_tolerance(tolerance: float | None, int8: bool) -> float:
    if tolerance is None:
        return INT8_TOLERANCE if int8 else TOLERANCE
    if not (math.isfinite(tolerance) and 0 <= tolerance <= (1 if int8 else math.inf)):
        raise PatchloomError(f"A tolerance is 0 or more{', of int8 at most 1' if int8 else ''}, not {tolerance}.")
    return tolerance


def _checked_path(out: str | PathLike[str], to: str, form: Format) -> Path:
    """Where the file may be written: told before anything is computed."""
    try:
        path = Path(out).resolve() if Path(out).is_symlink() else Path(out)
    except (OSError, RuntimeError) as error:
        raise PatchloomError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}.") from error
    if path.suffix not in form.suffixes:
        raise PatchloomError(f"A file for {to} ends in {' or '.join(form.suffixes)}, not {path.name!r}.")
    if not path.parent.is_dir():
        raise PatchloomError(f"{path} cannot be written: there is no folder {path.parent}.")
    if not os.access(path.parent, os.W_OK):
        raise PatchloomError(f"{path} cannot be written: {path.parent} is no folder that this user may write to.")
    for there in (path, path.with_suffix(".bin")) if to == "openvino" else (path,):
        if there.is_dir():
            raise PatchloomError(f"{there} is a folder; --out names a file.")
        if there.exists() and not there.is_file():
            raise PatchloomError(f"{there} is no regular file: it is not written over.")
    return path


def _refuse_other_files(path: Path, to: str) -> None:
    """An earlier export may be replaced; other files may not. OpenVINO's weights are told by the .xml beside them."""
    if path.exists() and not _is_export(path):
        raise PatchloomError(f"{path} exists and is no export: it is not written over.")
    weights = path.with_suffix(".bin")
    if to == "openvino" and weights.exists() and not path.exists():
        raise PatchloomError(f"{weights}, where the weights would be, exists and is no export: it is not written over.")


def _refuse_sources(path: Path, *sources: Source | None) -> None:
    for source in (Path(source) for source in sources if isinstance(source, str | PathLike)):
        own = (source, source / "model.safetensors", source / "export" / "model.safetensors")
        if path.exists() and any(file.exists() and path.samefile(file) for file in own):
            raise PatchloomError(f"{path} is what is exported: choose another file.")


def _is_export(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return content.find(MARK.encode()) >= 0
    except (OSError, ValueError) as error:
        raise PatchloomError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.") from error


def _is_close(found: Found, bound: float, int8: bool) -> bool:
    return math.isfinite(found.difference) and (1 - found.agreement if int8 else found.difference) <= bound


def _refuse_wrong(found: Found, path: Path, to: str, bound: float, int8: bool) -> None:
    if _is_close(found, bound, int8):
        return
    if int8 and math.isfinite(found.difference):
        changed = 1 - found.agreement
        tried = ", with ranges from percentiles of the images too," if FORMATS[to].calibrates else ""
        instead = ", or take --to openvino, whose int8 keeps products in float" if to != "openvino" else ""
        raise PatchloomError(
            f"{path} is not written: int8{tried} changes the likeliest class of {changed:.1%} of {found.images} "
            f"images, more than the tolerance of {bound:.1%}. Allow it with --tolerance "
            f"{math.ceil(100 * changed) / 100:g}{instead}."
        )
    raise PatchloomError(
        f"{path} is not written: its logits differ by {found.difference:.1e} of the largest, more than the "
        f"tolerance of {bound:.1e}."
    )


def _move(folder: Path, path: Path) -> int:
    """Put what was written into its place, the file that names the others last; the bytes of all."""
    written = sorted(folder.iterdir(), key=lambda file: file.name == path.name)
    size = sum(file.stat().st_size for file in written)
    if len(written) > 1:  # killed between two of them, there is no graph rather than one with others' weights
        path.unlink(missing_ok=True)
    for file in written:
        os.replace(file, path.with_name(file.name))
    return size
