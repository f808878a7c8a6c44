"""Encoder-decoder networks: interface, causality, padding, lengths, parameters, their start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import patchloom
from conftest import assert_close, stir
from patchloom import PatchloomError
from patchloom.layers.attention import capture_attention
from patchloom.layers.sequence import SequenceLinear, StepCache
from patchloom.models.registry import build, config_from_json, find_config
from patchloom.models.translation import TranslationConfig, sinusoids

NANOS = ["resmlp_mt_nano", "transformer_mt_nano"]
VARIANTS = [
    ("resmlp_mt_nano", {}),
    ("resmlp_mt_nano", {"positions": "none", "norm": "affine"}),
    ("transformer_mt_nano", {}),
    ("transformer_mt_nano", {"norm_place": "post"}),
]


def make(name: str, **options):
    torch.manual_seed(0)
    model = patchloom.create_model(name, **{"vocab_size": 61, "max_length": 24, "dim": 32, "hidden": 64, **options})
    return stir(model).eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(8, 61, shape, generator=torch.Generator().manual_seed(seed))


def parameters(name: str, **options) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(find_config(name).replace(**options)).parameters())


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_later_tokens_leave_earlier_logits_equal_to_the_bit(name: str, options: dict) -> None:
    model, source, target = make(name, **options), tokens(3, 11), tokens(3, 13, seed=1)
    with torch.no_grad():
        logits = model(source, target)
        assert logits.shape == (3, 13, 61)
        for place in range(1, 13):
            other = target.clone()
            other[:, place:] = tokens(3, 13 - place, seed=place + 2)
            changed = model(source, other)
            assert torch.equal(changed[:, :place], logits[:, :place])
            assert not torch.equal(changed[:, place:], logits[:, place:])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", NANOS)
def test_later_tokens_change_no_bit_in_training_either(name: str, precision: str) -> None:
    model, source, target = make(name, dropout=0.2).train(), tokens(3, 11), tokens(3, 13, seed=1)

    def logits(target: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)  # of dropout
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return model(source, target)

    other = target.clone()
    other[:, 7:] = tokens(3, 6, seed=2)
    assert torch.equal(logits(other)[:, :7], logits(target)[:, :7])
    assert not torch.equal(logits(other)[:, 7:], logits(target)[:, 7:])


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_padding_changes_nothing(name: str, options: dict) -> None:
    model, source, target = make(name, **options), tokens(3, 11), tokens(3, 13, seed=1)
    zeros = torch.zeros(3, 5, dtype=torch.long)
    with torch.no_grad():
        logits = model(source, target)
        padded = model(torch.cat([source, zeros], 1), torch.cat([target, zeros], 1))[:, :13]
        assert float((padded - logits).abs().max()) <= 1e-6 * max(1.0, float(logits.abs().max()))
        shorter = source.clone()
        shorter[0, 7:] = 0
        assert_close(model(shorter, target)[:1], model(source[:1, :7], target[:1]), 1e-6)
        shorter[0] = 0  # no source at all
        assert model(shorter, target).isfinite().all()


def test_fresh_networks_keep_padding_below_one_millionth() -> None:
    for name in NANOS:
        torch.manual_seed(0)
        model = patchloom.create_model(name).eval()
        source, target = tokens(4, 20), tokens(4, 24)
        with torch.no_grad():
            wide = model(torch.cat([source, torch.zeros(4, 9, dtype=torch.long)], 1), target)
            logits = model(source, target)
            assert float((wide - logits).abs().max()) <= 1e-6 * float(logits.abs().max())


@pytest.mark.parametrize("name", NANOS)
def test_every_token_and_its_place_reach_the_logits(name: str) -> None:
    model, source, target = make(name), tokens(2, 9), tokens(2, 8, seed=1)
    with torch.no_grad():
        logits = model(source, target)
        for place in range(9):
            other = source.clone()
            other[:, place] = 8 + (source[:, place] - 8 + 17) % 53
            assert float((model(other, target) - logits)[:, -1].abs().max()) > 1e-4
        swapped = source[:, [1, 0, *range(2, 9)]]
        assert float((model(swapped, target) - logits).abs().max()) > 1e-4


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_steps_with_a_cache_give_the_logits_of_the_whole_target(name: str, options: dict) -> None:
    model, source, target = make(name, **options), tokens(3, 11), tokens(3, 20, seed=1)
    source[1, 6:] = 0
    with torch.no_grad():
        logits = model(source, target)
        state = model.start(model.encode(source))
        for place in range(20):
            assert_close(model.step(state, target[:, place : place + 1])[:, 0], logits[:, place], 1e-5)
        assert state.length == 20


@pytest.mark.parametrize("name", NANOS)
def test_hypotheses_of_a_state_can_be_chosen_and_doubled(name: str) -> None:
    model, source, target = make(name), tokens(3, 11), tokens(6, 9, seed=1)
    rows, sources = torch.tensor([5, 4, 4, 5, 0, 1]), torch.tensor([2, 2, 0])
    with torch.no_grad():
        state = model.start(model.encode(source))
        for place in range(5):
            last = model.step(state, target[:, place].view(3, 2))
        assert last.shape == (3, 2, 61)
        state.select(rows, sources)
        after = torch.cat([target[rows, :5], tokens(6, 3, seed=2)], 1)
        for place in range(5, 8):
            last = model.step(state, after[:, place].view(3, 2))
        whole = model(source[sources].repeat_interleave(2, dim=0), after)[:, -1]
    assert_close(last.flatten(0, 1), whole, 1e-5)


def test_the_triangular_layer_is_its_equation() -> None:
    torch.manual_seed(0)
    layer = stir(SequenceLinear(7, causal=True))
    x, mask = torch.randn(2, 5, 3), torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0]], dtype=torch.bool)
    out = layer(x, mask)
    for b in range(2):
        for i in range(5):
            row = sum(layer.weight[i, j] * x[b, j] * mask[b, j] for j in range(i + 1)) + layer.bias[i]
            assert_close(out[b, i], row, 1e-6)
    cache = StepCache()
    steps = torch.stack([layer(x[:, i : i + 1], cache=cache)[:, 0] for i in range(5)], dim=1)
    assert_close(steps, layer(x), 1e-6)


def test_a_cache_keeps_its_steps_when_it_grows() -> None:
    cache, steps = StepCache(), torch.randn(40, 3, 2)
    for i, step in enumerate(steps):
        (filled,) = cache.append(step)
        assert torch.equal(filled, steps[: i + 1])


def test_transformer_agrees_with_the_layers_of_torch() -> None:
    """torch's own encoder and decoder layers, post-norm, with our weights."""
    model = make("transformer_mt_nano", norm_place="post")
    dim, heads, hidden = model.config.dim, model.config.heads, model.config.hidden
    reference = nn.Transformer(dim, heads, 2, 2, hidden, 0.0, batch_first=True, layer_norm_eps=1e-6)
    reference.encoder.norm = reference.decoder.norm = None  # training mode, without dropout: no fused path
    for ours, theirs in zip(model.encoder, reference.encoder.layers, strict=True):
        _copy_attention(theirs.self_attn, ours.mixing.branches[0].fn.qkv, ours.mixing.branches[0].fn.proj)
        _copy_rest(theirs, ours, [ours.mixing.norm, ours.ffn.norm])
    for ours, theirs in zip(model.decoder, reference.decoder.layers, strict=True):
        _copy_attention(theirs.self_attn, ours.mixing.branches[0].fn.qkv, ours.mixing.branches[0].fn.proj)
        cross = ours.cross.branches[0].fn
        joined = nn.Linear(dim, 3 * dim)
        joined.weight.data = torch.cat([cross.q.weight, cross.kv.weight]).detach()
        joined.bias.data = torch.cat([cross.q.bias, cross.kv.bias]).detach()
        _copy_attention(theirs.multihead_attn, joined, cross.proj)
        _copy_rest(theirs, ours, [ours.mixing.norm, ours.cross.norm, ours.ffn.norm])
    source, target = tokens(3, 11), tokens(3, 13, seed=1)
    source[1, 6:] = 0
    embed = lambda ids: model.embedding(ids) * dim**0.5 + sinusoids(24, dim)[: ids.shape[1]]  # noqa: E731
    with torch.no_grad():
        out = reference(
            embed(source),
            embed(target),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(13),
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        assert_close(model(source, target), out @ model.embedding.weight.T, 1e-5)


def _copy_attention(theirs: nn.MultiheadAttention, qkv: nn.Linear, proj: nn.Linear) -> None:
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = qkv.weight.data, qkv.bias.data
    theirs.out_proj.load_state_dict(proj.state_dict())


def _copy_rest(theirs: nn.Module, ours: nn.Module, norms: list[nn.Module]) -> None:
    theirs.linear1.load_state_dict(ours.ffn.branches[0].fn.fc1.state_dict())
    theirs.linear2.load_state_dict(ours.ffn.branches[0].fn.fc2.state_dict())
    for i, norm in enumerate(norms, 1):
        getattr(theirs, f"norm{i}").load_state_dict(norm.state_dict())


def test_parameters_are_those_of_the_parts() -> None:
    attention, mlp, norm = 4 * (512 * 512 + 512), 2 * 512 * 2048 + 512 + 2048, 2 * 512
    for name, depth in (("resmlp_mt_6", 6), ("resmlp_mt_12", 12)):
        for length in (16, 256):
            matrices = 2 * (length * length + length)
            layers = depth * (matrices + 2 * mlp + attention + 5 * (norm + 512))  # 512: LayerScale
            assert parameters(name, vocab_size=100, max_length=length) == layers + 2 * norm + 100 * 512
    assert round((parameters("resmlp_mt_6") - 32000 * 512) / 1e6, 2) == 32.34  # without the embedding
    assert round((parameters("resmlp_mt_12") - 32000 * 512) / 1e6, 2) == 64.67
    layers = 6 * (2 * mlp + 3 * attention + 5 * norm)
    assert parameters("transformer_mt_6", vocab_size=100) == layers + 100 * 512
    assert parameters("transformer_mt_6", vocab_size=37000) // 10**6 == 63  # printed as 65 M


def test_fresh_networks_start_as_documented() -> None:
    torch.manual_seed(0)
    model = patchloom.create_model("resmlp_mt_6", vocab_size=3000, max_length=64)
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):
            assert torch.equal(parameter, torch.full((512,), 0.2))
        elif name.endswith("bias"):
            assert not parameter.any()
    assert abs(float(model.embedding.weight.detach().std()) * 512**0.5 - 1) < 0.01
    weight = model.encoder[0].ffn.branches[0].fn.fc1.weight.detach()
    assert abs(float(weight.std()) / (2 / (512 + 2048)) ** 0.5 - 1) < 0.01


