"""`patchloom runs`: every state of a run, figures as in its log, and files for other programs."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchloom.cli.main import main
from patchloom.errors import EXIT_CODES
from patchloom.runs.listing import KEYS

TINY = [
    "--model", "deit_nano", "--recipe", "deit@small", "model.depth=1", "model.dim=24", "model.heads=2",
    "img_size=16", "workers=0",
]  # fmt: skip
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """finished, extended (finished and then begun again), failed, damaged in four ways, of a newer version; no run."""
    root = tmp_path_factory.mktemp("runs")
    main(["train", "digits", *TINY, "epochs=2", "seed=7", "--out", str(root / "deep" / "finished")])
    for name in ("extended", "log", "recipe", "no-recipe", "no-log", "newer"):
        shutil.copytree(root / "deep" / "finished", root / name)
    recipe = (root / "extended" / "recipe.yaml").read_text()
    (root / "extended" / "recipe.yaml").write_text(recipe.replace("\nepochs: 2\n", "\nepochs: 3\n"))
    (root / "log" / "log.jsonl").write_bytes(b'{"event": "epo\xff\n')
    (root / "recipe" / "recipe.yaml").write_bytes(b'model: {"architecture\n\xff\xfe')
    (root / "no-recipe" / "recipe.yaml").unlink()
    (root / "no-log" / "log.jsonl").unlink()
    (root / "newer" / "recipe.yaml").write_text(recipe.replace('task: "classify"', 'task: "dream"'))
    (root / "notes").mkdir()
    (root / "link").symlink_to(root)
    with pytest.raises(SystemExit):
        main(["train", "digits", *TINY, "epochs=2", "lr=1e30", "warmup_epochs=0", "--out", str(root / "failed")])
    return root


def listed(capsys, *folders: Path) -> dict[str, dict]:
    capsys.readouterr()
    main(["runs", *map(str, folders), "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert all(tuple(row) == KEYS for row in rows)
    return {Path(row["run"]).name: row for row in rows}


def test_every_folder_has_its_state(runs: Path, capsys) -> None:
    rows = listed(capsys, runs, runs / "deep")
    assert {name: row["status"] for name, row in rows.items()} == {
        "finished": "finished", "extended": "interrupted", "failed": "failed",
        "log": "damaged", "recipe": "damaged", "no-recipe": "damaged", "no-log": "damaged", "newer": "damaged",
    }  # fmt: skip
    assert (rows["log"]["model"], rows["log"]["epochs"]) == ("deit_nano", None)  # what can be read is shown
    assert rows["recipe"]["model"] is None


def test_a_run_in_steps_is_finished_after_its_last_step(tmp_path: Path, capsys) -> None:
    """Before the recipe's number of epochs, which does not count then."""
    out = tmp_path / "run"
    main(["train", "digits", *TINY, "batch_size=512", "steps=3", "--out", str(out)])
    assert [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()] == [2, 3]
    assert listed(capsys, out)["run"]["status"] == "finished"
    main(["runs", str(out)])
    assert "3/3 steps" in capsys.readouterr().out
    main(["resume", str(out)])
    assert "is already finished (3 steps)." in capsys.readouterr().out
    assert ", 3 steps;" in (out / "report.html").read_text()
    with pytest.raises(SystemExit):
        main(["extend", str(out), "--epochs", "1"])
    assert "steps=3" in capsys.readouterr().err


def test_figures_are_those_of_the_log(runs: Path, capsys) -> None:
    row = listed(capsys, runs)["finished"]
    log = [json.loads(line) for line in (runs / "deep" / "finished" / "log.jsonl").read_text().splitlines()]
    assert row["metric"] == "top1"
    assert row["last"] == log[-1]["top1"]
    assert row["best"] == max(record["top1"] for record in log)
    assert (row["task"], row["model"], row["recipe"], row["epochs"]) == ("classify", "deit_nano", "deit@small", 2)
    assert row["changes"] == {
        "resolution": 16, "workers": 0, "epochs": 2, "seed": 7,
        "model.depth": 1, "model.dim": 24, "model.heads": 2,
    }  # fmt: skip
    assert row["seconds"] > 0


def test_without_held_out_images_the_training_loss_is_the_metric(tmp_path: Path, capsys) -> None:
    main(["train", "digits", *TINY, "epochs=1", "--train-split", "train+val", "--hold-out", "none",
          "--out", str(tmp_path / "run")])  # fmt: skip
    (row,) = listed(capsys, tmp_path).values()
    assert (row["metric"], row["status"]) == ("train_loss", "finished")
    assert row["best"] == row["last"]


