"""Weights of timm's networks: our own files of them, files in timm's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import patchloom
from conftest import assert_close
from patchloom.compat import import_timm
from patchloom.errors import PatchloomError
from patchloom.models.foreign import ForeignNetwork
from patchloom.weights.save import save_delta


def make(name: str = "test_resnet", **options: Any) -> ForeignNetwork:
    torch.manual_seed(0)
    model = patchloom.create_model(f"timm:{name}", **{"num_classes": 3, "img_size": 64, **options})
    assert isinstance(model, ForeignNetwork)
    model.class_names = ("a", "b", "c")
    return model.eval()


@pytest.mark.parametrize("layout", ["patchloom", "timm"])
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_a_file_holds_all_of_the_network(name: str, layout: str, tmp_path: Path) -> None:
    model, x = make(name), torch.randn(2, 3, 64, 64)
    patchloom.save(model, tmp_path / "a.safetensors", layout=layout)
    again = patchloom.load(tmp_path / "a.safetensors")
    assert isinstance(again, ForeignNetwork)
    assert (again.config, again.class_names, again.preprocessing) == (
        model.config,
        model.class_names,
        model.preprocessing,
    )
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    assert not again.training
    assert len(again.load_report.loaded) == len(model.state_dict())


def test_a_file_in_timms_layout_loads_in_timm(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    patchloom.save(make(), tmp_path / "a.safetensors", layout="timm")
    import_timm().create_model("test_resnet", num_classes=3).load_state_dict(load_file(tmp_path / "a.safetensors"))
    with pytest.raises(PatchloomError, match="official"):
        patchloom.save(make(), tmp_path / "a.safetensors", layout="official")


def test_other_classes_and_sizes(tmp_path: Path) -> None:
    model = make("test_vit")
    patchloom.save(model, tmp_path / "a.safetensors")
    again = patchloom.load(tmp_path / "a.safetensors", num_classes=7, img_size=96)
    assert again(torch.zeros(1, 3, 96, 96)).shape == (1, 7)
    assert again.config.img_size == again.preprocessing.img_size == (96, 96)
    assert set(again.load_report.reinitialised) == {"network.head.weight", "network.head.bias"}
    assert again.class_names is None
    with pytest.raises(PatchloomError, match="in_chans=1"):
        patchloom.load(tmp_path / "a.safetensors", in_chans=1)
    with pytest.raises(PatchloomError, match="heads"):
        patchloom.load(tmp_path / "a.safetensors", heads=3)


def test_timm_name_and_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = import_timm().create_model("test_vit", num_classes=4).eval()
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    model = patchloom.load(f"timm:test_vit:{tmp_path / 'w.pth'}")
    x = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        assert torch.equal(model(x), theirs(x))
        other = patchloom.load(f"timm:test_vit:{tmp_path / 'w.pth'}", img_size=64)
        theirs.set_input_size(img_size=(64, 64))
        assert_close(other(x[..., :64, :64]), theirs(x[..., :64, :64]), 1e-6)
    assert model.config.num_classes == 4
    with pytest.raises(PatchloomError, match=r"does not fit timm:test_resnet.*missing"):
        patchloom.load(f"timm:test_resnet:{tmp_path / 'w.pth'}")
    torch.save({**theirs.state_dict(), "norm.weight": torch.zeros(3)}, tmp_path / "w.pth")
    with pytest.raises(PatchloomError, match=r"norm\.weight"):
        patchloom.load(f"timm:test_vit:{tmp_path / 'w.pth'}")
    with pytest.raises(PatchloomError, match="does not exist"):
        patchloom.load("timm:test_vit:nowhere.pth")


def test_missing_tensors_are_refused_or_reported(tmp_path: Path) -> None:
    from patchloom.weights.files import read, write

    patchloom.save(make(), tmp_path / "a.safetensors")
    found = read(tmp_path / "a.safetensors")
    del found.tensors["network.fc.bias"]
    write(tmp_path / "b.safetensors", found.tensors, found.metadata)
    with pytest.raises(PatchloomError, match=r"fc\.bias"):
        patchloom.load(tmp_path / "b.safetensors")
    assert patchloom.load(tmp_path / "b.safetensors", strict=False).load_report.missing == ["network.fc.bias"]


def test_a_delta_of_a_foreign_network(tmp_path: Path) -> None:
    base = make()
    patchloom.save(base, tmp_path / "base.safetensors")
    tuned = patchloom.load(tmp_path / "base.safetensors")
    with torch.no_grad():
        tuned.network.fc.weight.add_(1)
    save_delta(tuned, tmp_path / "delta.safetensors", base)
    again = patchloom.load(tmp_path / "delta.safetensors", base=tmp_path / "base.safetensors")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again(x), tuned(x))
