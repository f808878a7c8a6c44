"""A translation run from text to export: files, exact resume, evaluation, prediction, bad input."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import sacrebleu
import torch

import patchloom
from patchloom import PatchloomError
from patchloom.cli.main import main
from patchloom.console import Console
from patchloom.recipes.registry import find_recipe
from patchloom.runs.launch import resume
from patchloom.runs.plan import measure_plan
from patchloom.tasks.spec import Context
from patchloom.tasks.translation.plans import plan_translation
from patchloom.tasks.translation.setup import open_task
from patchloom.training.processes import Processes
from patchloom.training.run import Run

WORDS = {"ba": "ka", "bo": "ko", "di": "li", "du": "lü", "ga": "ma", "go": "mo"}


def write_text(folder: Path, split: str, count: int, seed: int) -> None:
    """`count` sentences whose translation is word by word, in the opposite order."""
    rng = random.Random(seed)
    rows = [rng.choices(list(WORDS), k=rng.randint(2, 6)) for _ in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.en").write_text("".join(" ".join(row) + ".\n" for row in rows), encoding="utf-8")
    targets = [" ".join(WORDS[word] for word in reversed(row)) for row in rows]
    (folder / f"{split}.de").write_text("".join(f"{row}.\n" for row in targets), encoding="utf-8")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for split, count, seed in (("train", 120, 0), ("val", 12, 1), ("test", 8, 2)):
        write_text(folder, split, count, seed)
    return folder


def start(data: Path, out: Path, **changes: object) -> Run:
    options = {"model": "resmlp_mt_nano", "recipe": "resmlp_mt@small", "epochs": 2, "batch_tokens": 200, **changes}
    return patchloom.translate(data, pair="en-de", out=out, console=Console(quiet=True), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    start(text, out)
    return out


def sentences(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text(encoding="utf-8").splitlines()


def test_a_run_leaves_an_export_and_a_report_with_samples_and_matrices(run: Path, text: Path) -> None:
    described = json.loads((run / "export" / "model.json").read_text())
    assert described["task"] == "translation"
    assert described["pair"] == ["en", "de"]
    page = unescape((run / "report.html").read_text())
    assert all(line in page for line in (sentences(text, "val.en")[0], sentences(text, "val.de")[0]))
    assert page.count("data:image/png") == 4  # two layers on each side


def test_load_gives_the_network_with_its_vocabulary(run: Path) -> None:
    network = patchloom.load(run)
    assert network.pair == ("en", "de")  # type: ignore[attr-defined]
    assert network.vocabulary
    with pytest.raises(PatchloomError, match="img_size"):
        patchloom.load(run, img_size=32)


def test_evaluate_scores_what_predict_says(run: Path, text: Path) -> None:
    found = patchloom.evaluate(run, text, split="test")
    rows = patchloom.predict(run, sentences(text, "test.en"))
    translations = [row["translation"] for row in rows]
    assert found["count"] == 8
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(translations, [sentences(text, "test.de")]).score)
    assert [row["source"] for row in rows] == sentences(text, "test.en")
    network = patchloom.load(run)
    assert found["loss"] == pytest.approx(_loss_one_by_one(network, text), abs=1e-4)


@pytest.mark.parametrize("split", ["", "nowhere", "test.en", "train+val"])
def test_splits_that_are_no_file_are_refused(run: Path, text: Path, split: str) -> None:
    with pytest.raises(PatchloomError, match=f"has no {re.escape(split)}.en and no {re.escape(split)}.en.gz"):
        patchloom.evaluate(run, text, split=split)


def _loss_one_by_one(network, text: Path) -> float:
    """The loss without batches: one pair after the other, unpadded."""
    from patchloom.tasks.translation.vocabulary import Vocabulary

    vocabulary = Vocabulary(network.vocabulary)
    total, tokens = 0.0, 0
    for pair in zip(sentences(text, "test.en"), sentences(text, "test.de"), strict=True):
        source, target = vocabulary.encode(pair)
        begun = torch.tensor([[vocabulary.bos, *target[:-1]]])
        logits = network(torch.tensor([source]), begun).log_softmax(-1)[0]
        total -= float(logits[range(len(target)), target].sum().detach())
        tokens += len(target)
    return total / tokens


def test_resume_is_exact(text: Path, run: Path, tmp_path: Path) -> None:
    class Killed(BaseException):  # as a kill: nothing turns it into a message
        pass

    class Kill(patchloom.Callback):
        def after_step(self, step, losses) -> None:
            if step == 7:
                raise Killed

    out = tmp_path / "run"
    with pytest.raises(Killed):
        start(text, out, callbacks=[Kill()], checkpoint_every="3")
    resume(out, Console(quiet=True))
    ours, theirs = (patchloom.load(folder).state_dict() for folder in (out, run))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_sharding_is_refused_before_anything_is_written(text: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="shard=full cannot be used for translation"):
        start(text, tmp_path / "run", shard="full")
    assert not (tmp_path / "run").exists()


def test_a_network_or_a_copied_file_is_applied_by_its_own_task(run: Path, text: Path, tmp_path: Path) -> None:
    expected = patchloom.predict(run, ["ba bo."], beam=1, device="cpu")
    shutil.copy(run / "export" / "model.safetensors", tmp_path / "copied.safetensors")
    for model in (patchloom.load(run), tmp_path / "copied.safetensors"):
        assert patchloom.predict(model, ["ba bo."], beam=1, device="cpu") == expected
        assert patchloom.evaluate(model, text, beam=1, device="cpu")["pair"] == "en-de"


def test_changed_text_is_not_resumed(text: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(text, data)
    start(data, tmp_path / "run", epochs=1)
    write_text(data, "train", 120, seed=5)
    with pytest.raises(PatchloomError, match="has changed since"):
        resume(tmp_path / "run", Console(quiet=True))


def test_an_accumulated_step_weighs_every_token_alike(text: Path, tmp_path: Path) -> None:
    _run_plain(text, tmp_path / "whole")
    _run_plain(text, tmp_path / "parts", "accumulate=3")
    assert _largest_difference(tmp_path / "whole", tmp_path / "parts") < 1e-6


@pytest.mark.slow
def test_two_processes_equal_one(text: Path, tmp_path: Path) -> None:
    two = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    _run_plain(text, tmp_path / "one")
    _run_plain(text, tmp_path / "two", "accumulate=2", launcher=two)
    assert _largest_difference(tmp_path / "one", tmp_path / "two") < 1e-6


def _run_plain(data: Path, out: Path, *settings: str, launcher: tuple[str, ...] = ()) -> None:
    """A run by plain SGD, whose update is proportional to the gradient; Adagrad's hides a wrong factor."""
    words = ["translate", data, "--pair", "en-de", "--model", "resmlp_mt_nano", "--recipe", "resmlp_mt@small"]
    plain = ["optimizer=sgd", "lr=0.05", "warmup_steps=0", "epochs=2", "batch_tokens=200", "model.dim=32"]
    command = [sys.executable, "-m", *launcher, "patchloom", *words, "--out", out, *plain, *settings]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:]


