"""What a run counts: steps, losses since the last evaluation, and the best evaluation. JSON in every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from patchloom.training.processes import Processes
from patchloom.training.task import Metric


@dataclass
class Counters:
    """The part of a run's state that is not a tensor. Sums are those of this process."""

    step: int = 0
    loss_sum: float = 0.0  # since the last evaluation, over images, tokens or whatever the task counts
    losses: dict[str, float] = field(default_factory=dict)  # the same by name
    weight: float = 0.0  # how many of them
    evaluated: int = 0  # the step of the last evaluation
    best: dict[str, Any] = field(default_factory=dict)  # {"value", "step"}

    def count(self, losses: Mapping[str, float], loss: float, weight: float) -> None:
        """Add one step with its losses, by name and in all, summed over what the task counts."""
        self.step += 1
        self.loss_sum += loss
        self.weight += weight
        for name, value in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + value

    def totals(self, processes: Processes) -> tuple[float, float, dict[str, float]]:
        """The sum of losses, what was counted, and the sums by name, over all processes; all of them call it."""
        # A process whose share held nothing may lack a loss: all must reduce the same names in the same order.
        names = sorted({name for part in processes.gather(list(self.losses)) for name in part})
        by_name = {name: processes.total(self.losses.get(name, 0.0)) for name in names}
        return processes.total(self.loss_sum), processes.total(self.weight), by_name

    def begin_interval(self) -> None:
        """After an evaluation: count losses from here on."""
        self.loss_sum, self.losses, self.weight, self.evaluated = 0.0, {}, 0.0, self.step

    def note_best(self, metric: Metric | None, record: Mapping[str, Any], averaged: bool) -> bool:
        """Whether an evaluation is the best so far. Without a metric, the newest is the best.

        Args:
            metric: what decides; it is looked up in `record` under its name, or with the prefix `ema_`.
            averaged: whether the result is the averaged weights, whose metric then decides.
        """
        value = record.get(f"ema_{metric.name}" if averaged else metric.name) if metric else None
        if metric is None or value is None:
            value, improved = float(self.step), True
        else:
            improved = metric.improves(value, self.best.get("value"))
        if improved:
            self.best = {"value": value, "step": self.step}
        return improved

    def to_json(self, processes: Processes) -> dict[str, Any]:
        """With the sums over all processes."""
        loss_sum, weight, losses = self.totals(processes)
        return {**asdict(self), "loss_sum": loss_sum, "weight": weight, "losses": losses}

    @classmethod
    def from_json(cls, info: Mapping[str, Any], is_main_process: bool) -> Counters:
        """The sums over all processes go to the main process, so that they are counted once."""
        sums = {
            "loss_sum": info["loss_sum"],
            "losses": dict(info.get("losses", {})),
            "weight": info["weight"] if "weight" in info else info["loss_images"],  # its name in version 0.1
        }
        kept = {"step": info["step"], "evaluated": info["evaluated"], "best": info["best"]}
        # The other processes begin at zero, so that the totals are right for any number of them.
        return cls(**kept, **(sums if is_main_process else {}))
