"""`patchloom bench`: both sides measured, pictures drawn, a slowdown noticed, mistakes told in a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import patchloom
from patchloom.benching.records import compare
from patchloom.cli.main import main
from patchloom.errors import PatchloomError
from patchloom.kernels import native

QUICK = ("--rounds", "2", "--batch", "2", "--no-memory")


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    main(["bench", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_it_measures_both_sides_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("patchconvnet_nano", "--against", "published", "--sizes", "32", "64", "--out", str(tmp_path))
    found = bench(capsys, *words, *QUICK)
    assert [row["size"] for row in found["rows"]] == [32, 64]
    for row in found["rows"]:
        assert row["difference"] < 1e-5
        assert row["low"] <= row["ratio"] <= row["high"]
        for side in (row["ours"], row["theirs"]):
            assert side["share"] > 0
            assert side["latency_share"] > 0
            for figure, spread in (("throughput", "throughput_quartiles"), ("latency_ms", "latency_quartiles")):
                assert 0 < side[spread][0] <= side[figure] <= side[spread][1]
    assert found["about"]["threads"] >= 1
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "roofline.png", "size.png"}
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == found["rows"]


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_products_of_bytes_are_a_case_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    row = bench(capsys, "patchconvnet_nano", "--against", "published", "--int8", *QUICK)["rows"][0]
    assert row["model"] == "patchconvnet_nano, int8"
    assert 1e-5 < row["difference"] < 0.1


def test_a_run_and_a_file_are_measured_at_their_own_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run" / "export" / "model.safetensors"
    patchloom.save(patchloom.create_model("deit_nano", img_size=48, num_classes=3, depth=2), file)
    (file.parent / "model.json").write_text(json.dumps({"task": "classify", "step": 1, "weights": "raw"}))
    places = (str(tmp_path / "run"), str(file))
    rows = bench(capsys, *places, *QUICK)["rows"]
    network = patchloom.load(file)
    assert [(row["model"], row["size"], row["depth"]) for row in rows] == [(place, 48, 2) for place in places]
    assert {row["cost"]["params"] for row in rows} == {sum(p.numel() for p in network.parameters())}
    assert "by name" in refused(capsys, str(file), "--against", "timm")


def test_a_larger_image_takes_more_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "deit_nano", "--sizes", "32", "256", "--rounds", "1", "--batch", "2")
    small, large = (row["ours"]["memory_mb"] for row in found["rows"])
    assert 0 <= small < large
    assert "theirs" not in found["rows"][0]


def test_a_fall_of_the_ratio_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("patchconvnet_nano", "--against", "published", *QUICK)
    found = bench(capsys, *words)
    (row,) = found["rows"]
    kept = tmp_path / "kept.json"

    def keep(**figures: Any) -> None:
        easy = {"ratio": 0.01, "latency_ratio": 0.01, "ours": {"share": 0.01, "latency_share": 0.01}}
        kept.write_text(json.dumps({"rows": [{**row, **easy, **figures}, {**row, "batch": 77}]}))

    keep()
    main(["bench", *words, "--compare", str(kept)])
    assert "not compared, since not measured: patchconvnet_nano" in capsys.readouterr().err
    for figures, told in (({"ratio": 100.0}, "ratio"), ({"ours": {"share": 100.0}}, "share")):
        keep(**figures)
        said = refused(capsys, *words, "--compare", str(kept))
        assert f"worse than recorded by more than the noise band: patchconvnet_nano: {told}" in said


def test_memory_that_grew_is_worse_than_recorded() -> None:
    row = {"model": "one", "ours": {"memory_mb": 10.0}, "theirs": {"memory_mb": 100.0}}
    compare([row], [row])
    with pytest.raises(PatchloomError, match=r"memory_ratio 0.20, recorded 0.10"):
        compare([{**row, "ours": {"memory_mb": 20.0}}], [row])


@pytest.mark.parametrize("name", ["deit_tiny", "deit3_small", "cait_xxs24", "resmlp_s12"])
def test_timms_network_of_another_depth(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, name, "--against", "timm", "--sizes", "32", "--depths", "1", "2", *QUICK)
    assert [row["depth"] for row in found["rows"]] == [1, 2]
    assert all(row["difference"] < 1e-5 for row in found["rows"])


def test_without_a_peer_what_is_ours_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("deit_nano", "--out", str(tmp_path), *QUICK)
    (row,) = bench(capsys, *words)["rows"]
    kept = tmp_path / "bench.json"
    kept.write_text(json.dumps({"rows": [{**row, "ours": {"share": 100.0}}]}))
    assert "share" in refused(capsys, *words, "--compare", str(kept))


def test_nothing_is_measured_before_every_case_is_known_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("patchloom.benching.records.describe_machine", lambda *_: pytest.fail("it began to measure"))
    damaged = tmp_path / "damaged.json"
    (tmp_path / "bench.json").write_text("my own")
    case = {"model": "deit_nano", "batch": 2, "size": 32, "depth": 6}
    for words, told in (
        (("deit_nano", "cait_nano", "--against", "timm"), "timm has no network like deit_nano"),
        (("patchconvnet_nano", "deit_nano", "--against", "published"), "published supports PatchConvNet only"),
        (("deit_nano", "--sizes", "32", "33"), "33"),
        (("deit_nano", "--threads", "100000"), "cores"),
        (
            ("vit_tiny_99999999999x1", "--sizes", "32"),
            "'depth' of vit_tiny_99999999999x1 must be a whole number from 1",
        ),
        (("deit_nano", "--out", str(tmp_path)), "not a file of recorded measurements"),
    ):
        assert told in refused(capsys, *words, *QUICK)
    for rows, told in (
        ([{**case, "ratio": "x"}], "not a file"),
        ([{**case, "model": ["a"], "ratio": 1.0}], "not a file"),
        ([3], "not a file"),
        ([case], "no metric to compare with"),
    ):
        damaged.write_text(json.dumps({"rows": rows}))
        assert told in refused(capsys, "deit_nano", "--compare", str(damaged), *QUICK)
    damaged.write_text("[" * 100_000)
    assert "not a file" in refused(capsys, "deit_nano", "--compare", str(damaged), *QUICK)
    os.mkfifo(tmp_path / "fifo.json")
    assert "it is a FIFO" in refused(capsys, "deit_nano", "--compare", str(tmp_path / "fifo.json"), *QUICK)


def test_more_images_than_memory_has_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "deit_nano", "--batch", "99999999999", "--rounds", "1", "--no-memory")
    assert "not enough memory" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("deit_tinny",), "deit_tiny"),
        (("deit_nano", "--against", "timm"), "timm has no network like deit_nano"),
        (("cait_nano", "--against", "published"), "published supports PatchConvNet only"),
        (("deit_nano", "--batch", "0"), "at least 1"),
        (("deit_nano", "--sizes", "33"), "33"),
        (("deit_nano", "--compare", "/nowhere.json"), "nowhere.json"),
        (("deit_nano", "--out", "/proc/never"), "/proc/never"),
    ],
)
def test_mistakes_are_told(words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in refused(capsys, *words, *QUICK)


def test_an_absent_device_is_refused_before_a_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, "deit_nano", "--out", str(tmp_path / "bench"), "--device", "nonsense", *QUICK)
    assert "Choose from: auto, cpu" in told
    assert not (tmp_path / "bench").exists()


def test_a_network_of_timm_beside_one_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("timm:resnet10t", "deit_nano", "--sizes", "32", "--rounds", "1", "--batch", "2", "--no-memory")
    main(["bench", *words, "--out", str(tmp_path)])
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.split() == ["timm:resnet10t", "32", "px"]
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["depth"] for row in rows] == [None, 6]
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "roofline.png"}
