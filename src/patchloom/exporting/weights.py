"""Weight files in patchloom's layout, timm's and the official repositories'."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.exporting.formats import Request, Runner, write_through_memory
from patchloom.weights.files import METADATA_KEY, read, write_tensors
from patchloom.weights.layouts import from_ours
from patchloom.weights.load import load
from patchloom.weights.save import describe
from patchloom.weights.timm_networks import timm_network


class WeightsFile:
    """A state dict with metadata. Files in timm's layout are verified with timm's network."""

    def __init__(self, request: Request, layout: str) -> None:
        self.network, self.layout = request.network, layout
        tensors = from_ours(self.network.state_dict(), self.network.config, layout)
        self.tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        # Loading the file with our own code would only show that our renaming is its own inverse.
        self.in_timm = timm_network(self.network.config) if layout == "timm" else None

    def write(self, path: Path, found: dict[str, Any]) -> None:
        metadata = {**describe(self.network, self.layout), "export": found}
        if path.suffix == ".pth":
            content = {"model": self.tensors, METADATA_KEY: json.dumps(metadata)}
            write_through_memory(path, partial(torch.save, content))
        else:
            write_tensors(path, self.tensors, {METADATA_KEY: json.dumps(metadata)})

    def open(self, path: Path) -> Runner:
        """A function from normalised images to logits: the file loaded into the network of its layout."""
        module = load(path) if self.in_timm is None else self._filled(self.in_timm, path)

        def run(images: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                return module(torch.from_numpy(images)).numpy()

        return run

    def _filled(self, module: nn.Module, path: Path) -> nn.Module:
        try:
            module.load_state_dict(read(path).tensors)
        except RuntimeError as error:
            raise PatchloomError(
                f"{self.network.config.name} with these options has no counterpart in timm: "
                f"{str(error).splitlines()[-1].strip()} Use --to safetensors, which supports every network."
            ) from error
        return module.eval()


def make(request: Request, to: str) -> WeightsFile:
    return WeightsFile(request, "patchloom" if to == "safetensors" else to)
