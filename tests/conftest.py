"""What tests share: the recorded reference data, and the real data that may lie beside the repository."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import patchloom

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, which what is tested obeys
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

REFERENCE = Path(__file__).parent / "reference"
SHARED = Path(__file__).parents[2] / "shared"

# the recorded networks and what their tensors cannot tell: heads, and the size of those without a square of positions
GOLDEN_HINTS = {
    "deit": {"heads": 3},
    "deit_distilled": {"heads": 3},
    "deit3": {"heads": 3},
    "vit_parallel": {"heads": 4},
    "vit_parallel_ls": {"heads": 4},
    "vit_hmlp": {"heads": 3},
    "cait": {},
    "cait_rect": {"img_size": (32, 48)},
    "resmlp": {},
    "patchconvnet": {"img_size": 64},
    "patchconvnet_multi": {"img_size": 64},
}


class Golden:
    """One recorded network: the authors' weights, their inputs, and what came out."""

    def __init__(self, name: str, kind: str = "strong", folder: Path = REFERENCE / "models") -> None:
        self.name = name
        self.kind = kind
        self.tensors = load_file(folder / f"{name}.{kind}.safetensors")
        bounds = json.loads((REFERENCE / "tolerances.json").read_text())["models"][f"{name}.{kind}"]["tensors"]
        self.bounds = bounds

    @property
    def official(self) -> dict[str, Tensor]:
        return {key[2:]: value for key, value in self.tensors.items() if key.startswith("w.")}

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        return patchloom.load(self.official, **GOLDEN_HINTS[self.name]).to(dtype)

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key].double()

    def check(self, key: str, got: Tensor) -> None:
        """`got` equals the recorded tensor within the tolerance recorded for its precision."""
        tolerance = self.bounds[key]["tol_f32" if got.dtype == torch.float32 else "tol_f64"]
        assert_close(got, self[key], tolerance, f"{self.name}.{self.kind} {key}")


def relative_difference(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want.detach().double()).abs().max() / want.detach().double().abs().max())


def assert_close(got: Tensor, want: Tensor, tolerance: float, what: str = "tensor") -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    worst = relative_difference(got, want)
    assert worst <= tolerance, f"{what}: relative difference {worst:.1e}, allowed {tolerance:.0e}"


@torch.no_grad()
def stir(model: nn.Module, strength: float = 1.0) -> nn.Module:
    """Weights under which every term counts: fresh ones hide mistakes behind small scales and zero biases."""
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator)

    for parameter in model.parameters():
        narrow = parameter.ndim < 2 or parameter.shape[0] == 1
        parameter.add_(noise(parameter) * strength * (0.2 if narrow else parameter[0].numel() ** -0.5))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(noise(buffer) * 0.2)
        if name.endswith("running_var"):
            buffer.mul_(noise(buffer).abs() + 0.5)
    return model


def stirred_translator(name: str, seed: int = 0, **options: Any) -> Any:
    """A small network for translation, in eval mode, whose next token depends on all that it reads."""
    torch.manual_seed(seed)
    model = stir(patchloom.create_model(name, **{"dim": 32, "hidden": 64, **options})).eval()
    with torch.no_grad():  # strong branches: with shared embeddings a fresh network repeats the token that it was given
        for key, parameter in model.named_parameters():
            if key.endswith(("fc2.weight", "proj.weight")):
                parameter.mul_(8)
            if key.endswith("gamma"):
                parameter.fill_(1)
    return model


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real weights and photos; not ours to publish, so they may not be there."""
    if not SHARED.is_dir():
        pytest.skip(f"no real weights and photos at {SHARED}: this test did not run")
    return SHARED


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="browser tests did not run: no playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("browser tests did not run: no chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left out for want of a browser is said in the last lines, not only by a letter among thousands."""
    left_out = [r for r in terminalreporter.stats.get("skipped", []) if "browser tests did not run" in str(r.longrepr)]
    if left_out:
        reason = str(left_out[0].longrepr[-1]).removeprefix("Skipped: ")  # type: ignore[index]
        terminalreporter.write_line(
            f"NOTE: {reason}; web page, report and docs are untested in a browser.", yellow=True
        )
