"""Everything that computes, on an accelerator: the test device of backend.py, which refuses mixed devices as CUDA does.

It runs in a process of its own, because a process with an accelerator means it by `auto`. The functions before the
tests are called there.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import backend
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

import patchloom
from patchloom.training.precision import survives

LOOM = "loom"
SETTINGS = ["epochs=3", "batch_size=64", "workers=0", "img_size=16", "warmup_epochs=1", "model.depth=2"]
FAMILIES = {
    "deit": ["--model", "deit_nano", "--recipe", "deit@small", "ema=0.9", "accumulate=2", "clip_grad=1", "erasing=1"],
    "deit3": ["--model", "deit3_nano", "--recipe", "deit3_1k@small", "drop_path=0.2", "mixup=0.8", "cutmix=1"],
    "cait": ["--model", "cait_nano", "--recipe", "cait@small", "optimizer=lamb", "lr=0.005"],
    "resmlp": ["--model", "resmlp_nano", "--recipe", "resmlp@small", "gradient_checkpointing=true"],
    "patchconvnet": ["--model", "patchconvnet_nano", "--recipe", "patchconvnet@small", "model.norm=batch"],
}


# Called in the process that has the device


def begin() -> None:
    backend.register()
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was not spawned


def command(*words: object) -> int:
    """A command of patchloom; the number of operators that ran on the device meanwhile."""
    from patchloom.cli.main import main

    before = torch.ops.loom.operators()
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        raise AssertionError(f"exit code {ended.code}") from ended
    return torch.ops.loom.operators() - before


def call(function: Callable[..., Any], *values: Any, **options: Any) -> Any:
    """A public function by its result; the device must have computed if and only if it was chosen."""
    before = torch.ops.loom.operators()
    result = function(*values, **options)
    assert (torch.ops.loom.operators() > before) == (options["device"] != "cpu")
    return result


def chosen(names: list[str], local_rank: str | None = None) -> list[str]:
    os.environ.pop("LOCAL_RANK", None)
    if local_rank is not None:
        os.environ["LOCAL_RANK"] = local_rank
    try:
        return [str(patchloom.devices.choose_device(name)) for name in names]
    finally:
        os.environ.pop("LOCAL_RANK", None)


def abilities() -> dict[str, Any]:
    from patchloom import devices

    loom = torch.device("loom:1")
    return {
        "available": devices.available_devices(),
        "name": devices.device_name(loom),
        "pins": devices.pins_memory(loom),
        "bf16": devices.supports(loom, torch.bfloat16),
        "moved": [str(x.device) for x in devices.to_device((torch.ones(2), [torch.ones(3)]), loom)[:1]],
        "values": devices.to_device({"x": torch.arange(3)}, loom)["x"].tolist(),
    }


class Mistake(nn.Module):
    """Adds a tensor that was left on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(x.shape[-1])


