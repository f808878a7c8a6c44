"""Files of weights that lie about themselves are refused before anything of that size is allocated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import patchloom
from patchloom import PatchloomError
from patchloom.models.imagenet import imagenet_names
from patchloom.weights.layouts import from_ours
from patchloom.weights.save import describe

LIES = {
    "depth": 10**7,
    "branches": 10**7,
    "in_chans": 10**9,
    "dim": 10**12,
    "mlp_ratio": 1e300,
    "num_classes": 10**9,
    "img_size": [10**6, 10**6],
    "patch_size": 10**9,
    "heads": 10**9,
}
SUBTLE = {"depth": 3, "in_chans": 4, "dim": 192, "num_classes": 7, "img_size": [64, 64], "branches": 2}
# in a process of its own: what it takes beyond the import of torch
MEASURE = """
import resource, sys, time
import patchloom, patchloom.weights.load
start, before = time.time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        patchloom.load(path)
        print("loaded", path)
    except patchloom.PatchloomError as error:
        print(str(error)[:300])
print(time.time() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def measured(*paths: Path) -> list[str]:
    """The messages of `load`, each quick and small."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, paths)], capture_output=True, text=True, timeout=60)
    *messages, costs = done.stdout.splitlines() or [""]
    assert len(messages) == len(paths), done.stderr[-1000:]
    seconds, megabytes = map(float, costs.split())
    assert max(seconds / 5, megabytes / 200) < 1, f"{seconds} s, {megabytes} MB"
    return messages


def forge(path: Path, model: torch.nn.Module, about: dict, **lies: object) -> Path:
    """A file whose config tells lies."""
    about["config"] |= lies
    save_file(model.state_dict(), path, metadata={"patchloom": json.dumps(about)})
    return path


def write(path: Path, name: str = "deit_nano", preprocessing: dict | None = None, **lies: object) -> Path:
    model = patchloom.create_model(name, num_classes=6, depth=2)
    about = describe(model, "patchloom")
    about["preprocessing"] |= preprocessing or {}
    return forge(path, model, about, **lies)


def test_a_config_that_the_tensors_contradict_is_refused_at_once(tmp_path: Path) -> None:
    paths = {write(tmp_path / f"{i}.safetensors", **{key: value}): key for i, (key, value) in enumerate(LIES.items())}
    for message, key in zip(measured(*paths), paths.values(), strict=True):
        assert key in message or key.replace("_", " ") in message, message


@pytest.mark.parametrize("key", SUBTLE)
def test_the_message_names_the_option_and_what_is_there(tmp_path: Path, key: str) -> None:
    path = write(tmp_path / "a.safetensors", **{key: SUBTLE[key]})
    with pytest.raises(PatchloomError, match=f"has {key}=.* but its tensors have"):
        patchloom.load(path)


@pytest.mark.parametrize("name", ["cait_nano", "resmlp_nano", "patchconvnet_nano"])
def test_every_family_is_checked_and_honest_files_load(tmp_path: Path, name: str) -> None:
    assert patchloom.load(write(tmp_path / "a.safetensors", name)).config.depth == 2
    for key in ("depth", "in_chans", "dim", "num_classes"):
        with pytest.raises(PatchloomError, match=key):
            patchloom.load(write(tmp_path / "a.safetensors", name, **{key: SUBTLE[key]}))


def test_networks_of_text_are_checked_too(tmp_path: Path) -> None:
    model = patchloom.create_model("resmlp_mt_nano", vocab_size=40)
    for lie in ({"vocab_size": 10**7}, {"depth": 1000}, {"dim": 1 << 16}, {"max_length": 1 << 16}):
        with pytest.raises(PatchloomError, match=r"where resmlp_mt_nano needs|many more tensors than there are in it"):
            patchloom.load(forge(tmp_path / "a.safetensors", model, model.metadata(), **lie))
    honest = patchloom.load(forge(tmp_path / "a.safetensors", model, model.metadata()))
    assert all(map(torch.equal, honest.state_dict().values(), model.state_dict().values()))


def test_networks_of_timm_are_checked_too(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    model = patchloom.create_model("timm:test_vit", num_classes=3)
    lies = {
        "does not fit timm:test_vit": {"embed_dim": 1 << 14},
        "many more tensors than there are in it": {"depth": 1 << 12},
        "at most 65,536, not 1000000000000": {"depth": 10**12},
        "timm:test_vit cannot be built: AssertionError": {"class_token": False},
    }
    for message, lie in lies.items():
        path = forge(tmp_path / "a.safetensors", model, describe(model, "patchloom"), options=lie)
        with pytest.raises(PatchloomError, match=message):
            patchloom.load(path)


@pytest.mark.parametrize(
    "option",
    [{"checkpoint_path": "other.pth"}, {"pretrained": True}, {"pretrained_cfg_overlay": {"file": "other.pth"}}],
)
def test_no_file_makes_timm_open_another(tmp_path: Path, option: dict) -> None:
    pytest.importorskip("timm")
    model = patchloom.create_model("timm:test_vit", num_classes=3)
    path = forge(tmp_path / "a.safetensors", model, describe(model, "patchloom"), options=option)
    with pytest.raises(PatchloomError, match=f"{next(iter(option))!r} .* loads weights"):
        patchloom.load(path)
    with pytest.raises(PatchloomError, match="loads weights"):
        patchloom.create_model("timm:test_vit", **option)


def test_preprocessing_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for lie, words in (
        ({"crop_ratio": 1e-9}, "crop ratio"),
        ({"crop_ratio": 1e9}, "crop ratio"),
        ({"mean": [0.5] * 4, "std": [0.5] * 4}, "4 channels, but the network has 3"),
    ):
        with pytest.raises(PatchloomError, match=words):
            patchloom.load(write(tmp_path / "a.safetensors", preprocessing=lie))


def test_partial_files_still_load_without_strict(tmp_path: Path) -> None:
    model = patchloom.create_model("deit_nano", num_classes=6, depth=2)
    part = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("blocks.1.")}
    about = json.dumps(describe(model, "patchloom"))
    save_file(part, tmp_path / "part.safetensors", metadata={"patchloom": about})
    assert patchloom.load(tmp_path / "part.safetensors", strict=False).config.depth == 2
    with pytest.raises(PatchloomError, match="depth=2 in its config, but its tensors have depth 1"):
        patchloom.load(tmp_path / "part.safetensors")


def test_bombs_are_refused_by_their_declared_size(tmp_path: Path) -> None:
    # a torch archive whose storage was compressed 1000 times; written in pieces, as it has a gigabyte
    torch.save({"a": torch.zeros(4)}, tmp_path / "small.pth")
    with zipfile.ZipFile(tmp_path / "small.pth") as small, zipfile.ZipFile(tmp_path / "zip.pth", "w") as bomb:
        for entry in small.infolist():
            with bomb.open(zipfile.ZipInfo(entry.filename), "w", force_zip64=True) as file:
                file.write(small.read(entry))
        packed = zipfile.ZipInfo("archive/data/1")
        packed.compress_type = zipfile.ZIP_DEFLATED
        with bomb.open(packed, "w", force_zip64=True) as file:
            for _ in range(1 << 8):
                file.write(bytes(4 << 20))
    # one value that stands for a trillion, and names that share memory
    torch.save({"norm.weight": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "stride.pth")
    shared = torch.zeros(1 << 20)
    torch.save({f"blocks.{i}.w": shared for i in range(100)}, tmp_path / "shared.pth")
    for message in measured(*(tmp_path / f"{name}.pth" for name in ("zip", "stride", "shared"))):
        assert "unpack to" in message, message


@pytest.mark.parametrize("archive", [True, False])
def test_pickles_that_allocate_are_refused(tmp_path: Path, archive: bool) -> None:
    class Allocating:
        def __reduce__(self) -> tuple[object, ...]:
            return bytearray, (1 << 30,)

    path = tmp_path / "a.pth"
    torch.save({"head.weight": torch.zeros(3), "more": Allocating()}, path, _use_new_zipfile_serialization=archive)
    (message,) = measured(path)
    assert "is refused" in message


def test_headers_beyond_reason_and_special_files_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"patchloom": "x" * (20 << 20)}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    names = ("a.safetensors", "pipe.pth", "zero.safetensors")
    header_, pipe, zero = measured(*(tmp_path / name for name in names))
    assert "its header has" in header_
    assert "not a regular file" in pipe
    assert "not a regular file" in zero


def test_class_names_are_different(tmp_path: Path) -> None:
    model = patchloom.create_model("deit_nano", num_classes=3)
    model.class_names = ("ant", "bee", "ant")
    with pytest.raises(PatchloomError, match="several classes named 'ant'"):
        patchloom.save(model, tmp_path / "a.safetensors")
    about = {
        **describe(patchloom.create_model("deit_nano", num_classes=3), "patchloom"),
        "class_names": ["a", "a", "b"],
    }
    save_file(model.state_dict(), tmp_path / "a.safetensors", metadata={"patchloom": json.dumps(about)})
    with pytest.raises(PatchloomError, match="several classes named 'a'"):
        patchloom.load(tmp_path / "a.safetensors")


def test_bare_imagenet_weights_have_its_names_and_say_what_is_assumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = patchloom.create_model("deit_tiny", depth=1)
    torch.save({"model": from_ours(model.state_dict(), model.config, "official")}, tmp_path / "bare.pth")
    bare = patchloom.load(tmp_path / "bare.pth")
    assert bare.class_names == imagenet_names()
    told = f"{tmp_path / 'bare.pth'}: mean 0.485, 0.456, 0.406 and standard deviation 0.229, 0.224, 0.225 are assumed"
    assert caplog.text.count(told) == 1
    assert "mean 0.485" in str(bare.load_report)
    assert "ImageNet's: the file has no class names" in str(bare.load_report)
    assert patchloom.load(tmp_path / "bare.pth", num_classes=5).class_names is None
    assert caplog.text.count(told) == 1  # once per file, however often it is loaded
    caplog.clear()
    patchloom.save(bare, tmp_path / "own.safetensors")
    assert patchloom.load(tmp_path / "own.safetensors").class_names == imagenet_names()
    assert not caplog.text


def test_absurd_options_are_refused_by_name() -> None:
    for option, value in (("depth", 10**6), ("dim", 10**9), ("in_chans", 10**6), ("img_size", 10**6)):
        with pytest.raises(PatchloomError, match=option):
            patchloom.create_model("deit_nano", **{option: value})
    assert patchloom.create_model("deit_nano", in_chans=np.int64(4)).config.in_chans == 4
