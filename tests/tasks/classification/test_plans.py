"""What a run records is what its network and its schedule have, whatever recipe, model and changes meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import patchloom
from patchloom.errors import PatchloomError
from patchloom.layers.residual import DropPath
from patchloom.models.network import Network
from patchloom.models.preprocessing import Preprocessing
from patchloom.models.registry import build, find_config
from patchloom.recipes.changes import parse_words
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.registry import find_recipe, list_recipes
from patchloom.runs.config import config_from_settings, settings_of
from patchloom.tasks.classification.config import Start
from patchloom.tasks.classification.plans import plan_training
from patchloom.tasks.spec import RunConfig
from patchloom.training.schedule import learning_rate

RECIPES = list_recipes(ClassificationOptions)
PAPERS = [name for name in RECIPES if "@" not in name]
FAMILIES = ["deit_nano", "deit3_nano", "cait_nano", "vit_tiny_12x1", "vit_tiny_6x2", "resmlp_nano", "patchconvnet_nano"]
POOLED = "resnet10t_attention_pool"


def plan(model: str, recipe: str, options: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    depth = {} if model == POOLED else {"depth": 3}  # a trunk of timm has its own
    return plan_training("digits", model, recipe, changes, {**depth, **(options or {})})


def network_of(run: RunConfig) -> Network:
    return build(run.task.network_config(run.recipe, 4))


def scale_starts(network: Network) -> set[float]:
    """The first values of LayerScale's gammas in the trunk."""
    named = network.blocks.state_dict().items()
    return {round(float(value), 8) for name, p in named if name.endswith("scale.gamma") for value in p[:1]}


def drop_rates(network: Network) -> list[float]:
    """One rate per block, read from the modules."""
    rates = [{m.rate for m in block.modules() if isinstance(m, DropPath)} for block in network.blocks]
    assert all(len(found) == 1 for found in rates)
    return [found.pop() for found in rates]


@pytest.mark.parametrize("drop_path", [None, 0.3])
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_recorded_is_what_the_network_and_the_schedule_have(
    recipe: str, model: str, drop_path: float | None
) -> None:
    given = {} if drop_path is None else {"drop_path": drop_path}
    run = plan(model, recipe, img_size=16 if "nano" in model else 32, epochs=20, **given)
    network, recorded = network_of(run), run.recipe
    starts = scale_starts(network)
    assert starts == (set() if recorded.layerscale is None else {round(recorded.layerscale, 8)})
    assert recorded.scale == ("layerscale" if starts else "none")
    rate = recorded.drop_path
    assert rate == network.config.drop_path
    assert rate == (drop_path if drop_path is not None else rate)
    rates = [rate] * 3 if recorded.drop_path_decay == "uniform" else [0.0, rate / 2, rate]
    assert drop_rates(network) == pytest.approx(rates)
    assert recorded.dropout == getattr(network.config, "dropout", 0.0)
    steps = 20 * 50 if recorded.schedule_by == "step" else 20  # the last one of 20 epochs comes near the floor
    per_epoch = steps // 20
    after = [learning_rate(recorded, step, per_epoch) for step in range(steps + 1)]
    if recorded.schedule == "cosine":
        assert after[-1] == pytest.approx(recorded.min_lr, abs=1e-12)
        assert recorded.min_lr <= recorded.lr or any("rises" in note for note in run.notes)
    elif recorded.schedule == "step":
        assert after[-1] < recorded.lr


@pytest.mark.parametrize(
    ("model", "recipe", "scale", "decay"),
    [
        ("deit_nano", "deit3_1k", "layerscale", "uniform"),
        ("deit_nano", "vit_a2_ls", "layerscale", "uniform"),
        ("deit3_nano", "vit_a2", "none", "uniform"),
        ("cait_nano", "vit_a2", "none", "uniform"),
        ("deit_nano", "cait", "layerscale", "uniform"),
        ("deit3_nano", "deit", "layerscale", "linear"),
        ("deit_nano", "deit", "none", "linear"),
        ("deit_nano", "depth_study", "none", "uniform"),
        ("resmlp_nano", "vit_a2", "layerscale", "uniform"),
    ],
)
def test_scale_and_drop_rates_are_the_recipes(model: str, recipe: str, scale: str, decay: str) -> None:
    recorded = plan(model, recipe).recipe
    assert (recorded.scale, recorded.drop_path_decay) == (scale, decay)


