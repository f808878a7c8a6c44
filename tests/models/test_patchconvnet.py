"""One query per class from one query (thesis 5.2.1)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import patchloom
from patchloom.errors import PatchloomError
from patchloom.layers.attention import ClassAttention
from patchloom.models.patchconvnet import per_class_queries

SIZES = {"patchconvnet_nano": 32, "resnet18_attention_pool": 64}


def one_query(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = patchloom.create_model(name, num_classes=5, img_size=SIZES[name], scale_value=0.5, **options).eval()
    nn.init.normal_(model.class_token)
    nn.init.normal_(model.head.bias)
    return model


@pytest.mark.parametrize("name", SIZES)
def test_logits_are_those_of_one_query_that_does_not_attend_to_itself(name: str) -> None:
    model = one_query(name)
    converted = per_class_queries(model)
    images = torch.randn(2, 3, SIZES[name], SIZES[name])
    expected = model(images)
    with torch.inference_mode():
        got = converted(images)
        assert torch.equal(model(images), expected)  # the network itself stays as it was
        for module in model.modules():
            if isinstance(module, ClassAttention):
                module.in_keys = False
        torch.testing.assert_close(got, model(images), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(patchloom.fuse(converted)(images), got, rtol=1e-4, atol=1e-4)
    assert (got - expected).abs().max() > 0


def test_weights_that_are_not_converted_stay_and_the_network_can_be_saved(tmp_path) -> None:
    model = one_query("patchconvnet_nano")
    model.class_names = tuple("abcde")
    model.class_token.requires_grad_(False)
    converted = per_class_queries(model)
    assert converted.config == model.config.replace(queries="per_class")
    assert converted.class_names == model.class_names
    assert not converted.class_token.requires_grad
    before = model.state_dict()
    for key, tensor in converted.state_dict().items():
        assert torch.equal(tensor, before[key].expand_as(tensor)), key
    assert patchloom.complexity(converted).params == sum(p.numel() for p in converted.parameters())
    patchloom.save(converted, tmp_path / "model.safetensors")
    loaded = patchloom.load(tmp_path / "model.safetensors").eval()
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(loaded(images), converted(images))
    assert per_class_queries(loaded).class_token.shape == (1, 5, converted.config.dim)


def test_queries_of_classes_part_when_they_are_trained() -> None:
    converted = per_class_queries(one_query("patchconvnet_nano")).train()
    nn.functional.cross_entropy(converted(torch.randn(2, 3, 32, 32)), torch.tensor([0, 1])).backward()
    grads = converted.class_token.grad[0]
    assert not torch.equal(grads[0], grads[1])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("deit_nano", {}, "attention pooling"),
        ("patchconvnet_nano", {"aggregation": "average"}, "aggregation='attention'"),
        ("patchconvnet_nano", {"head": "mlp"}, "head='linear'"),
    ],
)
def test_networks_without_one_query_are_refused(name: str, options: dict, words: str) -> None:
    model = patchloom.create_model(name, num_classes=5, img_size=32, **options)
    with pytest.raises(PatchloomError, match=words):
        per_class_queries(model)
