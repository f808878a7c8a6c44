"""Visual tokenizers: a vector-quantised autoencoder turns an image into a grid of codes, and codes into an image.

z = encoder(image)                     (B, h, w, code_dim), unit vectors
code = the codebook's vector nearest to z, by cosine
image = decoder(vectors of the codes)

Encoder and decoder are those of VQ-VAE (van den Oord et al. 2017, section 4.1): strided 4 x 4 convolutions and residual
blocks. Codes are unit vectors, compared by cosine and moved by moving averages, as in ViT-VQGAN (Yu et al. 2022) and
BEiT v2 (Peng et al. 2022), which keeps more of them in use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.models.config import BaseConfig, as_size, check_divisible
from patchloom.models.preprocessing import Preprocessing, default_preprocessing
from patchloom.models.registry import register_architecture

PATCH_SIZES = (2, 4, 8, 16)  # pixels per code
_LEAST_DEVIATION = 0.05  # of an image, in units of the normalised pixels
_SCORES = 1 << 24  # of vectors and codes, that are in memory at a time


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(BaseConfig):
    """The choices of a tokenizer."""

    architecture: ClassVar[str] = "tokenizer"
    kind: ClassVar[str] = "image codes"

    name: str = "tokenizer"
    family: str = "tokenizer"
    img_size: tuple[int, int] = (112, 112)
    in_chans: int = field(default=3, metadata={"most": 1024})
    patch_size: int = 8  # pixels per code, along height and width
    dim: int = field(default=256, metadata={"least": 16, "most": 1 << 14})  # channels on the grid of codes
    depth: int = field(default=2, metadata={"most": 1000})  # residual blocks of the encoder, and of the decoder
    codes: int = field(default=8192, metadata={"least": 2, "most": 1 << 20})
    code_dim: int = field(default=32, metadata={"least": 2, "most": 1 << 14})
    standardise: bool = False  # each image to mean 0 and standard deviation 1, so that codes do not tell its exposure

    def __post_init__(self) -> None:
        object.__setattr__(self, "img_size", as_size(self.img_size))
        super().__post_init__()
        if self.patch_size not in PATCH_SIZES:
            raise PatchloomError(f"The patch_size of {self.name} is one of {PATCH_SIZES}, not {self.patch_size}.")
        check_divisible(self.img_size, self.patch_size, f"An image size of {self.name}")

    @property
    def grid(self) -> tuple[int, int]:
        """Codes along the height and along the width."""
        return self.img_size[0] // self.patch_size, self.img_size[1] // self.patch_size

    @property
    def widths(self) -> list[int]:
        """Channels of the image and after each halving of its size; they double up to `dim`."""
        halvings = self.patch_size.bit_length() - 1
        return [self.in_chans, *(max(8, self.dim >> (halvings - 1 - i)) for i in range(halvings - 1)), self.dim]


class Quantised(NamedTuple):
    """What a tokenizer makes of images in training."""

    codes: Tensor  # (B, N), row-major over the grid
    vectors: Tensor  # (B, N, code_dim): unit vectors of the encoder
    pixels: Tensor  # (B, C, height, width): the images, standardised if the config says so
    reconstruction: Tensor  # (B, C, height, width), of these pixels
    commitment: Tensor  # (B,): squared distance of the vectors to those of their codes, averaged over N and code_dim


class Tokenizer(nn.Module):
    """See the module's docstring. Gradients pass the codes straight through (van den Oord et al. 2017, section 3.2)."""

    entry_points = ("encode", "decode")  # methods beside `forward` that compute with parameters

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.preprocessing = default_preprocessing(config.family, config.img_size, config.in_chans)
        self.encoder = _encoder(config)
        self.codebook = Codebook(config.codes, config.code_dim)
        self.decoder = _decoder(config)

    def forward(self, images: Tensor) -> Quantised:
        """Codes and reconstructions of images (B, C, height, width), normalised."""
        pixels, _, _ = self._standardised(images)
        vectors = self._vectors(pixels)
        codes = self.codebook(vectors)
        nearest = self.codebook.vectors[codes]
        commitment = (vectors - nearest).square().mean(dim=(1, 2))
        # The value of the codes, the gradient of the vectors.
        through = vectors + (nearest - vectors).detach()
        return Quantised(codes, vectors, pixels, self._pixels(through), commitment)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Codes (B, N) of images (B, C, height, width), normalised; of another size, they are resized."""
        if tuple(images.shape[2:]) != self.config.img_size:
            images = F.interpolate(images, self.config.img_size, mode="bicubic", antialias=True)
        return self.codebook(self._vectors(self._standardised(images)[0]))

    @torch.no_grad()
    def decode(self, codes: Tensor, like: Tensor) -> Tensor:
        """Images (B, C, height, width), normalised, of codes (B, N). Standardised ones get the mean and the standard
        deviation of the images `like` (B, C, ...), which codes do not tell."""
        _, mean, deviation = self._standardised(like)
        return self._pixels(self.codebook.vectors[codes]) * deviation + mean

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """The vectors of all codes of each image, (B, N * code_dim)."""
        return self._vectors(self._standardised(images)[0]).flatten(1)

    def metadata(self) -> dict[str, Any]:
        """What is saved with the weights."""
        return {"config": self.config.to_json(), "preprocessing": self.preprocessing.to_json()}

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """The inverse of `metadata`, for a tokenizer that has the config already."""
        self.preprocessing = Preprocessing.from_json(metadata.get("preprocessing", self.preprocessing.to_json()))

    def _standardised(self, images: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Images as the encoder takes them, and the mean and the standard deviation (B, 1, 1, 1) that are gone."""
        if not self.config.standardise:
            return images, 0.0, 1.0
        mean = images.mean(dim=(1, 2, 3), keepdim=True)
        # The small term keeps blank images at 0 instead of amplifying their noise.
        deviation = images.std(dim=(1, 2, 3), keepdim=True, correction=0) + _LEAST_DEVIATION
        return (images - mean) / deviation, mean, deviation

    def _vectors(self, images: Tensor) -> Tensor:
        """Unit vectors (B, N, code_dim) of images."""
        config = self.config
        if images.ndim != 4 or tuple(images.shape[1:]) != (config.in_chans, *config.img_size):
            raise PatchloomError(
                f"This {config.name} takes images (batch, {config.in_chans}, {config.img_size[0]}, "
                f"{config.img_size[1]}), not {tuple(images.shape)}."
            )
        z = self.encoder(images.contiguous(memory_format=torch.channels_last))
        # In float32 whatever the precision: bf16 would tie codes whose cosines differ by less than 1/256.
        return F.normalize(z.flatten(2).transpose(1, 2).float(), dim=2)

    def _pixels(self, vectors: Tensor) -> Tensor:
        maps = vectors.transpose(1, 2).unflatten(2, self.config.grid)
        return self.decoder(maps.contiguous(memory_format=torch.channels_last))


