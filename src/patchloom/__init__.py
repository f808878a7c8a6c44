"""patchloom: the patch-based vision models of one line of research, from photos to a deployed model.

The public names are loaded when first used, so that `import patchloom` costs little more than `import torch`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "Callback": "patchloom.training.callbacks",
    "Index": "patchloom.search.index",
    "Metric": "patchloom.training.task",
    "PatchloomError": "patchloom.errors",
    "Recipe": "patchloom.recipes.recipe",
    "Task": "patchloom.training.task",
    "capture_attention": "patchloom.layers.attention",
    "complexity": "patchloom.models.complexity",
    "create_model": "patchloom.models.registry",
    "distill": "patchloom.api",
    "embed": "patchloom.inference.embeddings",
    "evaluate": "patchloom.tasks.kinds",
    "explain": "patchloom.explaining.explanation",
    "finetune": "patchloom.api",
    "fit": "patchloom.runs.own",
    "fuse": "patchloom.models.fused",
    "grafit": "patchloom.api",
    "layerscale_value": "patchloom.layers.scales",
    "list_models": "patchloom.models.registry",
    "load": "patchloom.weights.load",
    "parameter_roles": "patchloom.models.roles",
    "predict": "patchloom.tasks.kinds",
    "pretrain": "patchloom.api",
    "save": "patchloom.weights.save",
    "train": "patchloom.api",
    "translate": "patchloom.api",
    "uniform_drop_rate": "patchloom.layers.scales",
}
__all__ = list(_MODULES)
_PACKAGES = (
    "compat",
    "data",
    "errors",
    "explaining",
    "exporting",
    "inference",
    "kernels",
    "layers",
    "models",
    "recipes",
    "runs",
    "search",
    "tasks",
    "training",
    "weights",
)


def __getattr__(name: str) -> Any:
    # Python calls this for names that the module does not have yet; after the import it has them.
    if name in _PACKAGES:
        return import_module(f"patchloom.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'patchloom' has no attribute {name!r}")
    import_module("patchloom.models")  # fills the registry
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])


if TYPE_CHECKING:
    from patchloom.api import distill as distill
    from patchloom.api import finetune as finetune
    from patchloom.api import grafit as grafit
    from patchloom.api import pretrain as pretrain
    from patchloom.api import train as train
    from patchloom.api import translate as translate
    from patchloom.errors import PatchloomError as PatchloomError
    from patchloom.explaining.explanation import explain as explain
    from patchloom.inference.embeddings import embed as embed
    from patchloom.layers.attention import capture_attention as capture_attention
    from patchloom.layers.scales import layerscale_value as layerscale_value
    from patchloom.layers.scales import uniform_drop_rate as uniform_drop_rate
    from patchloom.models.complexity import complexity as complexity
    from patchloom.models.fused import fuse as fuse
    from patchloom.models.registry import create_model as create_model
    from patchloom.models.registry import list_models as list_models
    from patchloom.models.roles import parameter_roles as parameter_roles
    from patchloom.recipes.recipe import Recipe as Recipe
    from patchloom.runs.own import fit as fit
    from patchloom.search.index import Index as Index
    from patchloom.tasks.kinds import evaluate as evaluate
    from patchloom.tasks.kinds import predict as predict
    from patchloom.training.callbacks import Callback as Callback
    from patchloom.training.task import Metric as Metric
    from patchloom.training.task import Task as Task
    from patchloom.weights.load import load as load
    from patchloom.weights.save import save as save
