"""Runs of Grafit: logged losses against the formulas, labels of any kind, exports, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import patchloom
from patchloom.cli.main import main
from patchloom.console import Console
from patchloom.errors import PatchloomError
from patchloom.models.heads import MLPHead
from patchloom.search.granularity import granularity
from patchloom.tasks.classification.images import open_images
from patchloom.tasks.retrieval import clusters
from patchloom.tasks.retrieval.images import open_labelled
from patchloom.tasks.retrieval.plans import plan_grafit
from patchloom.tasks.retrieval.setup import make_task
from patchloom.tasks.spec import Context
from patchloom.training.processes import Processes
from patchloom.weights import foreign

TINY: dict[str, Any] = {
    "model": "resmlp_nano", "model_options": {"depth": 1, "dim": 32}, "resolution": 16, "views": 2, "workers": 0,
    "batch_size": 8, "epochs": 1, "projector_hidden": 16, "projector_dim": 12, "predictor_hidden": 16,
    "device": "cpu", "console": Console(quiet=True),
}  # fmt: skip
QUIET: dict[str, Any] = {"device": "cpu", "console": Console(quiet=True)}
# nothing moves but the memory, which comes to hold the embeddings
STILL: dict[str, Any] = {
    "lr": 0.0, "min_lr": 0.0, "warmup_epochs": 0.0, "augmentation": "none", "affine": 0.0, "color_jitter": 0.0,
    "epochs": 30, "eval_every": "30 epochs", "checkpoint_every": "1h",
}  # fmt: skip


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """24 training images of one colour each, whose crops and flips are all alike, in three classes; 4 held out."""
    return table(tmp_path, ["a"] * 9 + ["b"] * 8 + ["c"] * 7)


def table(folder: Path, names: list[str], held_out: int = 4) -> Path:
    draw = np.random.default_rng(0)
    rows = []
    for i, name in enumerate([*names, *(names[-1] for _ in range(held_out))]):
        Image.new("RGB", (16, 16), tuple(int(v) for v in draw.integers(0, 256, 3))).save(folder / f"{i:02d}.png")
        rows.append([f"{i:02d}.png", name, f"fine {i % 4}", "train" if i < len(names) else "val"])
    with open(folder / "colours.csv", "w", newline="") as file:
        csv.writer(file).writerows([["path", "colour", "fine", "split"], *rows])
    return folder / "colours.csv"


def rows_of(data: Path, split: str) -> list[dict[str, str]]:
    with open(data, newline="") as file:
        return [row for row in csv.DictReader(file) if row["split"] == split]


def record(run: Path) -> dict[str, Any]:
    return json.loads((run / "log.jsonl").read_text().splitlines()[-1])


def embeddings(run: Path, data: Path, split: str = "train") -> tuple[np.ndarray, list[str]]:
    """Unit vectors of the images of a manifest, read and normalised by hand."""
    network, chosen = patchloom.load(run), rows_of(data, split)
    pixels = [np.asarray(Image.open(data.parent / row["path"]), np.float64) / 255 for row in chosen]
    mean, std = (np.asarray(v) for v in (network.preprocessing.mean, network.preprocessing.std))
    x = torch.from_numpy(np.stack([(image - mean) / std for image in pixels])).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        vectors = network.embed(x).double().numpy()
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), [row["colour"] for row in chosen]


def neighbour_loss(z: np.ndarray, labels: list[str]) -> float:
    """The mean of Eq. 2.3 with m = z."""
    losses = []
    for i, label in enumerate(labels):
        weights = {j: math.exp(float(z[i] @ z[j]) / 0.05) for j in range(len(z)) if j != i}
        own = sum(weight for j, weight in weights.items() if labels[j] == label)
        losses.append(-math.log(own / sum(weights.values())))
    return float(np.mean(losses))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "projector", "changes"),
    [("knn", "none", {}), ("knn+inst", "fc", {"memory_update": "before"}), ("knn", "fc", {"memory_start": "network"})],
)
def test_the_logged_loss_is_equation_2_3_over_all_images(
    loss: str, projector: str, changes: dict[str, Any], colours: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    patchloom.grafit(
        colours, out=run, labels="colour", **{**TINY, **STILL, "loss": loss, "projector": projector, **changes}
    )
    z, labels = embeddings(run, colours)
    assert record(run)["losses"]["knn"] > 0
    task_memory = load_file(next((run / "checkpoints").glob("step-*")))["state.memory"].double().numpy()
    np.testing.assert_allclose(np.sort((task_memory @ task_memory.T).ravel()), np.sort((z @ z.T).ravel()), atol=1e-4)
    # one more epoch, whose mean is of a memory at rest
    resumed = patchloom_resume(run)
    assert record(resumed)["losses"]["knn"] == pytest.approx(neighbour_loss(z, labels), abs=2e-4)


def patchloom_resume(run: Path) -> Path:
    from patchloom.runs.launch import resume

    resume(run, Console(quiet=True), more_epochs=30, device="cpu")
    return run


def test_held_out_images_are_not_in_the_collection_they_are_classified_by(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for i in range(20):
        folder = tmp_path / "photos" / f"class {i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i:02d}.png")
    run = patchloom.grafit(tmp_path / "photos", out=tmp_path / "run", **TINY).folder
    found = patchloom.evaluate(run, tmp_path / "photos", k=1, device="cpu")
    assert (found["count"], found["collection"]) == (4, 16)


def test_losses_are_logged_by_name_and_their_sum_is_trained(colours: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    patchloom.grafit(colours, out=run, labels="colour", instance_weight=0.5, **TINY)
    logged = record(run)
    assert set(logged["losses"]) == {"knn", "inst"}
    assert logged["train_loss"] == pytest.approx(sum(logged["losses"].values()))
    assert abs(logged["losses"]["inst"]) <= 0.5
    assert 0 <= logged["knn"] <= 1


def test_the_export_is_trunk_and_projector(colours: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    patchloom.grafit(colours, out=run, labels="colour", **TINY)
    network = patchloom.load(run)
    assert network.label_column == "colour"
    assert network.class_names == ("a", "b", "c")
    x = torch.randn(2, 3, 16, 16)
    assert network.embed(x).shape == (2, 12)
    torch.testing.assert_close(network(x), network.embed(x))  # without cross-entropy there is no classifier
    torch.testing.assert_close(patchloom.fuse(network).embed(x), network.embed(x), rtol=1e-4, atol=1e-5)
    assert patchloom.load(run, img_size=32).embed(torch.randn(1, 3, 32, 32)).shape == (1, 12)
    names = set(load_file(run / "export" / "model.safetensors"))
    assert {name.split(".")[0] for name in names} == {"trunk", "projector"}
    assert not any("head" in name for name in names)
    assert json.loads((run / "export" / "model.json").read_text())["label_column"] == "colour"
    assert (run / "report.html").read_text().count("data:image/jpeg") > 8


@pytest.mark.parametrize("loss", ["ce", "ce+inst", "inst", "triplet"])
def test_what_a_loss_exports(loss: str, colours: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    patchloom.grafit(colours, out=run, labels="colour", loss=loss, **TINY)
    assert set(record(run)["losses"]) == set(loss.split("+"))
    network, x = patchloom.load(run), torch.randn(2, 3, 16, 16)
    assert network.embed(x).shape == (2, 12 if loss == "triplet" else 32)
    assert network(x).shape[1] == (3 if "ce" in loss else network.embed(x).shape[1])


def test_without_labels_the_knn_loss_is_left_out_aloud(
    colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    patchloom.grafit(colours, out=run, labels="none", **{**TINY, "console": Console()})
    assert "The kNN loss is left out" in capsys.readouterr().out
    assert set(record(run)["losses"]) == {"inst"}
    assert patchloom.load(run).label_column is None
    assert patchloom.load(run).class_names is None
    found = patchloom.evaluate(run, colours, labels="fine")
    assert found["labels"] == "fine"


def test_classes_with_one_image_train_and_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = table(tmp_path, ["alone"] + ["b"] * 9 + ["c"] * 8)
    run = tmp_path / "run"
    patchloom.grafit(data, out=run, labels="colour", loss="knn", **{**TINY, "console": Console()})
    assert "1 class with one training image: alone." in capsys.readouterr().out
    assert math.isfinite(record(run)["losses"]["knn"])
    with pytest.raises(PatchloomError, match="alone"):
        patchloom.grafit(data, out=tmp_path / "other", labels="colour", loss="knn", singletons="refuse", **TINY)
    assert not (tmp_path / "other").exists()


def task_of(data: Path, **changes: Any) -> Any:
    settings = {
        k: v for k, v in {**TINY, **changes}.items() if k not in ("model", "model_options", "device", "console")
    }
    config = plan_grafit(data, TINY["model"], None, settings, TINY["model_options"], labels="colour")
    context = Context(Processes(), Console(quiet=True))
    images = open_images(config.task, config.recipe, context, open_labelled(config.task, context.opened))
    return make_task(config.task, config.recipe, images, context)


def test_the_target_follows_by_its_schedule(colours: Path) -> None:
    task = task_of(colours, target_decay=0.5, target_decay_end=1.0, epochs=4)  # 12 steps
    names = dict(task.modules["target"].trunk.named_parameters())
    name = next(name for name, parameter in names.items() if parameter.ndim == 2)
    before = names[name].clone()
    fast = dict(task.network.trunk.named_parameters())[name]
    with torch.no_grad():
        fast += 1
    # BYOL's tau of update k, from 0 on, of K: tau itself at the first one, nearly 1 at the last
    for k in (0, 6, 11):
        decay = 1 - (1 - 0.5) * (math.cos(math.pi * k / 12) + 1) / 2
        task.after_step(k + 1)
        before = decay * before + (1 - decay) * fast
        torch.testing.assert_close(names[name], before)


@pytest.mark.parametrize("loss", ["knn", "knn+inst"])
def test_a_projector_that_is_not_exported_is_what_the_knn_loss_trains(loss: str, colours: Path, tmp_path: Path) -> None:
    changes = {**TINY, "loss": loss, "embedding": "trunk", "memory_start": "network"}
    task = task_of(colours, **{k: changes[k] for k in ("loss", "embedding", "memory_start")})
    next(task.batches(0, 1))
    projector = task.modules["projector"]
    images = [task.split.train[i] for i in task.memory.images.tolist()]
    trunk = task._embed(task.network, images)
    assert (trunk.shape[1], task.memory.vectors.shape) == (32, (24, 12))
    projector.eval()
    # not from `trunk`: unit vectors have lost their lengths, which a projector with biases sees
    raw = torch.cat([task.network.trunk.embed(x) for x in inputs_of(task, images)])
    wanted = torch.nn.functional.normalize(projector(raw), dim=1)
    torch.testing.assert_close(task.memory.vectors, wanted, rtol=1e-4, atol=1e-5)
    assert task.network.config.projector == "none"  # of the export
    run = tmp_path / "run"
    before = {name: value.clone() for name, value in projector.named_parameters()}
    patchloom.grafit(colours, out=run, labels="colour", **changes)
    last = load_file(next((run / "checkpoints").glob("step-*")))
    moved = [name for name, value in before.items() if not torch.equal(last[f"projector.{name}"], value)]
    assert "0.weight" in moved
    assert int(last["projector.1.num_batches_tracked"]) == 3 * (2 if "inst" in loss else 1)  # once per view
    assert patchloom.load(run).embed(torch.randn(1, 3, 16, 16)).shape == (1, 32)


def inputs_of(task: Any, items: list[Any]) -> list[torch.Tensor]:
    from patchloom.data.images import to_input
    from patchloom.data.loader import eval_batches

    preprocessing = task.network.preprocessing
    batches = eval_batches(task.source, range(len(items)), items, preprocessing, 64, 0, False)
    return [to_input(images, preprocessing) for images, _ in batches]


def test_the_loss_sees_the_memory_before_or_after_the_update(colours: Path) -> None:
    for order in ("after", "before"):
        task = task_of(colours, memory_update=order)
        for module in task.modules.values():
            module.eval()
        task.network.train()
        start = task.memory.vectors.clone()
        batch = next(task.batches(0, 1))
        task.losses(batch, 0, 0)
        assert torch.equal(task.memory.vectors, start) == (order == "after")
        given_up = task.state()["memory"].clone()  # the step is given up: a checkpoint has the memory before it
        assert torch.equal(given_up, start)
        task.losses(batch, 0, 0)
        task.after_step(1)
        changed = (task.memory.vectors != start).any(dim=1).nonzero().flatten()
        assert set(changed.tolist()) == set(task.memory.row_of[batch[1]].tolist())


def test_memory_starts_at_random_or_with_the_network(colours: Path) -> None:
    random, again = (task_of(colours).memory.vectors for _ in range(2))
    assert torch.equal(random, again)
    task = task_of(colours, memory_start="network")
    next(task.batches(0, 1))
    images = [task.split.train[i] for i in task.memory.images.tolist()]
    torch.testing.assert_close(task.memory.vectors, task._embed(task.network, images))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": "color"}, "colour"),
        ({"model": "resmpl_nano"}, "resmlp_nano"),
        ({"epoch": 3}, "epochs"),
        ({"loss": "knn+knn"}, "knn\\+knn"),
        ({"projector": "mpl"}, "mpl"),
        ({"recipe": "deit"}, "deit is a recipe for classification"),
        ({"recipe": "clusterfit_plus@small", "clusters": 26}, "clusters=26 is more than the 24 training images"),
        ({"loss": "ce", "clusters": 5}, "--clusters-from"),
        ({"recipe": "clusterfit_plus@small", "labels": "none"}, "needs labels"),
        ({"mean": (0.5,) * 3}, "mean and std"),
        ({"model": "resmlp_mt_nano"}, "text"),
        ({"clusters_from": "somewhere"}, "clusterfit_plus"),
        ({"batch_size": 1}, "at least 2"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    change: dict[str, Any], words: str, colours: Path, tmp_path: Path
) -> None:
    with pytest.raises(PatchloomError, match=words):
        patchloom.grafit(colours, out=tmp_path / "run", **{"labels": "colour", **TINY, **change})
    assert not (tmp_path / "run").exists()


@pytest.fixture
def make_run(colours: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, **options: Any) -> Path:
        patchloom.grafit(colours, out=tmp_path / name, **{"labels": "colour", **TINY, **options})
        return tmp_path / name

    return make


def test_weights_to_start_from(make_run: Callable[..., Path], colours: Path, tmp_path: Path) -> None:
    first = make_run("first", lr=0.0, min_lr=0.0)
    second = make_run("second", model=first, model_options={}, lr=0.0, min_lr=0.0, seed=5)  # the trunk of a run
    one, other = (load_file(run / "export" / "model.safetensors") for run in (first, second))
    trunk = [name for name in one if name.startswith("trunk.")]
    assert all(torch.equal(one[name], other[name]) for name in trunk)
    assert not torch.equal(one["projector.0.weight"], other["projector.0.weight"])
    bare = tmp_path / "bare.safetensors"
    patchloom.save(patchloom.create_model("deit_nano", 10, img_size=16, depth=1), bare)
    third = make_run("third", model=bare, model_options={}, lr=0.0, min_lr=0.0)
    theirs = load_file(bare)
    mine = load_file(third / "export" / "model.safetensors")
    assert all(torch.equal(mine[f"trunk.{name}"], theirs[name]) for name in theirs if "head" not in name)


def test_a_run_of_grafit_is_fine_tuned_as_a_classifier(
    make_run: Callable[..., Path], colours: Path, tmp_path: Path
) -> None:
    first = make_run("first")
    patchloom.finetune(
        first, colours, out=tmp_path / "tuned", labels="fine", recipe="grafit_transfer@small", epochs=1, batch_size=8,
        workers=0, console=Console(quiet=True), device="cpu",
    )  # fmt: skip
    assert patchloom.load(tmp_path / "tuned")(torch.randn(1, 3, 16, 16)).shape == (1, 4)


def test_clusterfit_learns_clusters_of_a_baseline(make_run: Callable[..., Path]) -> None:
    baseline = make_run("baseline", recipe="grafit_baseline@small")
    run = make_run("clusters", recipe="clusterfit_plus@small", clusters=5, clusters_from=baseline)
    network = patchloom.load(run)
    assert network.label_column is None
    assert network.class_names == tuple(f"cluster {i}" for i in range(5))
    environment = json.loads((run / "environment.json").read_text())
    assert len(environment["clusters"]) == 24


def test_many_clusters_are_found_in_batches_nearly_as_well_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more clusters than a batch of scikit-learn's default has vectors, as the recipe's 15,000 are."""
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(1200, 8))[draw.integers(0, 1200, 5000)] + 0.3 * draw.normal(size=(5000, 8))

    def inertia() -> float:
        found = clusters._k_means(vectors, 1200, 0)
        parts = (vectors[found == one] for one in np.unique(found))
        return sum(float(((part - part.mean(axis=0)) ** 2).sum()) for part in parts)

    at_once = inertia()
    monkeypatch.setattr(clusters, "_WHOLE", 1000)
    assert inertia() < 1.15 * at_once


