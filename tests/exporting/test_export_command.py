"""`patchloom export` as people use it: real processes, the example without torch, one sentence for what is wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import patchloom
from conftest import stir
from patchloom.cli.main import main
from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.exporting import export, exporter, formats
from patchloom.exporting.check import _held_out
from patchloom.models.network import Network

EXAMPLE = Path(__file__).parents[2] / "examples" / "run_onnx.py"
WITHOUT_TORCH = """
import runpy, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "patchloom"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, NoTorch())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = stir(patchloom.create_model("resmlp_nano", num_classes=3, depth=1)).eval()
    model.class_names = ("cat", "dog", "owl")
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    patchloom.save(model, path)
    return path


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["export", *words])
    assert stopped.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("patchloom: ")
    assert told.err.count("\n") == 1
    return told.err


def test_a_file_that_runs_without_torch(weights: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    out = tmp_path / "model.onnx"
    words = ["export", str(weights), "--to", "onnx", "--out", str(out), "--json"]
    done = subprocess.run([sys.executable, "-m", "patchloom", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["format"] == "onnx"
    assert report["file"] == str(out)
    assert report["bytes"] == out.stat().st_size
    assert report["difference"] < 1e-5
    assert report["agreement"] == 1
    assert {tuple(size) for size in report["sizes"]} == {(batch, 32, 32) for batch in (1, 2, 5)}
    picture = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(picture)
    asked = [sys.executable, "-c", WITHOUT_TORCH, str(EXAMPLE), str(out), str(picture), str(picture)]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    want = patchloom.predict(weights, picture, top=3)[0]["predictions"]
    expected = ", ".join(f"{row['class']} ({row['probability']:.1%})" for row in want)
    assert said.stdout.splitlines() == [f"{picture}: {expected}"] * 2


def test_what_it_says(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(weights), "--to", "official", "--out", str(tmp_path / "a.pth")]
    main(words)
    first = capsys.readouterr().out
    assert "a.pth" in first
    assert "100.0% of the predicted classes agree" in first
    main(words)
    assert "replaces an earlier export" in capsys.readouterr().out


@pytest.mark.parametrize("hold_out", [0.5, "none"])
def test_a_run_that_chose_its_held_out_images_is_checked_on_those(hold_out: float | str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(4):
            image = Image.fromarray(draw.integers(0, 256, (16, 16, 3), np.uint8))
            image.save(tmp_path / "data" / name / f"{i}.png")
    small = {"model_options": {"depth": 1}, "resolution": 16, "epochs": 1, "batch_size": 4, "workers": 0}
    given = {"model": "deit_nano", "recipe": "deit@small", "hold_out": hold_out, "console": Console(quiet=True)}
    patchloom.train(tmp_path / "data", out=tmp_path / "run", **small, **given)
    assert len(_held_out(tmp_path / "run")) == (4 if hold_out == 0.5 else 0)
    export(tmp_path / "run", "safetensors", tmp_path / "x.safetensors")


def test_images_of_the_users_own(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    noise = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(noise.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(photos / f"{i}.png")
    words = [str(weights), "--to", "safetensors", "--out", str(tmp_path / "a.safetensors"), "--images"]
    main(["export", *words, str(photos)])
    capsys.readouterr()
    assert "nowhere" in refused([*words, str(tmp_path / "nowhere")], capsys)
    (tmp_path / "empty").mkdir()
    assert "contains no images" in refused([*words, str(tmp_path / "empty")], capsys)
    (photos / "1.png").write_bytes(b"no image")
    assert "1.png" in refused([*words, str(photos)], capsys)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--to", "onxx", "--out", "a.onnx"], r"Unknown value 'onxx' for --to.*Did you mean 'onnx'"),
        (["--to", "onnx", "--out", "a.pt"], r"must end in \.onnx, not 'a\.pt'"),
        (["--to", "official", "--out", "a.pt"], r"must end in \.safetensors or \.pth"),
        (["--to", "onnx", "--out", "nowhere/a.onnx"], "there is no folder nowhere"),
        (["--to", "torch", "--out", "folder.pt2"], "is a folder"),
        (["--to", "torch", "--int8", "--out", "a.pt2"], "does not support int8; onnx and openvino do"),
        (["--to", "timm", "--with-preprocessing", "--out", "a.safetensors"], "contains only weights"),
        (["--to", "torch", "--tolerance", "-1", "--out", "a.pt2"], "0 or more"),
        (["--to", "torch", "--tolerance", "nan", "--out", "a.pt2"], "0 or more"),
        (["--to", "torch", "--out", "notes.pt2"], "is not overwritten"),
        (["--to", "torch", "--out", "pipe.pt2"], "is not a regular file"),
        (["--to", "torch", "--out", "loop.pt2"], "loop.pt2 cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, weights, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.pt2").mkdir()
    Path("notes.pt2").write_text("my notes")
    os.mkfifo("pipe.pt2")
    Path("loop.pt2").symlink_to("loop.pt2")
    before = sorted(os.listdir())
    told = refused([str(weights), *words], capsys)
    assert re.search(sentence, told), told
    assert sorted(os.listdir()) == before


def test_the_weights_themselves_are_not_written_over(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = weights.read_bytes()
    for source in (weights, weights.parent):
        told = refused([str(source), "--to", "official", "--out", str(weights)], capsys)
        assert "Choose another file" in told
    assert weights.read_bytes() == content


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    told = refused([str(weights), "--to", "torch", "--out", str(tmp_path / "a.pt2")], capsys)
    assert "may write to" in told


def test_a_missing_package_names_the_extra(weights: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    found = formats.find_spec
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    told = refused([str(weights), "--to", "onnx", "--out", str(tmp_path / "a.onnx")], capsys)
    assert "install -e" in told
    assert "[export]'" in told


def test_past_the_tolerance_nothing_is_written(weights: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """A file that lost one tensor's values on the way is found out, and an earlier file stays."""
    out = tmp_path / "a.safetensors"
    words = [str(weights), "--to", "safetensors", "--out", str(out)]
    main(["export", *words])
    capsys.readouterr()
    before = out.read_bytes()
    made = exporter.make

    def corrupted(*args):
        artefact = made(*args)
        artefact.tensors["head.weight"] = artefact.tensors["head.weight"] * 1.01
        return artefact

    monkeypatch.setattr(exporter, "make", corrupted)
    assert "more than the tolerance of 1.0e-04" in refused(words, capsys)
    assert out.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]
    main(["export", *words, "--tolerance", "0.1"])


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_draft(which: signal.Signals, weights: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "patchloom", "export", str(weights), "--to", "torch"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "a.pt2")], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    limit = time.time() + 120
    while not list(tmp_path.iterdir()):
        assert process.poll() is None
        assert time.time() < limit
        time.sleep(0.002)
    process.send_signal(which)
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (3, "patchloom: stopped.\n")
    assert not list(tmp_path.iterdir())


def test_of_two_files_none_is_there_with_the_other_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it moves them: OpenVINO would read a graph with the weights of another without a word."""
    folder, out = tmp_path / "draft", tmp_path / "a.xml"
    folder.mkdir()
    for place, words in ((folder, "after"), (tmp_path, "before")):
        for name in ("a.xml", "a.bin"):
            (place / name).write_text(words)

    class Killed(Exception):
        pass

    moved: list[Path] = []

    def replace(file: Path, to: Path) -> None:
        if moved:
            raise Killed
        moved.append(to)
        Path(file).rename(to)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        exporter._move(folder, out)
    assert moved == [tmp_path / "a.bin"]
    assert not out.exists()


def test_a_network_that_answers_nothing_but_zeros_is_exported(tmp_path: Path) -> None:
    model = patchloom.create_model("resmlp_nano", num_classes=3, depth=1)
    for parameter in model.head.parameters():
        nn.init.zeros_(parameter)
    assert exporter.export(model, "safetensors", tmp_path / "a.safetensors").difference == 0


def test_a_file_named_like_an_encoder_is_no_concern_of_a_network_of_images(tmp_path: Path) -> None:
    (tmp_path / "a.encoder.onnx").write_text("mine")
    exporter.export(patchloom.create_model("resmlp_nano", num_classes=3, depth=1), "onnx", tmp_path / "a.onnx")
    assert (tmp_path / "a.encoder.onnx").read_text() == "mine"


@pytest.mark.parametrize(("to", "name"), [("official", "a.pth"), ("official", "a.safetensors"), ("torch", "a.pt2")])
def test_a_full_disk_is_told_as_such(to: str, name: str, tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow past 100 000 bytes: torch's writer would end it."""
    patchloom.save(patchloom.create_model("deit_nano", num_classes=3), tmp_path / "deit.safetensors")

    def small_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    words = [tmp_path / "deit.safetensors", "--to", to, "--out", tmp_path / name]
    command = [sys.executable, "-m", "patchloom", "export", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=small_disk)
    assert done.returncode == 2
    assert done.stderr == f"patchloom: {tmp_path / name} cannot be written: File too large.\n"
    assert os.listdir(tmp_path) == ["deit.safetensors"]


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    model = patchloom.create_model("resmlp_nano", num_classes=3, depth=1)
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(PatchloomError, match="its weights are damaged"):
        exporter.export(model, "safetensors", tmp_path / "a.safetensors")


def test_a_fused_copy_is_refused(tmp_path: Path) -> None:
    model: Network = patchloom.fuse(patchloom.create_model("resmlp_nano", num_classes=3, depth=1), kernels=False)
    with pytest.raises(PatchloomError, match="Export the network it was made from"):
        exporter.export(model, "torch", tmp_path / "a.pt2")


@pytest.mark.parametrize("to", ["onnx", "openvino", "torch", "safetensors", "timm", "official"])
def test_only_an_earlier_export_is_replaced(to: str, weights: Path, tmp_path: Path) -> None:
    for package in formats.FORMATS[to].packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    out = (tmp_path / "model").with_suffix(formats.FORMATS[to].suffixes[0])
    precious = out.with_suffix(".bin") if to == "openvino" else out
    precious.write_bytes(weights.read_bytes())
    with pytest.raises(PatchloomError, match="is not an export, so it is not overwritten"):
        exporter.export(weights, to, out)
    assert precious.read_bytes() == weights.read_bytes()
    precious.unlink()
    assert not exporter.export(weights, to, out).replaced
    assert exporter.export(weights, to, out).replaced


def test_what_is_exported_is_not_written_over(weights: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.safetensors"
    exporter.export(weights, "safetensors", first)
    with pytest.raises(PatchloomError, match="is the source of the export"):
        exporter.export(first, "safetensors", first)


def test_a_network_of_timm_is_exported_at_its_size(tmp_path: Path) -> None:
    network = patchloom.create_model("timm:resnet10t", num_classes=3, img_size=32)
    patchloom.save(network, tmp_path / "weights.safetensors")
    report = export(tmp_path / "weights.safetensors", "torch", tmp_path / "model.pt2")
    assert report.difference < 1e-4
