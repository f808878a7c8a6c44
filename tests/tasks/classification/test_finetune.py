"""Fine-tuning: another size, other classes, some of the parameters, deltas, two runs in sequence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchloom
from patchloom import PatchloomError
from patchloom.api import finetune
from patchloom.console import Console
from patchloom.errors import InterruptedWork
from patchloom.models.roles import tuned_parameters
from patchloom.runs.launch import launch as launch_one
from patchloom.runs.sequence import launch, resume
from patchloom.tasks.classification.plans import plan_distillation, plan_finetuning, plan_training
from patchloom.tasks.classification.sequence import FinishHigh
from patchloom.training.loop import Loop

QUIET = {"console": Console(quiet=True)}
SHORT = {"epochs": 1, "batch_size": 256, "workers": 0}
NANOS = ["deit_nano", "deit3_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"]


def base_of(model: str, folder: Path, **options) -> Path:
    torch.manual_seed(1)
    network = patchloom.create_model(model, num_classes=10, img_size=16, depth=2, **options)
    network.class_names = tuple("0123456789")
    path = folder / f"{model}.safetensors"
    patchloom.save(network, path)
    return path


def exported(run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "export" / "model.safetensors")


@pytest.mark.parametrize("model", NANOS)
def test_a_higher_resolution_for_every_family(model: str, tmp_path: Path) -> None:
    base = base_of(model, tmp_path)
    run = finetune(base, "digits", out=tmp_path / "run", resolution=24, **SHORT, **QUIET)
    network = patchloom.load(run.folder)
    assert network.config.img_size == (24, 24)
    assert network(torch.randn(2, 3, 24, 24)).shape == (2, 10)
    assert run.settings["recipe_name"].endswith("finetune@small")


@pytest.mark.parametrize("model", ["deit_nano", "cait_nano", "patchconvnet_nano"])
@pytest.mark.parametrize("tune", ["attention", "ffn", "head"])
def test_only_what_is_tuned_moves(model: str, tune: str, tmp_path: Path) -> None:
    base = base_of(model, tmp_path)
    run = finetune(base, "digits", out=tmp_path / "run", tune=tune, lr=1e-3, **SHORT, **QUIET)
    before, after = load_file(base), exported(run)
    tuned = tuned_parameters(patchloom.load(base), tune)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved <= tuned
    assert {name for name in tuned if after[name].ndim > 1} <= moved
    state = load_file(max((run.folder / "checkpoints").glob("step-*.safetensors")))
    stepped = {
        name.removeprefix("optimizer.model.").removesuffix(".exp_avg") for name in state if name.endswith("exp_avg")
    }
    assert stepped == tuned


def test_attention_means_every_branch_and_class_attention() -> None:
    parallel = patchloom.create_model("deit_nano", depth=2, branches=2)
    names = tuned_parameters(parallel, "attention")
    assert sum(name.endswith("qkv.weight") for name in names) == 4
    assert not any("ffn" in name for name in names)
    cait = patchloom.create_model("cait_nano", depth=2)
    assert any(name.startswith("pool.") for name in tuned_parameters(cait, "attention"))
    with pytest.raises(PatchloomError, match="resmlp_nano has no attention to tune: choose all, ffn, head"):
        tuned_parameters(patchloom.create_model("resmlp_nano"), "attention")


def test_frozen_statistics_stay(tmp_path: Path) -> None:
    base = base_of("deit_nano", tmp_path, stem="hmlp")
    run = finetune(base, "digits", out=tmp_path / "run", tune="head", **SHORT, **QUIET)
    before, after = load_file(base), exported(run)
    statistics = [name for name in before if "running" in name or "tracked" in name]
    assert statistics
    assert all(torch.equal(before[name], after[name]) for name in statistics)


def test_new_classes_get_a_fresh_head_and_keep_the_rest(tmp_path: Path, capsys) -> None:
    torch.manual_seed(1)
    network = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=2)
    network.class_names = tuple("abcdefghij")
    patchloom.save(network, tmp_path / "base.safetensors")
    run = finetune(tmp_path / "base.safetensors", "digits", out=tmp_path / "run", tune="head", **SHORT)
    said = capsys.readouterr().out
    assert "re-initialised" in said
    assert "head.weight" in said
    assert run.settings["recipe_name"] == "new_classes"
    tuned = patchloom.load(run.folder)
    assert tuned.class_names == tuple("0123456789")
    assert "the classes in the file have other names" in said
    before, after = network.state_dict(), tuned.state_dict()
    assert {name for name in after if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}


@pytest.mark.parametrize(("classes", "resolution"), [(10, 32), (3, 160)])
def test_networks_of_timm_are_fine_tuned(classes: int, resolution: int, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    network = patchloom.create_model("timm:test_vit", num_classes=classes)
    patchloom.save(network, tmp_path / "base.safetensors")
    changes = {"resolution": resolution, "tune": "head", "lr": 1e-3, "steps": 1, "batch_size": 8, "workers": 0}
    run = finetune(tmp_path / "base.safetensors", "digits", out=tmp_path / "run", **changes, **QUIET)
    trained = patchloom.load(run.folder)
    assert (trained.config.num_classes, trained.config.img_size) == (10, (resolution, resolution))
    before, after = load_file(tmp_path / "base.safetensors"), exported(run)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    # Another resolution means resized positions; the rest of the trunk is frozen.
    assert {name for name in moved if "head" not in name} == ({"network.pos_embed"} if resolution == 32 else set())
    assert any("head" in name for name in moved)


def test_the_same_classes_in_another_order_keep_their_heads(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1).eval()
    network.class_names = tuple("9876543210")
    patchloom.save(network, tmp_path / "base.safetensors")
    still = {"lr": 0.0, "warmup_lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0}
    run = finetune(
        tmp_path / "base.safetensors", "digits", out=tmp_path / "run", **SHORT, **still, test_crop_ratio=0.875, **QUIET
    )
    assert patchloom.load(run.folder).class_names == network.class_names
    want = patchloom.evaluate(network, "digits")
    assert patchloom.evaluate(run.folder, "digits")["loss"] == pytest.approx(want["loss"], rel=1e-6)
    assert run.records()[-1]["loss"] == pytest.approx(want["loss"], rel=1e-6)


def test_normalisation_that_a_file_does_not_carry_travels_on(tmp_path: Path) -> None:
    base = base_of("deit_nano", tmp_path)
    run = finetune(
        base, "digits", out=tmp_path / "run", tune="head", mean=(0.5,) * 3, std=(0.25,) * 3, **SHORT, **QUIET
    )
    how = patchloom.load(run.folder).preprocessing
    assert (how.mean, how.std) == ((0.5,) * 3, (0.25,) * 3)


def test_the_mlp_head_of_grafit(tmp_path: Path) -> None:
    base = base_of("deit_nano", tmp_path)
    run = finetune(base, "digits", out=tmp_path / "run", tune="head", model_options={"head": "mlp"}, **SHORT, **QUIET)
    network = patchloom.load(run.folder)
    kinds = [type(layer).__name__ for layer in network.head]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert patchloom.evaluate(run.folder, "digits")["count"] == 359
    still = {"lr": 0.0, "warmup_lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0}
    again = finetune(run.folder, "digits", out=tmp_path / "again", tune="ffn", **SHORT, **still, **QUIET)
    for name, tensor in network.head.named_parameters():
        assert torch.equal(patchloom.load(again.folder).head.get_parameter(name), tensor)  # kept, not started afresh


def test_a_head_may_learn_faster_than_the_rest(tmp_path: Path) -> None:
    base = base_of("deit_nano", tmp_path)
    run = finetune(base, "digits", out=tmp_path / "run", lr=1e-6, head_lr=1e-2, **SHORT, **QUIET)
    before, after = load_file(base), exported(run)
    far = {name: float((after[name] - before[name]).abs().max()) for name in before}
    assert far["head.weight"] > 100 * max(value for name, value in far.items() if not name.startswith("head"))


def test_a_new_head_at_a_rate_for_another_resolution_is_noted(tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    patchloom.save(patchloom.create_model("deit_nano", num_classes=3, img_size=16, depth=1), base)

    def notes(recipe: str | None, **changes: float) -> str:
        return " ".join(plan_finetuning(base, "digits", recipe, changes, {}).notes)

    assert "The head is new" in notes("deit_finetune@small")
    assert "The head is new" not in notes("deit_finetune@small", head_lr=5e-3)
    assert "The head is new" not in notes(None)


@pytest.mark.parametrize("task", ["attention", "distilled"])
def test_a_cut_run_goes_on_to_the_same_bits_without_its_base(task: str, tmp_path: Path, monkeypatch) -> None:
    base = base_of("deit_nano", tmp_path, distilled=task == "distilled")
    taught = plan_distillation(base_of("resmlp_nano", tmp_path), "token") if task == "distilled" else None
    options = {"tune": "attention" if task == "attention" else "all", "distillation": taught, "resolution": 24}
    changes = {**SHORT, "epochs": 2, "ema": 0.9, "drop_path": 0.2, "mixup": 0.8, "lr": 1e-3}
    straight = finetune(base, "digits", out=tmp_path / "straight", **options, **changes, **QUIET)
    real = Loop.step

    def stopping(self: Loop, batch) -> None:
        real(self, batch)
        if self.counters.step == 7:
            self._signal = "a test"

    monkeypatch.setattr(Loop, "step", stopping)
    with pytest.raises(InterruptedWork):
        finetune(base, "digits", out=tmp_path / "cut", **options, **changes, **QUIET)
    monkeypatch.setattr(Loop, "step", real)
    base.unlink()
    run = resume(tmp_path / "cut", **QUIET)
    want = exported(straight)
    assert all(torch.equal(tensor, want[name]) for name, tensor in exported(run).items())


def test_a_delta_joins_its_base_shares_it_and_refuses_another(tmp_path: Path) -> None:
    base = base_of("deit_nano", tmp_path)
    run = finetune(base, "digits", out=tmp_path / "run", tune="attention", delta=True, lr=1e-3, **SHORT, **QUIET)
    delta, direct = run.folder / "export" / "delta.safetensors", patchloom.load(run.folder).state_dict()
    assert delta.stat().st_size < 0.45 * base.stat().st_size
    joined = patchloom.load(delta, base=base)
    assert all(torch.equal(tensor, direct[name]) for name, tensor in joined.state_dict().items())
    assert joined.class_names == tuple("0123456789")
    network = patchloom.load(base)
    shared = patchloom.load(delta, base=network)
    own, theirs = dict(shared.named_parameters()), dict(network.named_parameters())
    tuned = tuned_parameters(network, "attention")
    assert {name for name in own if own[name].data_ptr() == theirs[name].data_ptr()} == set(own) - tuned
    assert patchloom.evaluate(delta, "digits", base=base) == patchloom.evaluate(run.folder, "digits")
    with pytest.raises(PatchloomError, match="Pass its base"):
        patchloom.load(delta)
    with pytest.raises(PatchloomError, match="other weights"):
        patchloom.load(delta, base=base_of("deit_nano", tmp_path, drop_path=0.0, mlp_ratio=2.0))


def test_train_low_finish_high_in_one_command_cut_in_either_stage(tmp_path: Path, monkeypatch) -> None:
    low = plan_training(
        "digits", "deit_nano", "deit@small", {**SHORT, "resolution": 16}, {"depth": 1, "dim": 24, "heads": 2}
    )
    both = dataclasses.replace(low, then=FinishHigh(24, {"epochs": 1, "batch_size": 256}))
    want = exported(launch(both, tmp_path / "straight", **QUIET))
    for stage in (1, 2):
        real, steps = Loop.step, []

        def stopping(self: Loop, batch, real=real, steps=steps, stage=stage) -> None:
            real(self, batch)
            steps.append(1)
            if len(steps) == (2 if stage == 1 else 8):
                self._signal = "a test"

        monkeypatch.setattr(Loop, "step", stopping)
        out = tmp_path / f"cut{stage}"
        with pytest.raises(InterruptedWork):
            launch(both, out, **QUIET)
        monkeypatch.setattr(Loop, "step", real)
        with pytest.raises(PatchloomError, match="holds a run already"):  # the folder of the second stage is taken
            launch_one(low, out, **QUIET)
        got = exported(resume(out, **QUIET))
        assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())
    with pytest.raises(PatchloomError, match="holds a run already"):
        launch(both, tmp_path / "straight", **QUIET)
    with pytest.raises(PatchloomError, match="26"):
        launch(dataclasses.replace(low, then=FinishHigh(26)), tmp_path / "odd", **QUIET)
    assert not (tmp_path / "odd").exists()
    with pytest.raises(PatchloomError, match="wandb"):
        launch(both, tmp_path / "refused", log="wandb", **QUIET)
    assert not (tmp_path / "refused").exists()
    launch(both, tmp_path / "refused", **QUIET)
    (tmp_path / "cut1" / "stages.json").write_text('{"low": {}, "finish": {}, "strict": false, "log": null}')
    (tmp_path / "cut1" / "recipe.yaml").unlink()
    with pytest.raises(PatchloomError, match="is damaged"):
        resume(tmp_path / "cut1", **QUIET)
    assert json.loads((tmp_path / "straight" / "export" / "model.json").read_text())["config"]["img_size"] == [24, 24]


def test_weights_without_layerscale_keep_their_structure(tmp_path: Path) -> None:
    """The recipe of the family trains networks with LayerScale."""
    small = {"dim": 48, "heads": 3, "depth": 1, "patch_size": 8}
    low = plan_training(
        "digits", "vit_small_12x1", "vit_a2@small", {**SHORT, "resolution": 16}, {**small, "scale": "none"}
    )
    both = dataclasses.replace(low, then=FinishHigh(24, {"epochs": 1, "batch_size": 256}))
    run = launch(both, tmp_path / "run", **QUIET)
    assert patchloom.load(run.folder).config.scale == "none"
    assert run.settings["recipe_name"] == "deit3_finetune@small"


def test_a_delta_knows_what_its_bare_base_does_not_say(tmp_path: Path) -> None:
    network = patchloom.create_model("deit_nano", num_classes=10, img_size=16, depth=1, dim=48, heads=2)
    torch.save(network.state_dict(), tmp_path / "bare.pth")
    base = tmp_path / "bare.pth"
    run = finetune(base, "digits", out=tmp_path / "run", tune="head", delta=True, model_options={"heads": 2},
                   **SHORT, **QUIET)  # fmt: skip
    delta = run.folder / "export" / "delta.safetensors"
    assert patchloom.evaluate(delta, "digits", base=base) == patchloom.evaluate(run.folder, "digits")
    with pytest.raises(PatchloomError, match="is not a delta"):
        patchloom.load(run.folder, base=base)
    base.unlink()
    with pytest.raises(PatchloomError, match="does not exist"):  # at once, not after the last epoch
        resume(run.folder, more_epochs=1, **QUIET)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 0.0, "head_lr": 1e-3}, "--tune head"),
        ({"model_options": {"head": "mlp"}, "batch_size": 1}, "at least 2"),
        ({"tune": "everything"}, "all, attention, ffn, head"),
        ({"resolution": 26}, "26"),
        ({"recipe": "nothing"}, "Unknown recipe 'nothing'"),
        ({"mean": (0.5,)}, "one mean and one positive std"),
        ({"model_options": {"depht": 3}}, "depth"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(options: dict, said: str, tmp_path: Path) -> None:
    base = base_of("deit_nano", tmp_path)
    with pytest.raises(PatchloomError, match=said):
        finetune(base, "digits", out=tmp_path / "run", **{**SHORT, **options}, **QUIET)
    assert not (tmp_path / "run").exists()


def test_a_token_cannot_be_taught_to_a_network_without_one(tmp_path: Path) -> None:
    base = base_of("deit_nano", tmp_path)
    with pytest.raises(PatchloomError, match="no distillation token"):
        finetune(base, "digits", out=tmp_path / "run", distillation=plan_distillation(base, "token"), **SHORT, **QUIET)


@pytest.mark.parametrize("classes", ["0123456789", "abcdefg"])
def test_one_query_becomes_one_per_class(classes: str, tmp_path: Path) -> None:
    """Thesis 5.2.1: every class starts from a copy of the one query; the head stays where the classes do."""
    torch.manual_seed(1)
    network = patchloom.create_model("patchconvnet_nano", num_classes=len(classes), img_size=16, depth=2)
    network.class_names = tuple(classes)
    patchloom.save(network, tmp_path / "base.safetensors")
    settings = {**SHORT, "lr": 0.0, "warmup_lr": 0.0, "min_lr": 0.0, "model_options": {"queries": "per_class"}}
    if len(classes) != 10:
        settings["head_lr"] = None
    run = finetune(tmp_path / "base.safetensors", "digits", out=tmp_path / "run", **settings, **QUIET)
    tuned = patchloom.load(run.folder)
    assert tuned.config.queries == "per_class"
    assert torch.equal(tuned.class_token, network.class_token.expand(1, 10, -1))
    same = len(classes) == 10
    assert same is (
        tuned.head.weight.shape == network.head.weight.shape and torch.equal(tuned.head.weight, network.head.weight)
    )
    assert run.settings["recipe_name"] == ("patchconvnet_per_class@small" if same else "new_classes")


def test_queries_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="queries"):
        finetune(
            base_of("deit_nano", tmp_path),
            "digits",
            out=tmp_path / "run",
            model_options={"queries": "per_class"},
            **SHORT,
            **QUIET,
        )


def test_flowers_tune_the_attention_of_deit3(tmp_path: Path) -> None:
    """Thesis 6.3.5.1; --tune still decides."""
    base = base_of("deit3_nano", tmp_path)
    for given, expected in ((None, "attention"), ("all", "all")):
        run = plan_finetuning(base, "digits", "transfer_flowers@small", {}, {}, tune=given)
        assert (run.task.start.tune, run.recipe.tune) == (expected, expected)
    with pytest.raises(PatchloomError, match="contradicts"):
        plan_finetuning(base, "digits", "transfer_flowers@small", {"tune": "ffn"}, {}, tune="all")
    with pytest.raises(PatchloomError, match="finetune"):
        plan_training("digits", "deit3_nano", "deit@small", {"tune": "ffn"}, {})
    assert plan_training("digits", "deit3_nano", "transfer_flowers@small", {}, {}).recipe.tune == "all"


@pytest.mark.parametrize(("name", "options"), [("resnet10t", {}), ("vit_tiny_patch16_224", {"depth": 1})])
def test_a_network_of_timm_from_its_run(name: str, options: dict[str, int], tmp_path: Path) -> None:
    short = {"steps": 1, "batch_size": 8, "workers": 0, **QUIET}
    patchloom.train(
        "digits", model=f"timm:{name}", recipe="deit@small", out=tmp_path / "first", resolution=32,
        model_options=options, **short,
    )  # fmt: skip
    run = finetune(tmp_path / "first", "digits", out=tmp_path / "second", **short)
    assert patchloom.load(run.folder).config.name == f"timm:{name}"


def test_a_network_of_timm_on_other_classes(tmp_path: Path) -> None:
    network = patchloom.create_model("timm:resnet10t", num_classes=5, img_size=32)
    network.class_names = tuple("abcde")
    patchloom.save(network, tmp_path / "weights.safetensors")
    short = {"steps": 1, "batch_size": 8, "workers": 0, **QUIET}
    run = finetune(tmp_path / "weights.safetensors", "digits", out=tmp_path / "run", **short)
    assert patchloom.load(run.folder).class_names == tuple("0123456789")
