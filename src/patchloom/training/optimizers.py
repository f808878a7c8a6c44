"""Optimizers, and which parameters decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from patchloom.models.roles import layer_depths, parameter_roles
from patchloom.recipes.recipe import Recipe


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """The trainable parameters by decay and rate. No decay for vectors (biases, norms, scales) and for the roles of
    `no_decay`. `lr_factor` is the rate of a group in multiples of the recipe's: that of the heads (`head_lr`), times
    `layer_decay` for every layer that comes after."""
    head = 1.0 if recipe.head_lr is None else recipe.head_lr / recipe.lr
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    roles = parameter_roles(model)
    # With neither a decay nor an end value, one group is enough: all parameters count as not decaying.
    may_decay = bool(recipe.weight_decay or recipe.weight_decay_end)
    depths = layer_depths(model) if recipe.layer_decay != 1 else {}
    last = max(depths.values(), default=0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = may_decay and parameter.ndim > 1 and roles[name] not in recipe.no_decay
            factor = head if roles[name] == "head" else 1.0
            # The last layer keeps the full rate; every layer before it has one factor of layer_decay more.
            factor *= recipe.layer_decay ** (last - depths.get(name, last))
            groups.setdefault((decays, factor), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": recipe.weight_decay if decays else 0.0,
            "decays": decays,
            # "decays" is kept beside the value, because a schedule may begin or end at a weight decay of 0.
            "lr_factor": factor,
        }
        for (decays, factor), parameters in groups.items()
    ]


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """The recipe's optimizer over the trainable parameters of a network.

    Parameters without `requires_grad` are in none of its groups, and so have no state in checkpoints.
    """
    groups = parameter_groups(model, recipe)
    if recipe.optimizer == "sgd":
        return SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)
    if recipe.optimizer == "lamb":
        return Lamb(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, max_grad_norm=recipe.clip_grad)
    if recipe.optimizer == "adagrad":
        return Adagrad(groups, lr=recipe.lr, eps=recipe.eps)
    fused = recipe.shard == "none"  # one pass over each parameter
    adam = Adam if recipe.optimizer == "adam" else AdamW  # Adam's decay is a part of the gradient
    return adam(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=fused)


class Lamb(Optimizer):
    """LAMB as the published runs used it (fact sheets of apex's and timm's): Adam's update, decay added to it, then

        w <- w - lr (|w| / |update|) update

    per tensor; no trust ratio for tensors without decay, or where a norm is 0. The gradient's global norm is clipped
    at `max_grad_norm` (0: not at all) before anything else.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.max_grad_norm = max_grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        if self.max_grad_norm:
            # One norm over all groups: groups differ in decay and rate only, and clipping must not depend on them.
            everything = [p for group in self.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(everything, self.max_grad_norm)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[weight], group["betas"]
        if not state:
            # A tensor, not an int: checkpoints hold tensors only, and this is how torch's own optimizers count.
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        count = state["step"].item()
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(weight.grad, 1 - beta1)
        square.mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
        # Adam's bias correction: both averages start at 0 and are too small at first.
        update = (mean / (1 - beta1**count)) / ((square / (1 - beta2**count)).sqrt_().add_(group["eps"]))
        if not group["weight_decay"]:
            weight.sub_(update, alpha=group["lr"])
            return
        update.add_(weight, alpha=group["weight_decay"])
        weight_norm, update_norm = weight.norm(), update.norm()
        # On the device, without .item(): reading the norms would make the CPU wait for every tensor.
        trust = torch.where(
            (weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, torch.ones_like(weight_norm)
        )
        weight.sub_(update * (trust * group["lr"]))
