"""`export`: write a network for another program and verify the file."""

from __future__ import annotations

import copy
import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from PIL import Image

from patchloom import temporary
from patchloom.devices import Device, choose_device
from patchloom.errors import PatchloomError, errors_in_writing
from patchloom.exporting.check import Comparison, calibration_crops, compare, find_pictures
from patchloom.exporting.formats import FORMATS, Artefact, Format, Request, find_format, make
from patchloom.exporting.text import TextFiles, check_text_options, compare_text, encoder_file
from patchloom.models.fused import FusedNetwork
from patchloom.models.network import Network, unwrapped
from patchloom.models.translation import TranslationNetwork
from patchloom.weights.load import load

TOLERANCE = 1e-4  # largest difference of a logit, relative to the largest logit
INT8_TOLERANCE = 0.1  # fraction of images whose predicted class may change
MARK = "patchloom_export"  # in every exported file, so that only exports are overwritten

Source = Network | str | PathLike[str]


@dataclass(frozen=True)
class Report:
    """The exported file and the result of its verification."""

    format: str
    file: str
    bytes: int  # including the .bin file of OpenVINO
    difference: float  # largest difference of a logit, relative to the largest logit
    agreement: float  # fraction of images with the same predicted class
    tolerance: float  # bound of difference; for int8, of 1 - agreement
    images: int
    sizes: tuple[tuple[int, int, int], ...]  # batch, height, width; of text: batch, source tokens, target tokens
    replaced: bool  # whether an earlier export was replaced
    unit: str = "images"  # what `images` counts: images or sentences

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def export(
    model: Source | TranslationNetwork,
    to: str,
    out: str | PathLike[str],
    int8: bool = False,
    with_preprocessing: bool = False,
    tolerance: float | None = None,
    *,
    images: str | PathLike[str] | None = None,
    base: Source | None = None,
    device: Device = "cpu",
) -> Report:
    """Write a network for another program and verify on real images that the file computes the same logits.

    Args:
        model: A network, of images or one that translates, or anything that `load` accepts.
        to: The format: onnx, openvino, torch (a .pt2 program), safetensors, timm or official. Networks that translate
            support safetensors and onnx, which is two files: the decoder step and, beside it, `NAME.encoder.onnx`.
        out: The file to write; an earlier export is replaced, other files are not.
        int8: Store weights in 8 bits (onnx and openvino); onnx also multiplies in int8.
        with_preprocessing: Take uint8 pixels (B, height, width, C) and normalise inside (onnx, openvino and torch).
        tolerance: The largest difference of a logit, relative to the largest logit (default: 1e-4). For int8, the
            largest fraction of images whose predicted class changes (default: 0.1).
        images: A file, folder or pattern of images to compare on (default: the validation images of the run, or
            photos that installed packages include).
        base: The weights that a delta was made from.
        device: Where the network computes the logits that the file is compared with (default: the CPU, on which the
            file runs for the check). The file itself is the same.

    Raises:
        PatchloomError: The format does not support the network, or the file differs by more than the tolerance.
            Nothing is written then.
    """
    chosen = choose_device(device)
    # All that can be refused is refused before the network is loaded, which may take minutes.
    form = find_format(to, int8, with_preprocessing)
    path = _checked_path(out, to, form)
    _refuse_sources(path, model, base)
    _refuse_other_files(path, to)
    bound = _checked_tolerance(tolerance, int8)
    network = _network(model, base)
    write: Callable[[str, Path, Path, float], Comparison]
    if isinstance(network, TranslationNetwork):
        check_text_options(network.config.name, to, int8=int8, with_preprocessing=with_preprocessing, images=images)
        _refuse_other_encoder(path, to)
        write = partial(_write_text_checked, network)
    else:
        request = Request(network, int8, with_preprocessing, chosen)
        write = partial(_write_checked, request, find_pictures(images, model))
    replaced = path.exists()
    with errors_in_writing(path), _temporary_folder(path) as folder:
        found = write(to, path, folder, bound)
        size = _move(folder, path)
    return Report(
        to, str(path), size, found.difference, found.agreement, bound, found.images, found.sizes, replaced, found.unit
    )


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside the file; leftovers of killed exports are removed."""
    folder = temporary.aside(path)
    with temporary.folder(folder):
        yield folder


def _write_text_checked(network: TranslationNetwork, to: str, path: Path, folder: Path, bound: float) -> Comparison:
    """Write and verify the files of a network that translates."""
    temporary_file = folder / path.name
    with _as_patchloom_error(f"{path} is not written: {to} does not support this network"):
        files = TextFiles(network, to)
        files.write(temporary_file, {})
        found = compare_text(network, to, temporary_file)
    _refuse_wrong(found, path, to, bound, int8=False)
    with _as_patchloom_error(f"{path} cannot be written"):
        files.write(temporary_file, {**found.to_json(), "tolerance": bound, MARK: to})
    return found


def _write_checked(
    request: Request, pictures: list[Image.Image], to: str, path: Path, folder: Path, bound: float
) -> Comparison:
    """Write and verify the file; int8 is tried again with calibrated ranges if it is not accurate enough."""
    temporary_file = folder / path.name
    artefact, found = _attempt(request, to, path, temporary_file, pictures)
    if not _is_close(found, bound, request.int8) and FORMATS[to].calibrates and request.int8:
        again = replace(request, calibration=calibration_crops(request.network, pictures))
        second = _attempt(again, to, path, temporary_file, pictures)
        # Calibration can also make things worse: the better of both attempts is kept.
        artefact, found = max((artefact, found), second, key=lambda one: one[1].agreement)
    _refuse_wrong(found, path, to, bound, request.int8)
    with _as_patchloom_error(f"{path} cannot be written"):
        artefact.write(temporary_file, {**found.to_json(), "tolerance": bound, MARK: to})
    return found


def _attempt(
    request: Request, to: str, path: Path, temporary_file: Path, pictures: list[Image.Image]
) -> tuple[Artefact, Comparison]:
    """Convert and write the network, and compare the file with it."""
    with _as_patchloom_error(f"{path} is not written: {to} does not support this network"):
        artefact = make(request, to)
    with _as_patchloom_error(f"{path} cannot be written"):
        artefact.write(temporary_file, {})
    with _as_patchloom_error(f"{path} is not written: {to} does not support this network"):
        return artefact, compare(request, artefact.open(temporary_file), pictures)


@contextmanager
def _as_patchloom_error(what: str) -> Iterator[None]:
    """Turn any exception into a PatchloomError with its last line as the reason."""
    try:
        yield
    except (PatchloomError, OSError):
        raise
    except Exception as error:  # exporters and runtimes raise all kinds of errors
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise PatchloomError(f"{what}: {reason.strip()}") from error


def _network(model: Source | TranslationNetwork, base: Source | None) -> Network | TranslationNetwork:
    """A copy of the network on the CPU in float32, so that tracing does not change the caller's."""
    if isinstance(model, str | PathLike):
        network: Any = load(model, base=base)
    else:
        network = copy.deepcopy(model if isinstance(model, TranslationNetwork) else unwrapped(model))
    if isinstance(network, FusedNetwork):
        raise PatchloomError("A fused copy cannot be exported. Export the network it was made from.")
    return network.cpu().float().eval().requires_grad_(False)