def test_clusterfit_trains_its_baseline_first(colours: Path, tmp_path: Path, capsys) -> None:
    """One command: stage by stage what two runs give, and a run that was cut between the stages is resumed."""
    words = ["--recipe", "clusterfit_plus@small", "clusters=5", "model.depth=1", "model.dim=32", "img_size=16"]
    words += ["epochs=1", "batch_size=8", "workers=0", "--labels", "colour", "--out", str(tmp_path / "run")]
    main(["grafit", str(colours), "--model", "resmlp_nano", *words, "--plan", "--json"])
    planned = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["recipe"] for stage in planned] == ["grafit_baseline@small", "clusterfit_plus@small"]
    main(["grafit", str(colours), "--model", "resmlp_nano", *words])
    run, first = tmp_path / "run", tmp_path / "run" / "baseline"
    assert patchloom.load(first).class_names == ("a", "b", "c")
    assert patchloom.load(run).class_names == tuple(f"cluster {i}" for i in range(5))
    kept = (run / "export" / "model.safetensors").read_bytes()
    for place in [path for path in run.iterdir() if path.name not in ("baseline", "stages.json")]:
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    main(["resume", str(run)])
    assert (run / "export" / "model.safetensors").read_bytes() == kept
    # in the granularity matrix it stands under the level of its baseline, and under its recipe
    rows = granularity([str(run), str(first)], str(colours), ["colour", "fine"])["runs"]
    assert [row["method"] for row in rows] == ["clusterfit_plus@small", "grafit_baseline@small"]
    assert [row["train_level"] for row in rows] == ["colour", "colour"]


