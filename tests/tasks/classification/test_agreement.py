"""Disagreement: between models, with the truth, and with networks of other people."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import patchloom
from patchloom import PatchloomError
from patchloom.data.images import resize_and_crop
from patchloom.inference.items import open_items
from patchloom.tasks.classification.agreement import disagreement, disagreement_lines, draw_disagreement
from patchloom.tasks.classification.evaluate import scores
from patchloom.tasks.classification.teachers import open_teacher

INDICES = "The class names of the data are numbers: they are taken as class indices, from 0"  # of a nameless model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = []
    for i, options in enumerate(({"distilled": True}, {})):
        torch.manual_seed(i)
        model = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1, **options)
        model.class_names = tuple("0123456789") if i else tuple("9876543210")
        paths.append(folder / f"{i}.safetensors")
        patchloom.save(model, paths[-1])
    return paths


def test_disagreement_with_the_truth_is_the_error_and_the_table_is_symmetric(
    models: list[Path], tmp_path: Path
) -> None:
    got = disagreement(models, "digits")
    rates = np.asarray(got["rates"])
    assert got["names"][0] == "ground truth"
    assert len(got["names"]) == 5  # the truth, the distilled one and its two heads, the other
    assert (rates == rates.T).all()
    assert (np.diag(rates) == 0).all()
    for row, options in ((1, {}), (2, {"head": "class"}), (3, {"head": "distill"})):
        assert rates[0, row] == pytest.approx(1 - patchloom.evaluate(models[0], "digits", **options)["top1"])
    assert rates[0, 4] == pytest.approx(1 - patchloom.evaluate(models[1], "digits")["top1"])
    assert len(got["cosines"][str(models[0])]) == 2
    tokens = load_file(models[0] / "export" / "model.safetensors") if models[0].is_dir() else load_file(models[0])
    one, other = (tokens[name].flatten().numpy() for name in ("class_token", "distill_token"))
    want = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert got["parameter_cosines"] == {str(models[0]): pytest.approx(float(want), abs=1e-5)}
    assert f"cosine of their parameters alone: {want:.2f}" in "\n".join(disagreement_lines(got))
    assert "ground truth" in "\n".join(disagreement_lines(got))
    long = {**got, "names": ["a/long/path/" * 20 + name for name in got["names"]]}
    draw_disagreement(long, tmp_path / "d.png")
    with Image.open(tmp_path / "d.png") as picture:
        assert picture.width > 500


def test_token_cosines_average_over_all_classes(models: list[Path], tmp_path: Path) -> None:
    """Folders are read class by class: the images must not all come from the first classes."""
    for name, value in (("0", 0), ("1", 255)):
        (tmp_path / "both" / name).mkdir(parents=True)
        (tmp_path / name / name).mkdir(parents=True)
        for i in range(50):
            pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3)) // 8 + value * 7 // 8
            for folder in ("both", name):
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / folder / name / f"{i}.png")
    both, one, other = (
        np.asarray(disagreement(models[:1], tmp_path / folder, split="all")["cosines"][str(models[0])])
        for folder in ("both", "0", "1")
    )
    gap = np.abs(one - other)[-1]
    assert gap > 1e-4
    assert np.abs(both - (one + other) / 2)[-1] < 0.1 * gap


def foreign(folder: Path) -> str:
    """A network of timm with ten outputs, from a file."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(2)
    network = timm.create_model("test_resnet", num_classes=10)
    torch.save(network.state_dict(), folder / "weights.pth")
    return f"timm:test_resnet:{folder / 'weights.pth'}"


def test_networks_of_timm_and_onnx_files_are_evaluated_as_their_own_code_does(tmp_path: Path) -> None:
    """Tables 3.2 and 3.4 compare with convnets of other people."""
    source = foreign(tmp_path)
    with pytest.warns(UserWarning, match=INDICES):
        result = scores(source, "digits", resolution=32)
    images, items = open_items("digits", None, None)
    teacher = open_teacher(source, torch.device("cpu"), {"img_size": 32})
    pictures = [np.asarray(resize_and_crop(images.read(item), teacher.preprocessing)) for item in items[:20]]
    x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255
    own = teacher.preprocessing
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (own.mean, own.std))
    with torch.no_grad():
        logits = teacher.network((x - mean) / std)
    labels = torch.tensor([item.label for item in items[:20]])
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(torch.tensor(result.loss[:20]), loss.double(), atol=1e-4)


@pytest.mark.parametrize("option", [{"int8": True}, {"base": "x"}, {"head": "class"}])
def test_what_a_foreign_network_does_not_have_is_refused(option: dict, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError):
        scores(foreign(tmp_path), "digits", **option)


def test_a_foreign_network_agrees_with_itself(tmp_path: Path) -> None:
    source = foreign(tmp_path)
    with pytest.warns(UserWarning, match=INDICES):
        found = disagreement([source, source], "digits")
    with pytest.warns(UserWarning, match=INDICES):
        top1 = patchloom.evaluate(source, "digits")["top1"]
    assert found["rates"][1][2] == 0
    assert found["rates"][0][1] == pytest.approx(1 - top1)


def test_numeric_folders_of_a_nameless_model_are_indices(tmp_path: Path) -> None:
    """Folders 0 to 11, which sort as 0, 1, 10, 11, 2: truth and predictions are named by the same order."""
    for label in range(12):
        (tmp_path / "data" / str(label)).mkdir(parents=True)
        pixels = np.random.RandomState(label).randint(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / str(label) / "0.png")
    network = patchloom.create_model("deit_nano", num_classes=12, depth=1)
    patchloom.save(network, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=INDICES):
        found = disagreement([tmp_path / "model.safetensors"], tmp_path / "data", split="all")
    with pytest.warns(UserWarning, match=INDICES):
        top1 = patchloom.evaluate(tmp_path / "model.safetensors", tmp_path / "data", split="all")["top1"]
    assert found["rates"][0][1] == pytest.approx(1 - top1)