@pytest.mark.parametrize("name", NANOS)
def test_every_parameter_has_a_role_and_a_gradient(name: str) -> None:
    model = make(name).train()
    model(tokens(2, 24), tokens(2, 24, seed=1)).square().mean().backward()
    roles = patchloom.parameter_roles(model)
    assert roles["embedding.weight"] == "stem"
    assert roles["decoder.1.cross.branches.0.fn.kv.weight"] == "attention"
    mixing = "mixing" if name.startswith("resmlp") else "attention"
    assert {role for key, role in roles.items() if ".mixing.branches.0.fn." in key} == {mixing}
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


def test_an_empty_share_of_a_batch_gives_gradients_of_zero() -> None:
    for name in NANOS:
        model = make(name).train()
        empty = torch.zeros(0, 4, dtype=torch.long)
        model(empty, empty).sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", NANOS)
def test_lengths_beyond_the_matrices_and_other_inputs_are_refused(name: str) -> None:
    model = make(name)
    with pytest.raises(PatchloomError, match=r"source of 25 tokens is longer than the 24"):
        model(torch.ones(1, 25, dtype=torch.long), tokens(1, 3))
    with pytest.raises(PatchloomError, match=r"target of 25 tokens"):
        model(tokens(1, 3), torch.ones(1, 25, dtype=torch.long))
    with pytest.raises(PatchloomError, match=r"token ids, \(batch, length\), not \(3,\)"):
        model(torch.ones(3, dtype=torch.long), tokens(1, 3))
    with pytest.raises(PatchloomError, match="float32"):
        model(torch.rand(1, 3), tokens(1, 3))
    with torch.no_grad():
        state = model.start(model.encode(tokens(1, 3)))
        for _ in range(24):
            model.step(state, tokens(1, 1))
        with pytest.raises(PatchloomError, match="25 tokens"):
            model.step(state, tokens(1, 1))


