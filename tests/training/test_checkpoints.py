"""Checkpoints: whole or absent, two and the best kept, values of the moment of saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from patchloom.errors import StoppedError
from patchloom.training.checkpoints import Checkpoints, State, read_checkpoint, write_checkpoint


def state(step: int) -> State:
    tensors = {"weight": torch.full((3, 2), float(step)).T, "count": torch.tensor(step), "flags": torch.tensor([True])}
    return State(tensors, {"step": step, "best": {}})


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_written_is_read_with_its_types_and_shapes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.safetensors", State({**state(3).tensors, "weight": torch.ones(2, 3)}, {"step": 3}))
    read = read_checkpoint(tmp_path / "a.safetensors")
    assert read.info == {"step": 3}
    assert read.tensors["count"].shape == ()
    assert read.tensors["count"].dtype == torch.int64
    assert read.tensors["flags"].dtype == torch.bool


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    for step in range(1, 6):
        kept.save(state(step), best=step == 2)
    kept.release()
    assert names(tmp_path) == {"step-00000004.safetensors", "step-00000005.safetensors", "best.safetensors"}
    assert read_checkpoint(tmp_path / "best.safetensors").info["step"] == 2
    assert torch.equal(
        read_checkpoint(tmp_path / "step-00000004.safetensors").tensors["weight"], torch.full((2, 3), 4.0)
    )


def test_a_checkpoint_has_the_values_of_its_moment(tmp_path: Path) -> None:
    """Training changes the tensors while they are written."""
    kept = Checkpoints(tmp_path)
    saved = State({"weight": torch.zeros(500_000)}, {"step": 1})
    kept.reserve(saved.tensors)
    kept.save(saved)
    saved.tensors["weight"].fill_(1)
    saved.info["step"] = 99
    kept.wait()
    read = read_checkpoint(tmp_path / "step-00000001.safetensors")
    assert not read.tensors["weight"].any()
    assert read.info["step"] == 1
    kept.release()


@pytest.mark.parametrize("place", [0.02, 0.5, 0.999])
def test_a_changed_byte_is_noticed_and_the_checkpoint_before_it_taken(place: float, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    for step in (1, 2):
        kept.save(state(step))
    kept.release()
    last = tmp_path / "step-00000002.safetensors"
    blob = bytearray(last.read_bytes())
    blob[int(len(blob) * place)] ^= 1
    last.write_bytes(blob)
    said: list[str] = []
    assert kept.newest(said.append) == tmp_path / "step-00000001.safetensors"
    assert "step-00000002.safetensors is damaged" in said[0]
    assert (tmp_path / "damaged-step-00000002.safetensors").exists()


def test_a_write_that_fails_is_told_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "run")
    kept.save(state(1))
    kept.wait()
    (tmp_path / "run" / "tmp-00000002.safetensors").mkdir()  # stands in the way
    (tmp_path / "run" / "tmp-00000002.safetensors" / "file").touch()
    kept.save(state(2))
    with pytest.raises(StoppedError, match=r"step 2 could not be written.*last good one is step-00000001"):
        kept.wait()
    kept.save(state(3))
    kept.release()
    assert kept.newest(lambda _: None) == tmp_path / "run" / "step-00000003.safetensors"


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nothing").newest(lambda _: None) is None
