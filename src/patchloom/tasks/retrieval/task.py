"""Grafit as a task of the loop (thesis 2.3.1): several views of each image, a memory, a target network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.console import Console
from patchloom.data.images import to_input
from patchloom.data.loader import Samples
from patchloom.data.mixing import erase
from patchloom.data.order import Order, Steps
from patchloom.data.transforms import Augment, Views
from patchloom.data.workers import Batches, load_batches
from patchloom.devices import pins_memory
from patchloom.models.embedding import EmbeddingNetwork, Outputs
from patchloom.models.network import evaluation_mode
from patchloom.recipes.recipe import Recipe
from patchloom.tasks.classification.images import Images
from patchloom.tasks.retrieval.config import RetrievalConfig
from patchloom.tasks.retrieval.finish import finish
from patchloom.tasks.retrieval.images import Numbered, labels_of
from patchloom.tasks.retrieval.losses import instance_loss, triplet_loss
from patchloom.tasks.retrieval.memory import Memory
from patchloom.tasks.retrieval.metrics import KNN, embed_items, knn_accuracy
from patchloom.tasks.retrieval.networks import MODEL, PREDICTOR, PROJECTOR, TARGET, follow, projecting
from patchloom.tasks.retrieval.terms import Terms
from patchloom.training.processes import Processes
from patchloom.training.run import Run
from patchloom.training.schedule import Schedule, total_steps
from patchloom.training.task import Result, Task


@dataclass(frozen=True)
class Supervision:
    """What the images of the training split are supervised by."""

    labels: Tensor  # (N,); zeros without labels
    class_names: tuple[str, ...]
    column: str | None  # of the data
    clusters: tuple[int, ...] | None = None  # the labels, where they are clusters


class Retrieval(Task):
    """Views of images and numbers of the images in; kNN loss, instance loss, cross-entropy and triplet loss out."""

    metric = KNN

    def __init__(
        self,
        config: RetrievalConfig,
        modules: nn.ModuleDict,
        terms: Terms,
        images: Images,
        supervision: Supervision,
        recipe: Recipe,
        processes: Processes,
        console: Console,
    ) -> None:
        self.config, self.modules, self.terms, self.recipe = config, modules, terms, recipe
        self.processes, self.console = processes, console
        self.network: EmbeddingNetwork = modules[MODEL]  # type: ignore[assignment]
        self.images, self.source, self.split = images, images.source, images.split
        self.supervision, self.labels = supervision, supervision.labels
        self.order = Order(len(self.split.train), recipe.batch_size, recipe.repeated_augmentation, recipe.seed)
        self.steps_per_epoch = self.order.steps_per_epoch
        end = recipe.target_decay if recipe.target_decay_end is None else recipe.target_decay_end
        self.target_decay = Schedule(recipe.target_decay, end)
        self.memory = self._make_memory() if "knn" in terms else None
        self._seen: list[tuple[Tensor, Tensor]] = []  # rows and embeddings of the step, for the memory

    def _make_memory(self) -> Memory:
        recipe = self.recipe
        dim = recipe.projector_dim if PROJECTOR in self.modules else self.network.config.dim
        return Memory(
            self.labels, dim, self.processes, sigma=recipe.sigma,
            renormalise=recipe.memory_renormalise, precision=recipe.memory_precision, seed=recipe.seed,
        )  # fmt: skip

    # What the loop asks for

    @property
    def trained(self) -> Sequence[str]:
        return [name for name in self.modules if name != TARGET]

    @property
    def averaged(self) -> Sequence[str]:
        return [MODEL]

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.labels = self.labels.to(device)
        if self.memory is not None:
            self.memory.to(device)

    def state(self) -> dict[str, Tensor]:
        if self.memory is None:
            return {}
        self.memory.revoke()  # of a step that was given up
        return {"memory": self.memory.gather()}

    def load_state(self, state: Any) -> None:
        if self.memory is not None:
            self.memory.fill(state["memory"])

    def batches(self, start: int, end: int) -> Batches:
        """Views, a tuple of (B, height, width, 3) uint8, and the numbers (B,) of the images."""
        # Only at the beginning: a resumed run has the memory of its checkpoint.
        if start == 0 and self.memory is not None and self.recipe.memory_start == "network":
            self.memory.fill(self._embed(projecting(self.modules), self.split.train)[self.memory.images])
        recipe, fields = (
            self.recipe,
            {field.name: getattr(self.recipe, field.name) for field in dataclasses.fields(Augment)},
        )
        augment = Augment(**{**fields, "flip": recipe.flip if self.source.flips else 0.0})
        views = Views(((augment, self.network.config.img_size),) * self.terms.views)
        # The loader knows an image by its key, memory and labels by its place.
        places = {item.key: place for place, item in enumerate(self.split.train)}
        samples = Samples(
            self.source, self.split.train, Numbered(views, places), recipe.seed, fast=recipe.pixels == "fast"
        )
        steps = Steps(self.order, start, end, self.processes.rank, self.processes.count)
        return load_batches(samples, steps, recipe.workers, pin=pins_memory(self.processes.device))

    def losses(self, batch: Any, step: int, part: int) -> dict[str, Tensor]:
        # A step that was given up (a signal, a loss that is not finite) may have left its embeddings and updates.
        if part == 0:
            self._seen.clear()
            if self.memory is not None:
                self.memory.revoke()
        views, numbers = batch
        images = [self._input(view, step, part, place) for place, view in enumerate(views)]
        outputs: list[Outputs] = [self.network(x) for x in images]
        skipped = int(self.terms.extra)
        # One pass of the projector per view: each updates the running statistics of its BatchNorm.
        supervised = self._projected(outputs[0]) if "knn" in self.terms else None
        found: dict[str, Tensor] = {}
        if supervised is not None:
            found["knn"] = self._neighbour_loss(supervised, numbers)
        if "ce" in self.terms:
            found["ce"] = F.cross_entropy(outputs[0].logits.float(), self.labels[numbers], reduction="none")  # type: ignore[union-attr]
        if self.terms.compares_views:
            known = [] if supervised is None or skipped else [supervised]
            projected = known + [self._projected(output) for output in outputs[skipped + len(known) :]]
            found |= self._view_losses(images[skipped:], projected)
        return found

    def _projected(self, output: Outputs) -> Tensor:
        """(B, dim): what kNN, instance and triplet loss compare, of the projector also where it is dropped at the
        end."""
        return self.modules[PROJECTOR](output.vector) if PROJECTOR in self.modules else output.embedding

    def _input(self, view: Tensor, step: int, part: int, place: int) -> Tensor:
        """A view (B, C, height, width), normalised and erased."""
        x = to_input(view, self.network.preprocessing)
        seed = (self.recipe.seed, step * self.recipe.accumulate + part, self.processes.rank, place)
        return erase(x, self.recipe.erasing, *seed) if self.recipe.erasing else x

    def _neighbour_loss(self, embeddings: Tensor, numbers: Tensor) -> Tensor:
        """Eq. 2.3, (B,); notes the embeddings for the memory, or updates it before the loss."""
        assert self.memory is not None
        vectors, rows = F.normalize(embeddings.float(), dim=1), self.memory.row_of[numbers]
        # Every process updates its own rows with the vectors of all, so their number does not matter.
        seen = (self.processes.gather_rows(rows), self.processes.gather_rows(vectors.detach()))
        if self.recipe.memory_update == "before":
            self.memory.update(*seen, revocable=True)
        else:
            self._seen.append(seen)
        return self.memory.loss(vectors, rows)

    def _view_losses(self, images: Sequence[Tensor], projected: Sequence[Tensor]) -> dict[str, Tensor]:
        """The weighted instance or triplet loss, (B,)."""
        weight = self.recipe.instance_weight
        if "triplet" in self.terms:
            loss = triplet_loss(projected[0], projected[1], self.recipe.triplet_margin, self.recipe.triplet_mining)
            return {"triplet": weight * loss}
        target: Any = self.modules[TARGET]
        with torch.no_grad():
            targets = [target.embed(x) for x in images]
        predicted = [self.modules[PREDICTOR](z) for z in projected]
        return {"inst": weight * instance_loss(predicted, targets)}

    def after_step(self, step: int) -> None:
        if self.memory is not None:
            # Not in `losses`: a step that is given up must leave the memory as it was.
            for rows, vectors in self._seen:
                self.memory.update(rows, vectors)
            self.memory.keep()
            self._seen.clear()
        if TARGET in self.modules:
            # Steps count from 0 in BYOL's schedule: the first update has tau itself.
            decay = self.target_decay.at(step - 1, total_steps(self.recipe, self.steps_per_epoch))
            follow(self.modules, decay, self.recipe.target_norm == "running")

    def evaluate(self, modules: nn.ModuleDict, after_batch: Callable[[], None]) -> dict[str, Any]:
        """The accuracy of kNN classification of the held-out images into the classes of the training column."""
        if not (self.source.labelled and self.split.held_out):
            return {}
        network = modules[MODEL]
        items, queries = (self._embed(network, part, after_batch) for part in (self.split.train, self.split.held_out))
        labels, truth = labels_of(self.split.train), labels_of(self.split.held_out)
        accuracy = knn_accuracy(queries, truth, items, labels, self.recipe.neighbours)
        return {"count": len(truth), "knn": accuracy}

    def _embed(self, network: Any, items: Any, after_batch: Callable[[], None] = lambda: None) -> Tensor:
        with evaluation_mode(network):
            return embed_items(
                network, self.source, items, self.network.preprocessing,
                batch=max(64, self.recipe.batch_size // self.processes.count), workers=self.recipe.workers,
                processes=self.processes, after_batch=after_batch,
            )  # fmt: skip

    def final_embeddings(self, network: Any) -> tuple[Tensor, Tensor]:
        """Unit vectors of the training images and of the held-out ones, with the final weights: m_i = g(x_i)."""
        queries = self._embed(network, self.split.held_out) if self.split.held_out else torch.empty(0, 1)
        return self._embed(network, self.split.train), queries

    def metadata(self) -> dict[str, Any]:
        return self.network.metadata()

    def environment(self) -> dict[str, Any]:
        """Enough of the data to notice a change, which images the run never saw, and the clusters that it learns."""
        data = self.images.to_json(self.config.data)
        clusters = self.supervision.clusters
        return {"data": data} if clusters is None else {"data": data, "clusters": list(clusters)}

    def finish(self, run: Run, result: Result) -> None:
        finish(self, run, result)
