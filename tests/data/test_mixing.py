"""Erasing, Mixup and CutMix on batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import assert_close
from patchloom.data.mixing import Mixing, erase, normalise, soft_targets

TARGETS = soft_targets(torch.tensor([0, 1, 2, 3]), 4, 0.0)


def test_normalising_equals_the_formula() -> None:
    images = torch.randint(0, 256, (2, 5, 6, 3), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    want = (images.permute(0, 3, 1, 2) / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert_close(normalise(images, mean, std), want, 1e-6)


def test_erasing_hits_a_quarter_within_its_bounds() -> None:
    erased, areas = 0, []
    for step in range(60):
        out = erase(torch.full((16, 3, 32, 32), 9.0), 0.25, 1, step)
        touched = (out != 9).any(dim=1).flatten(1).float().mean(dim=1)
        erased += int((touched > 0).sum())
        areas += touched[touched > 0].tolist()
    assert abs(erased / 960 - 0.25) < 0.05
    assert min(areas) > 0.01
    assert max(areas) < 0.36
    assert torch.equal(erase(torch.ones(4, 3, 8, 8), 1.0, 3), erase(torch.ones(4, 3, 8, 8), 1.0, 3))
    noise = erase(torch.zeros(200, 3, 32, 32), 1.0, 5)
    values = noise[noise != 0]
    assert abs(float(values.mean())) < 0.02
    assert abs(float(values.std()) - 1) < 0.02


def test_mixup_mixes_with_the_batch_reversed() -> None:
    x = torch.arange(4.0)[:, None, None, None].expand(4, 1, 2, 2).clone()
    images, targets = Mixing(mixup=0.8)(x.clone(), TARGETS, 0, 1)
    share = float(targets[0, 0])
    assert 0 < share < 1
    assert_close(images[:, 0, 0, 0], share * torch.arange(4.0) + (1 - share) * torch.arange(4.0).flip(0), 1e-5)
    assert_close(targets.sum(dim=1), torch.ones(4), 1e-6)


def test_cutmix_pastes_a_box_and_counts_its_pixels() -> None:
    for step in range(50):
        x = torch.arange(4.0)[:, None, None, None].expand(4, 1, 16, 24).clone()
        images, targets = Mixing(cutmix=1.0)(x, TARGETS, 0, step)
        kept = (images[0] == 0).float().mean()
        assert float(targets[0, 0]) == pytest.approx(float(kept), abs=1e-6)
        assert set(images[0].unique().tolist()) <= {0.0, 3.0}


def test_both_take_turns_and_the_weight_is_beta_distributed() -> None:
    both, kinds, shares = Mixing(mixup=0.8, cutmix=1.0), [], []
    for step in range(400):
        x = torch.arange(4.0)[:, None, None, None].expand(4, 1, 8, 8).clone()
        images, _ = both(x, TARGETS, 0, step)
        kinds.append(set(images[0].unique().tolist()) <= {0.0, 3.0})
        shares.append(float(Mixing(mixup=0.8)(x, TARGETS, 1, step)[1][0, 0]))
    assert abs(np.mean(kinds) - 0.5) < 0.1
    assert abs(np.var(shares) - 0.25 / 2.6) < 0.02  # variance of Beta(0.8, 0.8)


def test_no_mixing_leaves_everything() -> None:
    x = torch.randn(4, 1, 8, 8)
    images, targets = Mixing()(x, TARGETS, 0)
    assert images is x
    assert targets is TARGETS
