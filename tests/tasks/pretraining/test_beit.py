"""BeiT: a tokenizer is trained, then a network that predicts its codes, in one command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretraining_runs
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import patchloom
from patchloom.console import Console
from patchloom.errors import InterruptedWork, PatchloomError
from patchloom.models.tokenizer import Tokenizer, TokenizerConfig
from patchloom.recipes.registry import find_recipe
from patchloom.runs.sequence import launch, resume
from patchloom.tasks.pretraining.beit import PREDICTION, Beit
from patchloom.tasks.pretraining.method import ENCODER
from patchloom.tasks.pretraining.plans import plan_pretraining
from patchloom.tasks.pretraining.setup import open_task
from patchloom.tasks.pretraining.task import Pretraining
from patchloom.tasks.pretraining.tokenizer import TOKENIZER, TokenizerTraining
from patchloom.tasks.spec import Context, RunConfig
from patchloom.training.loop import Loop
from patchloom.training.processes import Processes

make_folder, records = pretraining_runs.make_folder, pretraining_runs.records

QUIET = Console(quiet=True)
SETTINGS: dict[str, Any] = {
    "resolution": 32, "workers": 0, "batch_size": 8, "epochs": 2, "tokenizer_epochs": 2, "tokenizer_dim": 16,
    "codes": 16, "code_dim": 4,
}  # fmt: skip
TRUNK = {"depth": 2, "dim": 48, "patch_size": 8}
records, make_folder = pretraining_runs.records, pretraining_runs.make_folder

Records = Callable[[Path], list[dict[str, Any]]]


def plan(
    data: Path, *, model: str = "deit_nano", tokenizer: Path | None = None, options: Any = None, **changes: Any
) -> RunConfig:
    settings = {**SETTINGS, **changes}
    if tokenizer is not None:  # it decides them
        settings = {name: value for name, value in settings.items() if not name.startswith(("tokenizer", "code"))}
    return plan_pretraining(
        data, model, "beit", "beit@small", settings, {**TRUNK, **(options or {})}, tokenizer=tokenizer
    )


def pretrain(data: Path, out: Path, **options: Any) -> Path:
    return launch(plan(data, **options), out, console=QUIET, device="cpu").folder


def task_of(config: RunConfig, processes: Processes | None = None) -> Pretraining:
    return open_task(config.task, config.recipe, Context(processes or Processes(), QUIET, writes=False))  # type: ignore[return-value]


def beit_task(data: Path, **options: Any) -> tuple[Pretraining, Beit]:
    """The second run, with a tokenizer of random weights."""
    first = plan(data, **options)
    assert first.then is not None
    task = task_of(first.then.check(first))
    assert isinstance(task.method, Beit)
    return task, task.method


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Path:
    return make_folder(tmp_path_factory.mktemp("photos") / "flat", 24)


@pytest.fixture(scope="module")
def done(photos: Path) -> Path:
    """A finished run, made once."""
    return pretrain(photos, photos.parent / "run")


def test_one_command_trains_a_tokenizer_and_then_the_network(done: Path, records: Records) -> None:
    for folder in (done, done / "tokenizer"):
        for name in ("recipe.yaml", "environment.json", "log.jsonl", "checkpoints", "report.html", "export/model.json"):
            assert (folder / name).exists()
    *_, first = records(done / "tokenizer")
    assert first["losses"].keys() == {"reconstruction", "commitment"}
    assert {"codes", "perplexity", "reconstruction_error"} <= first.keys()
    assert first["epoch"] == 2
    *_, last = records(done)
    assert last["losses"].keys() == {"masked_codes"}
    assert {"codes", "perplexity", "accuracy", "accuracy_of_most_frequent", "std"} <= last.keys()
    assert 1 <= last["perplexity"] <= last["codes"] <= 16


def test_the_reports_show_reconstructions(done: Path) -> None:
    page = (done / "report.html").read_text()
    assert "Masked patches and their predicted codes" in page
    assert page.count("data:image/png") == 12 * 4
    assert (done / "tokenizer" / "report.html").read_text().count("data:image/png") == 12 * 2


def test_the_export_is_the_network_alone_and_the_tokenizer_beside_it(done: Path) -> None:
    network = patchloom.load(done)
    assert network.config.aggregation == "average"  # type: ignore[attr-defined]
    roles = patchloom.parameter_roles(network)
    assert not {"head", "token"} & set(roles.values())
    tokenizer: Any = patchloom.load(done / "export" / "tokenizer.safetensors")
    assert tokenizer.config.grid == (4, 4)
    assert all(torch.equal(weights(done / "tokenizer")[name], value) for name, value in tokenizer.state_dict().items())


@pytest.mark.parametrize("stage", [1, 2])
def test_a_run_that_is_cut_in_either_stage_ends_with_the_same_bits(
    stage: int, photos: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = Loop.step, []

    def stopping(self: Loop, batch: Any) -> None:
        real(self, batch)
        steps.append(1)
        if len(steps) == (2, 9)[stage - 1]:  # each stage has six steps
            self._signal = "a test"

    monkeypatch.setattr(Loop, "step", stopping)
    with pytest.raises(InterruptedWork):
        pretrain(photos, tmp_path / "cut")
    monkeypatch.undo()
    assert (tmp_path / "cut" / "recipe.yaml").exists() == (stage == 2)
    resume(tmp_path / "cut", QUIET, device="cpu")
    for folder in ("", "tokenizer"):
        want, got = weights(done / folder), weights(tmp_path / "cut" / folder)
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want)


def test_a_resumed_network_has_its_tokenizer_from_the_checkpoint(
    photos: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real, steps = tmp_path / "t.safetensors", Loop.step, []
    file.write_bytes((done / "export" / "tokenizer.safetensors").read_bytes())

    def stopping(self: Loop, batch: Any) -> None:
        real(self, batch)
        steps.append(1)
        if len(steps) == 4:
            self._signal = "a test"

    want = weights(pretrain(photos, tmp_path / "straight", tokenizer=file))
    monkeypatch.setattr(Loop, "step", stopping)
    with pytest.raises(InterruptedWork):
        pretrain(photos, tmp_path / "cut", tokenizer=file)
    monkeypatch.undo()
    file.unlink()
    got = weights(resume(tmp_path / "cut", QUIET, device="cpu").folder)
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize(
    "place", ["", "tokenizer", "tokenizer/export/model.safetensors", "export/tokenizer.safetensors"]
)
def test_a_trained_tokenizer_is_taken_from_a_run_or_a_file(place: str, photos: Path, done: Path) -> None:
    config = plan(photos, tokenizer=done / place)
    assert config.then is None
    assert config.recipe.codes == 16  # as the tokenizer has, not as the recipe
    tokenizer: Any = task_of(config).modules[TOKENIZER]
    want = weights(done / "tokenizer")
    assert all(torch.equal(want[name], value) for name, value in tokenizer.state_dict().items())


def test_a_tokenizer_of_another_grid_is_refused(photos: Path, done: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=r"4 x 4 codes .* 8 x 8 patches"):
        pretrain(photos, tmp_path / "run", tokenizer=done, options={"patch_size": 4})
    assert not (tmp_path / "run").exists()


def test_what_is_no_tokenizer_is_refused(photos: Path, done: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=r"There is no tokenizer .*nothing"):
        plan(photos, tokenizer=tmp_path / "nothing")
    with pytest.raises(PatchloomError, match="is not a tokenizer"):
        plan(photos, tokenizer=done / "export" / "model.safetensors")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "stages.json").write_text("{}")
    with pytest.raises(PatchloomError, match="finished run"):
        plan(photos, tokenizer=tmp_path / "begun")
    with pytest.raises(PatchloomError, match="codes is a setting of the tokenizer"):
        plan_pretraining(photos, "deit_nano", "beit", "beit@small", {"codes": 64}, TRUNK, tokenizer=done)
    with pytest.raises(PatchloomError, match="--tokenizer is for --method beit"):
        plan_pretraining(photos, "deit_nano", "dino", "dino@small", {"resolution": 32}, TRUNK, tokenizer=done)


def test_networks_without_patches_are_refused(photos: Path) -> None:
    with pytest.raises(PatchloomError, match="has no patches"):
        plan_pretraining(photos, "timm:resnet18", "beit", "beit@small", {"resolution": 32}, {})


@pytest.mark.parametrize(
    "trunk",
    [
        {"model": "deit_nano", "stem": "hmlp"},
        {"model": "deit_nano", "stem": "conv"},
        {"model": "cait_nano"},
        {"model": "resmlp_nano"},
        {"model": "patchconvnet_nano"},
        {"model": "deit_nano", "options": {"aggregation": "class_token"}},
    ],
)
def test_every_stem_and_family_learns_the_codes(trunk: dict[str, Any], photos: Path) -> None:
    options = {"depth": 2, "patch_size": 8, **trunk.get("options", {})}
    first = plan_pretraining(
        photos, trunk["model"], "beit", "beit@small",
        {**SETTINGS, **({"stem": trunk["stem"]} if "stem" in trunk else {})}, options,
    )  # fmt: skip
    assert first.then is not None
    task = task_of(first.then.check(first))
    (batch,) = task.batches(0, 1)
    losses = task.losses(batch, 0, 0)["masked_codes"]
    assert losses.shape == (8,)
    losses.sum().backward()
    trained = {name: p for part in (ENCODER, PREDICTION) for name, p in task.modules[part].named_parameters()}
    without = [name for name, p in trained.items() if p.requires_grad and p.grad is None]
    assert not without  # data-parallel training waits for every gradient
    assert task.modules[PREDICTION].mask_token.grad.abs().sum() > 0  # type: ignore[union-attr]


def test_the_loss_is_the_cross_entropy_of_the_masked_codes(photos: Path) -> None:
    task, method = beit_task(photos)
    (batch,) = task.batches(0, 1)
    pixels, mask = batch
    assert mask.sum(dim=1).tolist() == [method.masked.hidden] * 8 == [6] * 8
    network: Any = task.modules[ENCODER]
    network.eval()
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (network.preprocessing.mean, network.preprocessing.std))
    x = (pixels.permute(0, 3, 1, 2) / 255 - mean) / std
    codes = method.tokenizer.encode(x)
    prediction: Any = task.modules[PREDICTION]
    patches = network.features(x, mask=mask, mask_token=prediction.mask_token).patches
    want = []
    for i in range(8):
        rows = prediction.head(patches[i]).log_softmax(dim=1)
        want.append(-sum(rows[j, codes[i, j]] for j in range(16) if mask[i, j]) / 6)
    torch.testing.assert_close(task.losses(batch, 0, 0)["masked_codes"], torch.stack(want), rtol=1e-4, atol=1e-5)


def test_masks_and_crops_follow_seed_epoch_and_image(photos: Path) -> None:
    masks = {}
    for seed in (0, 1):
        task, _ = beit_task(photos, seed=seed)
        for step in (0, 3):  # in two epochs
            batch, again = (next(task.batches(step, step + 1)) for _ in range(2))
            assert torch.equal(batch[1], again[1])
            masks[seed, step] = batch[1]
    assert len({mask.numpy().tobytes() for mask in masks.values()}) == 4


def test_the_tokenizer_learns_and_uses_its_codes(photos: Path) -> None:
    task = task_of(plan(photos, tokenizer_epochs=60, tokenizer_dim=32))
    optimizer = torch.optim.AdamW(task.modules.parameters(), lr=3e-3)
    first = task.evaluate(task.modules, lambda: None)
    for step, batch in enumerate(task.batches(0, 90)):
        optimizer.zero_grad()
        sum(value.mean() for value in task.losses(batch, step, 0).values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        task.after_step(step + 1)
    last = task.evaluate(task.modules, lambda: None)
    assert last["reconstruction_error"] < 0.85 * first["reconstruction_error"]
    assert last["perplexity"] > 8


def test_parts_of_an_accumulated_step_move_the_codes_as_one_batch_does(photos: Path) -> None:
    moved = []
    for parts in (1, 4):
        task = task_of(plan(photos))
        task.modules.eval()  # BatchNorm would normalise each part by itself
        (batch,) = task.batches(0, 1)
        for part, piece in enumerate(task.split_batch(batch, parts)):
            task.losses(piece, 0, part)
        task.after_step(1)
        moved.append(task.modules[TOKENIZER].codebook)  # type: ignore[union-attr]
    one, other = moved
    torch.testing.assert_close(one.vectors, other.vectors, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.usage, other.usage)


def test_a_step_that_was_given_up_leaves_no_trace_in_the_codes(photos: Path) -> None:
    codebooks = []
    for lost in (False, True):
        task = task_of(plan(photos))
        batch, other = task.batches(0, 2)
        if lost:
            task.losses(other, 0, 0)
        task.losses(batch, 0, 0)
        task.after_step(1)
        codebooks.append(task.modules[TOKENIZER].codebook.vectors)  # type: ignore[union-attr]
    assert torch.equal(*codebooks)


def test_replaced_codes_do_not_depend_on_the_number_of_processes(photos: Path) -> None:
    task = task_of(plan(photos))
    method = task.method
    assert isinstance(method, TokenizerTraining)
    (batch,) = task.batches(0, 1)
    task.losses(batch, 0, 0)
    (whole,) = method._seen
    places = torch.tensor([0, 17, 5 * 16 + 3, 127])
    want = method._vectors_at(places)
    assert torch.equal(want, whole.vectors.view(-1, 4)[places])
    total = torch.zeros_like(want)
    for rank in range(3):
        # each process has every third image, and the sum over processes is made here
        method._seen = [whole._replace(vectors=whole.vectors[rank::3])]
        method.processes = _Alone(rank, 3)
        total += method._vectors_at(places)
    assert torch.equal(total, want)


class _Alone(Processes):
    """One of several processes that does not communicate."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.slow
