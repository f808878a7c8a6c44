"""BatchNorm over several processes equals one BatchNorm over the whole batch."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from patchloom.layers.norms import BatchNorm
from patchloom.training.batchnorm import synchronise

SHARES = (5, 3)  # images of each process: the weights of the mean are the images, not the processes
NORMS = {
    "tokens": (lambda: BatchNorm(6), (8, 7, 6)),
    "vectors": (lambda: nn.BatchNorm1d(6), (8, 6)),
    "maps": (lambda: nn.BatchNorm2d(6), (8, 6, 4, 3)),
}


def norm_and_batch(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = NORMS[kind]
    norm = make()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_()
    return norm, torch.randn(shape) * 3 + 100  # a mean far from 0 shows a variance without its two passes


def step(norm: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs, gradients and statistics of one step whose loss is a sum over images."""
    x = x.requires_grad_()
    y = norm(x)
    (y * torch.linspace(0, 1, y[0].numel()).view_as(y[0]).cos() + y**2 / 7).sum().backward()
    return {"y": y.detach(), "x": x.grad, "weight": norm.weight.grad, **dict(norm.named_buffers())}


def in_process(rank: int, kind: str, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    norm, x = norm_and_batch(kind)
    synchronise(norm)
    torch.save(step(norm, x.split(SHARES)[rank].clone()), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", NORMS)
def test_two_processes_equal_one(kind: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(in_process, (kind, port, str(tmp_path)), nprocs=2)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    norm, x = norm_and_batch(kind)
    whole = step(norm, x)
    for name in ("y", "x"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), whole[name], atol=2e-4, rtol=1e-3)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for part in parts:
            torch.testing.assert_close(part[name], whole[name], atol=1e-4, rtol=1e-4)
    gradient = parts[0]["weight"] + parts[1]["weight"]
    torch.testing.assert_close(gradient, whole["weight"], atol=1e-3, rtol=1e-3)


def test_in_eval_mode_nothing_is_summed() -> None:
    norm, x = norm_and_batch("tokens")
    want = norm.eval()(x)
    synchronise(norm)
    assert torch.equal(norm(x), want)
