"""Train with an augmentation of your own: python examples/own_augmentation.py --out RUN

It may draw from `random`, numpy or torch: patchloom seeds them for every image, so that a run is resumed to the bit.
"""

import argparse
import random

from PIL import Image, ImageFilter

import patchloom


class BlurAndShift:
    """Resize to 16 x 16, blur sometimes, and shift by up to one pixel."""

    def __call__(self, image: Image.Image) -> Image.Image:
        image = image.resize((16, 16))
        if random.random() < 0.3:
            image = image.filter(ImageFilter.GaussianBlur(random.uniform(0.2, 0.8)))
        x, y = random.randint(-1, 1), random.randint(-1, 1)
        return image.transform(image.size, Image.Transform.AFFINE, (1, 0, x, 0, 1, y))


class Printer(patchloom.Callback):
    """A callback: code of your own after every evaluation."""

    def after_evaluation(self, record):
        print(f"epoch {record['epoch']}: {record['count']} images held out")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, metavar="RUN")
    options = parser.parse_args()
    patchloom.train(
        "digits", model="deit_nano", model_options={"depth": 2}, augmentation=BlurAndShift(), callbacks=[Printer()],
        recipe="deit@small", out=options.out, resolution=16, epochs=2, workers=0,
    )  # fmt: skip
