"""The end of a translation run: translations of the held-out text, the report, and the exported network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchloom.models.registry import build
from patchloom.tasks.translation.metrics import translation_metrics
from patchloom.tasks.translation.predict import decoding_options, translate_lines
from patchloom.tasks.translation.report import CHARTS, translation_sections
from patchloom.temporary import write_json
from patchloom.training.report import write_report
from patchloom.training.run import Run
from patchloom.training.sharding import whole_tensors
from patchloom.training.task import Result
from patchloom.weights.files import write

if TYPE_CHECKING:
    from patchloom.tasks.translation.task import Translation


def finish(task: Translation, run: Run, result: Result) -> None:
    """Translate the held-out text with the recipe's beam, then write the report and the export, which comes last."""
    trained: Any = result.modules["model"]
    whole = whole_tensors(trained)
    if not task.processes.is_main_process:
        return
    network: Any = build(trained.config)
    network.load_state_dict(whole)
    network.set_metadata(trained.metadata())
    network = network.to(task.processes.device).eval()
    text, recipe = task.corpus.held_out_text, task.recipe
    options = decoding_options(task.vocabulary, recipe.beam, recipe.length_penalty)
    translations = translate_lines(network, task.vocabulary, text.source, options)
    metrics = translation_metrics([row.translation for row in translations], text.target, text.pair[1])
    metrics = {"split": text.stem, "count": len(text), **metrics}
    headline, sections = translation_sections(run, network, text, translations, metrics)
    write_report(run, f"{network.config.name} on {run.settings['data']}", headline, sections, CHARTS)
    folder, weights = run.folder / "export", "averaged" if result.averaged else "raw"
    described = {"step": result.step, "weights": weights, "held_out": metrics, "best": dict(result.best)}
    export_network(folder, network, described)
    task.console.say(
        f"BLEU {metrics['bleu']:.2f}, chrF {metrics['chrf']:.2f} on {text.stem} with a beam of {recipe.beam}.",
        f"The report is {run.folder / 'report.html'}, the {weights} weights are in {folder}.",
    )


def export_network(folder: Path, network: Any, described: dict[str, Any]) -> None:
    """model.safetensors with the vocabulary in it, and model.json for programs that do not read safetensors."""
    metadata = {"task": "translation", "layout": "patchloom", **network.metadata()}
    write(folder / "model.safetensors", network.state_dict(), metadata)
    short = {name: value for name, value in metadata.items() if name != "vocabulary"}
    write_json(folder / "model.json", {**short, **described})