@pytest.mark.parametrize("recipe", ["cait", "deit3_1k", "deit", "vit_a2_ls"])
@pytest.mark.parametrize(
    ("scale", "start"), [("rezero", 0.0), ("skipinit", 0.0), ("fixup", 1.0), ("t-fixup", None), ("shortcut_gate", None)]
)
def test_other_scales_keep_their_own_start(recipe: str, scale: str, start: float | None) -> None:
    for model in ("cait_nano", "deit3_nano", "deit_nano"):
        run = plan(model, recipe, {"scale": scale})
        alphas = {float(p) for name, p in network_of(run).state_dict().items() if name.endswith("scale.alpha")}
        assert alphas == (set() if start is None else {start})
        assert run.recipe.layerscale is None
        assert run.recipe.scale == scale


def test_scale_none_is_a_scale_and_not_the_models_own() -> None:
    changes, _ = parse_words(["scale=none"], ClassificationOptions)
    run = plan("deit3_nano", "deit3_1k", **changes)
    assert run.recipe.scale == "none"
    assert scale_starts(network_of(run)) == set()


def test_the_pooling_stage_of_a_convnet_has_the_recipes_layerscale() -> None:
    for recipe, value in (("deit3_1k", 1e-4), ("cait", 0.1)):
        run = plan(POOLED, recipe)
        gammas = {float(p[0]) for name, p in network_of(run).pool.state_dict().items() if name.endswith("gamma")}
        assert list(gammas) == [pytest.approx(value)] == [pytest.approx(run.recipe.layerscale)]
    averaged = plan(POOLED, "deit3_1k", {"aggregation": "average"}).recipe
    assert (averaged.scale, averaged.layerscale) == ("none", None)


@pytest.mark.parametrize("recipe", PAPERS)
def test_a_convnet_gets_no_drop_rate_by_width_or_depth(recipe: str) -> None:
    longer = {"epochs": 800} if recipe.startswith("deit3") else {}
    rate = plan(POOLED, recipe, img_size=64, **longer).recipe.drop_path
    assert rate == 0 or recipe in (
        "deit",
        "transfer_inat18",
        "transfer_inat19",
        "resnet_a2",
        "deit_cifar10",
        "vit_augreg",
        "beit_finetune",
        "mae_finetune",
    ), rate


def test_gammas_that_start_at_zero_are_recorded_so() -> None:
    run = plan("deit_nano", "depth_study", {"scale": "layerscale", "scale_init": "zero"})
    assert run.recipe.layerscale == 0
    assert scale_starts(network_of(run)) == {0.0}


def test_parallel_branches_count_as_blocks() -> None:
    for recipe in ("cait", "depth_study"):
        wide, deep = (
            plan_training("digits", f"vit_small_{shape}", recipe, {}, {"scale": "layerscale"}).recipe
            for shape in ("18x2", "36x1")
        )
        assert (wide.drop_path, wide.layerscale) == (deep.drop_path, deep.layerscale)


def test_scales_of_another_run_are_recorded_and_leave_no_other_start(tmp_path: Path) -> None:
    run = plan_training("digits", "cait_nano", "cait@small", {}, {}, scales_from=tmp_path)
    assert run.recipe.layerscale is None
    assert str(tmp_path) in run.recipe.sources["layerscale"]
    for changes, options in (({"layerscale": 0.5}, {}), ({}, {"scale_init": "uniform"})):
        with pytest.raises(PatchloomError, match=r"layerscale|scale_init"):
            plan_training("digits", "cait_nano", "cait@small", changes, options, scales_from=tmp_path)


@pytest.mark.parametrize("recipe", [name for name in PAPERS if find_recipe(name).lr_scaling == "linear"])
@pytest.mark.parametrize("batch", [16, 64, 4096])
def test_a_rate_that_follows_the_batch_stays_above_its_floor(recipe: str, batch: int) -> None:
    before, run = find_recipe(recipe), plan("deit_nano", recipe, batch_size=batch, img_size=16)
    assert run.recipe.min_lr <= run.recipe.lr
    assert (before.lr == before.min_lr) == (run.recipe.lr == run.recipe.min_lr) or batch < before.batch_size
    assert not any("rises" in note for note in run.notes)


