"""`explain` and its command: what goes in, what comes out, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from PIL import Image

import patchloom
from conftest import stir
from patchloom import PatchloomError
from patchloom.explaining.figures import row_picture, strongest, thresholded
from patchloom.models.network import Network


@pytest.fixture(scope="module")
def network() -> Network:
    made = stir(patchloom.create_model("cait_nano", num_classes=3, img_size=(16, 24), depth=1)).eval()
    made.class_names = ("cat", "dog", "bird")
    return made


@pytest.fixture(scope="module")
def weights(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "cait.safetensors"
    patchloom.save(network, path)
    return path


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_a_file_an_image_and_an_array_are_explained_alike(network: Network, photo: Path) -> None:
    image = Image.open(photo)
    results = [patchloom.explain(network, given) for given in (photo, str(photo), image, np.asarray(image))]
    for other in results[1:]:
        assert other.to_json() == results[0].to_json()
        np.testing.assert_array_equal(other.image, results[0].image)
    assert results[0].image.shape == (16, 24, 3)
    predicted = patchloom.predict(network, photo)[0]["predictions"]  # by the fused copy
    assert [p["class"] for p in results[0].predictions] == [p["class"] for p in predicted]
    assert [p["probability"] for p in results[0].predictions] == pytest.approx(
        [p["probability"] for p in predicted], 1e-5
    )
    assert set(results[0].faithfulness) == set(results[0].maps)


def test_the_target_is_a_name_or_an_index(network: Network, photo: Path) -> None:
    got = [patchloom.explain(network, photo, maps=["occlusion"], target=t) for t in ("dog", 1, "1")]
    assert {one.target for one in got} == {"dog"}
    other = patchloom.explain(network, photo, maps=["occlusion"], target="bird")
    assert not np.array_equal(got[0].maps["occlusion"], other.maps["occlusion"])
    for wrong in ("dgo", 3, -1, True, 1.5, "1_0", "\u0661", "1.5", [1], b"1", "9" * 5000):
        with pytest.raises(PatchloomError, match="has no class"):
            patchloom.explain(network, photo, target=wrong)  # type: ignore[arg-type]


def test_classes_of_one_name_are_told_apart(photo: Path) -> None:
    network = patchloom.create_model("patchconvnet_nano", num_classes=4, img_size=16, depth=1, queries="per_class")
    network = stir(network).eval()
    network.class_names = ("crane", "cat", "crane", "dog")
    found = patchloom.explain(network, photo, target="crane (2)", faithfulness=False)
    assert found.target == "crane (2)"
    other = patchloom.explain(network, photo, target=0, faithfulness=False)
    assert other.target == "crane (0)"
    assert not np.array_equal(found.maps["per-class: crane (2)"], other.maps["per-class: crane (0)"])
    assert any(name.endswith(": crane (2)") for name in found.heads)
    assert {row["class"] for row in found.predictions} == {"crane (0)", "crane (2)", "cat", "dog"}
    with pytest.raises(PatchloomError, match=r"2 classes named 'crane': crane \(0\), crane \(2\)"):
        patchloom.explain(network, photo, target="crane")


def test_a_network_in_training_stays_in_training(photo: Path) -> None:
    network = patchloom.create_model("deit_nano", num_classes=3, img_size=16, depth=1, distilled=True).train()
    network.blocks[0].eval()
    before = [module.training for module in network.modules()]
    patchloom.explain(network, photo, maps="grad-cam", faithfulness=False)
    assert [module.training for module in network.modules()] == before


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((4, 4, 3)),
        np.zeros((4, 4), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        Image.new("RGB", (0, 4)),
        Image.new("I;16", (4, 0)),
        7,
        "no such file.png",
    ],
)
def test_what_is_no_picture_is_refused(network: Network, wrong: object) -> None:
    with pytest.raises(PatchloomError):
        patchloom.explain(network, wrong)  # type: ignore[arg-type]


def test_a_photo_on_its_side_is_turned_and_gradients_are_ours_to_switch(network: Network, photo: Path) -> None:
    turned = Image.open(photo).rotate(90, expand=True)
    turned.getexif()[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    with torch.inference_mode():
        got = patchloom.explain(network, turned, maps="grad-cam", faithfulness=False)
    want = patchloom.explain(network, photo, maps=["grad-cam"], faithfulness=False)
    np.testing.assert_array_equal(got.image, want.image)
    np.testing.assert_array_equal(got.maps["grad-cam"], want.maps["grad-cam"])
    assert patchloom.explain(network, photo, maps=[]).maps == {}


def test_json_is_small_and_plain(network: Network, photo: Path) -> None:
    told = json.dumps(patchloom.explain(network, photo).to_json(), allow_nan=False)
    assert len(told) < 6000


@pytest.mark.parametrize("name", ["cait_nano", "resmlp_nano", "patchconvnet_nano"])
def test_the_figure_is_drawn_when_asked_for(name: str, photo: Path, tmp_path: Path) -> None:
    options = {"queries": "per_class"} if name == "patchconvnet_nano" else {}
    network = patchloom.create_model(name, num_classes=3, img_size=(16, 24), depth=2, **options).eval()
    network.class_names = ("$x_{", "a" * 60, "ж")  # what a drawing library may trip over
    found = patchloom.explain(network, photo)
    assert bool(found.rows) == bool(found.sparsity) == (name == "resmlp_nano")
    figure = found.figure
    layers = [part for part in figure.subfigs[-1].axes if part.images] if found.rows else []
    assert len(layers) == len(found.rows)  # one picture per layer
    figure.savefig(tmp_path / "figure.png", dpi=60)
    with Image.open(tmp_path / "figure.png") as drawn:
        assert len(np.unique(np.asarray(drawn))) > 50


def test_overlays_are_the_grey_picture_times_the_map_in_cividis(network: Network, photo: Path) -> None:
    """CaiT D.2."""
    found = patchloom.explain(network, photo, faithfulness=False)
    red, green, blue = (found.image[..., i].astype(np.float64) / 255 for i in range(3))
    grey = 0.299 * red + 0.587 * green + 0.114 * blue  # not Pillow's "L": rounded, it may fall into the next colour
    assert list(found.overlays) == list(found.maps)
    for name, values in found.maps.items():
        got = found.overlays[name]
        assert got.shape == (16, 24, 3)
        assert got.dtype == np.uint8
        want = colormaps["cividis"](grey * values)[..., :3] * 255
        assert np.abs(got - want).max() < 1.001  # whole levels


def test_every_class_above_a_tenth_is_reported(photo: Path, tmp_path: Path) -> None:
    even = patchloom.create_model("deit_nano", num_classes=8, img_size=16, depth=1).eval()
    torch.nn.init.zeros_(even.head.weight)
    even.class_names = tuple("abcdefgh")
    found = patchloom.explain(even, photo, maps=[])
    assert [row["class"] for row in found.predictions] == list("abcdefgh")
    patchloom.save(even, tmp_path / "even.safetensors")
    done = command(tmp_path / "even.safetensors", photo, "--out", tmp_path / "out", "--map", "grad-cam")
    assert ", ".join(f"{name} 12.5%" for name in "abcdefgh") in done.stdout
    even.reset_head(30)
    assert len(patchloom.explain(even.eval(), photo, maps=[]).predictions) == 5


def test_top_gives_the_maps_of_the_best_classes(photo: Path) -> None:
    """Thesis Fig. 5.6, also of classes that are unlikely."""
    made = patchloom.create_model("patchconvnet_nano", num_classes=9, img_size=16, depth=1, queries="per_class")
    made = stir(made).eval()
    made.class_names = tuple("abcdefghi")
    for top in (1, 3, 7):
        found = patchloom.explain(made, photo, maps="per-class", top=top, faithfulness=False)
        assert list(found.maps) == [f"per-class: {row['class']}" for row in found.predictions[:top]]
        assert len(found.predictions) >= max(5, top)
    last = patchloom.explain(made, photo, maps=[], top=9).predictions[-1]["class"]
    found = patchloom.explain(made, photo, maps="per-class", top=2, target=last, faithfulness=False)
    assert len(found.maps) == 3
    assert f"per-class: {last}" in found.maps
    for wrong in (0, 10, -1):
        with pytest.raises(PatchloomError, match=f"from 1 to the 9 .*not {wrong}"):
            patchloom.explain(made, photo, top=wrong)


@pytest.mark.parametrize(
    ("size", "ys", "xs"),
    [
        (32, range(1, 7), range(1, 7)),
        ((28, 40), range(6), range(2, 8)),
        ((16, 24), range(4), range(6)),
    ],
)
def test_rows_are_those_of_the_central_patches(size: object, ys: range, xs: range, photo: Path) -> None:
    """Thesis Fig. 4.2; a smaller grid gives all that it has."""
    network = patchloom.create_model("resmlp_nano", num_classes=3, img_size=size, depth=2).eval()
    found = patchloom.explain(network, photo, maps=[])
    width = network.config.grid[1]
    for i, block in enumerate(network.blocks):
        matrix = block.mixing.branches[0].fn.weight.detach().numpy()
        got = found.rows[f"blocks.{i}.mixing.branches.0.fn"]
        assert got.shape == (len(ys) * len(xs), *network.config.grid)
        np.testing.assert_array_equal(got.reshape(len(got), -1), matrix[[y * width + x for y in ys for x in xs]])
    picture = row_picture(got)
    height = network.config.grid[0]
    assert picture.shape == (len(ys) * (height + 1) - 1, len(xs) * (width + 1) - 1)
    second = picture[: network.config.grid[0], width + 1 : 2 * width + 1]  # right of the first
    np.testing.assert_allclose(second, got[1] / np.abs(got[1]).max(), rtol=1e-6)


def test_the_thresholded_picture_keeps_the_patches_with_60_percent_of_the_attention(
    network: Network, photo: Path
) -> None:
    grid = np.array([[0.3, 0.02, 0.28], [0.2, 0.1, 0.1]], np.float32)  # 0.3 + 0.28 are too few
    keep = strongest(grid)
    assert keep.tolist() == [[True, False, True], [True, False, False]]
    np.testing.assert_array_equal(strongest(grid / 7 + 0), keep)  # whatever share goes to other tokens
    assert strongest(np.eye(5)).sum() == 3  # 3 of 5 are 60 %
    assert not strongest(np.zeros((2, 2))).any()
    image = np.full((4, 6, 3), 100, np.uint8)
    shown = thresholded(image, grid)[..., 0] == 100 / 255
    np.testing.assert_array_equal(shown, np.kron(keep, np.ones((2, 2))).astype(bool))
    found = patchloom.explain(network, photo, maps="class-attention", faithfulness=False)
    attention = found.heads["pool.0.mixing.branches.0.fn"].mean(axis=0)
    np.testing.assert_allclose(found.grids["class-attention"], attention, rtol=1e-5)
    kept = np.sort(attention[strongest(attention)])
    assert kept[1:].sum() < 0.6 * attention.sum() <= kept.sum() * (1 + 1e-6)


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "patchloom", "explain", *map(str, words)], capture_output=True, text=True, check=False
    )


def test_a_bad_image_among_several_is_named_and_the_others_are_done(weights: Path, photo: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "other").mkdir()
    Image.open(photo).save(tmp_path / "other" / "photo.png")
    images = (photo, tmp_path / "bad.png", tmp_path / "other" / "photo.png", photo)
    done = command(weights, *images, "--out", tmp_path / "out", "--map", "grad-cam", "--json")
    assert done.returncode == 2
    assert "bad.png cannot be read as an image" in done.stderr
    assert "1 of 4 images" in done.stderr
    assert "Traceback" not in done.stderr
    rows = json.loads(done.stdout)
    assert ["error" in row for row in rows] == [False, True, False, False]
    names = sorted(f"photo{i}.explained.png" for i in ("", "-2", "-3"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    assert list(rows[0]["faithfulness"]) == ["grad-cam"]


def test_no_file_is_written_over(weights: Path, photo: Path, tmp_path: Path) -> None:
    """Neither the picture in the same folder, nor a folder of the figure's name, nor the figure of an earlier run."""
    before = photo.read_bytes()
    (tmp_path / "photo.explained.png").mkdir()
    written = []
    for _ in range(2):
        done = command(weights, photo, "--out", tmp_path, "--map", "grad-cam", "--json")
        assert done.returncode == 0, done.stderr
        written.append(Path(json.loads(done.stdout)[0]["figure"]).name)
    assert written == ["photo-2.explained.png", "photo-3.explained.png"]
    assert photo.read_bytes() == before


def test_models_only_says_that_further_words_are_models_and_what_cannot_be_written(
    weights: Path, photo: Path, tmp_path: Path
) -> None:
    done = command(weights, photo, "--model-only", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "takes models" in done.stderr
    assert "photo.png is an image" in done.stderr
    (tmp_path / "analysis.json").mkdir()
    done = command(weights, "--model-only", "--out", tmp_path)
    assert done.returncode == 2
    assert "analysis.json cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--map", "pooling"), "cait_nano does not support the map 'pooling'. Choose from: class-attention"),
        (("--target", "brd"), "Did you mean 'bird'"),
        (("--top", "3"), "cait_nano has no map per class. Leave out --top"),
        (("--count", "30"), "--count requires --model-only"),
        (("--model-only", "--count", "30"), "takes models"),
    ],
)
def test_wrong_use_is_one_sentence_and_nothing_is_written(
    words: tuple[str, ...], said: str, weights: Path, photo: Path, tmp_path: Path
) -> None:
    done = command(weights, photo, "--out", tmp_path / "out", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
