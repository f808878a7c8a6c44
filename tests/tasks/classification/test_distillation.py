"""Distillation: the equations, teachers of every kind, two heads."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import patchloom
from patchloom import PatchloomError
from patchloom.api import distill
from patchloom.console import Console
from patchloom.exporting import export
from patchloom.models.preprocessing import Preprocessing
from patchloom.recipes.options import ClassificationOptions
from patchloom.recipes.recipe import setting_types
from patchloom.runs.sequence import resume
from patchloom.tasks.classification import setup
from patchloom.tasks.classification.config import DistillationConfig, teacher_place
from patchloom.tasks.classification.distillation import Distillation, soft_loss, teacher_loss, token_cosines
from patchloom.tasks.classification.plans import plan_training
from patchloom.tasks.classification.setup import _NOT_OF_IMAGES, open_task
from patchloom.tasks.classification.teacher_cache import TeacherCache
from patchloom.tasks.classification.teachers import Teacher, Teachers, match_classes, open_teacher
from patchloom.tasks.spec import Context
from patchloom.training.processes import Processes
from patchloom.training.run import Run

QUIET = {"console": Console(quiet=True)}
TINY = {"recipe": "deit@small", "resolution": 16, "batch_size": 256, "epochs": 1, "workers": 0}
CPU = torch.device("cpu")


def opened(changes: dict, distillation: DistillationConfig) -> Distillation:
    """The task of a small student."""
    settings = {"resolution": 16, "batch_size": 64, "workers": 0, **changes}
    run = plan_training("digits", "deit_nano", "deit@small", settings, {"depth": 1}, distillation=distillation)
    task = open_task(run.task, run.recipe, Context(Processes(), QUIET["console"]))
    assert isinstance(task, Distillation)
    return task


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A network of ten classes with names and a normalisation of its own."""
    torch.manual_seed(3)
    model = patchloom.create_model("resmlp_nano", num_classes=10, img_size=24, depth=1)
    model.class_names = tuple("9876543210")
    model.preprocessing = Preprocessing((24, 24), (0.5,) * 3, (0.5,) * 3)
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    patchloom.save(model, path)
    return path


def test_soft_distillation_is_equation_3_2_and_the_published_form_is_the_other_direction() -> None:
    torch.manual_seed(0)
    student, said = torch.randn(4, 7).double(), torch.randn(4, 7).double()
    for i in range(4):
        p, q = ((values[i] / 3).softmax(0) for values in (student, said))
        paper = 9 * sum(float(a * math.log(a / b)) for a, b in zip(p, q, strict=True))
        published = 9 * sum(float(b * math.log(b / a)) for a, b in zip(p, q, strict=True)) / 7
        assert float(soft_loss(student, said, 3.0)[i]) == pytest.approx(paper, rel=1e-5)
        assert float(soft_loss(student, said, 3.0, "published")[i]) == pytest.approx(published, rel=1e-5)
    # torch's own divergence, as the published code calls it: sum over everything, divided by the number of elements
    whole = (
        F.kl_div((student / 3).log_softmax(-1), (said / 3).log_softmax(-1), reduction="sum", log_target=True)
        * 9
        / student.numel()
    )
    assert float(soft_loss(student, said, 3.0, "published").mean()) == pytest.approx(float(whole), rel=1e-5)


def test_hard_distillation_takes_the_teachers_decision_without_smoothing() -> None:
    logits, said = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.1, 0.0, 5.0]])
    got = teacher_loss(DistillationConfig(("t",), "hard"), logits, said)
    assert float(got) == pytest.approx(-float(logits.log_softmax(-1)[0, 2]))
    assert DistillationConfig(("t",), "soft").share == 0.1
    assert DistillationConfig(("t",), "token").share == DistillationConfig(("t",), "hard").share == 0.5


