"""scikit-learn's 1797 handwritten digits, 8 x 8 pixels, with a fixed fifth held out."""

from __future__ import annotations

import numpy as np

from patchloom.data.sources import ArraySource, Item, Source
from patchloom.errors import PatchloomError
from patchloom.install import pip_install

_FIFTH = 5


def open_digits() -> Source:
    """The digits as a source with the splits train (1438) and val (359), the same in every installation.

    Raises:
        PatchloomError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise PatchloomError(f"The data set digits needs scikit-learn: {pip_install('scikit-learn')}") from error
    images, labels = load_digits(return_X_y=True)
    # The digits have 17 grey values, 0 to 16.
    pixels = np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(pixels))  # RandomState: the same order in every version of numpy
    held_out = len(pixels) // _FIFTH

    def items(numbers: np.ndarray) -> list[Item]:
        return [Item(str(number), int(labels[number])) for number in sorted(numbers.tolist())]

    splits = {"train": items(order[held_out:]), "val": items(order[:held_out])}
    source = ArraySource({"": pixels}, "digits", map(str, range(10)), splits)
    # A mirrored 2 is not a 2.
    source.flips = False
    return source
