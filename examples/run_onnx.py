"""Ask an exported network about images, without torch: python examples/run_onnx.py FILE.onnx IMAGE...

Needs numpy, Pillow and onnxruntime. All that it has to know is in the file.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def main(file: str, *paths: str) -> None:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    how = json.loads(about["preprocessing"])
    pixels = np.stack([resize_and_crop(Image.open(path), how) for path in paths])
    if session.get_inputs()[0].type == "tensor(float)":  # otherwise the file takes pixels and normalises by itself
        normalised = (pixels / np.float32(255) - np.float32(how["mean"])) / np.float32(how["std"])
        pixels = np.ascontiguousarray(normalised.transpose(0, 3, 1, 2))
    (logits,) = session.run(["logits"], {"input": pixels})
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    names = json.loads(about["class_names"]) if "class_names" in about else list(map(str, range(logits.shape[1])))
    for path, row in zip(paths, chances, strict=True):
        best = np.argsort(-row)[:3]
        print(f"{path}: {', '.join(f'{names[i]} ({row[i]:.1%})' for i in best)}")


def resize_and_crop(image: Image.Image, how: dict) -> np.ndarray:
    """The centre of an image whose tighter side was resized to size / crop_ratio, (height, width, 3) uint8."""
    image = ImageOps.exif_transpose(image).convert("RGB")
    height, width = how["img_size"]
    least_height, least_width = int(height / how["crop_ratio"]), int(width / how["crop_ratio"])
    if least_height * image.width >= least_width * image.height:
        size = least_height * image.width // image.height, least_height
    else:
        size = least_width, least_width * image.height // image.width
    resized = image.resize(size, Image.Resampling[how["interpolation"].upper()])
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    return np.asarray(resized.crop((left, top, left + width, top + height)))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