def _checked_tolerance(tolerance: float | None, int8: bool) -> float:
    if tolerance is None:
        return INT8_TOLERANCE if int8 else TOLERANCE
    if not (math.isfinite(tolerance) and 0 <= tolerance <= (1 if int8 else math.inf)):
        raise PatchloomError(
            f"tolerance must be 0 or more{', and at most 1 for int8' if int8 else ''}, not {tolerance}."
        )
    return tolerance


def _checked_path(out: str | PathLike[str], to: str, form: Format) -> Path:
    """The path of the file; raises PatchloomError, before anything is computed, if it cannot be written there."""
    try:
        # A link stays a link: the file that it points to is replaced.
        path = Path(out).resolve() if Path(out).is_symlink() else Path(out)
    except (OSError, RuntimeError) as error:
        raise PatchloomError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}.") from error
    if path.suffix not in form.suffixes:
        raise PatchloomError(
            f"The name of a file for {to} must end in {' or '.join(form.suffixes)}, not {path.name!r}."
        )
    if not path.parent.is_dir():
        raise PatchloomError(f"{path} cannot be written: there is no folder {path.parent}.")
    if not os.access(path.parent, os.W_OK):
        raise PatchloomError(f"{path} cannot be written: no permission to write to {path.parent}.")
    for there in (path, path.with_suffix(".bin")) if to == "openvino" else (path,):
        if there.is_dir():
            raise PatchloomError(f"{there} is a folder; --out must be a file.")
        if there.exists() and not there.is_file():
            raise PatchloomError(f"{there} is not a regular file and is not overwritten.")
    return path


