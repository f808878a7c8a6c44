"""Randomness as a function, not a history: every draw comes from a generator seeded by what it is for.

View v of image i in epoch e, repeat r depends on (run seed, e, i, r, v) alone, and what happens to batch s on (run
seed, s): not on the number of workers, on prefetching, or on where a run was cut and resumed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*parts: int | str) -> int:
    """One 63-bit seed from several numbers and words; near ones give unrelated seeds."""
    numbers = [int.from_bytes(part.encode(), "little") if isinstance(part, str) else part for part in parts]
    # SeedSequence mixes its input: seeds 1 and 2 give streams that have nothing in common.
    low, high = np.random.SeedSequence(numbers).generate_state(2)
    return (int(high) << 32 | int(low)) >> 1


def sample_seed(seed: int, epoch: int, image: int, repeat: int = 0) -> int:
    """The seed of one training sample: image i of epoch e, repeat r, in a run with this seed."""
    return seed_of(seed, epoch, image, repeat, "image")


def view_seed(seed: int, view: int) -> int:
    """The seed of one of several views of a sample; the first view has the sample's own."""
    return seed if view == 0 else seed_of(seed, view, "view")


def torch_generator(*parts: int | str) -> torch.Generator:
    """A CPU generator of torch that is seeded by these parts."""
    return torch.Generator().manual_seed(seed_of(*parts))


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """For code that draws from the global generators of `random`, numpy and torch: seeded inside, untouched outside."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        # numpy's old generator takes 32 bits.
        np.random.seed(seed & 0xFFFFFFFF)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
