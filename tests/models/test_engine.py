"""Networks under torch's own machinery: processes, shards, tracing, export, quantisation, adapters, hooks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import patchloom
from conftest import assert_close, stir

NANOS = ["deit_nano", "deit3_nano", "cait_nano", "resmlp_nano", "patchconvnet_nano"]


def make(name: str, **options):
    return stir(patchloom.create_model(name, num_classes=5, depth=2, **options))


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def two_steps(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 32, 32, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # channels-last convolutions; "not an error"
@pytest.mark.parametrize("name", NANOS)
def test_data_parallel_training_sees_every_parameter(name: str, process_group) -> None:
    """DDP waits for a gradient of each one: the second step fails if one never came."""
    alone, wrapped = make(name), make(name)
    wrapped.load_state_dict(alone.state_dict())
    for a, b in zip(two_steps(alone), two_steps(DistributedDataParallel(wrapped)), strict=True):
        assert_close(b, a, 1e-5)


@pytest.mark.parametrize(("name", "options"), [*[(name, {}) for name in NANOS], ("deit_nano", {"stem": "hmlp"})])
def test_sharded_training_takes_every_parameter(name: str, options: dict, process_group) -> None:
    alone = make(name, **options)
    sharded = copy.deepcopy(alone)
    mesh = dist.init_device_mesh("cpu", (1,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for a, b in zip(two_steps(alone), two_steps(sharded), strict=True):
        assert_close(b, a, 1e-5)


@pytest.mark.parametrize("name", NANOS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_traced_network_works_at_another_batch_size(name: str, grad: bool) -> None:
    model = make(name).eval()
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # checks of the image size become constants
        traced = torch.jit.trace(model, torch.randn(2, 3, 32, 32))
        x = torch.randn(5, 3, 32, 32)
        assert_close(traced(x), model(x), 1e-5)


def test_a_patchconvnet_is_exported_for_any_size() -> None:
    model = make("patchconvnet_nano").eval()
    height, width = torch.export.Dim("rows", min=2, max=64) * 4, torch.export.Dim("columns", min=2, max=64) * 4
    exported = torch.export.export(model, (torch.randn(2, 3, 32, 40),), dynamic_shapes=({2: height, 3: width},))
    x = torch.randn(2, 3, 48, 64)
    with torch.no_grad():
        assert_close(exported.module()(x), model(x), 1e-5)


class Adapted(nn.Module):
    """What LoRA libraries put in place of a layer: its weight is still there, but its output is another."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.weight, self.bias = layer.weight, layer.bias
        if isinstance(layer, nn.Linear):
            self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.layer(x)


@pytest.mark.parametrize(
    ("name", "path"),
    [("deit_nano", "blocks.1.mixing.branches.0.fn.qkv"), ("deit_nano", "stem.proj"), ("resmlp_nano", "stem.proj"),
     ("cait_nano", "blocks.0.mixing.branches.0.fn.proj_w"), ("patchconvnet_nano", "stem.proj.0")],
)  # fmt: skip
def test_layers_that_are_replaced_or_watched_are_called(name: str, path: str) -> None:
    model = make(name).eval()
    x, seen = torch.randn(2, 3, 32, 32), []
    with torch.no_grad():
        before = model(x)
        handle = model.get_submodule(path).register_forward_hook(lambda *_: seen.append(1))
        assert_close(model(x), before, 1e-5)
        assert seen
        handle.remove()
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapted(model.get_submodule(path)))
        assert (model(x) - before).abs().max() > 1e-3


@pytest.mark.parametrize("path", ["blocks.0.mixing.branches.0.fn.proj_w", "pool.0.mixing.branches.0.fn.k"])
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_layers_whose_gradients_are_watched_are_called(path: str, register: str) -> None:
    model, seen = make("cait_nano").train(), []
    getattr(model.get_submodule(path), register)(lambda *_: seen.append(1))
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert seen


@pytest.mark.filterwarnings("ignore")  # torch says that this way to quantise will go
def test_dynamic_quantisation_changes_the_logits_little() -> None:
    for name in ("deit_nano", "cait_nano"):
        model = make(name).eval()
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        x = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            assert_close(quantised(x), model(x), 0.1)


def test_hooks_inside_a_stem_see_what_a_norm_put_out() -> None:
    model = make("deit_nano", stem="conv", stem_norm="layer").eval()
    norm, seen = model.stem.proj[1].norm, []
    norm.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].clone(), output)))
    with torch.no_grad():
        model(torch.randn(2, 3, 32, 32))
        assert torch.equal(
            nn.functional.layer_norm(seen[0][0], (norm.weight.numel(),), norm.weight, norm.bias, norm.eps), seen[0][1]
        )
