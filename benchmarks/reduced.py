"""Inference in reduced precision beside timm's eager float32: int8, and bfloat16 where the processor has it.

    python benchmarks/reduced.py [--weights FILE --photos DIR] [--rounds 15] [--json FILE] [--compare FILE]

deit_tiny and cait_xxs24 at batch 8. With `--weights` (of a deit_tiny) and `--photos`, the part of the photos on which
each form has the likeliest class of float32.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor

import patchloom
import script
from patchloom.benching.peers import pair
from patchloom.benching.timing import interleaved, ratio
from patchloom.data.images import read_image, to_batch
from patchloom.exporting.formats import Request, make
from patchloom.exporting.openvino import import_silently
from patchloom.inference.predict import expand_images
from patchloom.kernels import native
from patchloom.models.network import Network
from patchloom.training.precision import survives

Form = Callable[[Tensor], Tensor]
AMX = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}  # inductor's own products


def write_graphs(name: str, weights: Path | None, folder: Path) -> None:
    """What the graphs among FORMS read."""
    network = networks(name, weights)[0]
    for to, int8, file in (
        ("onnx", False, "float32.onnx"),
        ("onnx", True, "int8.onnx"),
        ("openvino", False, "float32.xml"),
    ):
        make(Request(network, int8, False), to).write(folder / f"{name}-{file}", {})


def of_onnx(path: Path) -> Form:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # its threads would go on spinning in timm's turn, and slow that by a sixth; its own time stays the same
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"input": images.numpy()})[0])


def of_openvino(path: Path) -> Form:
    compiled = (
        import_silently("openvino")
        .Core()
        .compile_model(
            path, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        )
    )
    return lambda images: torch.from_numpy(compiled(images.numpy())["logits"])


def in_bfloat16(network: Network) -> Form | None:
    if not (torch.cpu._is_avx512_bf16_supported() and survives("bf16")):
        print("bfloat16 is left out: this processor has no instructions for it, or they do not work")
        return None
    compiled = torch.compile(copy.deepcopy(network).bfloat16().requires_grad_(False), options=AMX)
    return lambda images: compiled(images.bfloat16()).float()


def in_bytes(network: Network) -> Form | None:
    return patchloom.fuse(network, int8=True) if native.available() else None


# what makes each form of a network, or None where the machine has none; given the network, and the path of a graph
FORMS: dict[str, Callable[[Network, str], Form | None]] = {
    "patchloom fused, float32": lambda network, _: patchloom.fuse(network),
    "patchloom fused, int8": lambda network, _: in_bytes(network),
    "onnx, float32": lambda _, path: of_onnx(Path(f"{path}-float32.onnx")),
    "onnx, int8": lambda _, path: of_onnx(Path(f"{path}-int8.onnx")),
    "openvino, float32": lambda _, path: of_openvino(Path(f"{path}-float32.xml")),
    "torch.compile, bfloat16": lambda network, _: in_bfloat16(network),
}


def networks(name: str, weights: Path | None) -> tuple[Network, torch.nn.Module]:
    """(ours, timm's); timm's side takes as long with the weights that it has."""
    torch.manual_seed(0)
    plain, theirs = pair(name, "timm", 224)
    assert theirs is not None
    return (patchloom.load(weights) if weights and name == "deit_tiny" else plain), theirs


def photos_of(where: str, network: Network) -> Tensor:
    """(photos, C, height, width), as the network is tested on them."""
    return to_batch([read_image(path) for path in expand_images(where)], network.preprocessing).contiguous()


def agreement(plain: Network, form: Form, photos: Tensor) -> float:
    same = [form(part).argmax(1) == plain(part).argmax(1) for part in photos.split(8)]  # type: ignore[union-attr]
    return float(torch.cat(same).float().mean())


@torch.inference_mode()
def measure(name: str, form: str, options: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    """One form beside timm."""
    plain, theirs = networks(name, options.weights)
    run = FORMS[form](plain, str(folder / name))
    if run is None:
        return None
    images = torch.randn(8, 3, 224, 224)
    times = interleaved({"timm": partial(theirs, images), form: partial(run, images)}, options.rounds)
    middle, low, high = ratio(times, "timm", form)
    same = None
    if name == "deit_tiny" and options.weights and options.photos:
        same = agreement(plain, run, photos_of(options.photos, plain))
    said = "" if same is None else f"  agrees on {same:.1%} of the photos"
    print(f"{name:12} {form:26} {middle:.2f} ({low:.2f} - {high:.2f}){said}", flush=True)
    row = {"model": f"{name}, {form}", "peer": "timm", "batch": 8, "size": 224}
    return {**row, "ratio": middle, "low": low, "high": high, "agreement": same}


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("deit_tiny", "cait_xxs24"):
            script.in_a_fresh_process(write_graphs, name, options.weights, Path(folder))
            for form in FORMS:
                if row := script.in_a_fresh_process(measure, name, form, options, Path(folder)):
                    yield row


if __name__ == "__main__":
    parser = script.parser(__doc__, rounds=15)
    parser.add_argument("--weights", type=Path, help="of a deit_tiny")
    parser.add_argument("--photos", help="a folder of photos to compare the likeliest class on")
    script.run(parser.parse_args(), measured)
