"""Fixed scales (thesis 3.5.3): they stay what they are, to the bit, and may come from another network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchloom
from patchloom import PatchloomError
from patchloom.api import finetune, train
from patchloom.cli.main import main
from patchloom.console import Console
from patchloom.runs.launch import resume

QUIET = {"console": Console(quiet=True)}
SHORT = {"epochs": 1, "batch_size": 256, "workers": 0, "lr": 1e-2}


def saved(folder: Path, model: str = "deit_nano", **options) -> Path:
    """A network whose scales are random numbers, as a training would leave them."""
    network = patchloom.create_model(model, num_classes=10, img_size=16, depth=2, **options)
    network.class_names = tuple("0123456789")
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".scale." in name:
                parameter.copy_(torch.rand_like(parameter))
    patchloom.save(network, folder / "base.safetensors")
    return folder / "base.safetensors"


def scales(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(path).items() if ".scale." in name}


@pytest.mark.parametrize("tune", ["all", "attention", "head"])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_finetune_keeps_fixed_scales(tune: str, ema: float, tmp_path: Path) -> None:
    base = saved(tmp_path, scale="layerscale", scale_trainable=False)
    run = finetune(base, "digits", out=tmp_path / "run", tune=tune, ema=ema, **SHORT, **QUIET)
    before, after = scales(base), scales(run.folder / "export" / "model.safetensors")
    assert len(before) == 4
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("model", "scale"), [("deit_nano", "layerscale"), ("cait_nano", "layerscale"), ("deit_nano", "fixup")]
)
def test_a_fresh_network_with_the_scales_of_another(model: str, scale: str, tmp_path: Path) -> None:
    base = saved(tmp_path, model, scale=scale)
    options = {"depth": 2, "scale": scale, "scale_trainable": False}
    settings = {"model": model, "recipe": "deit@small", "resolution": 16, "model_options": options, **SHORT, **QUIET}
    run = train("digits", scales_from=base, out=tmp_path / "run", **settings)
    exported = run.folder / "export" / "model.safetensors"
    before, after = scales(base), scales(exported)
    assert before
    assert all(torch.equal(before[name], after[name]) for name in before)
    others = {name for name, tensor in load_file(base).items() if tensor.ndim > 1 and ".scale." not in name}
    assert not any(torch.equal(load_file(base)[name], load_file(exported)[name]) for name in others)
    base.unlink()  # the run has its own copy
    resume(run.folder, Console(quiet=True), more_epochs=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in scales(exported).items())


def test_the_documented_command(tmp_path: Path) -> None:
    base, options = saved(tmp_path, "cait_nano"), ["model.scale_trainable=false", "model.depth=2", "img_size=16"]
    words = ["--model", "cait_nano", "--recipe", "cait@small", "epochs=1", "workers=0", *options]
    main(["train", "digits", *words, "--scales-from", str(base), "--out", str(tmp_path / "run")])
    before, after = scales(base), scales(tmp_path / "run" / "export" / "model.safetensors")
    assert before
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 2}, "no learned scales"),
        ({"depth": 3, "scale": "layerscale"}, "do not fit"),
        ({"depth": 2, "scale": "rezero"}, "do not fit"),
        ({"depth": 2, "scale": "layerscale", "dim": 48}, "do not fit"),
    ],
)
def test_scales_that_do_not_fit_are_refused(options: dict, message: str, tmp_path: Path) -> None:
    base = saved(tmp_path, scale="layerscale")
    with pytest.raises(PatchloomError, match=message):
        train(
            "digits", model="deit_nano", recipe="deit@small", out=tmp_path / "run", resolution=16, scales_from=base,
            model_options=options, **SHORT, **QUIET,
        )  # fmt: skip
    assert not (tmp_path / "run").exists()