def _largest_difference(ours: Path, theirs: Path) -> float:
    first, second = (patchloom.load(run).state_dict() for run in (ours, theirs))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_a_plan_writes_nothing_and_counts_steps(text: Path, run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {"batch_tokens": 200, "epochs": 2}
    plan = plan_translation(text, "en-de", "resmlp_mt_nano", "resmlp_mt@small", changes=changes)
    found = measure_plan(plan, Console(quiet=True))
    assert found["steps"] == json.loads((run / "export" / "model.json").read_text())["step"]
    assert found["estimated_seconds"] > 0
    assert not list(tmp_path.iterdir())


def test_a_given_vocabulary_is_used(text: Path, tmp_path: Path) -> None:
    from patchloom.tasks.translation.vocabulary import Vocabulary

    (tmp_path / "mine.model").write_bytes(Vocabulary.train(sentences(text, "train.en") * 2, 40).model)
    plan = plan_translation(text, "en-de", "resmlp_mt_nano", "resmlp_mt@small", tmp_path / "mine.model")
    task = open_task(plan.task, plan.recipe, Context(Processes(), Console(quiet=True)))
    assert task.vocabulary.model == (tmp_path / "mine.model").read_bytes()


def test_a_number_is_the_size_of_a_vocabulary_to_train(text: Path, tmp_path: Path) -> None:
    start(text, tmp_path / "run", epochs=1, vocabulary=30)
    assert patchloom.load(tmp_path / "run").config.vocab_size == 30


def test_the_recipe_is_that_of_the_family(text: Path) -> None:
    assert plan_translation(text, "en-de", "transformer_mt_nano").recipe == find_recipe("transformer_mt@small")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pair": "en-fr"}, "train.fr"),
        ({"pair": "english"}, "such as en-de"),
        ({"model": "deit_nano"}, "network of images"),
        ({"recipe": "deit"}, "deit is a recipe for classification, not for translation"),
        ({"changes": {"batch_size": 8}}, "batch_tokens"),
        ({"options": {"vocab_size": 50}}, "set vocabulary=50"),
        ({"model": "transformer_mt_nano", "changes": {"layerscale": 0.3}}, "transformer_mt_nano has no LayerScale"),
        ({"vocabulary": "mine.model", "changes": {"vocabulary": 50}}, "vocabulary=50 is for one that is trained"),
    ],
)
def test_bad_requests_are_refused(text: Path, options: dict, said: str) -> None:
    given = {"pair": "en-de", "model": "resmlp_mt_nano", **options}
    with pytest.raises(PatchloomError, match=said):
        plan_translation(text, **given)


