"""Export of networks that translate: weights that translate alone, and ONNX graphs that decode without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import patchloom
from conftest import stirred_translator
from patchloom import PatchloomError
from patchloom.exporting import export
from patchloom.tasks.translation.decoding import DecodingOptions, search
from patchloom.tasks.translation.predict import predict as translations
from patchloom.tasks.translation.vocabulary import Vocabulary

LINES = ["a man rides a bike", "two dogs run in the snow with a red ball", "a woman and a red ball"]
NANOS = ["resmlp_mt_nano", "transformer_mt_nano"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.train(LINES * 5, 70)


def make(name: str, vocabulary: Vocabulary):
    model = stirred_translator(name, vocab_size=len(vocabulary), max_length=24)
    model.describe_text(vocabulary.model, ("en", "de"), 2, 0.5)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", NANOS)
def test_onnx_graphs_decode_greedily_without_torch(name: str, vocabulary: Vocabulary, tmp_path: Path) -> None:
    """A loop over onnxruntime as another program would write it gives the tokens of `search`."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make(name, vocabulary)
    report = export(model, "onnx", tmp_path / "model.onnx")
    assert report.difference < 1e-5
    assert report.agreement == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.encoder.onnx"}
    encoder, step = (
        onnxruntime.InferenceSession(str(tmp_path / file), providers=["CPUExecutionProvider"])
        for file in ("model.encoder.onnx", "model.onnx")
    )
    described = step.get_modelmeta().custom_metadata_map
    assert json.loads(described["pair"]) == ["en", "de"]
    assert described["encoder"] == "model.encoder.onnx"
    for file in ("model.encoder.onnx", "model.onnx"):
        with pytest.raises(PatchloomError, match=r"its input '\w+' is not a batch of images"):
            patchloom.evaluate(tmp_path / file, "digits")
    seen = set()
    for row in vocabulary.encode(LINES):
        source = np.array([row])
        keys, values, mask = encoder.run(None, {"source": source})
        past = np.zeros((0, *step.get_inputs()[1].shape[1:2], 1, 1, model.config.dim), np.float32)
        tokens, found = np.array([[vocabulary.bos]]), []
        while len(found) < 10:
            logits, past = step.run(
                None, {"tokens": tokens, "past": past, "keys": keys, "values": values, "source_mask": mask}
            )
            logits[..., [0, vocabulary.bos, vocabulary.eos]] = -np.inf
            tokens = logits.argmax(-1)
            found.append(int(tokens[0, 0]))
        options = DecodingOptions(
            vocabulary.bos, vocabulary.eos, 1, forbidden=(vocabulary.eos,), limit_factor=0.0, limit_extra=11
        )
        assert tuple(found) == search(model, torch.tensor(source), options)[0].tokens
        seen |= set(found)
    assert len(seen) > 2


def test_safetensors_translate_alone(vocabulary: Vocabulary, tmp_path: Path) -> None:
    model = make("resmlp_mt_nano", vocabulary)
    report = export(model, "safetensors", tmp_path / "weights.safetensors")
    assert report.difference == 0
    assert report.unit == "sentences"
    assert patchloom.predict(tmp_path / "weights.safetensors", LINES) == translations(model, LINES)
    export(model, "safetensors", tmp_path / "weights.safetensors")  # an export may be replaced


@pytest.mark.slow
def test_a_graph_that_differs_is_not_written(vocabulary: Vocabulary, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match=r"differ by .* more than the tolerance"):
        export(make("resmlp_mt_nano", vocabulary), "onnx", tmp_path / "model.onnx", tolerance=0)
    assert not list(tmp_path.iterdir())


def test_formats_and_options_for_images_are_refused(vocabulary: Vocabulary, tmp_path: Path) -> None:
    model = make("resmlp_mt_nano", vocabulary)
    with pytest.raises(PatchloomError, match=r"--to torch does not support it\. Choose from: safetensors, onnx"):
        export(model, "torch", tmp_path / "model.pt2")
    with pytest.raises(PatchloomError, match="--int8 is for networks of images"):
        export(model, "onnx", tmp_path / "model.onnx", int8=True)
    (tmp_path / "model.encoder.onnx").write_text("mine")
    with pytest.raises(PatchloomError, match=r"model\.encoder\.onnx.* is not an export"):
        export(model, "onnx", tmp_path / "model.onnx")