def test_an_explicit_layerscale_reaches_the_network_or_is_refused() -> None:
    run = plan("deit_nano", "deit", {"scale": "layerscale"}, layerscale=0.003)
    assert scale_starts(network_of(run)) == {0.003}
    for model, options, changes in [
        ("deit_nano", {}, {"layerscale": 0.003}),
        ("cait_nano", {"scale": "rezero"}, {"layerscale": 0.003}),
        ("resmlp_nano", {}, {"scale": "rezero"}),
        ("resmlp_nano", {}, {"drop_path_decay": "linear"}),
    ]:
        with pytest.raises(PatchloomError, match=next(iter(changes))):
            plan(model, "deit", options, **changes)


def test_a_recipe_of_another_task_is_refused() -> None:
    for given in ["resmlp_mt", "transformer_mt@small", find_recipe("resmlp_mt")]:
        with pytest.raises(PatchloomError, match="is a recipe for translation, not for classification"):
            plan("deit_nano", given)


def test_the_run_is_the_same_after_it_was_written_and_read() -> None:
    for model, recipe, options in [("deit_nano", "vit_a2_ls", {}), ("cait_nano", "cait", {"scale": "rezero"})]:
        run = plan(model, recipe, options)
        again = config_from_settings(settings_of(run))
        assert again.task == run.task
        assert again.task.network_config(again.recipe, 4) == run.task.network_config(run.recipe, 4)
        assert again.recipe == run.recipe


def test_runs_of_earlier_versions_keep_their_network_and_their_rate() -> None:
    """They did not record the scale: LayerScale was given to vit_* alone, and the floor was never above the rate."""
    for model, recipe, has in [("vit_tiny_12x1", "vit_a2_ls", True), ("deit_nano", "deit3_1k", False)]:
        settings = settings_of(plan(model, recipe, lr=5e-6))
        del settings["scale"], settings["drop_path_decay"], settings["dropout"], settings["tune"]
        settings["min_lr"] = 1e-5
        old = config_from_settings(settings)
        assert bool(scale_starts(network_of(old))) is has
        assert old.recipe.min_lr == 5e-6


@pytest.mark.parametrize(
    ("recipe", "changes", "field", "value"),
    [
        ("patchconvnet_21k", {"batch_size": 4096}, "lr", 4e-3),  # 5.2.3
        ("patchconvnet_21k", {"batch_size": 1024}, "lr", 3e-3),
        ("cait", {"batch_size": 512}, "lr", 1e-3),  # "not scaled"
        ("deit", {"batch_size": 512}, "lr", 5e-4),
        ("old_fashioned", {"epochs": 9}, "decay_epochs", (3, 6, 8)),
        ("deit", {"lr": 1e-6}, "min_lr", 1e-6),
        ("deit3_1k", {"epochs": 800}, "weight_decay", 0.05),  # 6.4
        ("deit3_1k", {"epochs": 800}, "drop_path", 0.2),
        ("deit3_1k", {"epochs": 600}, "drop_path", 0.15),
        ("deit3_1k", {"epochs": 300}, "weight_decay", 0.02),
        ("deit3_1k", {"epochs": 800, "drop_path": 0.3}, "drop_path", 0.3),
        ("deit3_21k", {"epochs": 240}, "drop_path", 0.15),  # Table 6.5
        ("deit3_finetune", {"resolution": 224}, "drop_path", 0.2),
        ("deit3_finetune", {}, "drop_path", 0.15),
    ],
)
def test_what_follows_from_a_change(recipe: str, changes: dict[str, Any], field: str, value: Any) -> None:
    run = plan_training("digits", "deit3_base", recipe, changes, {})
    assert getattr(run.recipe, field) == pytest.approx(value)


def test_huge_is_fine_tuned_at_224() -> None:
    run = plan_training("digits", "deit3_huge", "deit3_finetune", {}, {})
    assert (run.recipe.resolution, run.recipe.drop_path) == (224, 0.55)


def test_a_patch_that_does_not_divide_384_is_fine_tuned_at_224() -> None:
    assert plan_training("digits", "deit3_small", "deit3_finetune", {}, {"patch_size": 14}).recipe.resolution == 224


