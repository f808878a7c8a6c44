"""Classify images with an exported model, without torch: python examples/run_onnx.py FILE.onnx IMAGE...

Needs numpy, Pillow and onnxruntime. Class names and preprocessing come from the metadata of the file.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def main(file: str, *paths: str) -> None:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    preprocessing = json.loads(metadata["preprocessing"])
    pixels = np.stack([resize_and_crop(Image.open(path), preprocessing) for path in paths])
    if session.get_inputs()[0].type == "tensor(float)":  # otherwise the graph takes uint8 pixels and normalises them
        mean, std = np.float32(preprocessing["mean"]), np.float32(preprocessing["std"])
        normalised = (pixels / np.float32(255) - mean) / std
        pixels = np.ascontiguousarray(normalised.transpose(0, 3, 1, 2))
    (logits,) = session.run(["logits"], {"input": pixels})
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    numbers = [str(i) for i in range(logits.shape[1])]
    names = json.loads(metadata["class_names"]) if "class_names" in metadata else numbers
    for path, row in zip(paths, probabilities, strict=True):
        best = np.argsort(-row)[:3]
        print(f"{path}: {', '.join(f'{names[i]} ({row[i]:.1%})' for i in best)}")


def resize_and_crop(image: Image.Image, preprocessing: dict) -> np.ndarray:
    """Resize the image to cover the input size / crop_ratio, then crop its centre: (height, width, 3) uint8."""
    image = ImageOps.exif_transpose(image).convert("RGB")
    height, width = preprocessing["img_size"]
    least_height, least_width = (int(side / preprocessing["crop_ratio"]) for side in (height, width))
    if least_height * image.width >= least_width * image.height:
        size = least_height * image.width // image.height, least_height
    else:
        size = least_width, least_width * image.height // image.width
    resized = image.resize(size, Image.Resampling[preprocessing["interpolation"].upper()])
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    return np.asarray(resized.crop((left, top, left + width, top + height)))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
