"""The pointing game: does the maximum of a map lie on the animal? On Oxford-IIIT Pets, whose animals are outlined.

    python benchmarks/pointing.py PETS WEIGHTS [WEIGHTS ...] [--photos 200] [--occluded 20] [--off-centre]

PETS is a folder with val/BREED/*.jpg and trimaps/val/BREED/*.png (1: pet, 2: background, 3: border). Prints a Markdown
table a model: the share of photos whose maximum lies in the pet, beside a guess at the centre of the crop and a place
drawn at random; and the share of the map's mass in it. Occlusion, which costs some 170 forwards a photo, sees fewer.
--off-centre takes only photos whose centre is not the pet, where that guess is always wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import patchloom
from patchloom.data.images import resize_and_crop
from patchloom.explaining.maps import available_maps
from patchloom.models.network import Network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pets", type=Path)
    parser.add_argument("weights", nargs="+")
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--occluded", type=int, default=20)
    parser.add_argument("--off-centre", action="store_true")
    parser.add_argument("--mean", type=float, help="of every channel, with --std, where the weights do not say")
    parser.add_argument("--std", type=float)
    options = parser.parse_args()
    for weights in options.weights:
        network = patchloom.load(weights)
        if options.mean is not None:
            how = dataclasses.replace(network.preprocessing, mean=(options.mean,) * 3, std=(options.std,) * 3)
            network.preprocessing = how
        chosen = choose(network, options.pets, options.photos, options.off_centre)
        print(f"\n{Path(weights).name}, {len(chosen)} photos\n", flush=True)
        print(table(play(network, options.pets, chosen, options.occluded)))


def choose(network: Network, pets: Path, count: int, off_centre: bool) -> list[Path]:
    """Photos evenly over all breeds, in an order in which the first few are a sample too."""
    paths = sorted((pets / "val").rglob("*.jpg"))
    if off_centre:
        paths = [path for path in paths if not centre_of(pet(network, pets, path))]
    count = min(count, len(paths))
    return [paths[i * len(paths) // count] for i in np.random.default_rng(0).permutation(count)]


def centre_of(mask: np.ndarray) -> bool:
    return bool(mask[mask.shape[0] // 2, mask.shape[1] // 2])


def play(network: Network, pets: Path, photos: list[Path], occluded: int) -> dict[str, list[dict[str, float]]]:
    """By map, for each photo: hit (the maximum), centre (the guess), area (of the pet), mass (of the map in it)."""
    found: dict[str, list[dict[str, float]]] = {}
    names = [name for name in available_maps(network) if name != "occlusion"]
    for i, path in enumerate(photos):
        mask = pet(network, pets, path)
        maps = [*names, "occlusion"] if i < occluded else names
        explained = patchloom.explain(network, path, maps=maps, faithfulness=False)
        for name, values in explained.maps.items():
            hit = mask.ravel()[values.argmax()]
            mass = float(values[mask].sum() / values.sum()) if values.any() else float(mask.mean())
            row = {"hit": float(hit), "centre": float(centre_of(mask)), "area": float(mask.mean()), "mass": mass}
            found.setdefault(name, []).append(row)
    return found


def pet(network: Network, pets: Path, path: Path) -> np.ndarray:
    """(H, W): where the crop that the network sees shows the pet."""
    trimap = pets / "trimaps" / path.relative_to(pets).with_suffix(".png")
    how = dataclasses.replace(network.preprocessing, interpolation="nearest")
    return np.asarray(resize_and_crop(Image.open(trimap), how)) == 1


def table(found: dict[str, list[dict[str, float]]]) -> str:
    lines = [
        "| map | photos | maximum in the pet | centre guess | difference | random place | mass in the pet |",
        "| :-- | --: | --: | --: | --: | --: | --: |",
    ]
    for name, rows in found.items():
        hit, centre, area, mass = (np.array([row[key] for row in rows]) for key in ("hit", "centre", "area", "mass"))
        lines.append(
            f"| {name} | {len(rows)} | {percent(hit)} | {percent(centre)} | {percent(hit - centre, sign='+')} | "
            f"{area.mean():.1%} | {mass.mean():.1%} |"
        )
    return "\n".join(lines)


def percent(values: Any, sign: str = "") -> str:
    """The mean and its standard error, in percent."""
    error = values.std(ddof=1) / np.sqrt(len(values))
    return f"{100 * values.mean():{sign}.1f} ± {100 * error:.1f} %"


if __name__ == "__main__":
    main()
