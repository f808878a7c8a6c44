"""Deletion and insertion, on a network of which one knows where it looks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch import Tensor, nn

from patchloom.explaining.faithfulness import RANDOM_MAPS, STEPS, faithfulness, random_like
from patchloom.models.preprocessing import Preprocessing

SIZE = (24, 32)


class Lamp(nn.Module):
    """Class 1 is the brightness of one 6 x 8 cell, class 0 its darkness: the right map is known."""

    preprocessing = Preprocessing(SIZE, (0.5,) * 3, (0.5,) * 3)

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(4.0))

    def forward(self, images: Tensor) -> Tensor:
        light = self.gain * images[:, :, 6:12, 16:24].mean(dim=(1, 2, 3))
        return torch.stack([-light, light], dim=1)


class Grain(Lamp):
    """Class 1 is what is bright on the right and without grain: pixel noise drives it out everywhere, blobs do not."""

    def forward(self, images: Tensor) -> Tensor:
        light = (images.mean(dim=(1, 2)) * torch.linspace(-1, 1, SIZE[1])).mean(dim=-1)
        grain = images.diff(dim=2).abs().mean(dim=(1, 2, 3)) + images.diff(dim=3).abs().mean(dim=(1, 2, 3))
        logit = 3 * light - 2 * grain
        return torch.stack([-logit, logit], dim=1)


@pytest.fixture
def picture() -> np.ndarray:
    pixels = np.random.default_rng(1).integers(0, 120, (*SIZE, 3), dtype=np.uint8)
    pixels[6:12, 16:24] = 255
    return pixels


@pytest.fixture
def right() -> np.ndarray:
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
    return np.exp(-(((rows - 8.5) / 3) ** 2) - ((columns - 19.5) / 4) ** 2).astype(np.float32)


def test_the_right_map_is_better_than_chance_and_its_opposite_worse(picture: np.ndarray, right: np.ndarray) -> None:
    got = faithfulness(Lamp(), picture, {"right": right, "wrong": 1 - right}, {"right": 1, "wrong": 1})
    assert got["right"]["verdict"] == "better than chance"
    assert got["wrong"]["verdict"] == "worse than chance"
    assert got["right"]["beaten"] == {"deletion": 1.0, "insertion": 1.0}
    assert got["wrong"]["beaten"] == {"deletion": 0.0, "insertion": 0.0}


def test_maps_that_mean_nothing_are_seldom_called_better_than_chance(picture: np.ndarray, right: np.ndarray) -> None:
    """One time in 17 at most; 200 of them, smooth as the right one, allow for 25."""
    generator = np.random.default_rng(7)
    maps = {str(i): random_like(right, generator) for i in range(200)}
    verdicts = [row["verdict"] for row in faithfulness(Lamp(), picture, maps, dict.fromkeys(maps, 1)).values()]
    assert verdicts.count("better than chance") <= 25
    assert verdicts.count("worse than chance") <= 25
    assert verdicts.count("no better than chance") > 120


def sparse(kind: str, generator: np.random.Generator) -> np.ndarray:
    """A map on a grid of 6 x 8 patches that is 0 in most of them, upsampled."""
    grid = torch.zeros(1, 1, 6, 8)
    top, left = generator.integers(5), generator.integers(7)
    if kind == "one patch":
        grid[..., top, left] = 1
    elif kind == "a rectangle":
        grid[..., top : top + 2, left : left + 3] = 1
    else:
        grid.view(-1)[generator.choice(48, 4, replace=False)] = torch.tensor([1, 0.7, 0.5, 0.2])
    return nn.functional.interpolate(grid, SIZE, mode="bilinear")[0, 0].numpy()


@pytest.mark.parametrize("kind", ["one patch", "a rectangle", "few patches"])
def test_maps_with_ties_that_mean_nothing_are_seldom_called_better(kind: str) -> None:
    """By either measure about one time in 17; 50 maps allow for 12. Ties in pixel noise made it nearly all."""
    generator = np.random.default_rng(3)
    slope = np.broadcast_to(np.linspace(0, 255, SIZE[1])[:, None], (*SIZE, 3)).astype(np.uint8)
    maps = {str(i): sparse(kind, generator) for i in range(50)}
    beaten = [row["beaten"] for row in faithfulness(Grain(), slope, maps, dict.fromkeys(maps, 1)).values()]
    for measure in ("deletion", "insertion"):
        assert sum(row[measure] == 1 for row in beaten) <= 12


def test_the_right_patch_alone_is_better_than_chance(picture: np.ndarray) -> None:
    cell = np.zeros(SIZE, np.float32)
    cell[6:12, 16:24] = 1
    assert faithfulness(Lamp(), picture, {"cell": cell}, {"cell": 1})["cell"]["verdict"] == "better than chance"


def test_areas_are_those_of_the_curves(picture: np.ndarray, right: np.ndarray) -> None:
    """Every image of both curves made by hand, and the area by numpy."""
    values = right + np.arange(right.size).reshape(SIZE) * 1e-4  # no ties
    blurred = np.array(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(8)))
    order = np.argsort(-values.ravel())
    curves: dict[str, list[float]] = {"deletion": [], "insertion": []}
    for step in range(STEPS + 1):
        chosen = order[: round(step / STEPS * values.size)]
        for name, kept, new in (("deletion", picture, blurred), ("insertion", blurred, picture)):
            pixels = kept.reshape(-1, 3).copy()
            pixels[chosen] = new.reshape(-1, 3)[chosen]
            x = torch.from_numpy(pixels.reshape(1, *SIZE, 3)).permute(0, 3, 1, 2).float() / 127.5 - 1
            curves[name].append(float(Lamp()(x).detach().softmax(dim=-1)[0, 1]))
    got = faithfulness(Lamp(), picture, {"map": values}, {"map": 1})["map"]
    for name, curve in curves.items():
        assert got[name] == pytest.approx(np.trapezoid(curve, dx=1 / STEPS), abs=1e-5)


def test_random_maps_are_as_smooth_as_the_map(right: np.ndarray) -> None:
    generator = np.random.default_rng(0)
    others = [random_like(right, generator) for _ in range(RANDOM_MAPS)]
    for other in others:
        np.testing.assert_allclose(
            np.abs(np.fft.fft2(other))[1:, 1:], np.abs(np.fft.fft2(right - right.mean()))[1:, 1:], atol=1e-3
        )
    assert len({other.argmax() for other in others}) > RANDOM_MAPS / 2


def test_chance_has_a_spread_and_the_seed_decides_it(picture: np.ndarray, right: np.ndarray) -> None:
    first, again, other = (faithfulness(Lamp(), picture, {"m": right}, {"m": 1}, seed)["m"] for seed in (0, 0, 1))
    assert first == again
    assert first["deletion"] == pytest.approx(other["deletion"], abs=0.02)  # only ties are drawn
    assert first["random"]["deletion"]["mean"] != other["random"]["deletion"]["mean"]
    assert RANDOM_MAPS >= 8
    assert first["random"]["deletion"]["std"] > 0


def test_an_empty_map_is_no_better_than_chance(picture: np.ndarray) -> None:
    got = faithfulness(Lamp(), picture, {"empty": np.zeros(SIZE, np.float32)}, {"empty": 1})
    assert got["empty"]["verdict"] == "no better than chance"


def test_every_map_is_judged_by_its_own_class(picture: np.ndarray, right: np.ndarray) -> None:
    """What makes the lamp bright makes the dark class go."""
    got = faithfulness(Lamp(), picture, {"bright": right, "dark": right}, {"bright": 1, "dark": 0})
    assert got["dark"]["verdict"] == "worse than chance"
    assert got["dark"]["deletion"] == pytest.approx(1 - got["bright"]["deletion"], abs=0.01)
