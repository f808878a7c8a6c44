"""The memory of all training images and the kNN loss over it, against the formula in float64."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from patchloom.tasks.retrieval import memory as module
from patchloom.tasks.retrieval.memory import Memory, plain_neighbour_loss


def by_hand(z: np.ndarray, rows: list[int], m: np.ndarray, labels: list[int], sigma: float) -> list[float]:
    """Eq. 2.2 and 2.3, one image after the other."""
    losses = []
    for vector, row in zip(z, rows, strict=True):
        weights = {j: math.exp(float(vector @ m[j]) / sigma) for j in range(len(m)) if j != row}
        own = [weight for j, weight in weights.items() if labels[j] == labels[row]]
        losses.append(-math.log(sum(own) / sum(weights.values())) if own else 0.0)
    return losses


def case(count: int = 40, dim: int = 6, classes: int = 5, **options: object) -> tuple[Memory, torch.Tensor]:
    labels = torch.randint(classes, (count,), generator=torch.Generator().manual_seed(1))
    labels[0] = classes  # a class with one image
    return Memory(labels, dim, seed=3, **options), labels  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [0.05, 0.5, 0.005])
def test_loss_and_gradient_are_those_of_the_formula(sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SCORES", 7 * 8)  # chunks of 7 rows
    memory, labels = case(sigma=sigma)
    memory.vectors = memory.vectors.double()
    images = torch.tensor([0, 3, 3, 17, 25, 31, 8, 12])
    rows = memory.row_of[images]
    raw = torch.randn(len(images), 6, dtype=torch.float64)
    one, two = raw.clone().requires_grad_(), raw.clone().requires_grad_()
    found = memory.loss(F.normalize(one, dim=1), rows)
    plain = plain_neighbour_loss(F.normalize(two, dim=1), rows, memory.vectors, labels[memory.images], sigma)
    weights = torch.rand(len(images), dtype=torch.float64)
    (found * weights).sum().backward()
    (plain * weights).sum().backward()
    z, m = F.normalize(raw, dim=1).numpy(), memory.vectors.numpy()
    expected = by_hand(z, rows.tolist(), m, labels[memory.images].tolist(), sigma)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(plain.detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    assert one.grad is not None
    assert two.grad is not None
    torch.testing.assert_close(one.grad, two.grad, rtol=1e-9, atol=1e-9)


def test_float32_stays_within_a_millionth_of_the_formula() -> None:
    memory, labels = case(3000, 64, 20)
    images = torch.arange(0, 3000, 50)
    rows = memory.row_of[images]
    near = F.normalize(memory.vectors[rows] + 0.1 * torch.randn(len(rows), 64), dim=1)
    one, two = near.clone().requires_grad_(), near.double().requires_grad_()
    found = memory.loss(one, rows)
    plain = plain_neighbour_loss(two, rows, memory.vectors.double(), labels[memory.images])
    (found.mean(), plain.mean().backward())
    found.mean().backward()
    torch.testing.assert_close(found.double(), plain, rtol=1e-6, atol=1e-6)
    assert one.grad is not None
    assert two.grad is not None
    torch.testing.assert_close(one.grad.double(), two.grad, rtol=1e-6, atol=1e-6)


def test_a_class_with_one_image_has_loss_zero_and_no_gradient() -> None:
    memory, _ = case()
    z = F.normalize(torch.randn(2, 6), dim=1).requires_grad_()
    losses = memory.loss(z, memory.row_of[torch.tensor([0, 1])])
    losses.sum().backward()
    assert losses[0] == 0
    assert losses[1] > 0
    assert z.grad is not None
    assert not z.grad[0].any()
    assert z.grad[1].any()


def test_one_class_gives_zero() -> None:
    memory = Memory(torch.zeros(10, dtype=torch.long), 4)
    losses = memory.loss(F.normalize(torch.randn(3, 4), dim=1), torch.arange(3))
    assert losses.min() >= 0
    assert losses.max() < 1e-6


def test_update_averages_and_renormalises() -> None:
    for renormalise in (True, False):
        memory, _ = case(renormalise=renormalise)
        before, rows = memory.vectors.clone(), torch.tensor([4, 9, 4])
        g = F.normalize(torch.randn(3, 6), dim=1)
        memory.update(rows, g)
        both = (before[4] + (g[0] + g[2]) / 2) / 2
        expected = F.normalize(both, dim=0) if renormalise else both
        torch.testing.assert_close(memory.vectors[4], expected)
        untouched = [row for row in range(40) if row not in (4, 9)]
        assert torch.equal(memory.vectors[untouched], before[untouched])


def test_averages_that_are_not_unit_vectors_count_by_their_direction() -> None:
    memory, labels = case(renormalise=False)
    memory.vectors *= torch.rand(40, 1) + 0.1
    z, rows = F.normalize(torch.randn(4, 6), dim=1), torch.tensor([1, 5, 20, 39])
    plain = plain_neighbour_loss(z, rows, F.normalize(memory.vectors, dim=1), labels[memory.images])
    torch.testing.assert_close(memory.loss(z, rows), plain, rtol=1e-5, atol=1e-6)


def test_an_update_can_be_revoked_until_it_is_kept() -> None:
    memory, _ = case()
    before = memory.vectors.clone()
    g = F.normalize(torch.randn(2, 6), dim=1)
    memory.update(torch.tensor([1, 2]), g, revocable=True)
    memory.update(torch.tensor([2, 3]), g, revocable=True)
    assert not torch.equal(memory.vectors, before)
    memory.revoke()
    assert torch.equal(memory.vectors, before)
    memory.update(torch.tensor([1, 2]), g, revocable=True)
    memory.keep()
    memory.revoke()
    assert not torch.equal(memory.vectors, before)


def test_half_precision_is_the_loss_of_the_rounded_vectors() -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        memory, labels = case(precision=precision)
        assert memory.vectors.dtype == dtype
        z, rows = F.normalize(torch.randn(4, 6), dim=1), torch.tensor([1, 5, 20, 39])
        rounded = F.normalize(memory.vectors.float(), dim=1)
        plain = plain_neighbour_loss(z, rows, rounded, labels[memory.images])
        torch.testing.assert_close(memory.loss(z, rows), plain, rtol=1e-5, atol=1e-5)


PROGRAM = """
import sys, torch
from torch.nn import functional as F
from patchloom.tasks.retrieval.memory import Memory
from patchloom.training.processes import join_processes, leave_processes
processes = join_processes("cpu")
labels = torch.randint(5, (41,), generator=torch.Generator().manual_seed(1))
for precision in ("float32", "bf16"):
    memory = Memory(labels, 6, processes, seed=3, precision=precision)
    images = torch.tensor([0, 3, 17, 25, 31, 8, 12])[processes.rank :: processes.count]
    raw = torch.randn(41, 6, generator=torch.Generator().manual_seed(2))[images].requires_grad_()
    z, rows = F.normalize(raw, dim=1), memory.row_of[images]
    losses = memory.loss(z, rows)
    losses.sum().backward()
    memory.update(processes.gather_rows(rows), processes.gather_rows(z.detach()))
    order = processes.gather_rows(images).argsort()
    found = [processes.gather_rows(t.detach())[order] for t in (losses, raw.grad)]
    if processes.rank == 0:
        torch.save([*found, memory.gather()], f"{sys.argv[1]}-{precision}-{processes.count}.pt")
    else:
        memory.gather()
leave_processes()
"""


@pytest.mark.slow
def test_two_processes_give_the_losses_gradients_and_vectors_of_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        command = [sys.executable, *launcher, str(tmp_path / "program.py"), str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    for precision in ("float32", "bf16"):
        one, two = (torch.load(tmp_path / f"out-{precision}-{count}.pt") for count in (1, 2))
        for alone, shared in zip(one, two, strict=True):
            torch.testing.assert_close(alone, shared, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [1, 2, 200])
def test_no_block_of_scores_is_larger_than_the_bound(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few the classes are: with two, a class is half of the memory."""
    monkeypatch.setattr(module, "_SCORES", 1000)
    memory = Memory(torch.arange(600) % classes, 8, seed=3)
    plain, sizes = module._scores, list[int]()

    def measured(*arguments: object) -> torch.Tensor:
        scores = plain(*arguments)  # type: ignore[arg-type]
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(module, "_scores", measured)
    memory.loss(F.normalize(torch.randn(30, 8), dim=1), torch.arange(30) * 20)
    assert max(sizes) <= 1000
    assert sum(sizes) >= 30 * 600