def test_files_of_different_length_are_refused(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "data")
    lines = sentences(tmp_path / "data", "train.de")
    (tmp_path / "data" / "train.de").write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    with pytest.raises(PatchloomError, match=r"120 lines .* 119"):
        start(tmp_path / "data", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_predict_refuses_files_and_empty_text(run: Path, tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"")
    with pytest.raises(PatchloomError, match=r"0\.png is a file"):
        patchloom.predict(run, str(tmp_path / "0.png"))
    with pytest.raises(PatchloomError, match="empty"):
        patchloom.predict(run, ["ba.", " "])
    with pytest.raises(PatchloomError, match="too long"):
        patchloom.predict(run, "ba " * 3000)
    with pytest.raises(PatchloomError, match="not valid Unicode"):
        patchloom.predict(run, ["ba.", "\udcff bo"])  # as Python gives arguments that are not UTF-8


def test_commands_for_images_refuse_the_network(run: Path, tmp_path: Path) -> None:
    from patchloom.inference.models import open_model

    with pytest.raises(PatchloomError, match="network of text"):
        open_model(run)
    with pytest.raises(PatchloomError, match="network of text"):
        patchloom.train("digits", model="resmlp_mt_nano", recipe="deit@small", out=tmp_path / "run")


@pytest.mark.parametrize(
    "words",
    [
        ["finetune", "RUN", "digits", "--out", "OUT"],
        ["distill", "RUN", "digits", "--model", "deit_nano", "--recipe", "deit@small", "--out", "OUT"],
        ["grafit", "digits", "--model", "RUN", "--out", "OUT"],
        ["bench", "resmlp_mt_nano"],
    ],
)
def test_commands_that_start_from_images_refuse_the_network(
    words: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    with pytest.raises(SystemExit) as caught:
        main([places.get(word, word) for word in words])
    assert caught.value.code == 2
    assert "is a network of text" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_resumes_without_the_file_of_its_vocabulary(text: Path, tmp_path: Path) -> None:
    from patchloom.tasks.translation.vocabulary import Vocabulary

    file = tmp_path / "mine.model"
    file.write_bytes(Vocabulary.train(sentences(text, "train.en") + sentences(text, "train.de"), 40).model)
    start(text, tmp_path / "run", epochs=1, vocabulary=file)
    file.unlink()
    resume(tmp_path / "run", Console(quiet=True), more_epochs=1)
    network = patchloom.load(tmp_path / "run")
    assert network.vocabulary == Vocabulary.from_text(Run.open(tmp_path / "run").environment()["vocabulary"]).model


def test_the_command_predicts_a_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.txt").write_text("ba bo.\ndi.\n")
    main(["predict", str(run), "--file", str(tmp_path / "lines.txt"), "--json", "--beam", "1"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["source"] for row in rows] == ["ba bo.", "di."]
    main(["predict", str(run), "ba bo.", "--beam", "1"])
    assert capsys.readouterr().out.strip() == rows[0]["translation"]


def test_lines_of_a_file_are_sentences_even_if_files_have_their_names(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ba").mkdir()
    Path("lines.txt").write_text("ba\nlines.txt\n.\n")
    main(["predict", str(run), "--file", "lines.txt", "--json"])
    assert [row["source"] for row in json.loads(capsys.readouterr().out)] == ["ba", "lines.txt", "."]
    with pytest.raises(SystemExit):
        main(["predict", str(run), "ba"])
    assert "ba is a folder" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--batch", "4"], ["--workers", "2"], ["--strict"]])
def test_options_for_images_are_refused(
    words: list[str], run: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["evaluate", str(run), str(text), *words])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"patchloom: {words[0]} has no effect on this model: leave it out.\n"