def with_mistake(device: str, place: str) -> str:
    """What a network says whose norm, attention or loss has a tensor on the wrong device; nothing where it works."""
    model = patchloom.create_model("deit_nano", num_classes=4, img_size=16, depth=1)
    if place == "norm":
        model.norm = nn.Sequential(model.norm, Mistake())
    model.to(device)
    x, labels = torch.zeros(2, 3, 16, 16, device=device), torch.tensor([0, 1])
    if place == "input":
        x = x.cpu()
    try:
        logits = model(x)
        nn.functional.cross_entropy(logits, labels if place == "labels" else labels.to(device)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def step_of(name: str, device: str) -> dict[str, Tensor]:
    """Logits and gradients of one backward pass."""
    torch.manual_seed(0)
    model = patchloom.create_model(name, num_classes=4, img_size=16, depth=2).to(device)
    logits = model(torch.randn(2, 3, 16, 16).to(device))
    logits.square().sum().backward()
    gradients = {key: p.grad.cpu() for key, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().cpu(), **gradients}


def explained(model: Any, image: Path, device: str) -> dict[str, Any]:
    found = call(patchloom.explain, model, image, faithfulness=False, device=device)
    return {**found.maps, **{f"head {name}": maps for name, maps in found.heads.items()}}


def served(run: Path, image: Path, device: str) -> dict[str, Any]:
    """The answers of the service to one image."""
    from patchloom.serve.hosting import Hosting
    from patchloom.serve.service import Service
    from patchloom.serve.settings import Settings

    service = Service(Hosting([str(run)], device=device), Settings())
    try:
        with service.predicting.admit() as place:
            model, files = service.find(None), [image.read_bytes()]
            assert str(next(model.predictor.parameters()).device).startswith(device)
            predicted = asyncio.run(service.predict(model, files, place, 4))
            asked = {"maps": None, "target": None, "faithfulness": False}
            shown = asyncio.run(service.explain(model, files, place, **asked))
        assert str(next(model.network.parameters()).device).startswith(device)  # an explanation moves nothing
        return {"digest": predicted["digest"], "predicted": predicted["predictions"], "shown": shown["predictions"]}
    finally:
        service.close()


def exported(run: Path, out: Path, device: str) -> float:
    from patchloom.exporting import export

    return call(export, run, "safetensors", out, device=device).difference


def probed(run: Path, data: Path, device: str) -> dict[str, Any]:
    from patchloom.inference.probes import probe

    return call(probe, run, data, "knn", k=3, device=device)


def analysed(run: Path, data: Path, device: str) -> dict[str, Any]:
    from patchloom.explaining.analyses import analyse

    return call(analyse, [run], data, device=device)["models"][str(run)]["branch_norms"]


def pinned_copies(*words: object) -> int:
    before = torch.ops.loom.pinned_copies()
    command(*words)
    return torch.ops.loom.pinned_copies() - before


def benched(device: str) -> dict[str, Any]:
    from patchloom.benching.inference import measure

    return call(measure, "deit_nano", None, batch=2, size=32, depth=1, rounds=1, memory=False, device=device)


def fused(device: str) -> tuple[bool, bool]:
    """Whether `fuse` gives a plain network in eval mode, and whether it is another than the given one."""
    model = patchloom.create_model("deit_nano", num_classes=4, img_size=16, depth=1).to(device)
    copy = patchloom.fuse(model)
    return not getattr(copy, "fused", False) and not copy.training and model.training, copy is not model


def searched(run: Path, data: Path, folder: Path, device: str) -> dict[str, Any]:
    """Vectors of the images, and what an index of them finds for one of them: keys with cosines, and classes."""
    index = call(patchloom.Index.build, run, data, folder, device=device)
    photo = str(next(data.glob("val/*/0.png")))
    (found,) = index.query(photo, k=3)
    return {
        "vectors": patchloom.embed(run, [photo], device=device),
        "scores": [row["score"] for row in found["results"]],
        "keys": [row["key"] for row in found["results"]],
    }


# Fixtures


@pytest.fixture(scope="module")
def on_loom() -> Iterator[Callable[..., Any]]:
    """Calls a function of this file in a process where the test device is registered."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("the test device needs a C++ compiler")
    backend.compiled()  # here, where an error is easier to read
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=begin) as pool:
        yield lambda function, *values, **options: pool.submit(function, *values, **options).result(600)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 handwritten digits to train on and 20 held out, of four classes: an epoch is one step."""
    folder, table = tmp_path_factory.mktemp("digits"), load_digits()
    for label in range(4):
        images = table.images[table.target == label]
        for split, some in (("train", images[:10]), ("val", images[10:15])):
            (folder / split / f"digit {label}").mkdir(parents=True)
            for i, image in enumerate(some):
                picture = Image.fromarray((image * 15).astype("uint8")).resize((20, 18)).convert("RGB")
                picture.save(folder / split / f"digit {label}" / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of three words, and the same in the opposite order."""
    folder, words, draw = tmp_path_factory.mktemp("text"), ["one", "two", "three"], np.random.default_rng(0)
    for split, count in (("train", 60), ("val", 8)):
        rows = [[words[i] for i in draw.integers(0, 3, draw.integers(2, 6))] for _ in range(count)]
        (folder / f"{split}.en").write_text("".join(" ".join(row) + ".\n" for row in rows))
        (folder / f"{split}.de").write_text("".join(" ".join(row[::-1]) + ".\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def photo(data: Path) -> Path:
    return data / "val" / "digit 0" / "0.png"


@pytest.fixture(scope="module")
def run(on_loom: Callable[..., Any], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with a distillation token, trained on the test device."""
    teacher, out = (tmp_path_factory.mktemp("runs") / name for name in ("teacher", "run"))
    on_loom(command, "train", data, *FAMILIES["resmlp"], *SETTINGS, "--device", LOOM, "--out", teacher)
    words = ["--model", "deit_nano", "--recipe", "deit@small", "--how", "token", *SETTINGS]
    on_loom(command, "distill", teacher, data, *words, "--device", LOOM, "--out", out)
    return out


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [value for row in rows if row["event"] == "epoch" for value in (row["train_loss"], row["loss"])]


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "export" / "model.safetensors")


def assert_near(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-4) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name)


