"""report.html, one file that needs no network: the task's sections, curves, and the recipe with its sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from patchloom.pages import html_page
from patchloom.svg import line_chart
from patchloom.temporary import write_text
from patchloom.training.run import Run

Section = tuple[str, str]  # a title and HTML
Charts = Mapping[str, Mapping[str, str]]  # title -> name of a curve -> key in log.jsonl

LOSS_AND_RATE: Charts = {"loss": {"training": "train_loss"}, "learning rate": {"": "lr"}}


def epoch_records(run: Run) -> list[dict[str, Any]]:
    """The log's records of evaluations."""
    return [row for row in run.records() if row.get("event") == "epoch"]


def write_report(
    run: Run, title: str, headline: str, sections: Sequence[Section], charts: Charts = LOSS_AND_RATE
) -> None:
    """Write RUN/report.html: the headline, curves of the log, the task's sections (HTML), and the recipe.

    Args:
        headline: HTML above everything.
        sections: title and HTML each, in their order.
        charts: title -> {name of a curve: key in log.jsonl}; keys that the log lacks give no curve.
    """
    parts = [
        headline,
        _section("Curves", _curves(epoch_records(run), charts)),
        *(_section(*section) for section in sections),
        _section("Recipe", _recipe(run.settings)),
    ]
    write_text(run.folder / "report.html", html_page(title, "".join(parts)))


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"


def _curves(records: Sequence[Mapping[str, Any]], charts: Charts) -> str:
    if not records:
        return "<p>No epoch was evaluated.</p>"
    drawn = (
        line_chart(title, {name: _points(records, key) for name, key in lines.items()})
        for title, lines in {**charts, **_losses(records)}.items()
    )
    return f'<div class="curves">{"".join(drawn)}</div>'


def _losses(records: Sequence[Mapping[str, Any]]) -> Charts:
    """A chart of the losses by name, where there are several."""
    names = list(records[-1].get("losses", {}))
    return {"losses": {name: f"losses.{name}" for name in names}} if len(names) > 1 else {}


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(epoch, value); "losses.NAME" is a loss by its name."""
    loss = key.removeprefix("losses.") if key.startswith("losses.") else None  # a metric's name may have a dot too
    values = [(row["epoch"], row.get(key) if loss is None else row.get("losses", {}).get(loss)) for row in records]
    return [(epoch, value) for epoch, value in values if value is not None]


def _recipe(settings: dict[str, Any]) -> str:
    sources = settings.get("sources", {})
    rows = "".join(
        f"<tr><td>{escape(key)}<td>{escape(str(value))}<td class=soft>{escape(sources.get(key, ''))}"
        for key, value in settings.items()
        if key not in ("sources", "model", "summary")
    )
    return f"<table class=settings><tr><th>setting<th>value<th>where it comes from</tr>{rows}</table>"
