"""Exported graphs, run by the runtimes that their users have, compute what the network does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import patchloom
from conftest import stir
from patchloom.errors import PatchloomError
from patchloom.exporting import export
from patchloom.exporting.openvino import import_silently
from patchloom.models.network import Network

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

FAMILIES = [
    ("deit_nano", {"distilled": True, "stem": "hmlp"}),
    ("cait_nano", {"depth": 1}),
    ("resmlp_nano", {"aggregation": "class_mlp"}),
    ("patchconvnet_nano", {"queries": "per_class", "depth": 1}),
]
OPTIONS = [
    ("deit3_nano", {"branches": 2}),
    ("deit_nano", {"scale": "fixup", "aggregation": "average"}),
    ("deit_nano", {"scale": "exclusive_gate", "class_token_at": 1}),
    ("deit_nano", {"head": "mlp", "stem": "conv", "in_chans": 1}),
    ("deit_nano", {"scale": "rezero", "scale_form": "published", "img_size": (16, 32)}),
    ("cait_nano", {"distilled": True, "class_in_keys": False}),
    ("resmlp_nano", {"mixing": "mlp"}),
    ("resmlp_nano", {"mixing": "conv", "norm": "layer"}),
    ("resmlp_nano", {"mixing": "depthwise"}),
    ("resmlp_nano", {"mixing": "separable"}),
    ("resmlp_nano", {"mixing": "none"}),
    ("patchconvnet_nano", {"norm": "batch", "in_chans": 5}),
    ("patchconvnet_nano", {"aggregation": "average", "stem": "linear"}),
    ("patchconvnet_nano", {"queries": "per_class"}),
    ("resnet18_attention_pool", {"img_size": 64}),
]
QUICK_OPTIONS = [  # as torch programs in the quick suite too
    ("deit_nano", {"dropout": 0.1}),
    ("deit_nano", {"norm_position": "post"}),
    ("deit_nano", {"norm_position": "post", "branches": 2}),
    ("cait_nano", {"norm_position": "post", "depth": 1}),
    ("cait_nano", {"norm_position": "post", "branches": 2, "depth": 1}),
    ("deit_nano", {"stem": "linear_norm", "stem_norm": "batch"}),
    ("deit_nano", {"stem": "linear_norm", "stem_norm": "layer"}),
    ("deit_nano", {"stem": "linear_gelu"}),
    ("deit_nano", {"scale": "epsilon"}),
    ("deit_nano", {"scale": "t-fixup", "scale_scalar": True}),
    ("resmlp_nano", {"activation": "relu"}),
    ("resmlp_nano", {"activation": "silu", "mixing": "mlp"}),
    ("resmlp_nano", {"activation": "hardswish"}),
    ("resmlp_nano", {"positions": "patches"}),
    ("resmlp_nano", {"norm": "batch"}),
    ("resmlp_nano", {"post": "affine"}),
]
every_option = pytest.mark.parametrize(("name", "options"), OPTIONS + QUICK_OPTIONS)


def network(name: str, classes: int = 7, **options) -> Network:
    depth = {} if "resnet" in name else {"depth": 2}
    model = stir(patchloom.create_model(name, num_classes=classes, **{**depth, **options})).eval()
    model.class_names = tuple(f"class {i}" for i in range(classes))
    return model


def session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def check_everywhere(model: Network, run, tolerance: float = 1e-5) -> None:
    """On inputs of our own making, at batches and sizes that the export did not compare on."""
    config = model.config
    height, width = config.img_size
    sizes = [(height, width)]
    if model.traces_any_size:
        sizes += [(2 * config.patch_size, 3 * config.patch_size), (2 * height, width + config.patch_size)]
    for size in sizes:
        for batch in (8, 1, 3):
            x = torch.randn(batch, config.in_chans, *size)
            with torch.no_grad():
                want = model(x)
            got = torch.from_numpy(np.array(run(x.numpy())))
            assert got.shape == want.shape
            assert float((got - want).abs().max() / want.abs().max()) < tolerance, (size, batch)


def check_onnx(model: Network, path: Path) -> None:
    report = export(model, "onnx", path)
    assert report.difference <= 1e-5
    assert report.agreement == 1
    assert report.bytes == path.stat().st_size
    ran = session(path)
    check_everywhere(model, lambda x: ran.run(["logits"], {"input": x})[0])
    about = ran.get_modelmeta().custom_metadata_map
    assert json.loads(about["mean"]) == list(model.preprocessing.mean)
    assert json.loads(about["preprocessing"]) == json.loads(json.dumps(model.preprocessing.to_json()))
    assert json.loads(about["class_names"]) == list(model.class_names or ())
    assert about["architecture"] == model.config.name
    assert float(about["difference"]) == report.difference
    assert b"/patchloom/" not in path.read_bytes()  # no path of the machine that exported


@pytest.mark.parametrize(("name", "options"), FAMILIES)
def test_onnx(name: str, options: dict, tmp_path: Path) -> None:
    check_onnx(network(name, **options), tmp_path / "a.onnx")


@pytest.mark.slow
@every_option
def test_onnx_of_every_option(name: str, options: dict, tmp_path: Path) -> None:
    check_onnx(network(name, **options), tmp_path / "a.onnx")


@pytest.mark.parametrize(
    ("name", "size"),
    [("resmlp_nano", (32, 32)), pytest.param("patchconvnet_nano", (40, 32), marks=pytest.mark.slow)],
)
def test_onnx_with_preprocessing_takes_pixels(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    model = network(name, depth=1)
    export(model, "onnx", tmp_path / "a.onnx", with_preprocessing=True)
    ran = session(tmp_path / "a.onnx")
    assert ran.get_inputs()[0].type == "tensor(uint8)"
    sides = ["height", "width"] if model.traces_any_size else [32, 32]
    assert ran.get_inputs()[0].shape == ["batch", *sides, 3]
    pixels = np.random.default_rng(0).integers(0, 256, (3, *size, 3), dtype=np.uint8)
    how = model.preprocessing
    x = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - torch.tensor(how.mean)[:, None, None]) / torch.tensor(
        how.std
    )[:, None, None]
    with torch.no_grad():
        want = model(x.contiguous()).numpy()
    got = ran.run(["logits"], {"input": pixels})[0]
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-5


def test_int8_of_onnx_is_smaller_and_agrees(tmp_path: Path) -> None:
    """The likeliest class where the network is sure: here one class of seven is far ahead on every image."""
    model = network("deit_nano", depth=1)
    with torch.no_grad():
        model.head.bias[3] += 20.0  # type: ignore[index, operator]
    small = export(model, "onnx", tmp_path / "a.onnx", int8=True, tolerance=0)
    assert small.agreement == 1
    assert 0 < small.difference < 0.1
    assert small.images >= 64
    assert small.bytes < 0.5 * sum(p.numel() * 4 for p in model.parameters())
    assert session(tmp_path / "a.onnx").get_inputs()[0].type == "tensor(float)"


def test_int8_that_misses_its_tolerance_is_calibrated_on_percentiles(tmp_path: Path) -> None:
    """Here ranges as they come change the class of more than a tenth of the images, fixed ones of fewer."""
    torch.manual_seed(0)
    model = stir(patchloom.create_model("cait_nano", num_classes=50, depth=2), 0.3).eval()
    report = export(model, "onnx", tmp_path / "a.onnx", int8=True)
    assert report.agreement >= 0.9
    ran = session(tmp_path / "a.onnx")
    assert ran.get_modelmeta().custom_metadata_map["quantisation"] == "percentile"
    assert report.bytes < 0.5 * sum(p.numel() * 4 for p in model.parameters())
    message = (
        r"calibrated ranges.* changes the predicted class .* Allow it with --tolerance 0\.\d+, or use --to openvino"
    )
    with pytest.raises(PatchloomError, match=message):
        export(model, "onnx", tmp_path / "b.onnx", int8=True, tolerance=0)
    assert not (tmp_path / "b.onnx").exists()


def check_torch(model: Network, path: Path) -> None:
    export(model, "torch", path)
    extra = {"metadata.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    about = json.loads(extra["metadata.json"])
    assert json.loads(about["class_names"]) == list(model.class_names or ())
    check_everywhere(model, lambda x: program(torch.from_numpy(x)).detach().numpy())


@pytest.mark.parametrize(("name", "options"), [("cait_nano", {"distilled": True}), ("patchconvnet_nano", {})])
def test_torch_program(name: str, options: dict, tmp_path: Path) -> None:
    check_torch(network(name, depth=1, **options), tmp_path / "a.pt2")


# a torch program is the cheapest graph to make
@pytest.mark.parametrize(
    ("name", "options"), [*QUICK_OPTIONS, *(pytest.param(*each, marks=pytest.mark.slow) for each in OPTIONS)]
)
def test_torch_program_of_every_option(name: str, options: dict, tmp_path: Path) -> None:
    check_torch(network(name, **options), tmp_path / "a.pt2")


def check_openvino(model: Network, path: Path, int8: bool = False) -> None:
    report = export(model, "openvino", path, int8=int8, tolerance=1.0 if int8 else None)
    assert report.bytes == sum(path.with_suffix(kind).stat().st_size for kind in (".xml", ".bin"))
    core = import_silently("openvino").Core()
    found = core.read_model(path)
    about = {key: found.get_rt_info(["model_info", key]).astype(str) for key in ("class_names", "mean", "difference")}
    assert json.loads(about["class_names"]) == list(model.class_names or ())
    assert json.loads(about["mean"]) == list(model.preprocessing.mean)
    assert float(about["difference"]) == report.difference
    ran = core.compile_model(found, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    check_everywhere(model, lambda x: ran({"input": x})["logits"], tolerance=0.1 if int8 else 1e-5)


with_openvino = pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed")


@with_openvino
@pytest.mark.parametrize(
    ("name", "options", "int8"),
    [
        ("resmlp_nano", {}, False),
        ("patchconvnet_nano", {"queries": "per_class"}, False),
        pytest.param("patchconvnet_nano", {"queries": "per_class"}, True, marks=pytest.mark.slow),
        pytest.param("patchconvnet_nano", {}, False, marks=pytest.mark.slow),
        pytest.param("patchconvnet_nano", {}, True, marks=pytest.mark.slow),
        pytest.param("cait_nano", {}, True, marks=pytest.mark.slow),
        ("deit_nano", {}, True),
    ],
)
def test_openvino(name: str, options: dict, int8: bool, tmp_path: Path) -> None:
    check_openvino(network(name, depth=1, **options), tmp_path / "a.xml", int8)


@with_openvino
@pytest.mark.slow
@every_option
def test_openvino_of_every_option(name: str, options: dict, tmp_path: Path) -> None:
    check_openvino(network(name, **options), tmp_path / "a.xml")


SILENT = """
import sys