def test_a_teacher_sees_the_same_picture_in_its_own_normalisation_and_size(teacher: Path) -> None:
    got = open_teacher(str(teacher), CPU)
    pixels = torch.rand(2, 3, 16, 16)
    how = Preprocessing((16, 16))
    mean, std = (torch.tensor(values)[:, None, None] for values in (how.mean, how.std))
    direct = F.interpolate((pixels - 0.5) / 0.5, (24, 24), mode="bicubic", antialias=True)
    torch.testing.assert_close(
        got.logits((pixels - mean) / std, how), patchloom.load(teacher)(direct), rtol=1e-4, atol=1e-5
    )


def test_classes_are_matched_by_name_and_a_mismatch_is_refused() -> None:
    known = Teacher("t", lambda x: x, Preprocessing(), ("b", "a", "c"), 3, "")
    order, message = match_classes(known, ("a", "b"))
    assert (order.tolist(), message) == ([1, 0], None)
    with pytest.raises(PatchloomError, match="does not know: d"):
        match_classes(known, ("a", "d"))
    nameless = Teacher("t", lambda x: x, Preprocessing(), None, 3, "")
    with pytest.raises(PatchloomError, match="3 classes without names, the data has 2"):
        match_classes(nameless, ("a", "b"))
    assert "sorted order" in str(match_classes(nameless, ("a", "b", "c"))[1])


def test_several_teachers_are_averaged_by_probability() -> None:
    x = torch.zeros(1, 3, 8, 8)
    how = Preprocessing((8, 8))
    answers = [torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.3, 0.7]]).log()]
    several = [Teacher("t", lambda _, a=a: a, how, None, 2, "") for a in answers]
    got = Teachers(several, ("a", "b"), None)(x, how, 0, 0)
    torch.testing.assert_close(got.softmax(-1), torch.tensor([[0.6, 0.4]]))
    hot = [Teacher("t", lambda _: torch.tensor([[0.0, 900.0]]), how, None, 2, "")] * 2
    torch.testing.assert_close(Teachers(hot, ("a", "b"), None)(x, how, 0, 0), torch.tensor([[-900.0, 0.0]]))


