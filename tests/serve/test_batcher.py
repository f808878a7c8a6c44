"""Batches, hosting and names, in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import patchloom
from patchloom import PatchloomError
from patchloom.inference.predict import class_probabilities
from patchloom.kernels import native
from patchloom.serve.batcher import Batcher
from patchloom.serve.hosting import Hosting, named, twin
from patchloom.serve.refused import Refused
from patchloom.serve.service import Gate, within
from patchloom.serve.settings import Settings
from patchloom.weights.save import save_delta
from serving import save_models


@pytest.fixture(scope="module")
def hosting(tmp_path_factory: pytest.TempPathFactory) -> Hosting:
    return Hosting([str(path) for path in save_models(tmp_path_factory.mktemp("models")).values()])


def test_batches_are_of_one_model_no_larger_than_allowed_and_answers_are_in_place(hosting: Hosting) -> None:
    models = list(hosting.models.values())
    pictures = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    seen: list[tuple[str, int]] = []
    batcher = Batcher(8, 0.5, lambda model, answer: seen.append((model.name, answer.batch)))
    for _ in pictures:
        batcher.expect()
    futures = [batcher.submit(models[i % 2], pixels) for i, pixels in enumerate(pictures)]
    for i, future in enumerate(futures):
        want = class_probabilities(models[i % 2].network, pictures[i : i + 1])[0]
        assert np.abs(future.result(60).probabilities - want).max() < 1e-5
    batcher.close()
    assert max(size for _, size in seen) == 8
    assert {name for name, _ in seen} == {"cait", "patchconvnet"}


def test_a_lone_request_does_not_wait_and_an_expected_one_is_waited_for(hosting: Hosting) -> None:
    batcher = Batcher(8, 5.0)
    pixels = np.zeros((32, 32, 3), np.uint8)
    batcher.expect()
    begun = time.perf_counter()
    assert batcher.submit(hosting.default, pixels).result(60).batch == 1
    assert time.perf_counter() - begun < 4
    batcher.expect(), batcher.expect(), batcher.expect()
    first = batcher.submit(hosting.default, pixels)
    threading.Timer(0.1, lambda: batcher.submit(hosting.default, pixels)).start()
    threading.Timer(0.2, batcher.forget).start()
    assert first.result(60).batch == 2
    batcher.close()


def test_an_error_answers_its_batch_and_the_next_one_works(hosting: Hosting) -> None:
    batcher = Batcher(8, 0.0)
    batcher.expect()
    with pytest.raises(PatchloomError):
        batcher.submit(hosting.default, np.zeros((31, 32, 3), np.uint8)).result(60)
    batcher.expect()
    assert batcher.submit(hosting.default, np.zeros((32, 32, 3), np.uint8)).result(60).batch == 1
    batcher.close()


def test_the_gate_counts_requests_and_bytes() -> None:
    gate = Gate(2, 100)
    with gate.admit() as first, gate.admit() as second:
        first.take(60, 1)
        with pytest.raises(Refused, match="busy"):
            second.take(41)
        with pytest.raises(Refused, match="busy"):
            second.take(0, 2)
        second.take(40, 1)
        with pytest.raises(Refused, match="busy"), gate.admit():
            pass
    assert (gate.inside, gate.bytes) == (0, 0)


def test_work_that_takes_too_long_is_a_503() -> None:
    with pytest.raises(Refused, match=r"longer than 0\.01 seconds") as refused:
        asyncio.run(within(0.01, asyncio.sleep(5)))
    assert refused.value.status == 503


def test_a_twin_shares_memory_and_nothing_else(hosting: Hosting) -> None:
    network = hosting.default.network
    other = twin(network)
    for (name, mine), (_, theirs) in zip(network.state_dict().items(), other.state_dict().items(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr(), name
    assert not set(map(id, network.modules())) & set(map(id, other.modules()))
    x = torch.randn(1, 3, 32, 32)
    with patchloom.capture_attention(other) as maps:
        network(x)
        assert not maps
        assert torch.allclose(network(x), other(x), atol=1e-5)
        assert maps
    assert torch.equal(network(x), other(x))


def test_deltas_share_what_their_base_has(tmp_path: Path) -> None:
    base_path = save_models(tmp_path)["cait_nano"]
    base = patchloom.load(base_path)
    for seed in range(2):
        tuned = patchloom.load(base_path)
        torch.manual_seed(seed)
        torch.nn.init.normal_(tuned.head.weight)
        save_delta(tuned, tmp_path / f"{seed}.delta.safetensors", base)
    sources = [str(base_path), *(str(tmp_path / f"{seed}.delta.safetensors") for seed in range(2))]
    models = list(Hosting(sources, str(base_path)).models.values())
    for model in models[1:]:
        for name, tensor in model.network.state_dict().items():
            shared = tensor.data_ptr() == models[0].network.state_dict()[name].data_ptr()
            assert shared == (name != "head.weight"), name


def test_products_of_bytes_need_weights_of_their_own(tmp_path: Path) -> None:
    path = str(save_models(tmp_path)["cait_nano"])
    with pytest.raises(PatchloomError, match="int8 needs separate weights per model"):
        Hosting([path], path, int8=True)
    if native.available():
        hosted = Hosting([path], int8=True).default
        assert any(buffer.dtype == torch.int8 for buffer in hosted.predictor.buffers())


def test_names(tmp_path: Path) -> None:
    for run in ("a/export", "b/export"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "model.safetensors").touch()
    a, b = tmp_path / "a", tmp_path / "b"
    got = named([str(a), str(b / "export" / "model.safetensors"), str(a / "export"), f"mine={b}", "deit_tiny.fb_in1k"])
    assert list(got) == ["a", "b", "a-2", "mine", "deit_tiny.fb_in1k"]
    assert got["mine"] == str(b)
    with pytest.raises(PatchloomError, match="have the same name 'x'"):
        named(["x=1", "x=2"])


@pytest.mark.parametrize(
    ("settings", "known", "unknown"),
    [
        (
            {},
            ["localhost", "127.0.0.1", "::1", "127.3.2.1"],
            ["evil.example", "", "10.0.0.1", "localhost.evil.example"],
        ),
        ({"allowed_hosts": ("models.lan",)}, ["models.lan", "localhost"], ["evil.example"]),
        ({"host": "0.0.0.0"}, ["anything.example", "10.0.0.1"], []),
        ({"host": "0.0.0.0", "allowed_hosts": ("models.lan",)}, ["models.lan", "127.0.0.1"], ["other.lan"]),
    ],
)
def test_names_that_the_server_goes_by(settings: dict, known: list[str], unknown: list[str]) -> None:
    made = Settings(**settings)
    assert [name for name in [*known, *unknown] if made.knows_host(name)] == known
