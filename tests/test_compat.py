"""torchvision and timm import beside a CPU-only torch, and the stand-in operators are right."""

from __future__ import annotations

import subprocess
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.compat import nms


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_torchvision_and_timm_import_after_compat() -> None:
    done = run("import patchloom.compat, torchvision, timm; print(timm.create_model('resnet18') is not None)")
    assert done.returncode == 0, done.stderr[-1000:]


def test_without_compat_they_may_not() -> None:
    """If this fails, the install is complete and compat declares nothing: then the operators must be torchvision's."""
    bare = run("import torchvision")
    declared = run("import patchloom.compat as c; print(len(c._libraries))").stdout.strip()
    assert declared == ("1" if bare.returncode else "0")


def test_everything_of_ours_that_imports_timm_goes_through_compat() -> None:
    """No other file of ours imports timm or torchvision by itself."""
    from pathlib import Path

    import patchloom

    for path in Path(patchloom.__file__).parent.rglob("*.py"):
        if path.name != "compat.py":
            lines = [line.strip() for line in path.read_text().splitlines()]
            assert not [
                line
                for line in lines
                if line.startswith(("import timm", "from timm", "import torchvision", "from torchvision"))
            ]


def slow_nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[int]:
    """By the definition, one pair at a time."""

    def overlap(a: list[float], b: list[float]) -> float:
        width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
        height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
        area = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
        return width * height / area

    kept: list[int] = []
    for i in sorted(range(len(scores)), key=lambda i: -float(scores[i])):
        if all(overlap(boxes[i].tolist(), boxes[j].tolist()) <= threshold for j in kept):
            kept.append(i)
    return kept


@settings(deadline=None)
@given(count=st.integers(0, 20), threshold=st.sampled_from([0.1, 0.3, 0.7]), seed=st.integers(0, 1000))
def test_non_maximum_suppression(count: int, threshold: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    boxes = torch.cat([corner, corner + 0.05 + torch.rand(count, 2, generator=generator, dtype=torch.float64)], dim=1)
    scores = torch.rand(count, generator=generator)
    assert nms(boxes, scores, threshold).tolist() == slow_nms(boxes, scores, threshold)
    assert torch.ops.torchvision.nms(boxes, scores, threshold).tolist() == slow_nms(boxes, scores, threshold)
