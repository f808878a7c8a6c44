"""The report of `load`: what happened to every tensor."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LoadReport:
    """Tensors by what happened to them, under patchloom's names. `print(model.load_report)` shows them as a table.

    `loaded` includes resized tensors. `missing` and `unused` are empty after a strict load.
    """

    source: str
    layout: str
    model: str
    weights: str | None = None  # of a run: "raw", or "averaged" where it averages its weights (ema)
    loaded: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)  # name -> old and new shape
    reinitialised: dict[str, str] = field(default_factory=dict)  # name -> reason
    missing: list[str] = field(default_factory=list)  # with strict=False
    unused: list[str] = field(default_factory=list)  # with strict=False
    ignored: dict[str, str] = field(default_factory=dict)  # of a pre-training method: name in the file -> reason
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The lines of the table."""
        kind = f", {self.weights} weights" if self.weights else ""
        lines = [f"{self.model} from {self.source} ({self.layout} layout{kind}): {len(self.loaded)} tensors loaded"]
        for title, names in (
            ("resized", [f"{name}: {change}" for name, change in self.resized.items()]),
            ("re-initialised", [f"{name}: {reason}" for name, reason in self.reinitialised.items()]),
            ("missing, initialised from scratch", self.missing),
            ("unknown, not used", self.unused),
            ("of pre-training, not used", [f"{name}: {reason}" for name, reason in self.ignored.items()]),
        ):
            if names:
                lines += [f"  {title} ({len(names)}):", *(f"    {name}" for name in names)]
        return [*lines, *(f"  note: {note}" for note in self.notes)]