def test_two_processes_train_the_same_as_one(photos: Path, tmp_path: Path) -> None:
    words = [f"{name}={value}" for name, value in {**SETTINGS, "resolution": 32, "seed": 3}.items()]
    words += [f"model.{name}={value}" for name, value in TRUNK.items()]
    command = ["pretrain", str(photos), "--method", "beit", "--model", "deit_nano", "--recipe", "beit@small", *words]
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launcher in (("one", []), ("two", many)):
        subprocess.run(
            [sys.executable, *launcher, "-m", "patchloom", *command, "--out", str(tmp_path / name)], check=True,
            capture_output=True, timeout=300,
        )  # fmt: skip
    for folder in ("", "tokenizer"):
        want, got = weights(tmp_path / "one" / folder), weights(tmp_path / "two" / folder)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4)


def test_images_that_are_all_alike_are_a_collapse_and_others_are_not(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "black").mkdir()
    for i in range(24):
        Image.new("RGB", (40 + i % 3, 40)).save(tmp_path / "black" / f"{i}.png")
    launch(plan(tmp_path / "black", color_jitter=0.0), tmp_path / "sick", device="cpu")
    said = capsys.readouterr().out
    assert "collapsed" in said
    assert "codes" in said
    launch(plan(photos, tokenizer_epochs=30, tokenizer_dim=32), tmp_path / "well", device="cpu")
    assert "tokenizer uses" not in capsys.readouterr().out