# Choosing


def test_auto_is_the_accelerator_and_the_local_rank_its_index(on_loom: Callable[..., Any]) -> None:
    assert on_loom(chosen, ["auto", "loom", "loom:1", "cpu"]) == ["loom:0", "loom:0", "loom:1", "cpu"]
    assert on_loom(chosen, ["auto", "loom", "loom:0", "cpu"], "1") == ["loom:1", "loom:1", "loom:0", "cpu"]
    with pytest.raises(patchloom.PatchloomError, match=r"'loom:2' is not available.*auto, cpu, loom:0, loom:1"):
        on_loom(chosen, ["loom:2"])
    with pytest.raises(patchloom.PatchloomError, match=r"'cuda'.*Choose from: auto, cpu, loom:0, loom:1"):
        on_loom(chosen, ["cuda"])


def test_a_registered_device_is_named_and_probed(on_loom: Callable[..., Any]) -> None:
    found = on_loom(abilities)
    assert found["available"] == ["cpu", "loom:0", "loom:1"]
    assert found["name"] == "loom:1 (test device)"
    assert found["pins"]
    assert found["bf16"]
    assert found["moved"] == ["loom:1"]
    assert found["values"] == [0, 1, 2]


@pytest.mark.parametrize("place", ["norm", "input", "labels"])
def test_a_tensor_that_is_left_on_the_cpu_is_caught(on_loom: Callable[..., Any], place: str) -> None:
    assert re.search("all tensors to be on the same device", on_loom(with_mistake, LOOM, place))
    assert on_loom(with_mistake, "cpu", place) == ""


def test_a_network_without_mistakes_passes(on_loom: Callable[..., Any]) -> None:
    assert on_loom(with_mistake, LOOM, "nowhere") == ""


def test_the_faster_forms_for_the_cpu_are_not_used_elsewhere(on_loom: Callable[..., Any]) -> None:
    assert on_loom(fused, LOOM) == (True, True)


@pytest.mark.parametrize("name", ["deit_nano", "deit3_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"])
def test_gradients_agree_with_the_cpu(on_loom: Callable[..., Any], name: str) -> None:
    assert_near(on_loom(step_of, name, LOOM), on_loom(step_of, name, "cpu"))


# Training


