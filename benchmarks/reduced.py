"""Inference in reduced precision beside timm's eager float32: int8 graphs, and bfloat16 where the processor has it.

    python benchmarks/reduced.py [--weights FILE --photos DIR] [--rounds 15] [--json FILE] [--compare FILE]

deit_tiny and cait_xxs24 at batch 8. With `--weights` (of a deit_tiny) and `--photos`, the part of the photos on which
each form has the likeliest class of float32.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import patchloom
import script
from patchloom.benching.peers import pair
from patchloom.benching.timing import interleaved, ratio
from patchloom.data.images import read_image, resize_and_crop
from patchloom.data.mixing import normalise
from patchloom.exporting.formats import Request, make
from patchloom.models.network import Network
from patchloom.tasks.evaluate import expand_images
from patchloom.training.precision import survives

Form = Callable[[Tensor], Tensor]
AMX = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}  # inductor's own products


def forms(network: Network, folder: Path) -> dict[str, Form]:
    """Every way to compute the network that this machine has."""
    found: dict[str, Form] = {"patchloom fused, float32": patchloom.fuse(network)}
    for to, int8 in (("onnx", False), ("onnx", True), ("openvino", False)):
        artefact = make(Request(network, int8, False), to)
        path = folder / f"{network.config.name}-{int8}{'.onnx' if to == 'onnx' else '.xml'}"
        artefact.write(path, {})
        found[f"{to}, {'int8' if int8 else 'float32'}"] = _run(artefact.open(path))
    if torch.cpu._is_avx512_bf16_supported() and survives("bf16"):
        compiled = torch.compile(copy.deepcopy(network).bfloat16().requires_grad_(False), options=AMX)
        found["torch.compile, bfloat16"] = lambda images: compiled(images.bfloat16()).float()
    else:
        print("bfloat16 is left out: this processor has no instructions for it, or they do not work")
    return found


def _run(runner: Callable[[np.ndarray], np.ndarray]) -> Form:
    return lambda images: torch.from_numpy(runner(images.numpy()))


def photos_of(where: str, network: Network) -> Tensor:
    """(photos, C, height, width), as the network is tested on them."""
    how = network.preprocessing
    crops = [np.asarray(resize_and_crop(read_image(path), how)) for path in expand_images(where)]
    return normalise(torch.from_numpy(np.stack(crops)), how.mean, how.std).contiguous()


def agreement(plain: Network, form: Form, photos: Tensor) -> float:
    same = [form(part).argmax(1) == plain(part).argmax(1) for part in photos.split(8)]  # type: ignore[union-attr]
    return float(torch.cat(same).float().mean())


@torch.inference_mode()
def measure(name: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    plain, theirs = pair(name, "timm", 224)
    assert theirs is not None
    photos = None
    if name == "deit_tiny" and options.weights:
        plain = patchloom.load(options.weights)  # timm's side takes as long with the weights that it has
        photos = photos_of(options.photos, plain) if options.photos else None
    images = torch.randn(8, 3, 224, 224)
    ours = forms(plain, folder)
    times = interleaved(
        {"timm": lambda: theirs(images), **{k: lambda f=f: f(images) for k, f in ours.items()}}, options.rounds
    )
    rows = []
    for form in ours:
        middle, low, high = ratio(times, "timm", form)
        row = {"model": f"{name}, {form}", "peer": "timm", "batch": 8, "size": 224}
        same = None if photos is None else agreement(plain, ours[form], photos)
        rows.append({**row, "ratio": middle, "low": low, "high": high, "agreement": same})
        said = "" if same is None else f"  agrees on {same:.1%} of {len(photos)} photos"
        print(f"{name:12} {form:26} {middle:.2f} ({low:.2f} - {high:.2f}){said}", flush=True)
    return rows


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("deit_tiny", "cait_xxs24"):
            yield from measure(name, options, Path(folder))


if __name__ == "__main__":
    parser = script.parser(__doc__, rounds=15)
    parser.add_argument("--weights", type=Path, help="of a deit_tiny")
    parser.add_argument("--photos", help="a folder of photos to compare the likeliest class on")
    script.run(parser.parse_args(), measured)
