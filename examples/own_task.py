"""A task of your own, with a memory and an EMA target: python examples/own_task.py --out RUN

An encoder learns without labels to predict, for two noisy views of a digit, what its slowly moving target says of the
other view, and to stay close to what it remembers of the image. Kill it at any moment and start it again: it ends with
the same bytes.
"""

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import patchloom
from patchloom.data.randomness import torch_generator


class Remember(patchloom.Task):
    """Two networks, of which one gets gradients, and a memory of all images."""

    metric = patchloom.Metric("agreement")
    trained = averaged = ("encoder",)

    def __init__(self, images, batch=128, seed=0, momentum=0.99):
        torch.manual_seed(seed)
        encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
        self.modules = nn.ModuleDict({"encoder": encoder, "target": copy.deepcopy(encoder)})
        self.images, self.batch, self.seed, self.momentum = images, batch, seed, momentum
        self.steps_per_epoch = len(images) // batch
        self.memory = F.normalize(torch.randn(len(images), 32), dim=1)
        self.latest = None  # the images of the last step, and their embeddings

    def to(self, device):
        super().to(device)
        self.images, self.memory = self.images.to(device), self.memory.to(device)

    def state(self):
        return {"memory": self.memory}

    def batches(self, start, end):
        for step in range(start, end):
            epoch, place = divmod(step, self.steps_per_epoch)
            order = torch.randperm(len(self.images), generator=torch_generator(self.seed, epoch, "order"))
            yield order[place * self.batch : (place + 1) * self.batch]

    def view(self, chosen, step, number):
        noise = torch.randn(len(chosen), 64, generator=torch_generator(self.seed, step, number, "view"))
        return self.images[chosen] + 0.2 * noise.to(self.images.device)

    def losses(self, batch, step, part):
        one, two = (self.view(batch, step, number) for number in (0, 1))
        embedded = F.normalize(self.modules["encoder"](one), dim=1)
        with torch.no_grad():
            wanted = F.normalize(self.modules["target"](two), dim=1)
        self.latest = batch, embedded.detach()
        logits = embedded @ self.memory.T / 0.2
        return {
            "target": 2 - 2 * (embedded * wanted).sum(dim=1),
            "memory": 0.1 * F.cross_entropy(logits, batch, reduction="none"),
        }

    def after_step(self, step):
        with torch.no_grad():
            pairs = zip(self.modules["target"].parameters(), self.modules["encoder"].parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 1 - self.momentum)
            chosen, embedded = self.latest
            self.memory[chosen] = F.normalize(self.memory[chosen] + embedded, dim=1)

    def evaluate(self, modules, after_batch):
        with torch.no_grad():
            embedded = F.normalize(modules["encoder"](self.images), dim=1)
        return {"agreement": float((embedded * self.memory).sum(dim=1).mean())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, metavar="RUN")
    options = parser.parse_args()
    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    patchloom.fit(Remember(digits), out=options.out, recipe="old_fashioned@small", epochs=40, checkpoint_every="20")
