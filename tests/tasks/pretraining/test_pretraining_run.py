"""Runs of `pretrain`: folders without classes, the log, probes, the report and the export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pretraining_runs
import pytest
import torch
from safetensors.torch import load_file

import patchloom
from patchloom.console import Console
from patchloom.inference.probes import probe
from patchloom.recipes.registry import find_recipe
from patchloom.runs.launch import resume
from patchloom.tasks.pretraining.config import PretrainingConfig
from patchloom.tasks.pretraining.plans import plan_pretraining
from patchloom.tasks.registry import find_task
from patchloom.tasks.spec import Context
from patchloom.training.processes import Processes

flat, labelled, pretrain, records = (
    pretraining_runs.flat,
    pretraining_runs.labelled,
    pretraining_runs.pretrain,
    pretraining_runs.records,
)

Records = Callable[[Path], list[dict[str, Any]]]


def test_a_flat_folder_leaves_a_whole_run_folder(flat: Path, pretrain: Callable[..., Path], records: Records) -> None:
    run = pretrain(flat)
    for name in ("recipe.yaml", "environment.json", "log.jsonl", "checkpoints", "report.html"):
        assert (run / name).exists()
    described = json.loads((run / "export" / "model.json").read_text())
    assert (described["task"], described["method"], described["config"]["head"]) == ("pretrain", "dino", "none")
    start, *rest = records(run)
    assert (start["step"], start["epoch"]) == (0, 0)
    assert "train_loss" not in start
    assert [row["step"] for row in rest] == [3, 6]
    for row in rest:
        assert row["losses"].keys() == {"dino"}
        assert row["train_loss"] == pytest.approx(row["losses"]["dino"])
        assert {"std", "entropy", "entropy_of_mean"} <= row.keys()
        assert "knn" not in row
    page = (run / "report.html").read_text()
    assert page.count("data:image/png") >= 24
    assert "Attention of the last block" in page
    assert "http" not in page.split("<script>")[0].replace("http://www.w3.org", "")


def test_images_in_nested_folders_and_beside_them_are_all_trained_on(flat: Path, pretrain: Callable[..., Path]) -> None:
    inner = flat / "2019" / "may"
    inner.mkdir(parents=True)
    for path in sorted(flat.glob("*.png"))[:10]:
        path.rename(inner / path.name)
    run = pretrain(flat, epochs=1)
    summary = json.loads((run / "environment.json").read_text())["data"]["split"]
    assert summary.startswith("All 24 images")


def test_labels_are_measured_by(labelled: Path, pretrain: Callable[..., Path], records: Records) -> None:
    run = pretrain(labelled, probe_every=2, epochs=3)
    found = [(row["epoch"], row["knn"], row["linear"]) for row in records(run) if "knn" in row]
    assert [epoch for epoch, *_ in found] == [0, 2, 3]
    assert all(0 <= value <= 1 for _, *values in found for value in values)
    assert len(json.loads((run / "environment.json").read_text())["data"]["held_out"]) == 9


def test_labels_are_not_trained_on(flat: Path, pretrain: Callable[..., Path], tmp_path: Path) -> None:
    images, exports = sorted(flat.glob("*.png")), []
    for name, classes in (("thirds", 3), ("halves", 2)):
        rows = [f"{path},{i % classes},{'val' if i > 17 else 'train'}" for i, path in enumerate(images)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
        exports.append(pretrain(tmp_path / f"{name}.csv", name, epochs=1) / "export" / "model.safetensors")
    one, other = (load_file(path) for path in exports)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_last_probe_is_what_evaluate_gives_for_the_export(
    labelled: Path, pretrain: Callable[..., Path], records: Records
) -> None:
    run = pretrain(labelled, probe_every=2)
    found = probe(run, labelled, "knn", k=20, device="cpu")
    assert found["count"] == 9
    assert records(run)[-1]["knn"] == pytest.approx(found["top1"])
    assert records(run)[-1]["linear"] == pytest.approx(probe(run, labelled, "linear", device="cpu")["top1"])
    assert patchloom.evaluate(run, labelled, device="cpu") == found


def test_the_first_record_is_the_untrained_network(
    labelled: Path, pretrain: Callable[..., Path], records: Records
) -> None:
    one, other = (records(pretrain(labelled, name, lr=lr, epochs=1)) for name, lr in (("a", 5e-4), ("b", 5e-2)))
    names = ("std", "entropy", "knn", "linear")
    assert [one[0][name] for name in names] == [other[0][name] for name in names]
    assert one[1]["std"] != other[1]["std"]


def test_the_teacher_is_exported_without_a_head(flat: Path, pretrain: Callable[..., Path]) -> None:
    run = pretrain(flat)
    network = patchloom.load(run)
    kept = load_file(sorted((run / "checkpoints").glob("step-*.safetensors"))[-1])
    own = network.state_dict()
    assert all(torch.equal(own[name], kept[f"teacher.{name}"]) for name in own)
    assert any(not torch.equal(own[name], kept[f"student.{name}"]) for name in own)
    assert "head" not in patchloom.parameter_roles(network).values()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(network(x), network.embed(x))


def test_local_crops_differ_from_epoch_to_epoch_and_follow_the_seed(flat: Path) -> None:
    from patchloom.tasks.pretraining.setup import open_task

    plan = plan_pretraining(
        flat, "deit_nano", "dino", "dino@small", {"batch_size": 24, "epochs": 2, "resolution": 32, "workers": 0}
    )
    task = open_task(plan.task, plan.recipe, Context(Processes(), Console(quiet=True)))
    one, two = (next(task.batches(step, step + 1)) for step in (0, 1))
    again = next(task.batches(1, 2))
    assert [tuple(crop.shape[1:]) for crop in one] == [(32, 32, 3)] * 2 + [(16, 16, 3)] * 4
    assert all(torch.equal(a, b) for a, b in zip(two, again, strict=True))
    assert not torch.equal(one[0], two[0])


@pytest.mark.parametrize(
    "changes",
    [{"accumulate": 2}, {"ema": 0.9}, {"precision": "bf16"}, {"gradient_checkpointing": True}],
    ids=["accumulate", "ema", "bf16", "checkpointing"],
)
def test_what_the_loop_offers_works(
    changes: dict[str, Any], flat: Path, pretrain: Callable[..., Path], records: Records
) -> None:
    run = pretrain(flat, epochs=1, **changes)
    last = records(run)[-1]
    assert np.isfinite(last["train_loss"])
    assert ("ema_std" in last) == ("ema" in changes)


def test_accumulated_steps_equal_whole_ones(flat: Path, pretrain: Callable[..., Path]) -> None:
    one, two = (pretrain(flat, f"by{parts}", accumulate=parts, epochs=1) for parts in (1, 2))
    first, second = (patchloom.load(run).state_dict() for run in (one, two))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-4, rtol=1e-3)


def test_a_run_starts_from_weights(flat: Path, pretrain: Callable[..., Path]) -> None:
    first = pretrain(flat)
    second = pretrain(flat, "second", model=first, model_options={}, lr=0.0, min_lr=0.0, warmup_epochs=0.0, epochs=1)
    one, other = (patchloom.load(run).state_dict() for run in (first, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_finished_run_is_extended(flat: Path, pretrain: Callable[..., Path], records: Records) -> None:
    run = pretrain(flat, epochs=1)
    resume(run, Console(quiet=True), more_epochs=1, device="cpu")
    assert [row["epoch"] for row in records(run)] == [0, 1, 2]


def test_the_config_survives_recipe_yaml(flat: Path) -> None:
    plan = plan_pretraining(flat, "resmlp_nano", "dino", "dino@small", {"probe_every": 3, "epochs": 2})
    again = PretrainingConfig.from_json(json.loads(json.dumps(plan.task.to_json())))
    assert again == plan.task
    assert find_task("pretrain").name == "pretraining"
    assert find_recipe("dino").method == "dino"


def test_a_plan_writes_nothing_and_says_what_is_learned(flat: Path, tmp_path: Path) -> None:
    from patchloom.tasks.pretraining.plan import plan

    run = plan_pretraining(flat, "deit_nano", "dino", None, {"epochs": 2, "resolution": 32, "workers": 0})
    assert any("dino@small" in note for note in run.notes)
    before = sorted(tmp_path.rglob("*"))
    found = plan(run, Context(Processes(), Console(quiet=True), opened=run.opened))
    assert sorted(tmp_path.rglob("*")) == before
    assert found["method"] == "dino"
    assert "local crops" in found["learned"]
    assert found["training_images"] == 24
    assert found["estimated_seconds"] > 0