def test_a_run_is_running_while_its_process_lives(tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "patchloom", "train", "digits", *TINY, "epochs=5000", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        limit = time.time() + 120
        while not (out / "log.jsonl").exists():
            assert process.poll() is None
            assert time.time() < limit
            time.sleep(0.01)
        assert listed(capsys, tmp_path)["run"]["status"] == "running"
    finally:
        process.kill()
        process.wait()
    with open(out / "log.jsonl", "a") as log:
        log.write('{"event": "epo')  # half a line, as a crash may leave it: `resume` cuts it off
    row = listed(capsys, tmp_path)["run"]
    assert (row["status"], row["metric"]) == ("interrupted", "top1")
    assert row["epochs"] >= 1


def test_a_failed_run_that_goes_on_is_failed_no_more(runs: Path, tmp_path: Path, capsys) -> None:
    out = shutil.copytree(runs / "failed", tmp_path / "run")
    main(["runs", str(out)])
    assert "not finite" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["resume", str(out)])
    assert (out / "failure.json").exists()
    (out / "failure.json").unlink()
    assert listed(capsys, out)["run"]["status"] == "interrupted"


def test_the_table_and_the_details_of_one_run(runs: Path, capsys) -> None:
    capsys.readouterr()
    main(["runs", str(runs)])
    table = capsys.readouterr().out
    assert all(name in table for name in ("finished", "failed", "no-recipe", "damaged", "2/3", "seed=7"))
    main(["runs", str(runs / "deep" / "finished")])
    details = capsys.readouterr().out
    assert all(word in details for word in ("deit_nano", "seed=7", "95 % interval", "report.html", "train_loss"))
    main(["runs", str(runs / "recipe")])
    assert "damaged" in capsys.readouterr().out


def test_csv_and_html(runs: Path, tmp_path: Path, capsys) -> None:
    main(["runs", str(runs), "--csv", str(tmp_path / "t.csv"), "--html", str(tmp_path / "t.html")])
    with open(tmp_path / "t.csv", newline="") as file:
        rows = {Path(row["run"]).name: row for row in csv.DictReader(file)}
    assert tuple(rows["finished"]) == KEYS
    assert rows["finished"]["changes"].split()[:2] == ["epochs=2", "resolution=16"]
    assert rows["recipe"]["model"] == ""
    page = (tmp_path / "t.html").read_text()
    assert all(name in page for name in rows)
    assert page.count("<svg") == 3  # top-1, both losses
    assert "http" not in page
    with pytest.raises(SystemExit) as ended:
        main(["runs", str(runs), "--csv", str(tmp_path / "nowhere" / "t.csv")])
    assert ended.value.code == 2


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_a_folder_that_is_not_there_is_wrong_use(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["runs", name])
    assert ended.value.code == 2
    main(["runs", "."])
    assert "No runs" in capsys.readouterr().out
    assert listed(capsys, Path(".")) == {}


def test_exit_codes_are_documented_as_they_are(capsys) -> None:
    page = (DOCS / "runs.md").read_text()
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in page
        assert f"{code}  {meaning}" in shown


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("log.jsonl", {"epoch": float("inf")}),
        ("log.jsonl", {"epoch": float("nan")}),
        ("log.jsonl", {"step": "5"}),
        ("log.jsonl", {"lr": "x"}),
        ("log.jsonl", {"top1_interval": "x"}),
        ("recipe.yaml", {"sources": [1]}),
        ("recipe.yaml", {"sources": {"seed": 5}}),
        ("recipe.yaml", {"model_options": [3]}),
        ("recipe.yaml", {"steps": "x"}),
        ("recipe.yaml", {"recipe_name": ["x"]}),
        ("recipe.yaml", {"model": {"name": 5}}),
    ],
)
def test_one_damaged_run_does_not_hide_the_others(file: str, values: dict, runs: Path, tmp_path: Path, capsys) -> None:
    broken = shutil.copytree(runs / "deep" / "finished", tmp_path / "broken")
    path = broken / file
    if file == "log.jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**record, **values}) + "\n" for record in records))
    else:
        kept = [line for line in path.read_text().splitlines() if line.partition(":")[0] not in values]
        path.write_text("\n".join([*kept, *(f"{key}: {json.dumps(value)}" for key, value in values.items())]) + "\n")
    rows = listed(capsys, tmp_path, runs / "deep")
    assert {name: row["status"] for name, row in rows.items()} == {"broken": "damaged", "finished": "finished"}
    for words in ([str(broken)], [str(tmp_path), "--csv", str(tmp_path / "t.csv"), "--html", str(tmp_path / "t.html")]):
        main(["runs", *words])
        shown = capsys.readouterr().out
        assert "damaged" in shown
        assert file in shown


@pytest.mark.parametrize("kind", ["fifo", "zero", "list"])
def test_an_export_that_is_no_file_of_ours_delays_no_list(kind: str, runs: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(runs / "deep" / "finished", tmp_path / "run")
    path = tmp_path / "run" / "export" / "model.json"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[]")
    assert listed(capsys, tmp_path)["run"]["status"] == "interrupted"
