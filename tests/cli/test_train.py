"""train, resume, extend, evaluate and predict from the command line: exit codes, sentences, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from patchloom.cli.main import _parser, main

TINY = [
    "--model", "deit_nano", "--recipe", "deit@small", "model.depth=1", "model.dim=24", "model.heads=2",
    "img_size=16", "batch_size=32", "epochs=1", "workers=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Real digits in class folders, without a split."""
    root = tmp_path_factory.mktemp("digits")
    digits = load_digits()
    for i, (pixels, label) in enumerate(zip(digits.images[:120], digits.target[:120], strict=True)):
        (root / f"{label}").mkdir(exist_ok=True)
        Image.fromarray((pixels * 15.9).astype("uint8")).save(root / f"{label}" / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    main(["train", str(folder), *TINY, "--out", str(out)])
    return out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "digits", *TINY, "epoch=3", "--out", "x"], "epochs"),
        (["train", "digits", *TINY, "lr=fast", "--out", "x"], "lr"),
        (["train", "nowhere", *TINY, "--out", "x"], "nowhere"),
        (["train", "digits", *TINY, "--out", "/proc/x"], "/proc"),
        (["resume", "nowhere"], "nowhere"),
        (["extend", "nowhere", "--epochs", "0"], "at least one epoch"),
        (["evaluate", "nowhere", "digits"], "nowhere"),
        (["predict", "nowhere", "x.png"], "nowhere"),
        (["train", "digits", *TINY, "finish.epochs=1", "--out", "x"], "--finish R"),
        (
            ["train", "digits", *TINY, "--finish", "24", "finish.model.depth=7", "--out", "x"],
            "not its model or image size",
        ),
        (["train", "digits", *TINY, "--finish", "24", "--out", ""], "name of a folder"),
        (
            ["distill", "t", "digits", *TINY, "model.distilled=false", "--how", "token", "--out", "x"],
            "distillation token",
        ),
        (["finetune", "w", "digits", "--tau", "2", "--out", "x"], "--tau applies only with --teacher"),
        (["finetune", "w", "digits", "--resolution", "32", "resolution=24", "--out", "x"], "differ: give one"),
        (["evaluate", "nowhere", "digits", "--fusion", "softmax"], "--head both"),
        (["evaluate", "nowhere", "digits", "--fusion", "x"], "Unknown value 'x' for --fusion"),
        (["evaluate", "nowhere", "digits", "--probe", "knn", "--head", "class"], "--head cannot be used with --probe"),
        (["evaluate", "--disagreement", "a", "b"], "--data DATA"),
        (["evaluate", "nowhere", "digits", "--data", "digits"], "--data cannot be used with one model"),
        (["evaluate", "nowhere", "digits", "--probe", "knn", "--data", "x"], "--data cannot be used with --probe"),
        (["evaluate", "--disagreement", "a", "--data", "digits", "--figure", "chart.txt"], "not 'chart.txt'"),
        (["evaluate", "--disagreement", "a", "--data", "digits", "--resolution", "32"], "--resolution cannot"),
    ],
)
def test_wrong_use_is_a_sentence_and_exit_2(words: list[str], said: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["distill", "finetune"])
def test_how_is_the_hidden_earlier_name_of_method(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--method" in shown
    assert "--how" not in shown
    words = (
        [command, "a", "b", "--model", "deit_nano", "--recipe", "deit"] if command == "distill" else [command, "a", "b"]
    )
    options = [_parser().parse_args([*words, name, "soft"]) for name in ("--how", "--method")]
    assert [given.method for given in options] == ["soft", "soft"]
    assert not hasattr(options[0], "how")


def test_a_loss_that_is_not_finite_exits_1(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", *TINY, "lr=1e30", "warmup_epochs=0", "--out", str(tmp_path / "run")])
    assert ended.value.code == 1
    assert "not finite" in capsys.readouterr().err


def test_the_last_record_is_the_whole_output(run: Path, capsys) -> None:
    main(["resume", str(run), "--json"])
    assert {"loss", "top1", "lr"} <= set(json.loads(capsys.readouterr().out))


def test_a_run_is_measured_on_what_it_held_out_whatever_came_later(run: Path, folder: Path, capsys) -> None:
    main(["evaluate", str(run), str(folder), "--json"])
    before = json.loads(capsys.readouterr().out)
    new = [folder / "0" / f"new{i}.png" for i in range(40)]
    try:
        for path in new:
            path.write_bytes((folder / "1" / "1.png").read_bytes())
        main(["evaluate", str(run), str(folder), "--json"])
        assert json.loads(capsys.readouterr().out) == before
    finally:
        for path in new:
            path.unlink()


def test_a_split_that_cannot_be_read_is_not_replaced_by_another(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "data" / "val" / "0").mkdir(parents=True)
    (tmp_path / "data" / "train").symlink_to(folder)
    (tmp_path / "data" / "val" / "0" / "bad.png").write_bytes(b"")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "data"), *TINY, "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert "'val'" in capsys.readouterr().err


def test_predictions_come_in_the_order_of_the_files(run: Path, folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    paths = [str(folder / "1" / "1.png"), str(tmp_path / "bad.png"), str(folder / "0" / "0.png")]
    main(["predict", str(run), *paths, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in rows] == paths
    assert ["error" in row for row in rows] == [False, True, False]
