"""Export of networks that translate: weights with the vocabulary, or two ONNX graphs, verified step by step.

For `model.onnx` the decoder step is written to that file and the encoder beside it, to `model.encoder.onnx`
(`text_graphs` describes inputs and outputs). The metadata of the step has what a program needs to decode: vocabulary,
languages, beam and length penalty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom import __version__
from patchloom.errors import PatchloomError
from patchloom.exporting.check import BATCHES, Comparison
from patchloom.exporting.text_graphs import Runner, encoder_graph, step_graph
from patchloom.models.translation import TranslationNetwork
from patchloom.weights.files import write
from patchloom.weights.load import load

FORMATS = ("safetensors", "onnx")

_STEPS = 12  # of the decoder that are compared
_HYPOTHESES = 3

Logits = Callable[[Tensor, Tensor], np.ndarray]  # source (B, S), target (B, K, T) -> logits (B, K, T, V)


def check_text_options(name: str, to: str, **unfit: object) -> None:
    """Refuse formats and options that are for images."""
    if to not in FORMATS:
        raise PatchloomError(
            f"{name} translates text: --to {to} does not support it. Choose from: {', '.join(FORMATS)}."
        )
    for option, value in unfit.items():
        if value:
            raise PatchloomError(f"{name} translates text: --{option.replace('_', '-')} is for networks of images.")


def encoder_file(path: Path) -> Path:
    """Where the encoder is, for the file of the decoder step."""
    return path.with_suffix(".encoder.onnx")


class TextFiles:
    """A network that translates, converted to a format. Written once for verification, and again with its result."""

    def __init__(self, network: TranslationNetwork, to: str) -> None:
        self.network, self.to = network, to
        self.graphs = (encoder_graph(network), step_graph(network)) if to == "onnx" else ()

    def write(self, path: Path, found: dict[str, Any]) -> None:
        if self.to == "safetensors":
            described = {"task": "translation", "layout": "patchloom", **self.network.metadata(), "export": found}
            write(path, self.network.state_dict(), described)
            return
        import onnx

        values = {**self.network.metadata(), "patchloom_version": __version__, **found}
        values["encoder"] = encoder_file(path).name
        properties = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        for graph, file in zip(self.graphs, (encoder_file(path), path), strict=True):
            del graph.metadata_props[:]
            onnx.helper.set_model_props(graph, properties)
            onnx.save(graph, file)


@torch.inference_mode()
def compare_text(network: TranslationNetwork, to: str, path: Path) -> Comparison:
    """Logits of the file and of the network, on sources of several lengths and numbers.

    Raises PatchloomError if those of the network are NaN.
    """
    run = _file_logits(to, path)
    largest = furthest = 0.0
    same: list[bool] = []
    sizes = []
    for source, target in _cases(network):
        flat = network(source.repeat_interleave(target.shape[1], dim=0), target.flatten(0, 1))
        want, got = flat.unflatten(0, target.shape[:2]).numpy(), run(source, target)
        if not np.isfinite(want).all():
            raise PatchloomError(f"The output of {network.config.name} is NaN: its weights are damaged.")
        largest = max(largest, float(np.abs(want).max()))
        furthest = float(np.maximum(furthest, np.abs(got - want).max()))  # np.maximum keeps NaN, max would not
        same += (got.argmax(axis=-1) == want.argmax(axis=-1)).ravel().tolist()
        sizes.append((len(source), source.shape[1], target.shape[2]))
    count = sum(sources for sources, _, _ in sizes)
    difference = furthest / largest if largest else furthest
    return Comparison(difference, sum(same) / len(same), count, tuple(sizes), "sentences")


def _cases(network: TranslationNetwork) -> Iterator[tuple[Tensor, Tensor]]:
    """Sources (B, S), padded, and targets (B, K, T) of random tokens; the shortest and the longest among them."""
    config, draw = network.config, torch.Generator().manual_seed(0)
    longest = config.max_length
    for batch, length in zip((*BATCHES, 1), (longest, min(9, longest), 1, min(6, longest)), strict=True):
        source = torch.randint(1, config.vocab_size, (batch, length), generator=draw)
        for row in range(1, batch):
            source[row, max(1, length - row) :] = 0
        shape = (batch, _HYPOTHESES if batch > 1 else 1, min(_STEPS, longest))
        yield source, torch.randint(1, config.vocab_size, shape, generator=draw)


def _file_logits(to: str, path: Path) -> Logits:
    if to == "safetensors":
        network: Any = load(path)
        return lambda source, target: (
            network(source.repeat_interleave(target.shape[1], dim=0), target.flatten(0, 1))
            .unflatten(0, target.shape[:2])
            .numpy()
        )
    runner = Runner(encoder_file(path), path)

    def run(source: Tensor, target: Tensor) -> np.ndarray:
        encoded, past, steps = runner.encode(source.numpy()), runner.no_past(*target.shape[:2]), []
        for tokens in target.unbind(2):
            logits, past = runner.next(tokens.numpy(), past, encoded)
            steps.append(logits)
        return np.stack(steps, axis=2)

    return run
