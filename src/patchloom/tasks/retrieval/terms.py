"""Which losses a run has, and what its network needs for them."""

from __future__ import annotations

from dataclasses import dataclass

from patchloom.errors import PatchloomError
from patchloom.recipes.recipe import Recipe


@dataclass(frozen=True)
class Terms:
    """The losses of a run by their names, and the parts that they train."""

    losses: tuple[str, ...]  # of knn, inst, ce, triplet
    projector_stays: bool  # the embedding is the projector's output, else the trunk's vector
    views: int  # augmentations of each image
    extra: bool  # the first view is for the supervised loss alone

    def __contains__(self, loss: str) -> bool:
        return loss in self.losses

    @property
    def compares_views(self) -> bool:
        return "inst" in self or "triplet" in self

    @property
    def projects(self) -> bool:
        """Whether any loss is of a projector's output."""
        return "knn" in self or self.compares_views


def terms_of(recipe: Recipe, labelled: bool) -> Terms:
    """The losses that a recipe names; without labels the kNN loss is left out, as it is 0.

    Raises PatchloomError where nothing is left to learn, or cross-entropy has no labels.
    """
    asked = tuple(recipe.terms)
    if not labelled and "ce" in asked:
        raise PatchloomError(f"loss={recipe.loss} needs labels: give --labels COLUMN, or --loss inst or triplet.")
    losses = asked if labelled else tuple(name for name in asked if name != "knn")
    if not losses:
        raise PatchloomError("Without labels the kNN loss is 0: nothing would be learned. Choose --loss knn+inst.")
    stays = recipe.embedding == "projector" or (
        # thesis 2.4.2 and Table 2.7: without kNN loss the projector belongs to the instance branch and is dropped
        recipe.embedding == "auto" and ("knn" in asked or asked == ("triplet",))
    )
    supervised = "knn" in losses or "ce" in losses
    extra = supervised and recipe.supervised_view == "extra" and ("inst" in losses or "triplet" in losses)
    views = recipe.views if "inst" in losses else 2 if "triplet" in losses else 1
    return Terms(losses, stays, views + extra, extra)