@pytest.mark.parametrize(
    "family", ["deit", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "deit")]
)
def test_training_agrees_with_the_cpu(on_loom: Callable[..., Any], data: Path, tmp_path: Path, family: str) -> None:
    for device in (LOOM, "cpu"):
        words = [*FAMILIES[family], *SETTINGS, "--device", device, "--out", tmp_path / device]
        operators = on_loom(command, "train", data, *words)
        assert (operators > 0) == (device == LOOM)
    np.testing.assert_allclose(losses(tmp_path / LOOM), losses(tmp_path / "cpu"), rtol=1e-5)
    assert_near(weights(tmp_path / LOOM), weights(tmp_path / "cpu"))
    environment = json.loads((tmp_path / LOOM / "environment.json").read_text())
    assert environment["device"] == "loom:0 (test device)"
    text = (tmp_path / LOOM / "recipe.yaml").read_text().replace(str(tmp_path), "").replace("patchloom", "")
    assert LOOM not in text


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_trains_on_the_device(on_loom: Callable[..., Any], data: Path, tmp_path: Path, precision: str) -> None:
    if not survives(precision):
        pytest.skip(f"this processor has no {precision}, and the test device computes on it")
    words = ["--model", "deit_nano", "--recipe", "deit@small", *SETTINGS]
    on_loom(command, "train", data, *words, f"precision={precision}", "--device", LOOM, "--out", tmp_path / "low")
    on_loom(command, "train", data, *words, "--device", "cpu", "--out", tmp_path / "full")
    np.testing.assert_allclose(losses(tmp_path / "low"), losses(tmp_path / "full"), rtol=2e-2)
    assert losses(tmp_path / "low") != losses(tmp_path / "full")


@pytest.fixture(scope="module")
def rough(on_loom: Callable[..., Any], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """For a precision, a folder of the test device and one of the CPU, each with a network that is distilled with a
    token, and one that is fine-tuned from it."""
    made: dict[str, dict[str, Path]] = {}

    def make(precision: str) -> dict[str, Path]:
        if not survives(precision):
            pytest.skip(f"this processor has no {precision}, and the test device computes on it")
        if precision not in made:
            made[precision] = {device: tmp_path_factory.mktemp(f"{precision}-{device}") for device in (LOOM, "cpu")}
            for device, folder in made[precision].items():
                _distill_and_finetune(on_loom, data, folder, precision, device)
        return made[precision]

    return make


def _distill_and_finetune(on_loom: Callable[..., Any], data: Path, folder: Path, precision: str, device: str) -> None:
    common = [f"precision={precision}", "--device", device, "--out"]
    on_loom(command, "train", data, *FAMILIES["resmlp"], *SETTINGS, "--device", device, "--out", folder / "teacher")
    words = ["--model", "deit_nano", "--recipe", "deit@small", "--method", "token", *SETTINGS]
    on_loom(command, "distill", folder / "teacher", data, *words, *common, folder / "distilled")
    words = ["--recipe", "new_classes", "epochs=2", "workers=0"]
    on_loom(command, "finetune", folder / "distilled", data, *words, *common, folder / "tuned")


HALF = pytest.mark.parametrize("precision", ["bf16", "fp16"])


@HALF
@pytest.mark.parametrize("kind", ["distilled", "tuned"])
def test_distillation_and_fine_tuning_in_half_precision_agree_with_the_cpu(
    rough: Callable[[str], Any], kind: str, precision: str
) -> None:
    here, there = (rough(precision)[device] / kind for device in (LOOM, "cpu"))
    np.testing.assert_allclose(losses(here), losses(there), rtol=2e-2)


@HALF
def test_a_run_in_half_precision_resumes_on_its_device_to_the_bit(
    on_loom: Callable[..., Any], rough: Callable[[str], Any], tmp_path: Path, precision: str
) -> None:
    whole = rough(precision)[LOOM] / "distilled"
    cut = shutil.copytree(whole, tmp_path / "cut")
    max((cut / "checkpoints").glob("step-*")).unlink()
    shutil.rmtree(cut / "export")
    on_loom(command, "resume", cut, "--device", LOOM)
    resumed = weights(cut)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights(whole).items())