class Codebook(nn.Module):
    """K unit vectors, moved by averages instead of gradients (van den Oord et al. 2017, appendix A.1).

    `usage` is the moving average of the share of vectors that each code stood for. All of the state is in buffers.
    """

    vectors: Tensor  # (K, d)
    usage: Tensor  # (K,)

    def __init__(self, codes: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("vectors", F.normalize(torch.randn(codes, dim), dim=1))
        # All codes count as unused at first, so that the first update places them among the encoder's vectors.
        self.register_buffer("usage", torch.zeros(codes))

    @torch.no_grad()
    def forward(self, vectors: Tensor) -> Tensor:
        """The nearest codes (...,) of unit vectors (..., d)."""
        flat = vectors.detach().reshape(-1, vectors.shape[-1])
        with torch.autocast(flat.device.type, enabled=False):
            rows = max(1, _SCORES // len(self.vectors))
            found = [(part @ self.vectors.T).argmax(dim=1) for part in flat.float().split(rows)]
        return torch.cat(found).view(vectors.shape[:-1])

    @torch.no_grad()
    def sums(self, codes: Tensor, vectors: Tensor) -> Tensor:
        """(K, 1 + d): how many of the vectors (..., d) each code stands for, and their sum. What `move` takes, added
        up over the parts of a batch and over processes."""
        flat = vectors.reshape(-1, vectors.shape[-1])
        ones = torch.cat([torch.ones_like(flat[:, :1]), flat], dim=1)
        return flat.new_zeros(len(self.vectors), ones.shape[1]).index_add_(0, codes.reshape(-1), ones)

    @torch.no_grad()
    def move(self, sums: Tensor, decay: float) -> None:
        """One step of the moving averages: each code goes towards the mean direction of the vectors it stood for."""
        counts, total = sums[:, 0], sums[:, 1:]
        used = counts > 0
        moved = F.normalize(torch.lerp(F.normalize(total, dim=1), self.vectors, decay), dim=1)
        self.vectors.copy_(torch.where(used[:, None], moved, self.vectors))
        self.usage.lerp_(counts / counts.sum().clamp(min=1), 1 - decay)

    @torch.no_grad()
    def unused(self, least: float) -> Tensor:
        """Codes (n,) whose usage is below `least` of an even share."""
        return (self.usage < least / len(self.usage)).nonzero().flatten()

    @torch.no_grad()
    def replace(self, codes: Tensor, vectors: Tensor) -> None:
        """Put codes (n,) to vectors (n, d) of the encoder; each then counts as used evenly."""
        self.vectors[codes] = vectors.to(self.vectors.dtype)
        self.usage[codes] = 1 / len(self.usage)


def perplexity(counts: Tensor) -> float:
    """exp of the entropy of the shares of codes, from how often each occurs (K,): 1 to K."""
    shares = counts.double() / counts.sum().clamp(min=1)
    return math.exp(float(torch.special.entr(shares).sum()))


class _Residual(nn.Module):
    """x + conv1x1(relu(conv3x3(relu(x)))).

    The last convolution has no bias: BatchNorm at the end of the encoder takes constants away, so that the gradient of
    one would be rounding errors, which Adam enlarges to steps of full size.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(dim, dim, 3, padding=1), nn.ReLU(), nn.Conv2d(dim, dim, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _encoder(config: TokenizerConfig) -> nn.Sequential:
    """Images (B, C, height, width) -> (B, code_dim, h, w)."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(config.widths):
        layers += [nn.Conv2d(inputs, outputs, 4, stride=2, padding=1), nn.ReLU()]
    blocks = [_Residual(config.dim) for _ in range(config.depth)]
    last = nn.Conv2d(config.dim, config.code_dim, 1, bias=False)
    # At first all vectors point the same way, so that all have one code, and are soon drawn into it. Without their
    # common mean they point in all directions from the first step on.
    return nn.Sequential(*layers[:-1], *blocks, nn.ReLU(), last, nn.BatchNorm2d(config.code_dim, affine=False))


def _decoder(config: TokenizerConfig) -> nn.Sequential:
    """(B, code_dim, h, w) -> images (B, C, height, width)."""
    layers: list[nn.Module] = [nn.Conv2d(config.code_dim, config.dim, 3, padding=1)]
    layers += [_Residual(config.dim) for _ in range(config.depth)]
    for inputs, outputs in pairwise(reversed(config.widths)):
        layers += [nn.ReLU(), nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1)]
    return nn.Sequential(*layers)


register_architecture(TokenizerConfig, Tokenizer)  # type: ignore[arg-type]
