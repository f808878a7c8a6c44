"""Evaluation: figures against scikit-learn and formulas, classes by name, other labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics

import patchloom
from patchloom import PatchloomError
from patchloom.data.opening import open_source
from patchloom.kernels import native
from patchloom.models.imagenet import imagenet_ids, imagenet_names
from patchloom.tasks.classification.evaluate import real_accuracy, scores
from patchloom.tasks.classification.metrics import Scores, calibration_error


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    network = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    network.class_names = tuple(map(str, range(10)))
    return network.eval()


def test_figures_equal_those_of_scikit_learn(model) -> None:
    result = scores(model, "digits", batch=50)
    truth = np.array([item.label for item in open_source("digits").splits["val"]])
    assert np.array_equal(result.labels, truth)
    summary = result.summary()
    assert summary["top1"] == pytest.approx(metrics.accuracy_score(truth, result.predicted))
    assert np.array_equal(result.confusion(), metrics.confusion_matrix(truth, result.predicted, labels=range(10)))
    assert sum(row["count"] for row in summary["per_class"].values()) == summary["count"] == 359
    recall = metrics.recall_score(truth, result.predicted, average=None, labels=range(10), zero_division=0)
    assert [row["top1"] for row in summary["per_class"].values()] == pytest.approx(recall.tolist())
    assert summary["top1"] <= summary["top5"] <= 1


def test_the_batch_size_changes_nothing(model) -> None:
    small, large = scores(model, "digits", batch=7), scores(model, "digits", batch=359)
    assert np.array_equal(small.predicted, large.predicted)
    assert np.allclose(small.loss, large.loss, atol=1e-5)


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_products_of_bytes_change_few_answers_and_the_batch_none(model) -> None:
    exact, near = scores(model, "digits"), scores(model, "digits", int8=True)
    assert np.mean(exact.predicted == near.predicted) > 0.9
    assert not np.allclose(exact.loss, near.loss, atol=1e-5)
    assert np.allclose(near.loss, scores(model, "digits", batch=7, int8=True).loss, atol=1e-5)


def test_calibration_error_by_hand() -> None:
    confidence = np.array([0.95, 0.95, 0.55, 0.55])
    correct = np.array([True, False, True, True])
    assert calibration_error(confidence, correct) == pytest.approx(0.5 * abs(0.5 - 0.95) + 0.5 * abs(1 - 0.55))
    assert calibration_error(np.ones(5), np.ones(5, dtype=bool)) == 0


def test_classes_are_matched_by_name(model) -> None:
    plain = scores(model, "digits").summary()
    turned = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1).eval()
    turned.load_state_dict(model.state_dict())
    with torch.no_grad():
        turned.head.weight.copy_(model.head.weight.flip(0))
        turned.head.bias.copy_(model.head.bias.flip(0))
    turned.class_names = model.class_names[::-1]
    assert scores(turned, "digits").summary()["top1"] == plain["top1"]
    turned.class_names = tuple("abcdefghij")
    with pytest.raises(PatchloomError, match="does not know: 0, 1"):
        scores(turned, "digits")
    mapped = scores(turned, "digits", class_map=dict(zip("0123456789", "jihgfedcba", strict=True)))
    assert mapped.summary()["top1"] == plain["top1"]


def test_real_counts_any_of_several_labels_and_leaves_images_without_any_out() -> None:
    nothing, names = np.zeros(4), tuple(map(str, range(1000)))  # 1000 classes without names
    keys = tuple(f"val/ILSVRC2012_val_0000000{i}.JPEG" for i in (1, 2, 3, 4))
    said = Scores(np.array([0, 1, 2, 3]), np.array([0, 2, 2, 1]), nothing, nothing, nothing, names, keys)
    got = real_accuracy(said, [[0, 3], [1, 2], [], [3]])
    assert got == {"real_top1": 2 / 3, "real_count": 3}
    for wrong in ([[0]], {"1": [0]}, [[0]] * 3):
        with pytest.raises(PatchloomError, match="ReaL"):
            real_accuracy(said, wrong)


def test_real_needs_imagenets_classes_by_name_or_order() -> None:
    ids, nothing = imagenet_ids(), np.zeros(1)
    keys = ("ILSVRC2012_val_00000001.JPEG",)
    for names, said in ((ids, 7), (ids[::-1], 992), (imagenet_names(), 7), (tuple(map(str, range(1000))), 7)):
        result = Scores(np.array([7]), np.array([said]), nothing, nothing, nothing, names, keys)
        assert real_accuracy(result, [[3, 7]])["real_top1"] == 1
        assert real_accuracy(result, [[3]])["real_top1"] == 0
    for names in (tuple("abcd"), ids[:100], tuple(f"class {i}" for i in range(1000))):
        with pytest.raises(PatchloomError, match="1000"):
            real_accuracy(Scores(np.array([0]), np.array([0]), nothing, nothing, nothing, names, keys), [[0]])


def test_a_network_that_knows_nothing_is_never_right(model) -> None:
    broken = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1).eval()
    broken.class_names = model.class_names
    with torch.no_grad():
        broken.head.weight.zero_()
        broken.head.bias.zero_()
        constant = scores(broken, "digits").summary()
        broken.head.bias.fill_(float("nan"))
        nothing = scores(broken, "digits").summary()
    assert constant["top1"] < 0.15
    assert (nothing["top1"], nothing["top5"]) == (0, 0)


def test_splits_can_be_chosen(model) -> None:
    assert scores(model, "digits", split="train").summary()["count"] == 1438
    assert scores(model, "digits", split="all").summary()["count"] == 1797
    with pytest.raises(PatchloomError, match="test"):
        scores(model, "digits", split="test")
    with pytest.raises(PatchloomError, match="the name of a split, not int"):
        scores(model, "digits", split=3)


def test_the_command_prints_json(model, tmp_path: Path, capsys) -> None:
    from patchloom.cli.main import main

    patchloom.save(model, tmp_path / "m.safetensors")
    main(["evaluate", str(tmp_path / "m.safetensors"), "digits", "--json"])
    got = json.loads(capsys.readouterr().out)
    assert {"top1", "top5", "count", "loss", "ece", "per_class", "confusion"} <= set(got)
    main(["evaluate", str(tmp_path / "m.safetensors"), "digits", "--resolution", "32"])
    assert "359 images" in capsys.readouterr().out