@pytest.mark.parametrize(
    ("model", "trained_at", "recipe", "resolution", "drop_path"),
    [
        ("deit3_base", 192, "deit3_finetune", 224, 0.2),  # README: 224 after training at 192 or 160
        ("deit3_large", 160, "deit3_finetune", 224, 0.45),
        ("deit3_huge", 126, "deit3_finetune", 224, 0.55),
        ("deit3_base", 224, "deit3_finetune", 384, 0.15),
        ("deit_small", 160, "deit_finetune", 384, 0.0),
        ("deit_tiny", 64, "transfer_cifar", 224, 0.0),
        ("deit3_nano", 32, "deit3_finetune", None, 0.0),  # patches of 4 are for small images
    ],
)
def test_resolution_of_fine_tuning_after_training_at_a_low_one(
    model: str, trained_at: int, recipe: str, resolution: int | None, drop_path: float
) -> None:
    trained = find_config(model).replace(img_size=(trained_at, trained_at))
    run = plan_training("digits", trained, recipe, {}, {}, start=Start("weights", Preprocessing(), None))
    size = resolution or trained_at
    assert (run.recipe.resolution, run.recipe.drop_path) == (resolution, drop_path)
    assert run.task.network_config(run.recipe, 4).img_size == (size, size)


def test_size_of_the_network_is_the_recorded_resolution() -> None:
    assert plan("deit_tiny", "deit", {"img_size": (192, 192)}).recipe.resolution == 192
    assert plan("deit_tiny", "deit", {"img_size": (192, 160)}).recipe.resolution is None
    with pytest.raises(PatchloomError, match="resolution=224 cannot be set"):
        plan("deit_tiny", "deit", {"img_size": (192, 192)}, resolution=224)


def test_patches_that_divide_the_requested_resolution() -> None:
    run = plan("deit_tiny", "deit", {"patch_size": 20}, resolution=240)
    assert run.task.network_config(run.recipe, 4).grid == (12, 12)
    with pytest.raises(PatchloomError, match="224 x 224 is not"):
        plan("deit_tiny", "deit", {"patch_size": 20})


def test_published_forms_have_no_warmup() -> None:
    run = plan("deit_nano", "deit", {"scale": "rezero", "scale_form": "published"})
    assert run.recipe.warmup_epochs == 0
    assert "published without warm-up" in run.recipe.sources["warmup_epochs"]
    assert any("warm-up" in note for note in run.notes)
    assert plan("deit_nano", "deit", {"scale": "rezero"}).recipe.warmup_epochs == 5


def test_fixed_rate_of_patchconvnet() -> None:
    recipe = plan("patchconvnet_nano", "patchconvnet_finetune").recipe
    assert {learning_rate(recipe, step, 3) for step in range(30)} == {1e-5}


def test_padded_images_are_tested_without_resizing() -> None:
    assert plan("deit_nano", "deit", crop="pad").recipe.test_crop_ratio == 1.0
    assert plan("deit_nano", "deit", crop="pad", test_crop_ratio=0.9).recipe.test_crop_ratio == 0.9
    assert plan("deit_nano", "deit").recipe.test_crop_ratio == 0.875


@pytest.mark.parametrize(
    "changes",
    [
        {"three_augment": ("gray",)},  # augmentation is rand
        {"augmentation": "three", "three_augment": ("grey",)},
        {"augmentation": "three", "three_augment": ()},
        {"augmentation": "three", "three_augment": ("gray", "gray")},
    ],
)
def test_parts_of_3_augment_that_mean_nothing_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PatchloomError, match="three_augment"):
        plan("deit_nano", "deit", **changes)


@pytest.mark.parametrize(
    ("distillation", "reason"),
    [
        (3, "distillation is a dictionary"),
        ({"tauu": 2}, "Unknown key 'tauu' of distillation.* Did you mean 'tau'"),
        ({"teachers": ["b"]}, "Unknown key 'teachers' of distillation"),
        ({"tau": "2"}, "tau of distillation is a number, not '2'"),
        ({"weight": []}, "weight of distillation is a number"),
    ],
)
def test_wrong_settings_of_distillation_are_named(distillation: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=reason):
        patchloom.distill(
            tmp_path, "digits", model="deit_nano", recipe="deit@small", out=tmp_path / "run", distillation=distillation
        )
    assert not (tmp_path / "run").exists()


def test_fine_tuning_takes_a_distillation_config_only(tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="distillation is a DistillationConfig, not dict"):
        patchloom.finetune(tmp_path, "digits", out=tmp_path / "run", distillation={"tau": 2})  # type: ignore[arg-type]