@HALF
def test_a_network_of_half_precision_is_applied_on_the_device_as_on_the_cpu(
    on_loom: Callable[..., Any], rough: Callable[[str], Any], data: Path, photo: Path, tmp_path: Path, precision: str
) -> None:
    """Evaluated, applied, explained, exported and served in float32, whatever it was trained in."""
    run = rough(precision)[LOOM] / "distilled"
    scores = [on_loom(call, patchloom.evaluate, run, data, device=device)["loss"] for device in (LOOM, "cpu")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    rows = [on_loom(call, patchloom.predict, run, photo, device=device)[0]["predictions"] for device in (LOOM, "cpu")]
    for mine, theirs in zip(*rows, strict=True):
        assert mine["probability"] == pytest.approx(theirs["probability"], abs=1e-5)
    assert_near(on_loom(explained, run, photo, LOOM), on_loom(explained, run, photo, "cpu"), 1e-3)
    assert on_loom(exported, run, tmp_path / "model.safetensors", LOOM) < 1e-5
    here, there = (on_loom(served, run, photo, device)["predicted"] for device in (LOOM, "cpu"))
    assert here[0]["probability"] == pytest.approx(there[0]["probability"], abs=1e-5)


def test_pretraining_agrees_with_the_cpu(on_loom: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    words = ["--method", "dino", "--model", "deit_nano", *SETTINGS, "local_crops=2", "prototypes=32", "probe_every=3"]
    for device in (LOOM, "cpu"):
        where = ["--device", device, "--out", tmp_path / device]
        operators = on_loom(command, "pretrain", data, *words, *where)
        assert (operators > 0) == (device == LOOM)
    assert_near(weights(tmp_path / LOOM), weights(tmp_path / "cpu"), 1e-3)
    cut = tmp_path / LOOM
    max((cut / "checkpoints").glob("step-*")).unlink()  # as if it had been killed in the last epoch
    before = weights(cut)
    shutil.rmtree(cut / "export")
    on_loom(command, "resume", cut, "--device", LOOM)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(cut).items())


def test_grafit_and_search_agree_with_the_cpu(on_loom: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    words = ["--model", "resmlp_nano", *SETTINGS, "batch_size=8", "projector_hidden=16", "projector_dim=12"]
    for device in (LOOM, "cpu"):
        where = ["--device", device, "--out", tmp_path / device]
        operators = on_loom(command, "grafit", data, *words, "predictor_hidden=16", *where)
        assert (operators > 0) == (device == LOOM)
    assert_near(weights(tmp_path / LOOM), weights(tmp_path / "cpu"), 1e-3)
    run, places = tmp_path / LOOM, [tmp_path / f"index-{device}" for device in (LOOM, "cpu")]
    here, there = (on_loom(searched, run, data, place, place.name[6:]) for place in places)
    assert here.pop("keys") == there.pop("keys")
    assert_near(here, there)
    assert on_loom(command, "evaluate", run, data, "--device", LOOM) > 0


def test_translation_agrees_with_the_cpu(on_loom: Callable[..., Any], text: Path, tmp_path: Path) -> None:
    words = ["--pair", "en-de", "--model", "resmlp_mt_nano", "--recipe", "resmlp_mt@small", "epochs=2"]
    for device in (LOOM, "cpu"):
        where = ["batch_tokens=200", "--device", device, "--out", tmp_path / device]
        operators = on_loom(command, "translate", text, *words, *where)
        assert (operators > 0) == (device == LOOM)
    # Not the weights: some biases have a gradient of 0 but for rounding, of which Adam makes full steps.
    assert losses(tmp_path / LOOM) == pytest.approx(losses(tmp_path / "cpu"), abs=1e-4)
    run, sentences = tmp_path / LOOM, ["one three.", "two one two."]
    said = [on_loom(call, patchloom.predict, run, sentences, device=device) for device in (LOOM, "cpu")]
    assert [row["translation"] for row in said[0]] == [row["translation"] for row in said[1]]
    found = [on_loom(call, patchloom.evaluate, run, text, split="val", device=device) for device in (LOOM, "cpu")]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], abs=1e-4)