heard, HEARD = [], ("socket.", "os.fork", "os.posix_spawn", "subprocess.")
sys.addaudithook(lambda event, _: event.startswith(HEARD) and heard.append(event))
import patchloom

model = patchloom.create_model("deit_nano", depth=1).eval()
patchloom.exporting.export(model, "openvino", sys.argv[1], int8=True, tolerance=1.0)
print(heard)
"""


@pytest.mark.skipif(find_spec("nncf") is None, reason="nncf is not installed")
@pytest.mark.skipif(
    find_spec("openvino_telemetry") is None, reason="openvino_telemetry is not installed: none could be"
)
def test_openvino_reports_nothing_over_the_network(tmp_path: Path) -> None:
    environment = {
        key: value for key, value in os.environ.items() if not key.endswith("CI")
    }  # where they report nothing
    command = [sys.executable, "-c", SILENT, str(tmp_path / "a.xml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_callers_network_stays_as_it_is(tmp_path: Path) -> None:
    model = network("resmlp_nano", depth=1).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export(model, "torch", tmp_path / "a.pt2")
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_graph_that_computes_something_else_is_refused_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    """One weight of the finished graph is changed behind the exporter's back."""
    from patchloom.exporting import onnx as form

    made = form.to_onnx

    def corrupted(request):
        model = made(request)
        largest = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        values = np.frombuffer(largest.raw_data, np.float32).copy()
        values[:50] += 3
        largest.raw_data = values.tobytes()
        return model

    monkeypatch.setattr(form, "to_onnx", corrupted)
    model = network("resmlp_nano", depth=1)
    with pytest.raises(PatchloomError, match=r"is not written: its logits differ by .* more than the tolerance"):
        export(model, "onnx", tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []
