"""Runs of MAE: what the encoder sees, resuming to the bit, what the log and the report show, what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pretraining_runs
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import patchloom
from patchloom import PatchloomError
from patchloom.console import Console
from patchloom.layers.positions import grid_sinusoids
from patchloom.models.registry import find_config
from patchloom.recipes.registry import find_recipe
from patchloom.runs.launch import resume
from patchloom.tasks.pretraining.mae import Mae
from patchloom.tasks.pretraining.plans import plan_pretraining
from patchloom.tasks.pretraining.setup import open_task
from patchloom.tasks.pretraining.task import Pretraining
from patchloom.tasks.spec import Context
from patchloom.training.callbacks import Callback
from patchloom.training.processes import Processes

flat, labelled, records = pretraining_runs.flat, pretraining_runs.labelled, pretraining_runs.records

Pretrain = Callable[..., Path]
Records = Callable[[Path], list[dict[str, Any]]]
MAE: dict[str, Any] = {"method": "mae", "recipe": "mae@small", "decoder_dim": 16, "decoder_heads": 2}


@pytest.fixture
def mae(tmp_path: Path) -> Pretrain:
    """Runs MAE with tiny settings, and gives the run folder."""
    tiny: dict[str, Any] = {
        "model": "deit_nano", "resolution": 32, "workers": 0, "batch_size": 8, "epochs": 2, "device": "cpu",
        "console": Console(quiet=True), **MAE,
    }  # fmt: skip

    def run(data: Path, name: str = "run", **changes: Any) -> Path:
        own = {"depth": 2, "dim": 48, "patch_size": 8} if "model" not in changes else {}
        options = {**own, **changes.pop("model_options", {})}
        return patchloom.pretrain(data, out=tmp_path / name, **{**tiny, **changes}, model_options=options).folder

    return run


def open_tiny(data: Path, **changes: Any) -> Pretraining:
    """The task of a tiny run, with an untrained network."""
    options = {"depth": 2, "dim": 48, "patch_size": 8}
    settings = {"resolution": 32, "workers": 0, "batch_size": 8, "decoder_dim": 16, "decoder_heads": 2, **changes}
    plan = plan_pretraining(data, "deit_nano", "mae", "mae@small", settings, options)
    return open_task(plan.task, plan.recipe, Context(Processes(), Console(quiet=True)))


def test_a_run_leaves_an_encoder_without_a_decoder(flat: Path, mae: Pretrain, records: Records) -> None:
    run = mae(flat)
    trunk = patchloom.load(run)
    assert trunk.config.headless
    assert trunk.config.aggregation == "average"  # no loss would reach a class token
    assert not any("decoder" in name or "mask" in name for name in trunk.state_dict())
    assert trunk.embed(torch.randn(2, 3, 32, 32)).shape == (2, 48)
    logged = [row for row in records(run) if row.get("event") == "epoch"]
    assert [row["step"] for row in logged] == [0, 3, 6]
    assert all({"std", "reconstruction", "reconstruction_by_mean"} <= row.keys() for row in logged)
    assert set(logged[-1]["losses"]) == {"pixels"}
    page = (run / "report.html").read_text()
    assert "Reconstructions" in page
    assert page.count('alt="predicted"') >= 4


def test_what_is_masked_reaches_nothing_but_the_target(flat: Path) -> None:
    """Pixels of masked patches change no prediction; pixels of visible ones do."""
    method = open_tiny(flat).method
    assert isinstance(method, Mae)
    images = torch.randn(2, 3, 32, 32)
    order = torch.stack([torch.randperm(16) for _ in range(2)])
    with torch.no_grad():
        before, masked = method.predict(method.modules, images, order)
        assert masked.shape == (2, 12)
        for patches, changes in ((order[:, 4:], False), (order[:, :4], True)):
            pixels = torch.zeros(2, 16, dtype=torch.bool).scatter(1, patches, True).view(2, 1, 4, 4)
            other = torch.where(pixels.repeat_interleave(8, 2).repeat_interleave(8, 3), -images, images)
            assert torch.equal(method.predict(method.modules, other, order)[0], before) is not changes


def test_the_mask_belongs_to_the_image_and_the_epoch(flat: Path) -> None:
    """Whichever process draws it: the same sample has the same mask in a batch of any size."""
    orders = []
    for batch in (8, 4):
        task = open_tiny(flat, batch_size=batch)
        steps = range(24 // batch)
        orders.append(torch.cat([part["order"] for part, _ in zip(task.batches(0, len(steps)), steps, strict=True)]))
    assert torch.equal(*orders)
    assert len({tuple(row.tolist()) for row in orders[0]}) == 24


class Stop(Callback):
    """Ends a run as a crash does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, step: int, losses: Any) -> None:
        if step == self.step:
            raise RuntimeError("crash")


def test_a_run_that_crashed_is_resumed_to_the_bit(flat: Path, mae: Pretrain, records: Records) -> None:
    settings = {"epochs": 3, "checkpoint_every": "2", "drop_path": 0.2, "accumulate": 2, "ema": 0.9}
    straight = mae(flat, "straight", **settings)
    with pytest.raises(PatchloomError, match="crash"):
        mae(flat, "crashed", **settings, callbacks=[Stop(6)])
    crashed = straight.parent / "crashed"
    resume(crashed, console=Console(quiet=True))
    first, second = (load_file(run / "export" / "model.safetensors") for run in (straight, crashed))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    names = ("reconstruction", "train_loss", "std")
    logs = [[row for row in records(run) if row.get("event") == "epoch"] for run in (straight, crashed)]
    rows = [[[row.get(name) for name in names] for row in log] for log in logs]
    assert rows[0] == rows[1]


def test_random_weights_start_with_fixed_positions_and_others_stay_as_they_are(flat: Path, mae: Pretrain) -> None:
    fresh = open_tiny(flat).trunk
    assert torch.allclose(fresh.positions[0], grid_sinusoids((4, 4), 48))
    run = mae(flat)
    again = mae(flat, "again", model=str(run), lr=0.0, min_lr=0.0, warmup_epochs=0.0, warmup_lr=0.0, epochs=1)
    first, second = (patchloom.load(each).state_dict() for each in (run, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "cait_nano", "model_options": {"depth": 2}, "aggregation": "class_attention"},
        {"model": "deit_tiny_distilled", "model_options": {"depth": 1, "patch_size": 8}, "aggregation": None},
        {"model": "vit_tiny_6x2", "model_options": {"depth": 1, "patch_size": 8}},
        {"stem": "hmlp"},
        {"norm_pixels": False, "precision": "bf16", "mask_ratio": 0.5},
    ],
)
def test_every_vision_transformer_is_trained(flat: Path, mae: Pretrain, options: dict[str, Any]) -> None:
    trunk = patchloom.load(mae(flat, epochs=1, **options))
    assert torch.isfinite(trunk.embed(torch.randn(2, 3, 32, 32))).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resmlp_nano"}, "resmlp_nano cannot leave patches out: its cross-patch layers"),
        ({"model": "patchconvnet_nano"}, "its convolutions need the whole map"),
        ({"model": "timm:vit_tiny_patch16_224"}, "it is a network of another library"),
        ({"mask_ratio": 0.0}, "mask_ratio .* above 0 and below 1"),
        ({"mask_ratio": 1.0}, "mask_ratio .* above 0 and below 1"),
        ({"mask_ratio": 0.95}, r"masks all 16 patches of .* at most 0\.937"),
        ({"decoder_dim": 18}, "decoder_dim must be a multiple of 4"),
        ({"decoder_heads": 3}, "multiple of 4 and of decoder_heads=3"),
        ({"local_crops": 2}, "local_crops is a setting of dino"),
        ({"recipe": "dino@small"}, "dino@small is a recipe for --method dino"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    flat: Path, mae: Pretrain, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(PatchloomError, match=words):
        mae(flat, **changes)
    assert not (tmp_path / "run").exists()


def black_folder(root: Path) -> Path:
    root.mkdir()
    for i in range(24):
        Image.new("RGB", (40 + i % 5, 40)).save(root / f"{i:02d}.png")
    return root


def noise_folder(root: Path) -> Path:
    """Images without anything to predict."""
    root.mkdir()
    draw = np.random.default_rng(0)
    for i in range(24):
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(root / f"{i:02d}.png")
    return root


def test_a_collapse_is_reported_with_its_cause(
    flat: Path, mae: Pretrain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mae(black_folder(tmp_path / "black"), "same", console=Console())
    assert "collapsed. The features of all images are the same" in capsys.readouterr().out
    mean = "collapsed. Masked patches are predicted no better than by their mean"
    long = {"console": Console(), "epochs": 40, "eval_every": "10 epochs"}
    mae(noise_folder(tmp_path / "noise"), "nothing", **long)
    assert mean in capsys.readouterr().out
    mae(flat, "too fast", **long, lr=1.0, warmup_epochs=0.0)
    assert mean in capsys.readouterr().out
    mae(flat, "healthy", **long, lr=3e-3)
    assert "collapsed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "lr", "epochs", "decay", "drop_path"),
    [("deit_base", 2e-3, 100, 0.65, 0.1), ("deit3_large", 4e-3, 50, 0.75, 0.2), ("deit3_huge", 4e-3, 50, 0.75, 0.3)],
)
def test_fine_tuning_has_the_published_values(
    model: str, lr: float, epochs: int, decay: float, drop_path: float
) -> None:
    recipe = find_recipe("mae_finetune", find_config(model))
    got = (recipe.lr, recipe.epochs, recipe.layer_decay, recipe.drop_path)
    assert got == pytest.approx((lr, epochs, decay, drop_path))
    assert not any("inferred for" in source for source in recipe.sources.values())


def test_an_encoder_is_fine_tuned_with_rates_that_decay_over_the_layers(
    flat: Path, labelled: Path, mae: Pretrain, tmp_path: Path
) -> None:
    run = mae(flat)
    tuned = patchloom.finetune(
        run, labelled, out=tmp_path / "tuned", recipe="mae_finetune@small", epochs=1, batch_size=8, workers=0,
        device="cpu", console=Console(quiet=True),
    ).folder  # fmt: skip
    before, after = patchloom.load(run).state_dict(), patchloom.load(tuned).state_dict()
    weights = [f"blocks.{i}.ffn.branches.0.fn.fc1.weight" for i in range(2)]
    moved = [float((after[name] - before[name]).norm()) for name in weights]
    assert 0 < moved[0] < moved[1]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("shard=full",)], ids=["ddp", "fsdp"])
def test_two_processes_equal_one(more: tuple[str, ...], flat: Path, tmp_path: Path) -> None:
    words = [
        "pretrain", str(flat), "--method", "mae", "--model", "deit_nano", "--recipe", "mae@small", "img_size=32",
        "model.patch_size=8", "model.depth=2", "model.dim=48", "workers=0", "epochs=3", "batch_size=8",
        "decoder_dim=16",
    ]  # fmt: skip
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "patchloom"]
    for launcher, out, settings in ((["-m", "patchloom"], "one", ()), (two, "two", more)):
        command = [sys.executable, *launcher, *words, "--out", str(tmp_path / out), *settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:]
    x = torch.randn(16, 3, 32, 32)
    with torch.no_grad():
        first, second = (patchloom.load(tmp_path / name).embed(x) for name in ("one", "two"))
    assert float((first - second).abs().mean() / first.abs().mean()) < 1e-3
