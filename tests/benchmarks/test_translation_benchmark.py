"""The benchmark of translation: equal parameters, peers that compute the same, a page from its rows."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from conftest import stir
from patchloom.tasks.translation.decoding import DecodingOptions, search

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPTIONS = DecodingOptions(bos=1, eos=2, forbidden=(3,))


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("translation_peers")


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(4, 50, shape, generator=torch.Generator().manual_seed(0))


def test_networks_of_a_size_have_equally_many_parameters(peers: ModuleType) -> None:
    for size, kinds in peers.SIZES.items():
        with torch.device("meta"):
            counts = [peers.parameters(peers.make_network(size, kind, 4000)) for kind in kinds]
            torchs = peers.TorchTransformer(peers.network_config(size, peers.TRANSFORMER, 4000))
        assert max(counts) / min(counts) < 1.01
        assert peers.parameters(torchs) == counts[1]


def test_the_rows_make_a_page(peers: ModuleType) -> None:
    speed, page = (importlib.import_module(name) for name in ("translation_speed", "translation_page"))
    batch = (tokens(2, 5), tokens(2, 6), tokens(2, 6))
    rows = list(speed.training_rows("small", 50, [batch], 1))
    networks = {kind: peers.make_network("small", kind, 50).eval() for kind in peers.SIZES["small"]}
    for row in speed.cache_rows("small", networks, tokens(2, 5), speed.fixed_length(OPTIONS), 1):
        assert row["equal"] == 1
        assert row["tokens"] == 2 * speed.STEPS
        rows.append({**row, "trained": False, "beam": 4})
    configs = {"small": {kind: peers.network_config("small", kind, 50) for kind in networks}}
    text = page.page(rows, configs, 1)
    assert "trial of the script" in text
    assert text.count("| small | resmlp |") == 3
    assert "{" not in text


@pytest.mark.parametrize("norm_place", ["pre", "post"])
def test_ctranslate_has_the_weights_of_our_transformer(peers: ModuleType, tmp_path: Path, norm_place: str) -> None:
    pytest.importorskip("ctranslate2")
    config = peers.network_config("small", peers.TRANSFORMER, 50).replace(dim=32, hidden=64, norm_place=norm_place)
    torch.manual_seed(0)
    network = stir(peers.build(config)).eval()
    for block in network.decoder:  # else a token follows itself: embedding and output share their matrix
        block.ffn.branches[0].fn.fc2.weight.data.mul_(8)
    # greedy and always 12 tokens: beams would weigh the end at the limit, which only ours counts
    options = dataclasses.replace(OPTIONS, beam=1, forbidden=(3, 2), limit_factor=0.0, limit_extra=12)
    theirs = peers.CTranslate(network, options, tmp_path / "model")
    source = tokens(6, 7)
    ours = [found.tokens for found in search(network, source, options)]
    assert ours == [found[:11] for found in theirs.translate(source, steps=12)]
    assert len({token for row in ours for token in row}) > 2