def test_configs_are_json_and_check_their_options() -> None:
    for name in patchloom.list_models(kind="text"):
        config = find_config(name)
        assert config_from_json(config.to_json()) == config
    assert patchloom.list_models("*_mt_*") == patchloom.list_models(kind="text")
    with pytest.raises(PatchloomError, match="Did you mean 'vocab_size'"):
        patchloom.create_model("resmlp_mt_nano", vocabsize=3)
    with pytest.raises(PatchloomError, match="no option 'num_classes'"):
        patchloom.create_model("resmlp_mt_nano", num_classes=3)
    with pytest.raises(PatchloomError, match="divisible by its heads"):
        TranslationConfig(dim=30)
    with pytest.raises(PatchloomError, match="dropout"):
        TranslationConfig(dropout=1.0)
    with pytest.raises(PatchloomError, match="max_length"):
        TranslationConfig(max_length=0)


def test_attention_maps_are_captured_and_dropout_acts_in_training_only() -> None:
    model, source, target = make("transformer_mt_nano", dropout=0.5), tokens(2, 9), tokens(2, 7)
    source[0, 5:] = 0
    with torch.no_grad():
        logits = model(source, target)
        with capture_attention(model) as maps:
            assert_close(model(source, target), logits, 1e-5)
        assert torch.equal(model(source, target), logits)
        assert not torch.equal(model.train()(source, target), logits)
    cross = maps["decoder.1.cross.branches.0.fn"]
    assert cross.shape == (2, 4, 7, 9)
    assert not cross[0, :, :, 5:].any()
    assert not maps["decoder.0.mixing.branches.0.fn"].triu(1).any()
