"""Networks that translate as two ONNX graphs: the encoder, run once per source, and one step of the decoder.

    encoder   source (B, S) -> keys and values (L, B, H, S, d), source_mask (B, S)
    step      tokens (B, K), past (t, C, B, K, D), keys, values, source_mask
              -> logits (B, K, V), present (t + 1, C, B, K, D)

B sources, S source tokens, K hypotheses of each, t steps so far (0 at first), L layers, H heads, d = D / H. C is L for
ResMLP, whose layers keep one vector per token, and 2 L for the Transformer, which keeps keys and values.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from patchloom.exporting.formats import quiet
from patchloom.exporting.onnx import OPSET, clean
from patchloom.layers.sequence import StepCache
from patchloom.models.translation import DecoderState, TranslationNetwork

if TYPE_CHECKING:
    from onnx import ModelProto

ENCODER = (("source",), ("keys", "values", "source_mask"))
STEP = (("tokens", "past", "keys", "values", "source_mask"), ("logits", "present"))
# the sizes of each input and output that are not fixed
_KEYS = {1: "sources", 3: "source_length"}
DYNAMIC: dict[str, dict[int, str]] = {
    "source": {0: "sources", 1: "source_length"},
    "source_mask": {0: "sources", 1: "source_length"},
    "keys": _KEYS,
    "values": _KEYS,
    "tokens": {0: "sources", 1: "hypotheses"},
    "logits": {0: "sources", 1: "hypotheses"},
    "past": {0: "steps", 2: "sources", 3: "hypotheses"},
    "present": {0: "steps + 1", 2: "sources", 3: "hypotheses"},
}


class PastCache(StepCache):
    """The earlier steps as a tensor (t, parts, N, D) that is not changed: `past` is replaced by a longer one."""

    def __init__(self, past: Tensor) -> None:
        self.past, self.length = past, past.shape[0]

    def append(self, *new: Tensor) -> list[Tensor]:
        self.past = torch.cat([self.past, torch.stack([part.flatten(1) for part in new])[None]])
        self.length = self.past.shape[0]
        return [self.past[:, i].reshape(-1, *part.shape) for i, part in enumerate(new)]


class Encoder(nn.Module):
    """See the module's docstring."""

    def __init__(self, network: TranslationNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.network.start(self.network.encode(source))
        keys, values = (torch.stack(parts) for parts in zip(*state.keys_values, strict=True))
        return keys, values, state.source_mask


class Step(nn.Module):
    """See the module's docstring."""

    def __init__(self, network: TranslationNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, tokens: Tensor, past: Tensor, keys: Tensor, values: Tensor, source_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = cached_parts(self.network)
        state = DecoderState(list(zip(keys, values, strict=True)), source_mask, parts)
        state.caches = [PastCache(each) for each in past.flatten(2, 3).split(parts, dim=1)]
        logits = self.network.step(state, tokens)
        present = torch.cat([cache.past for cache in state.caches if isinstance(cache, PastCache)], dim=1)
        return logits, present.unflatten(2, tokens.shape)


def cached_parts(network: TranslationNetwork) -> int:
    """How many vectors per token a decoder layer keeps: keys and values of attention, or the token."""
    return 1 if network.config.mixing == "linear" else 2


def no_past(network: TranslationNetwork, sources: int, hypotheses: int) -> Tensor:
    """`past` before the first step."""
    config = network.config
    return torch.zeros(0, config.depth * cached_parts(network), sources, hypotheses, config.dim)


def encoder_graph(network: TranslationNetwork) -> ModelProto:
    """The encoder, for any number and length of sources."""
    return _graph(Encoder(network), (_example_source(network),), *ENCODER)


def step_graph(network: TranslationNetwork) -> ModelProto:
    """One step of the decoder, for any number of sources, hypotheses and earlier steps."""
    with torch.no_grad():
        encoded = Encoder(network)(_example_source(network))
    past = no_past(network, sources=2, hypotheses=3)
    past = past.new_zeros(min(4, network.config.max_length - 1), *past.shape[1:])
    return _graph(Step(network), (torch.ones(2, 3, dtype=torch.int64), past, *encoded), *STEP)


def _example_source(network: TranslationNetwork) -> Tensor:
    return torch.ones(2, min(5, network.config.max_length), dtype=torch.int64)


def _graph(
    module: nn.Module, example: tuple[Tensor, ...], inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> ModelProto:
    shapes = tuple(dict.fromkeys(DYNAMIC[name], Dim.DYNAMIC) for name in inputs)
    with torch.no_grad(), quiet():
        # deferred: torch would refuse lengths of 1 and max_length, for which its rules of layouts differ
        program = torch.export.export(
            module.eval(),
            example,
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        exported = torch.onnx.export(
            program, dynamo=True, input_names=inputs, output_names=outputs, opset_version=OPSET, verbose=False
        )
    assert exported is not None
    model = exported.model_proto
    clean(model)
    for value in (*model.graph.input, *model.graph.output):
        for place, name in DYNAMIC[value.name].items():
            value.type.tensor_type.shape.dim[place].dim_param = name
    return model


class Runner:
    """The two files in onnxruntime, as a program without torch would use them."""

    def __init__(self, encoder: Path, step: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        self.encoder, self.step = (
            onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            for path in (encoder, step)
        )

    def no_past(self, sources: int, hypotheses: int) -> np.ndarray:
        """`past` before the first step; the graph knows the other sizes."""
        _, cached, _, _, dim = next(value.shape for value in self.step.get_inputs() if value.name == "past")
        return np.zeros((0, cached, sources, hypotheses, dim), dtype=np.float32)

    def encode(self, source: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(ENCODER[1], self.encoder.run(list(ENCODER[1]), {"source": source}), strict=True))

    def next(
        self, tokens: np.ndarray, past: np.ndarray, encoded: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        logits, present = self.step.run(list(STEP[1]), {"tokens": tokens, "past": past, **encoded})
        return logits, present
