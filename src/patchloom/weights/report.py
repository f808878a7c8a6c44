"""What happened to every tensor when weights were loaded."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LoadReport:
    """Names are ours. `print(model.load_report)` shows the table."""

    source: str
    layout: str
    model: str
    loaded: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)  # name -> from what to what
    reinitialised: dict[str, str] = field(default_factory=dict)  # name -> why
    missing: list[str] = field(default_factory=list)  # with strict=False
    unused: list[str] = field(default_factory=list)  # with strict=False
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        lines = [f"{self.model} from {self.source} ({self.layout} layout): {len(self.loaded)} tensors loaded"]
        for title, names in (
            ("resized", [f"{name}: {how}" for name, how in self.resized.items()]),
            ("re-initialised", [f"{name}: {why}" for name, why in self.reinitialised.items()]),
            ("missing, left at their start", self.missing),
            ("left over, not used", self.unused),
        ):
            if names:
                lines += [f"  {title} ({len(names)}):", *(f"    {name}" for name in names)]
        return [*lines, *(f"  note: {note}" for note in self.notes)]