def test_a_run_resumes_on_its_device_to_the_bit_and_on_another_closely(
    on_loom: Callable[..., Any], data: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    words = [*FAMILIES["deit"], *SETTINGS, "checkpoint_every=1 epoch"]
    on_loom(command, "train", data, *words, "--device", LOOM, "--out", whole)
    for device in (LOOM, "cpu"):
        cut = shutil.copytree(whole, tmp_path / device)
        max((cut / "checkpoints").glob("step-*")).unlink()  # as if it had been killed in the last epoch
        shutil.rmtree(cut / "export")
        on_loom(command, "resume", cut, "--device", device)
    same, close = weights(tmp_path / LOOM), weights(tmp_path / "cpu")
    assert all(torch.equal(same[name], tensor) for name, tensor in weights(whole).items())
    assert_near(close, weights(whole))


def test_fine_tuning_and_more_epochs_run_on_the_device(
    on_loom: Callable[..., Any], run: Path, data: Path, tmp_path: Path
) -> None:
    for device in (LOOM, "cpu"):
        words = ["--recipe", "new_classes", "epochs=1", "workers=0", "--device", device, "--out", tmp_path / device]
        on_loom(command, "finetune", run, data, *words)
        on_loom(command, "extend", tmp_path / device, "--epochs", 1, "--device", device)
    np.testing.assert_allclose(losses(tmp_path / LOOM), losses(tmp_path / "cpu"), rtol=1e-5)
    assert len(losses(tmp_path / LOOM)) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_copied_from_pinned_memory(
    on_loom: Callable[..., Any], data: Path, tmp_path: Path, workers: int
) -> None:
    words = ["--model", "deit_nano", "--recipe", "deit@small", *SETTINGS, f"workers={workers}", "--out", tmp_path / "a"]
    copies = on_loom(pinned_copies, "train", data, *words)
    assert copies >= 3 * 2 * 2  # images and labels, of three training steps and three evaluations


# What is done with a trained network


def test_evaluation_agrees_with_the_cpu(on_loom: Callable[..., Any], run: Path, data: Path) -> None:
    here, there = (on_loom(call, patchloom.evaluate, run, data, device=device) for device in (LOOM, "cpu"))
    assert here["top1"] == there["top1"]
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)


def test_both_heads_probes_and_analyses_run_on_the_device(on_loom: Callable[..., Any], run: Path, data: Path) -> None:
    heads = {"head": "both", "fusion": "softmax"}
    one, other = (on_loom(call, patchloom.evaluate, run, data, device=device, **heads) for device in (LOOM, "cpu"))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert on_loom(probed, run, data, LOOM) == on_loom(probed, run, data, "cpu")
    assert_near(on_loom(analysed, run, data, LOOM), on_loom(analysed, run, data, "cpu"))


def test_predictions_agree_with_the_cpu(on_loom: Callable[..., Any], run: Path, data: Path) -> None:
    here, there = (on_loom(call, patchloom.predict, run, data / "val", device=device) for device in (LOOM, "cpu"))
    assert len(here) == 20
    for one, other in zip(here, there, strict=True):
        for mine, theirs in zip(one["predictions"], other["predictions"], strict=True):
            assert mine["probability"] == pytest.approx(theirs["probability"], abs=1e-5)


def test_explanations_agree_with_the_cpu(on_loom: Callable[..., Any], run: Path, photo: Path) -> None:
    assert_near(on_loom(explained, run, photo, LOOM), on_loom(explained, run, photo, "cpu"), 1e-3)


def test_an_export_is_checked_against_the_device(on_loom: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    assert on_loom(exported, run, tmp_path / "model.safetensors", LOOM) < 1e-5
    on_loom(exported, run, tmp_path / "cpu.safetensors", "cpu")
    one, other = (load_file(tmp_path / name) for name in ("model.safetensors", "cpu.safetensors"))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_the_service_answers_from_the_device(on_loom: Callable[..., Any], run: Path, photo: Path) -> None:
    here, there = (on_loom(served, run, photo, device) for device in (LOOM, "cpu"))
    assert here["digest"] == there["digest"]
    for kind in ("predicted", "shown"):
        for one, other in zip(here[kind], there[kind], strict=True):
            assert one["class"] == other["class"]
            assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)


def test_the_speed_of_a_device_can_be_measured(on_loom: Callable[..., Any]) -> None:
    assert on_loom(benched, LOOM)["ours"]["throughput"] > 0