def _refuse_other_files(path: Path, to: str) -> None:
    """Raise PatchloomError if another file than an export would be overwritten. A .bin file of OpenVINO counts as an
    export if the .xml file beside it does."""
    if path.exists() and not _is_export(path):
        raise PatchloomError(f"{path} exists and is not an export, so it is not overwritten.")
    weights = path.with_suffix(".bin")
    if to == "openvino" and weights.exists() and not path.exists():
        raise PatchloomError(
            f"{weights}, where the weights would be, exists and is not an export, so it is not overwritten."
        )


def _refuse_other_encoder(path: Path, to: str) -> None:
    """As `_refuse_other_files`, for the second file of a network that translates."""
    encoder = encoder_file(path)
    if to == "onnx" and encoder.is_file() and not _is_export(encoder):
        raise PatchloomError(f"{encoder}, where the encoder would be, is not an export, so it is not overwritten.")


def _refuse_sources(path: Path, *sources: object) -> None:
    """Raise PatchloomError if the export would overwrite the weights that it is made from."""
    for source in (Path(source) for source in sources if isinstance(source, str | PathLike)):
        own = (source, source / "model.safetensors", source / "export" / "model.safetensors")
        if path.exists() and any(file.exists() and path.samefile(file) for file in own):
            raise PatchloomError(f"{path} is the source of the export. Choose another file.")


def _is_export(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                # Memory-mapped: a file of gigabytes is searched without being read into memory at once.
                return content.find(MARK.encode()) >= 0
    except (OSError, ValueError) as error:
        raise PatchloomError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.") from error


def _is_close(found: Comparison, bound: float, int8: bool) -> bool:
    """Whether a file is accurate enough; NaN never is."""
    return math.isfinite(found.difference) and (1 - found.agreement if int8 else found.difference) <= bound


def _refuse_wrong(found: Comparison, path: Path, to: str, bound: float, int8: bool) -> None:
    """Raise PatchloomError if the file differs by more than the tolerance, with what can be done about it."""
    if _is_close(found, bound, int8):
        return
    if int8 and math.isfinite(found.difference):
        changed = 1 - found.agreement
        tried = ", also with calibrated ranges," if FORMATS[to].calibrates else ""
        instead = ", or use --to openvino, which multiplies in float" if to != "openvino" else ""
        raise PatchloomError(
            f"{path} is not written: int8{tried} changes the predicted class of {changed:.1%} of {found.images} "
            f"images, more than the tolerance of {bound:.1%}. Allow it with --tolerance "
            f"{math.ceil(100 * changed) / 100:g}{instead}."
        )
    raise PatchloomError(
        f"{path} is not written: its logits differ by {found.difference:.1e} of the largest, more than the "
        f"tolerance of {bound:.1e}."
    )


def _move(folder: Path, path: Path) -> int:
    """Move the files into place, the one that refers to the others last. Returns their size in bytes."""
    written = sorted(folder.iterdir(), key=lambda file: file.name == path.name)
    size = sum(file.stat().st_size for file in written)
    # if killed between two files, a missing graph is better than a graph with the weights of another network
    if len(written) > 1:
        path.unlink(missing_ok=True)
    for file in written:
        os.replace(file, path.with_name(file.name))
    return size
