"""The other benchmarks run, on cases so small that they take seconds."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from conftest import assert_close, stir
from patchloom.kernels import native
from patchloom.layers.mixing import CrossPatchLinear

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = script("choices", monkeypatch)
    rows = [choices.few_queries(2, 1, 1), choices.no_keys(2, 6, 1, 1), choices.drop_rate(0.4, 2, 1)]
    rows += [choices.talking("cait_xxs24", 1, 1), choices.pairs("patchconvnet_s60", 64, 1, 1)]
    rows += [
        choices.pairs("cait_s24", 64, 1, 1),
        choices.no_keys_in_training(2, 6, 1, 1),
        choices.adamw("deit_nano", 1),
    ]
    rows += [choices.layout("cross-patch", CrossPatchLinear(9), torch.randn(2, 9, 8), training=True, rounds=1)]
    assert all(0 < row["low"] <= row["ratio"] <= row["high"] for row in rows)


def test_choices_compare_two_forms_whatever_the_rules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = script("choices", monkeypatch)
    called: dict[str, list[set[str]]] = {}

    def operators_of(rule: str, _: int, *forms: Callable[[], object]) -> dict[str, object]:
        for form in forms[:2]:
            with torch.profiler.profile() as profile:
                form()
            called.setdefault(rule, []).append({event.name for event in profile.events()})
        return {}

    monkeypatch.setattr(choices, "row", operators_of)
    torch.manual_seed(0)
    choices.drop_rate(0.5, 1, 1)
    if native.available():
        choices.talking("cait_xxs24", 1, 1)
    choices.no_keys_in_training(100, 6, 1, 1)
    for rule, (plain, rewrite) in called.items():
        assert plain != rewrite, rule


@pytest.mark.parametrize(
    ("theirs", "ours"), [("cait_xxs24_224", "cait_xxs24"), ("deit3_small_patch16_224", "deit3_small")]
)
def test_steps_drop_at_one_rate_on_both_sides(theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = script("steps", monkeypatch)
    case = steps.Case(theirs, ours, {"depth": 2}, 0.5, 2, 1.0)
    for network in steps.networks(case):
        for block in network.blocks:
            drops = [module for module in block.modules() if type(module).__name__ == "DropPath"]
            assert drops
            assert {getattr(drop, "rate", None) or drop.drop_prob for drop in drops} == {0.5}


def test_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = script("steps", monkeypatch)
    case = steps.Case("cait_xxs24_224", "cait_xxs24", {"depth": 1}, 0.5, 2, 1.0)
    theirs, ours = steps.networks(case)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert_close(ours.eval()(images), theirs.eval()(images), 1e-5)
    row = steps.measure("small", case, 1)
    assert row["ratio"] > 0
    assert 0 < row["kept"] < 1


def test_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = script("parallel", monkeypatch)
    rows = parallel.measure(("vit_tiny_2x1", "vit_tiny_1x2"), 32, 1)
    assert len(rows) == len({(row["model"], row["peer"]) for row in rows}) == 7
    assert all(0 < row["low"] <= row["ratio"] <= row["high"] for row in rows)
    trial, enough = parallel.page(rows, 1), parallel.page(rows, 31)
    assert "not results" in trial
    assert "not results" not in enough
    assert all(f"| {row['ratio']:.2f} | {row['low']:.2f} to {row['high']:.2f} |" in enough for row in rows)
    forms = parallel.forms("vit_tiny_1x2", 32)
    counts = [len(network.blocks[0].mixing.branches) for network in forms.values()]
    assert counts == [2, 2, 1]


def test_mae_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(script("mae_cost", monkeypatch).measured(argparse.Namespace(batch=1, size=64, rounds=1)))
    assert [row["model"] for row in rows] == ["mae 0.2", "mae 0.5", "mae 0.75", "mae 0.9"]
    assert rows[0]["relative"] == 1
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm's reader leaves files open
def test_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = script("loading", monkeypatch)
    for number in range(4):
        (tmp_path / str(number % 2)).mkdir(exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (80, 90, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / str(number % 2) / f"{number}.jpg")
    options = argparse.Namespace(folder=str(tmp_path), images=8, size=32, batch=4, workers=0, rounds=1)
    rows = list(loading.measured(options))
    assert [row["model"] for row in rows][1:] == ["exact", "fast"]
    assert rows[0]["ratio"] == 1
    assert loading.ours(str(tmp_path), options, "exact")() == loading.theirs(str(tmp_path), options)() == 8


def test_reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = script("reduced", monkeypatch)
    network = stir(patchloom.create_model("deit_nano", num_classes=6)).eval()
    monkeypatch.setattr(reduced, "networks", lambda *_: (network, network))
    images = torch.randn(8, 3, *network.config.img_size)
    with torch.inference_mode():
        reduced.write_graphs("small", None, tmp_path)
        want = network(images)
        for name, make in reduced.FORMS.items():
            if form := make(network, str(tmp_path / "small")):
                assert_close(form(images), want, 1e-4 if "float32" in name else 0.2, name)
        assert reduced.agreement(network, network, images) == 1
        assert reduced.agreement(network, lambda x: -network(x), images) == 0


def test_ranking_contenders_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ranking = script("ranking", monkeypatch)
    words = ["--queries", "30", "--items", "400", "--dim", "8", "--classes", "5", "--peer-queries", "20"]
    options = ranking.make_parser().parse_args(words)
    one = ranking.once("patchloom", options)
    assert one["measured"] == 30
    assert 0.2 < one["map"] < 1
    for name, module in ranking.PEERS.items():
        if importlib.util.find_spec(module) is not None:
            assert ranking.once(name, options)["map"] == pytest.approx(one["map"], abs=1e-6)


@pytest.mark.slow
def test_grafit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = script("grafit_memory", monkeypatch)
    sizes = {"images": 500, "dim": 8, "batch": 16, "classes": 5, "rounds": 1, "threads": 1}
    rows = list(memory.measured(argparse.Namespace(**sizes)))
    assert [row["model"] for row in rows[:2]] == ["ours", "ours bf16"]
    plain = next(row for row in rows if row.get("peer") == "plain")
    assert plain["ours"]["loss"] == pytest.approx(plain["theirs"]["loss"], rel=1e-5)


def test_switches() -> None:
    words = [sys.executable, str(BENCHMARKS / "switches.py"), "--show", "load"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    folders = [line.split()[0] for line in lines]
    assert folders[0] == "weights"
    assert {"weights", "models", "layers"} <= set(folders) <= {"weights", "models", "layers", "patchloom"}
    assert all(one != other for one, other in pairwise(folders))
    assert "load.load" in lines[0]
