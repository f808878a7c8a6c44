"""Which weights are the result: the raw ones, or with `ema` their average, and every place says which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import patchloom
from patchloom.api import train
from patchloom.cli.main import main
from patchloom.console import Console


@pytest.mark.parametrize(("ema", "kind"), [(0.0, "raw"), (0.9, "averaged")])
def test_the_export_is_what_it_says(ema: float, kind: str, tmp_path: Path, capsys) -> None:
    run = train(
        "digits", model="deit_nano", recipe="deit@small", out=tmp_path / "run", epochs=2, resolution=16, batch_size=256,
        workers=0, lr=5e-3, warmup_epochs=0, ema=ema, model_options={"depth": 1}, console=Console(),
    )  # fmt: skip
    checkpoint = load_file(max((run.folder / "checkpoints").glob("step-*.safetensors")))
    exported = load_file(run.folder / "export" / "model.safetensors")
    part = {"raw": "model", "averaged": "ema.model"}[kind]
    assert all(torch.equal(tensor, checkpoint[f"{part}.{name}"]) for name, tensor in exported.items())
    assert any(name.startswith("ema.") for name in checkpoint) is (kind == "averaged")
    assert json.loads((run.folder / "export" / "model.json").read_text())["weights"] == kind
    assert f"{kind} weights after the last epoch" in (run.folder / "report.html").read_text()
    assert f"the {kind} weights are in" in capsys.readouterr().out
    last = [row for row in run.records() if row.get("event") == "epoch"][-1]
    assert ("ema_loss" in last) is (kind == "averaged")
    metrics = patchloom.evaluate(run.folder, "digits")
    assert metrics["loss"] == pytest.approx(last["ema_loss" if ema else "loss"], rel=1e-4)
    assert metrics["weights"] == kind
    newest = max((run.folder / "checkpoints").glob("step-*.safetensors"))
    for place, file in ((run.folder, run.folder / "export" / "model.safetensors"), (newest, newest)):
        main(["evaluate", str(place), "digits", "--json"])
        printed = capsys.readouterr()
        assert f"deit_nano with the {kind} weights of {file}." in printed.err
        assert json.loads(printed.out)["weights"] == kind
    main(["evaluate", str(run.folder), "digits", "--crop-ratio", "0.9", "1"])
    assert capsys.readouterr().err.count(f"the {kind} weights of") == 1