def test_a_network_that_predicts_nothing_is_a_collapse(photos: Path) -> None:
    from patchloom.tasks.pretraining.method import Progress

    _, method = beit_task(photos)
    numbers = {"codes": 16.0, "perplexity": 12.0, "accuracy": 0.1, "accuracy_of_most_frequent": 0.12, "std": 0.5}
    assert method.collapse(numbers, Progress(10, 100)) is None  # it has only begun
    assert "most frequent" in str(method.collapse(numbers, Progress(60, 100)))
    assert method.collapse({**numbers, "accuracy": 0.2}, Progress(60, 100)) is None
    assert "perplexity of 1.0" in str(method.collapse({**numbers, "perplexity": 1.0}, Progress(0, 100)))


def test_a_classifier_is_fine_tuned_from_the_run(done: Path, tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    data = make_folder(tmp_path / "labelled", 45, classes=True)
    out = tmp_path / "fine"
    run = patchloom.finetune(
        done, data, out=out, recipe="beit_finetune@small", epochs=1, batch_size=16, workers=0, tune="head",
        console=QUIET, device="cpu",
    )  # fmt: skip
    before, after = patchloom.load(done).state_dict(), patchloom.load(run.folder).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert run.settings["layer_decay"] == find_recipe("beit_finetune@small").layer_decay < 1


def test_a_plan_estimates_both_runs(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from patchloom.cli.main import main

    words = [f"{name}={value}" for name, value in {**SETTINGS, "resolution": 32}.items()]
    words += [f"model.{name}={value}" for name, value in TRUNK.items()]
    main(
        [
            "pretrain",
            str(photos),
            "--method",
            "beit",
            "--model",
            "deit_nano",
            "--recipe",
            "beit@small",
            "--plan",
            "--json",
            *words,
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert [stage["method"] for stage in found["stages"]] == ["tokenizer", "beit"]


def test_a_tokenizer_of_any_patch_size_fits_the_grid() -> None:
    from patchloom.models.registry import find_config
    from patchloom.tasks.pretraining.tokenizers import fitting_config

    recipe = find_recipe("beit")
    for size, patch, want in (
        (224, 16, (112, 8)),
        (224, 14, (128, 8)),
        (32, 4, (32, 4)),
        (48, 6, (32, 4)),
        (30, 3, (20, 2)),
        (8, 1, (16, 2)),
    ):
        trunk = find_config("deit_nano").replace(img_size=(size, size), patch_size=patch)
        config: TokenizerConfig = fitting_config(recipe, trunk)
        assert (config.img_size, config.patch_size) == ((want[0], want[0]), want[1])
        assert config.grid == trunk.grid  # type: ignore[attr-defined]
    assert Tokenizer(config).config == config


def test_recipes_have_the_published_values() -> None:
    from patchloom.models.registry import find_config

    base = find_recipe("beit", find_config("deit_base"))
    assert (base.lr, base.batch_size, base.betas, base.clip_grad, base.layerscale) == (
        1.5e-3,
        2048,
        (0.9, 0.98),
        3.0,
        0.1,
    )
    assert round(base.mask_ratio * 196) == 75
    assert round(base.mask_block * 196) == 16
    large = find_recipe("beit_finetune", find_config("deit3_large"))
    assert (large.epochs, large.lr, large.layer_decay, large.drop_path) == (50, 1e-3, 0.75, 0.2)
    small = find_recipe("beit_finetune")
    assert (small.epochs, small.lr, small.layer_decay, small.warmup_epochs) == (100, 4e-3, 0.65, 20.0)
    for name in ("beit", "beit@small", "beit_finetune", "beit_finetune@small"):
        recipe = find_recipe(name)
        assert recipe.sources
        assert all(recipe.sources[field] for field in ("lr", "epochs", "batch_size"))
