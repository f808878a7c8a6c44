"""Grafit: thesis chapter 2, its baselines (2.4.2), and the values that the chapter leaves open.

Open values have a published stand-in where there is one: BYOL (Grill et al. 2020) for the target network, predictor and
projector, Wu et al. 2018 for the memory, FaceNet (Schroff et al. 2015) for the triplet loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from patchloom.errors import PatchloomError
from patchloom.recipes.cited import Cited, cite, derive
from patchloom.recipes.options import ImageOptions, NetworkOptions
from patchloom.recipes.recipe import Recipe
from patchloom.recipes.small import SUFFIX, small

_THESIS = "thesis 2.4.3"
_BYOL = "open in the thesis; Grill et al. 2020"
_WU = "open in the thesis; Wu et al. 2018"
_OPEN = "inferred: open in the thesis"
_SMALL = "ours, for thousands of small images on a CPU"


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(ImageOptions, NetworkOptions):
    """Losses, views, projector, target network and memory."""

    loss: Literal["knn+inst", "knn", "inst", "ce", "ce+inst", "triplet", "ce+triplet"] = "knn+inst"
    views: int = 4  # T, augmentations of each image for the instance loss
    supervised_view: Literal["first", "extra"] = "first"  # that kNN loss and cross-entropy see: one of T, or one more
    instance_weight: float = 1.0  # of the instance loss, or of the triplet loss in its place
    sigma: float = 0.05  # of Eq. 2.2
    # networks
    projector: Literal["mlp", "fc", "none"] = "mlp"
    projector_hidden: int = 4096  # width of the MLP
    projector_dim: int = 256  # of the embedding
    # weights of projector and predictor; linear: such that they keep the angles of the trunk's vectors; auto: linear on
    # a trunk with trained weights
    projector_start: Literal["random", "linear", "auto"] = "random"
    predictor_hidden: int = 4096
    embedding: Literal["auto", "projector", "trunk"] = "auto"  # what the run exports; auto: by the loss
    target_decay: float = 0.996  # tau: target <- tau target + (1 - tau) network, after every step
    target_decay_end: float | None = 1.0  # tau goes there along a cosine; None: it stays
    target_norm: Literal["batch", "running"] = "batch"  # statistics of the target's BatchNorm
    trained_lr: float = 1.0  # the rate of a trunk that starts from trained weights, as a fraction of lr
    # memory
    memory_start: Literal["random", "network"] = "random"  # unit vectors, or embeddings of the network as it starts
    memory_update: Literal["after", "before"] = "after"  # the loss of the step
    memory_renormalise: bool = True  # after averaging
    memory_precision: Literal["float32", "bf16", "fp16"] = "float32"
    singletons: Literal["skip", "refuse"] = "skip"  # classes with one image, which has no neighbour
    # baselines
    triplet_margin: float = 0.2
    triplet_mining: Literal["semihard", "hard", "all"] = "semihard"
    clusters: int | None = field(default=None, metadata={"most": 10**7})  # labels of ClusterFit+; None: the data's
    # evaluation
    neighbours: int = 10  # k of the accuracy that is logged
    test_crop_ratio: float = 0.875

    TASK: ClassVar[str] = "retrieval (Grafit)"
    FRACTIONS: ClassVar[tuple[str, ...]] = (
        *ImageOptions.FRACTIONS, *NetworkOptions.FRACTIONS,
        "trained_lr", "target_decay", "target_decay_end", "test_crop_ratio",
    )  # fmt: skip
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        *ImageOptions.NOT_NEGATIVE, *NetworkOptions.NOT_NEGATIVE, "instance_weight", "triplet_margin",
    )  # fmt: skip

    @property
    def terms(self) -> tuple[str, ...]:
        """The losses by their names: knn, inst, ce, triplet."""
        return tuple(self.loss.split("+"))

    def check(self, recipe: str) -> None:
        super().check(recipe)
        if not self.sigma > 0:
            raise PatchloomError(f"sigma of {recipe} is above 0, not {self.sigma}.")
        if "inst" in self.terms and self.views < 2:
            raise PatchloomError(
                f"The instance loss of {recipe} compares views: views is at least 2, not {self.views}."
            )
        if not self.test_crop_ratio > 0:
            raise PatchloomError(f"test_crop_ratio of {recipe} is above 0 and at most 1, not {self.test_crop_ratio}.")
        if self.embedding == "projector" and self.loss == "ce":
            raise PatchloomError(f"embedding=projector of {recipe} needs a loss that trains a projector, not ce.")


_COMMON: dict[str, Cited] = {
    "epochs": (600, _THESIS),
    "batch_size": (1024, _THESIS),
    "optimizer": ("sgd", _THESIS),
    "momentum": (0.9, f"{_OPEN}: ResNet practice"),
    "nesterov": (True, _THESIS),
    "lr": (0.4, f"{_THESIS}: 0.1 per 256 images"),
    "lr_scaling": ("linear", f"{_THESIS}: 0.1 per 256 images"),
    "schedule": ("cosine", _THESIS),
    "schedule_by": ("step", _OPEN),
    "warmup_epochs": (5.0, f"{_OPEN}; as the bag of tricks that {_THESIS} follows"),
    "warmup_lr": (0.0, f"{_OPEN}; as the bag of tricks that {_THESIS} follows"),
    "min_lr": (0.0, f"{_OPEN}: none named"),
    "weight_decay": (1e-4, f"{_OPEN}: ResNet practice"),
    "resolution": (224, f"{_THESIS}; 32 for CIFAR-100"),
    "augmentation": ("rand", f"{_THESIS}: RandAugment"),
    "magnitude": (9.0, f"{_OPEN}; as DeiT"),
    "erasing": (0.25, f"{_THESIS}: erasing; the probability is open, here as DeiT"),
    "drop_path": (0.0, f"{_OPEN}: none named"),
    "test_crop_ratio": (0.875, f"{_OPEN}; a centre crop of 224"),
    "views": (4, "thesis 2.4.3: 4 on ImageNet, 8 on CIFAR-100"),
    "supervised_view": ("first", f"{_OPEN}: the supervised loss has one augmentation, here the first of the T"),
    "instance_weight": (1.0, "thesis Eq. 2.4; Table 2.11 varies it"),
    "sigma": (0.05, "thesis 2.3.1, after Wu et al. 2018"),
    "projector_hidden": (4096, f"{_BYOL}; fits the parameters of Table 2.7"),
    "projector_dim": (256, "thesis 2.3.1: the example of the text; fits the parameters of Table 2.7"),
    "predictor_hidden": (4096, _BYOL),
    "projector_start": ("random", f"{_OPEN}: none named"),
    "trained_lr": (1.0, f"{_OPEN}: trunks of the thesis start at random"),
    "embedding": ("auto", "thesis 2.4.2: the trunk's vector for cross-entropy, else the projector's; Table 2.7"),
    "target_decay": (0.996, _BYOL),
    "target_decay_end": (1.0, f"{_BYOL}: to 1 along a cosine"),
    "target_norm": ("batch", _BYOL),
    "memory_start": ("random", _WU),
    "memory_update": ("after", _WU),
    "memory_renormalise": (True, f"{_WU}; the thesis normalises after the projector"),
    "memory_precision": ("float32", f"{_OPEN}: none named"),
    "singletons": ("skip", f"{_OPEN}: Eq. 2.3 is infinite for a class with one image; its kNN loss is left out"),
    "triplet_margin": (0.2, "open in the thesis; Schroff et al. 2015"),
    "triplet_mining": ("semihard", "open in the thesis; Schroff et al. 2015"),
    "neighbours": (10, "thesis 2.3.3: chosen among 10, 15, 20, 25, 30; here the first, for the log alone"),
}

GRAFIT = cite(
    Recipe.of(RetrievalOptions, name="grafit", summary="fine-grained search from coarse labels: kNN and instance loss"),
    **_COMMON,
    loss=("knn+inst", "thesis Eq. 2.4"),
    projector=("mlp", "thesis 2.3.1"),
)
GRAFIT_FC = derive(
    GRAFIT,
    "as grafit",
    "grafit_fc",
    "Grafit with a linear projector",
    projector=("fc", "thesis 2.3.1: for a fair comparison with SNCA"),
    projector_dim=(128, "inferred from the parameters of Table 2.7: 23.8 M; Wu et al. 2018"),
)
GRAFIT_BASELINE = derive(
    GRAFIT,
    "as grafit",
    "grafit_baseline",
    "Grafit's baseline: cross-entropy on the coarse labels",
    loss=("ce", "thesis 2.4.2"),
    projector=("none", "thesis 2.4.2: the normalised vector of the trunk"),
)
SNCA = derive(
    GRAFIT_FC, "as grafit_fc", "snca", "kNN loss alone, linear projector", loss=("knn", "thesis 2.4.2: Wu et al. 2018")
)
SNCA_PLUS = derive(
    GRAFIT, "as grafit", "snca_plus", "kNN loss alone, MLP projector", loss=("knn", "thesis 2.4.2: SNCA+")
)
CLUSTERFIT_PLUS = derive(
    GRAFIT_BASELINE,
    "as grafit_baseline",
    "clusterfit_plus",
    "cross-entropy on clusters of a trained network's vectors",
    clusters=(15_000, "thesis 2.4.2: 15,000 on ImageNet, 1,500 on CIFAR-100"),
)

GRAFIT_RECIPES = {r.name: r for r in (GRAFIT, GRAFIT_FC, GRAFIT_BASELINE, SNCA, SNCA_PLUS, CLUSTERFIT_PLUS)}


def _small(recipe: Recipe) -> Recipe:
    """By the rule of all small forms, but for what this loss needs: views that differ, and a rate by the batch."""
    narrow: dict[str, Cited] = {
        "projector_hidden": (1024, _SMALL),
        "predictor_hidden": (1024, _SMALL),
        "projector_dim": (256, "as grafit, for every projector"),
        "projector_start": (
            "auto",
            f"{_SMALL}: a random projector would first have to learn what trained weights know",
        ),
        "trained_lr": (0.1, f"{_SMALL}: a higher rate destroys what trained weights know"),
    }
    if recipe.clusters:
        narrow["clusters"] = (100, _SMALL)
    base = small(recipe)
    return cite(
        base,
        lr=(0.1 * base.batch_size / 256, f"{_THESIS}: 0.1 per 256 images"),
        lr_scaling=("linear", f"{_THESIS}: 0.1 per 256 images"),
        crop_scale=(0.35, f"{_SMALL}: views must differ"),
        color_jitter=(0.2, f"{_SMALL}: views must differ"),
        test_crop_ratio=(1.0, f"{_SMALL}: the whole image"),
        **narrow,
    )


GRAFIT_SMALL = {name + SUFFIX: _small(recipe) for name, recipe in GRAFIT_RECIPES.items()}
