"""Train on a data set of your own: anything with __len__ and __getitem__. python examples/own_data.py --out RUN"""

import argparse

import numpy as np
from PIL import Image

import patchloom


class Stripes:
    """Images of horizontal and vertical stripes; entry i is (PIL image, class)."""

    classes = ("horizontal", "vertical")

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        generator = np.random.default_rng(i)
        wave = np.sin(np.arange(16) * generator.uniform(0.8, 1.6) + generator.uniform(0, 6))
        pixels = np.repeat(wave[:, None], 16, axis=1) if i % 2 == 0 else np.repeat(wave[None], 16, axis=0)
        pixels = pixels + generator.normal(0, 0.5, (16, 16))
        grey = (255 * (pixels - pixels.min()) / np.ptp(pixels)).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB"), i % 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, metavar="RUN")
    options = parser.parse_args()
    patchloom.train(
        Stripes(), model="deit_nano", model_options={"depth": 2}, recipe="deit@small", out=options.out,
        resolution=16, epochs=3, batch_size=32, flip=0.0, affine=0.0, workers=0,
    )  # fmt: skip