def test_a_classifier_on_trained_weights_starts_at_zero(make_run: Callable[..., Path]) -> None:
    first = make_run("first", lr=0.0, min_lr=0.0, recipe="grafit_baseline@small")
    options = {"recipe": "grafit_baseline@small", "lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0}
    second = make_run("second", model=first, model_options={}, **options)
    one, other = (load_file(run / "export" / "model.safetensors") for run in (first, second))
    heads = [name for name in one if name.startswith("head.")]
    assert len(heads) == 2
    assert all(one[name].any() and not other[name].any() for name in heads)


def test_published_weights_of_timm_are_trunks(colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag stands for published weights; without one the network starts at random."""
    timm = pytest.importorskip("timm")
    name = "test_resnet.r160_in1k"
    published = timm.create_model(name)
    monkeypatch.setattr(foreign, "_published", lambda source, wanted: published.state_dict() if wanted == name else {})
    still = {**TINY, "resolution": 32, "model_options": {}, "lr": 0.0, "min_lr": 0.0}
    run = patchloom.grafit(colours, out=tmp_path / "run", labels="colour", **{**still, "model": f"timm:{name}"})
    mine = load_file(run.folder / "export" / "model.safetensors")
    convolution = next(key for key in published.state_dict() if key.endswith("conv1.weight"))
    assert torch.equal(mine[f"trunk.network.{convolution}"], published.state_dict()[convolution])
    random = plan_grafit(colours, "timm:test_resnet", "grafit@small", {}, labels="colour")
    assert random.task.start is None


@pytest.mark.parametrize("model", ["resmlp_nano", "timm:test_resnet"])
def test_both_transfer_heads_start_from_the_trunk(model: str, colours: Path, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    options = {"model_options": {}} if model.startswith("timm") else {}
    still = {"lr": 0.0, "min_lr": 0.0, "resolution": 32}
    patchloom.grafit(colours, out=tmp_path / "run", labels="colour", **{**TINY, **options, **still, "model": model})
    trunk = load_file(tmp_path / "run" / "export" / "model.safetensors")
    for head in ("linear", "mlp"):
        run = patchloom.finetune(
            tmp_path / "run", colours, out=tmp_path / head, labels="fine", recipe="grafit_transfer@small", epochs=1,
            model_options={"head": head}, batch_size=8, workers=0, warmup_epochs=0.0, **still, **QUIET,
        )  # fmt: skip
        network = patchloom.load(run.folder)
        assert network.class_names == tuple(f"fine {i}" for i in range(4))
        assert any(isinstance(module, MLPHead) for module in network.modules()) == (head == "mlp")
        mine = network.state_dict()
        kept = [name for name in trunk if name.startswith("trunk.") and name.endswith("weight")]
        assert kept
        assert all(torch.equal(trunk[name], mine[name.removeprefix("trunk.")]) for name in kept)


def test_predictions_are_equation_2_6(make_run: Callable[..., Path], colours: Path) -> None:
    run = make_run("run", epochs=2)
    z, labels = embeddings(run, colours)
    x, _ = embeddings(run, colours, "val")
    files = [colours.parent / row["path"] for row in rows_of(colours, "val")]
    rows = patchloom.predict(run, files, k=10, top=3)
    for query, row in zip(x, rows, strict=True):
        near = np.argsort(-(z @ query), kind="stable")[:10]
        weights = np.exp(z[near] @ query / 0.05)
        for found in row["predictions"]:
            own = sum(w for j, w in zip(near, weights, strict=True) if labels[j] == found["class"])
            assert found["probability"] == pytest.approx(own / weights.sum(), abs=1e-3)
    metrics = patchloom.evaluate(run, colours, k=10)
    assert metrics["count"] == 4
    assert metrics["collection"] == 24
    best = [row["predictions"][0]["class"] for row in rows]
    assert metrics["knn"] == pytest.approx(np.mean([name == "c" for name in best]))


@pytest.mark.parametrize(
    "model", ["deit_nano", "patchconvnet_nano", pytest.param("timm:resnet18", marks=pytest.mark.slow)]
)
def test_trunks_of_every_kind(model: str, make_run: Callable[..., Path]) -> None:
    options = {} if model.startswith("timm") else {"depth": 1}
    run = make_run("run", model=model, model_options=options, projector="fc", resolution=32, batch_size=12)
    assert patchloom.load(run).embed(torch.randn(1, 3, 32, 32)).shape == (1, 12)


def test_accumulated_steps_update_the_memory_once(make_run: Callable[..., Path]) -> None:
    run = make_run("run", accumulate=2, supervised_view="extra", ema=0.9)
    assert set(record(run)["losses"]) == {"knn", "inst"}
    assert "ema_knn" in record(run)


def test_a_trunk_with_trained_weights_learns_more_slowly_than_its_projector(colours: Path, tmp_path: Path) -> None:
    network = patchloom.create_model("resmlp_nano", depth=1, dim=32, img_size=16)
    patchloom.save(network, tmp_path / "trunk.safetensors")
    changes = {"lr": 0.2, "batch_size": 8}
    plan = plan_grafit(colours, tmp_path / "trunk.safetensors", "grafit@small", changes, labels="colour")
    assert (plan.recipe.lr, plan.recipe.head_lr) == (pytest.approx(0.02), 0.2)
    assert any("learns at 0.02" in note for note in plan.notes)
    classifier = plan_grafit(colours, tmp_path / "trunk.safetensors", "grafit_baseline@small", changes, labels="colour")
    assert (classifier.recipe.lr, classifier.recipe.head_lr) == (pytest.approx(0.02), None)
    for other in (
        plan_grafit(
            colours, tmp_path / "trunk.safetensors", "grafit@small", {**changes, "trained_lr": 1.0}, labels="colour"
        ),
        plan_grafit(colours, tmp_path / "trunk.safetensors", "grafit", changes, labels="colour"),
        plan_grafit(colours, "resmlp_nano", "grafit@small", changes, labels="colour"),
    ):
        assert (other.recipe.lr, other.recipe.head_lr) == (0.2, None)
    own = plan_grafit(
        colours, tmp_path / "trunk.safetensors", "grafit@small", {**changes, "head_lr": 0.5}, labels="colour"
    )
    assert (own.recipe.lr, own.recipe.head_lr) == (0.2, 0.5)


def test_the_small_recipe_starts_from_the_angles_of_trained_weights(colours: Path, tmp_path: Path) -> None:
    """Before any training the run ranks as its trunk does; a random projector does not."""
    network = patchloom.create_model("resmlp_nano", depth=1, dim=32, img_size=16).eval()
    patchloom.save(network, tmp_path / "trunk.safetensors")
    still = {"lr": 0.0, "epochs": 1, "batch_size": 8, "workers": 0, "device": "cpu", "projector": "fc"}
    cosines = {}
    for start in ("linear", "random", "auto"):
        run = tmp_path / start
        patchloom.grafit(
            colours, model=tmp_path / "trunk.safetensors", labels="colour", recipe="grafit@small", out=run,
            console=Console(quiet=True), projector_start=start, projector_dim=32, **still,
        )  # fmt: skip
        z = embeddings(run, colours)[0]
        cosines[start] = z @ z.T
    chosen = rows_of(colours, "train")
    mean, std = (np.asarray(v) for v in (network.preprocessing.mean, network.preprocessing.std))
    pixels = [(np.asarray(Image.open(colours.parent / row["path"]), np.float64) / 255 - mean) / std for row in chosen]
    with torch.no_grad():
        v = network.embed(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float()).double().numpy()
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    assert np.abs(cosines["linear"] - v @ v.T).max() < 1e-4
    assert np.array_equal(cosines["auto"], cosines["linear"])
    assert np.abs(cosines["random"] - v @ v.T).max() > 1e-2


def test_the_logged_accuracy_has_the_temperature_of_eq_2_6_whatever_sigma_trained(
    colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As report and `evaluate` have it. The nearest image outweighs nine of another class, which a sigma of 50 would
    count alike."""
    task = task_of(colours, sigma=50.0)
    train = torch.eye(24)
    monkeypatch.setattr(task, "_embed", lambda _, items, *__: train if len(items) == 24 else train[-4:])
    assert task.evaluate(task.modules, lambda: None) == {"count": 4, "knn": 1.0}


def test_weights_that_give_nan_are_not_evaluated(make_run: Callable[..., Path], colours: Path) -> None:
    from patchloom.tasks.retrieval.evaluate import evaluate

    network = patchloom.load(make_run("run"))
    with torch.no_grad():
        next(network.parameters()).fill_(math.nan)
    with pytest.raises(PatchloomError, match="NaN"):
        evaluate(network, colours, labels="colour", device="cpu")