def test_a_cache_answers_in_place_of_the_teacher_and_a_cut_file_does_not(tmp_path: Path) -> None:
    calls = []
    how = Preprocessing((8, 8))

    def network(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return torch.randn(len(x), 2)

    one = Teacher("t", network, how, None, 2, "")
    cached = Teachers([one], ("a", "b"), TeacherCache(tmp_path, ["key"]))
    x = torch.zeros(5, 3, 8, 8)
    first = cached(x, how, 7, 0)
    assert torch.equal(cached(x, how, 7, 0), first)
    assert calls == [5]
    (path,) = tmp_path.rglob("*.npy")
    whole = path.read_bytes()
    for damaged in (
        whole[:50],
        b"",
        b"PK\x03\x04",
        np.zeros(()),
        np.zeros((5, 1), np.float32),
        np.full((5, 2), np.nan),
    ):
        if isinstance(damaged, bytes):
            path.write_bytes(damaged)
        else:
            np.save(path, damaged)
        cached(x, how, 7, 0)
    flipped = bytearray(whole)
    flipped[-40] ^= 1  # of a logit
    path.write_bytes(flipped)
    told: list[str] = []
    cached.cache.say = told.append
    cached(x, how, 7, 0)
    assert f"{path} is damaged" in told[0]
    path.write_bytes(b"no array" + hashlib.sha256(b"no array").digest())
    cached(x, how, 7, 0)
    assert f"{path} is damaged" in told[1]
    path.unlink()
    os.mkfifo(path)
    cached(x, how, 7, 0)  # at once: a FIFO is not waited for
    cached(x, how, 8, 0)
    assert calls == [5] * 11
    (tmp_path / "file").touch()
    with pytest.raises(PatchloomError, match="cannot be written"):
        TeacherCache(tmp_path / "file", [])


def test_a_cache_is_shared_by_what_shows_the_same_images_and_by_nothing_else(teacher: Path, tmp_path: Path) -> None:
    def folder(changes: dict, **fields) -> Path:
        taught = DistillationConfig((str(teacher),), "hard", cache=str(tmp_path), **fields)
        return opened(changes, taught).teachers.cache.folder

    first = folder({})
    assert first == folder({"lr": 1e-5, "weight_decay": 0.2, "drop_path": 0.3, "epochs": 3})
    others = [folder({"seed": 1}), folder({"batch_size": 32}), folder({"erasing": 0.5}), folder({"resolution": 24})]
    others += [folder({"precision": "bf16"}), folder({}, hints={"mean": (0.4,) * 3})]
    assert len({first, *others}) == 7


def test_every_field_of_a_recipe_is_known_to_the_cache() -> None:
    """A field that changes the images of a step, or what a teacher computes, belongs to the key; any other would only
    lose a cache."""
    of_images = {
        "batch_size", "accumulate", "resolution", "seed", "crop", "crop_scale", "flip", "augmentation", "three_augment",
        "magnitude", "color_jitter", "affine", "erasing", "mixup", "cutmix", "mix_probability", "switch_probability",
        "repeated_augmentation", "interpolation", "pixels", "shard", "precision",
    }  # fmt: skip
    fields = {"name", "summary", "sources", *setting_types(ClassificationOptions)}
    assert fields - of_images == _NOT_OF_IMAGES


def test_the_teacher_may_work_at_the_students_size(teacher: Path, tmp_path: Path, monkeypatch) -> None:
    seen = []
    real = setup.open_teacher
    monkeypatch.setattr(setup, "open_teacher", lambda *given: seen.append(real(*given)) or seen[-1])
    settings = {**TINY, "resolution": 24, "distillation": {"hints": {"img_size": "student"}}}
    distill(teacher, "digits", model="deit_nano", method="hard", out=tmp_path / "run", **settings, **QUIET)
    assert [one.preprocessing.img_size for one in seen] == [(24, 24)]


def test_an_onnx_teacher_takes_its_own_size_and_number_of_classes_only(tmp_path: Path) -> None:
    network = patchloom.create_model("deit_nano", num_classes=3, img_size=16, depth=1)
    network.class_names = ("a", "b", "c")
    export(network, "onnx", tmp_path / "t.onnx")
    teacher = open_teacher(str(tmp_path / "t.onnx"), CPU, {"img_size": 16, "num_classes": 3})
    assert (teacher.class_names, teacher.preprocessing) == (("a", "b", "c"), network.preprocessing)
    for hints in ({"img_size": 32}, {"num_classes": 4}, {"heads": 3}):
        with pytest.raises(PatchloomError, match=r"16 x 16|has 3 classes|does not apply"):
            open_teacher(str(tmp_path / "t.onnx"), CPU, hints)


def test_a_teacher_that_changed_is_noticed(teacher: Path, tmp_path: Path) -> None:
    own = tmp_path / "teacher.safetensors"
    own.write_bytes(teacher.read_bytes())
    run = distill(own, "digits", model="deit_nano", method="hard", out=tmp_path / "run", **TINY, **QUIET)
    resume(run.folder, more_epochs=1, **QUIET)
    network = patchloom.load(own)
    torch.nn.init.ones_(network.head.bias)
    patchloom.save(network, own)
    with pytest.raises(PatchloomError, match="teacher has changed"):
        resume(run.folder, more_epochs=1, **QUIET)


def test_an_onnx_file_teaches(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    model = patchloom.create_model("deit_nano", num_classes=4, img_size=16, depth=1).eval()
    path = tmp_path / "t.onnx"
    with warnings.catch_warnings(action="ignore"):  # the exporter's own
        torch.onnx.export(model, (torch.zeros(2, 3, 16, 16),), path, dynamic_shapes=({0: "n"},), verbose=False)
    (tmp_path / "t.json").write_text(json.dumps({"class_names": list("dcba")}))
    got, x = open_teacher(str(path), CPU), torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(got.logits(x, Preprocessing((16, 16))), model(x), rtol=1e-3, atol=1e-4)
    assert got.class_names == tuple("dcba")
    (tmp_path / "t.json").write_text(json.dumps({"class_names": list("dcb")}))
    with pytest.raises(PatchloomError, match="4 outputs, and names of 3"):
        open_teacher(str(path), CPU)
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(model, (torch.zeros(1, 3, 16, 16),), tmp_path / "one.onnx", verbose=False)
    with pytest.raises(PatchloomError, match="several images"):
        open_teacher(str(tmp_path / "one.onnx"), CPU)


def test_a_timm_network_teaches(tmp_path: Path, monkeypatch) -> None:
    from patchloom.compat import import_timm

    timm = import_timm()
    torch.manual_seed(0)
    network = timm.create_model("resnet10t", num_classes=1000).eval()
    torch.save(network.state_dict(), tmp_path / "r.pth")
    got = open_teacher(f"timm:resnet10t:{tmp_path / 'r.pth'}", CPU)
    assert (got.num_classes, got.class_names[0]) == (1000, "n01440764")
    x = torch.randn(1, 3, *got.preprocessing.img_size)
    torch.testing.assert_close(got.logits(x, got.preprocessing), network(x), rtol=1e-3, atol=1e-4)
    with pytest.raises(PatchloomError, match="no model 'resnet1'"):
        open_teacher("timm:resnet1", CPU)
    with pytest.raises(PatchloomError, match="does not exist"):
        open_teacher("timm:resnet10t:nowhere.pth", CPU)
    torch.save(timm.create_model("resnet10t", num_classes=3).state_dict(), tmp_path / "r.pth")
    assert open_teacher(f"timm:resnet10t:{tmp_path / 'r.pth'}", CPU).num_classes == 3
    monkeypatch.chdir(tmp_path)
    assert teacher_place("timm:resnet10t:r.pth") == f"timm:resnet10t:{tmp_path / 'r.pth'}"


@pytest.mark.parametrize(
    ("model", "method", "heads"), [("deit_nano", "token", 2), ("cait_nano", "token", 2), ("deit_nano", "soft", 1)]
)
def test_students(model: str, method: str, heads: int, teacher: Path, tmp_path: Path) -> None:
    settings = {**TINY, "recipe": f"{model.split('_')[0]}@small", "model_options": {"depth": 1, "dim": 24, "heads": 2}}
    run = distill(teacher, "digits", model=model, method=method, out=tmp_path / "run", **settings, **QUIET)
    student = patchloom.load(run.folder)
    x = torch.randn(2, 3, 16, 16)
    answers = student.answers(x)
    assert len(answers) == heads
    torch.testing.assert_close(student(x), sum(answers) / heads)
    if heads == 2:
        losses = {
            head: patchloom.evaluate(run.folder, "digits", head=head)["loss"] for head in ("class", "distill", "both")
        }
        losses["softmax"] = patchloom.evaluate(run.folder, "digits", head="both", fusion="softmax")["loss"]
        assert len(set(losses.values())) == 4
        assert losses["both"] == pytest.approx(patchloom.evaluate(run.folder, "digits")["loss"], rel=1e-6)
        with torch.inference_mode():
            cosines, start = token_cosines(student, x), student._prefix(x)
            student.norm = torch.nn.Identity()
            end = student.features(x).prefix
        want = [float(torch.cosine_similarity(*tokens.unbind(1), dim=-1).mean()) for tokens in (start, end)]
        assert [cosines[0], cosines[-1]] == pytest.approx(want, abs=1e-5)
    else:
        with pytest.raises(PatchloomError, match="one head"):
            patchloom.evaluate(run.folder, "digits", head="class")


def test_the_equation_is_what_is_minimised(teacher: Path) -> None:
    """The two terms of a step are those of Eq. 3.3, computed here from scratch."""
    task = opened({"drop_path": 0.0}, DistillationConfig((str(teacher),), "token"))
    batch = next(iter(task.batches(0, 1)))
    x, targets = task.mixed(batch, 0, 0)
    own, taught = task.network.train()(x)
    got = task.losses(batch, 0, 0)
    told = open_teacher(str(teacher), CPU)
    said = told.logits(x, task.network.preprocessing).flip(-1).argmax(-1)  # its classes are in the other order
    torch.testing.assert_close(got["labels"], 0.5 * -(targets * own.log_softmax(-1)).sum(-1))
    torch.testing.assert_close(got["teacher"], 0.5 * F.cross_entropy(taught, said, reduction="none"))


def test_bad_distillations_are_refused(teacher: Path, tmp_path: Path) -> None:
    for wrong in (
        {"method": "softly"},
        {"method": "soft", "distillation": {"tau": 0.0}},
        {"method": "soft", "distillation": {"kl": "x"}},
    ):
        with pytest.raises(PatchloomError):
            distill(teacher, "digits", model="deit_nano", out=tmp_path / "run", **wrong, **TINY, **QUIET)
    with pytest.raises(PatchloomError, match="does not exist"):
        distill("nowhere", "digits", model="deit_nano", out=tmp_path / "run", **TINY, **QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "options", "method"),
    [
        ("deit_nano", {}, "token"),
        ("deit_nano", {"distilled": False}, "hard"),
        ("deit3_nano", {}, "hard"),
        ("cait_nano", {}, "hard"),
        ("cait_nano", {"distilled": True}, "token"),
        ("resmlp_nano", {}, "hard"),
        ("patchconvnet_nano", {}, "hard"),
    ],
)
def test_the_default_method_follows_the_family(model: str, options: dict, method: str) -> None:
    """DeiT has its token (thesis 3.3); CaiT is distilled from hard labels only (supplement A.3)."""
    run = plan_training("digits", model, "deit@small", {}, options, distillation=DistillationConfig(("teacher",)))
    assert run.task.distillation.method == method


def test_how_and_teaching_are_still_accepted(teacher: Path, tmp_path: Path) -> None:
    """The names of `method` and `distillation` in version 0.1, in calls and in recipe.yaml."""
    options = {"model": "deit_nano", "model_options": {"depth": 1, "dim": 24, "heads": 2}, **TINY, **QUIET}
    old = distill(teacher, "digits", out=tmp_path / "old", how="soft", teaching={"tau": 2.0}, **options)
    new = distill(teacher, "digits", out=tmp_path / "new", method="soft", distillation={"tau": 2.0}, **options)
    assert old.settings == new.settings
    assert (old.settings["teaching"]["method"], old.settings["teaching"]["tau"]) == ("soft", 2.0)
    assert old.records()[0]["train_loss"] == new.records()[0]["train_loss"]
    written = {**old.settings["teaching"], "how": "soft"}
    del written["method"]
    assert DistillationConfig.from_json(written) == DistillationConfig.from_json(old.settings["teaching"])


def test_the_terms_of_a_step_are_logged_by_name_and_sum_to_the_loss(teacher: Path, tmp_path: Path) -> None:
    options = {"model": "deit_nano", "model_options": {"depth": 1, "dim": 24, "heads": 2}, **TINY, **QUIET}
    run = distill(teacher, "digits", out=tmp_path / "run", method="hard", **{**options, "epochs": 2})
    for record in Run.open(run.folder).records():
        assert set(record["losses"]) == {"labels", "teacher"}
        assert sum(record["losses"].values()) == pytest.approx(record["train_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("hints", "message"),
    [({"num_classes": 7}, "num_classes=7"), ({"heads": 3}, "teacher.heads=3"), ({"banana": 1}, "teacher.banana=1")],
)
def test_hints_that_do_not_fit_a_teacher_of_timm_are_refused(hints: dict, message: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    network = timm.create_model("test_resnet", num_classes=10)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    source = f"timm:test_resnet:{tmp_path / 'weights.pth'}"
    assert open_teacher(source, CPU, {"num_classes": 10, "img_size": 48}).preprocessing.img_size == (48, 48)
    with pytest.raises(PatchloomError, match=message):
        open_teacher(source, CPU, hints)


def test_a_wrong_number_of_classes_never_makes_a_fresh_head(teacher: Path) -> None:
    with pytest.raises(PatchloomError, match="num_classes=7"):
        open_teacher(str(teacher), CPU, {"num_classes": 7})


def test_a_vit_of_timm_takes_another_size(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    network = timm.create_model("test_vit", num_classes=10)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    found = open_teacher(f"timm:test_vit:{tmp_path / 'weights.pth'}", CPU, {"img_size": 64})
    assert found.network(torch.zeros(2, 3, 64, 64)).shape == (2, 10)
