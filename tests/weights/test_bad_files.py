"""Files and values that are broken, hostile or of a wrong shape: one clear error each."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import patchloom
from conftest import stir
from patchloom import PatchloomError
from patchloom.models.registry import build, find_config
from patchloom.weights.layouts import from_ours


def make(name: str, options: dict, classes: int = 6):
    return stir(patchloom.create_model(name, num_classes=classes, **options), 0.5).eval()


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_hostile_and_broken_files_are_refused_without_running_anything(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    (tmp_path / "evil.pth").write_bytes(pickle.dumps({"model": Evil(touched)}))
    torch.save({"model": Evil(touched)}, tmp_path / "evil2.pth")
    patchloom.save(make("deit_nano", {}), tmp_path / "good.safetensors")
    good = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(good[:5000])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "noise.pth").write_bytes(os.urandom(3000))
    (tmp_path / "empty.pth").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"model": {"a": 3}}, tmp_path / "number.pth")
    torch.save({}, tmp_path / "nothing.pth")
    (tmp_path / "folder.pth").mkdir()
    names = ["evil.pth", "evil2.pth", "torn.safetensors", "empty.safetensors", "noise.pth", "empty.pth", "list.pth"]
    for name in [*names, "number.pth", "nothing.pth", "folder.pth", "missing.safetensors", "missing.pth"]:
        with pytest.raises(PatchloomError, match=name.split(".")[0]):
            patchloom.load(tmp_path / name)
        assert not touched.exists(), f"code in {name} was run"


def test_metadata_that_lies_is_refused(tmp_path: Path) -> None:
    model = make("deit_nano", {})
    tensors = model.state_dict()
    for about, words in [
        ({"config": {**model.config.to_json(), "architecture": "gpt"}}, "gpt"),
        ({"config": {**model.config.to_json(), "depth": 7}}, "depth=7 in its config"),
        ({"config": {**model.config.to_json(), "depth": "seven"}}, "seven"),
        ({"config": {**model.config.to_json(), "wings": 2}}, "wings"),
    ]:
        save_file(tensors, tmp_path / "lie.safetensors", metadata={"patchloom": json.dumps(about)})
        with pytest.raises(PatchloomError, match=words):
            patchloom.load(tmp_path / "lie.safetensors")
    save_file(tensors, tmp_path / "lie.safetensors", metadata={"patchloom": "{not json"})
    with pytest.raises(PatchloomError, match="lie"):
        patchloom.load(tmp_path / "lie.safetensors")


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    model = make("deit_nano", {})
    patchloom.save(model, tmp_path / "deep" / "er" / "a.safetensors")
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["a.safetensors"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PatchloomError, match="cannot be written"):
        patchloom.save(model, tmp_path / "file" / "a.safetensors")
    with pytest.raises(PatchloomError, match=r"\.safetensors"):
        patchloom.save(model, tmp_path / "a.pth")


def test_metadata_of_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    model = make("deit_nano", {})
    config, how = model.config.to_json(), model.preprocessing.to_json()
    headless = {key: value for key, value in config.items() if key != "img_size"}
    for about in [
        None, 3, [], {"config": 3}, {"config": None}, {"config": headless}, {"config": {**config, "architecture": []}},
        {"config": config, "class_names": 5}, {"config": config, "class_names": ["a"]},
        {"config": config, "preprocessing": 5}, {"config": config, "preprocessing": {**how, "wings": 2}},
        {"config": config, "preprocessing": {**how, "mean": "grey"}},
        {"config": config, "preprocessing": {**how, "std": [0.0, 1.0, 1.0]}},
        {"config": config, "preprocessing": {**how, "interpolation": "random"}},
    ]:  # fmt: skip
        save_file(model.state_dict(), tmp_path / "odd.safetensors", metadata={"patchloom": json.dumps(about)})
        with pytest.raises(PatchloomError):
            patchloom.load(tmp_path / "odd.safetensors")
    save_file(model.state_dict(), tmp_path / "deep.safetensors", metadata={"patchloom": "[" * 100_000})
    with pytest.raises(PatchloomError, match="deep"):
        patchloom.load(tmp_path / "deep.safetensors")


@pytest.mark.parametrize("name", ["deit_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"])
def test_any_tensor_of_a_wrong_shape_or_kind_is_refused(name: str) -> None:
    model = make(name, {"depth": 1})
    hints = {"img_size": 32, **({"heads": 3} if name == "deit_nano" else {})}
    whole = from_ours(model.state_dict(), model.config, "official")
    for key, tensor in whole.items():
        if key.endswith("num_batches_tracked"):
            continue
        for wrong in (
            torch.tensor(1.0),
            torch.zeros(3),
            tensor.to_sparse(),
            tensor.to("meta"),
            tensor.bool(),
            tensor + 0j,
        ):
            with pytest.raises(PatchloomError):
                patchloom.load({**whole, key: wrong}, **hints)


def test_names_with_huge_numbers_are_refused_at_once() -> None:
    whole = from_ours(make("deit_nano", {}).state_dict(), find_config("deit_nano"), "official")
    for name in ("blocks.30000.norm1.weight", "blocks.0.attn30000.qkv.weight", "head.99999999999.weight"):
        with pytest.raises(PatchloomError, match="numbered"):
            patchloom.load({**whole, name: torch.zeros(96)}, heads=3)


def test_heads_that_are_not_one_per_class_are_refused() -> None:
    whole = from_ours(make("patchconvnet_nano", {}).state_dict(), find_config("patchconvnet_nano"), "official")
    several = {"head.0.weight": torch.zeros(6, 96), "head.1.weight": torch.zeros(6, 48)}
    biases = {"head.0.bias": torch.zeros(6), "head.1.bias": torch.zeros(6)}
    with pytest.raises(PatchloomError, match="one head per class"):
        patchloom.load({**whole, **several, **biases}, img_size=32)


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    model = make("deit_nano", {})
    for path in ("a" * 5000 + ".safetensors", "weights.ckpt", "vit_small_patch16_rope_224.naver_in1k"):
        with pytest.raises(PatchloomError):
            patchloom.load(path)
    for path in (None, 3, tmp_path / ("b" * 300 + ".safetensors")):
        with pytest.raises(PatchloomError):
            patchloom.save(model, path)


def test_links_stay_links(tmp_path: Path) -> None:
    model = make("deit_nano", {})
    (tmp_path / "real").mkdir()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "real" / "a.safetensors")
    patchloom.save(model, tmp_path / "link.safetensors")
    assert (tmp_path / "link.safetensors").is_symlink()
    assert (tmp_path / "real" / "a.safetensors").is_file()


def test_wrapped_networks_are_saved_as_what_they_wrap(tmp_path: Path) -> None:
    model = make("deit_nano", {})
    compiled, averaged = torch.compile(model), torch.optim.swa_utils.AveragedModel(model)
    for wrapped in (compiled, averaged):
        patchloom.save(wrapped, tmp_path / "a.safetensors")
        assert patchloom.load(tmp_path / "a.safetensors").config == model.config
        assert patchloom.complexity(wrapped) == patchloom.complexity(model)
        roles = patchloom.parameter_roles(wrapped)
        assert list(roles) == [name for name, _ in wrapped.named_parameters()]
        assert list(roles.values()) == list(patchloom.parameter_roles(model).values())


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for call in (patchloom.complexity, lambda model: patchloom.save(model, path)):
        with pytest.raises(PatchloomError, match="not Linear"):
            call(nn.Linear(2, 2))
    model = make("deit_nano", {})
    for names in ({"a"}, ["a"], "abcdef", [1, 2, 3, 4, 5, 6]):
        model.class_names = names
        with pytest.raises(PatchloomError, match="6 classes"):
            patchloom.save(model, path)
    model.class_names = None
    model.blocks[1].ffn.branches[0].fn.fc1.weight = model.blocks[0].ffn.branches[0].fn.fc1.weight
    with pytest.raises(PatchloomError, match="share memory"):
        patchloom.save(model, path)
    with torch.device("meta"):
        bare = build(find_config("deit_nano"))
    with pytest.raises(PatchloomError, match="cannot be written"):
        patchloom.save(bare, path)
    assert not list(tmp_path.iterdir())


def test_what_was_loaded_for_inference_can_be_trained(tmp_path: Path) -> None:
    patchloom.save(make("deit_nano", {}), tmp_path / "a.safetensors")
    with torch.inference_mode():
        model = patchloom.load(tmp_path / "a.safetensors")
        fresh = patchloom.create_model("deit_nano")
    for network in (model, fresh):
        network(torch.randn(1, 3, 32, 32)).sum().backward()
        assert network.positions.grad is not None


def test_wrong_arguments_are_refused() -> None:
    for call in (
        lambda: patchloom.create_model(None),
        lambda: patchloom.list_models(None),
        lambda: patchloom.create_model("deit_nano", mlp_ratio=float("inf")),
        lambda: patchloom.create_model("deit_nano", stem="hmlp", dim=3, heads=1),
        lambda: patchloom.complexity(find_config("deit_tiny").replace(stem="hmlp", patch_size=32)),
        lambda: patchloom.create_model("resnet50_attention_pool", trunk="zzz"),
        lambda: patchloom.create_model("resnet50_attention_pool", patch_size=16),
        lambda: patchloom.create_model("resnet50_attention_pool", depth=2),
    ):
        with pytest.raises(PatchloomError):
            call()
    model = patchloom.create_model("deit_nano")
    for images in (np.zeros((1, 3, 32, 32)), torch.zeros(1, 3, 32, 32).double(), torch.zeros(1, 3, 0, 0), None):
        with pytest.raises(PatchloomError):
            model(images)
    assert patchloom.create_model("deit_nano", num_classes=np.int64(7), img_size=np.int32(16)).config.num_classes == 7
