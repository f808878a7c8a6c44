"""The end of a pre-training run: the report, and the trunk without a head as the export."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patchloom.models.registry import build
from patchloom.tasks.pretraining.report import pretraining_charts, pretraining_headline, pretraining_sections
from patchloom.training.report import write_report
from patchloom.training.run import Run
from patchloom.training.sharding import is_sharded, whole_tensors
from patchloom.training.task import Result

if TYPE_CHECKING:
    from patchloom.tasks.pretraining.task import Pretraining


def finish(task: Pretraining, run: Run, result: Result) -> None:
    """Write the report, then the export, which comes last: with it a run is finished."""
    whole = {name: whole_tensors(module) for name, module in result.modules.items()}  # every process: may be sharded
    if not task.processes.is_main_process:
        return
    trained: Any = result.modules[task.method.exported]
    # Built again from whole tensors: the parts of a sharded network are in several processes.
    network = build(trained.config)
    network.load_state_dict(whole[task.method.exported])
    network.preprocessing = trained.preprocessing
    modules = _whole_modules(task, result, whole)
    with torch.no_grad():
        sections = pretraining_sections(task, modules)
    title = f"{network.config.name} on {run.settings['data']}"
    headline = pretraining_headline(run, task, network)
    write_report(run, title, headline, sections, pretraining_charts(task))
    weights = "averaged" if result.averaged else "raw"
    described = {
        "task": run.settings["task"],
        "method": task.recipe.method,
        "module": task.method.exported,
        "step": result.step,
        "weights": weights,
        "held_out": None,
        "best": dict(result.best),
    }
    task.method.export(run.folder / "export", network.eval(), modules, described)
    task.console.say(
        f"The report is {run.folder / 'report.html'}, the {weights} weights of the {task.method.exported} are in "
        f"{run.folder / 'export'}."
    )


def _whole_modules(task: Pretraining, result: Result, whole: dict[str, Any]) -> nn.ModuleDict:
    """The modules on the CPU in evaluation mode, as the method's pictures need them."""
    modules, setup = result.modules, task.method.setup
    if any(is_sharded(parameter) for parameter in modules.parameters()):  # made again: parts are in other processes
        trunk = build(modules[task.method.exported].config)  # type: ignore[arg-type]
        modules = type(task.method)(dataclasses.replace(setup, trunk=trunk, from_checkpoint=True)).modules
        for name, tensors in whole.items():
            modules[name].load_state_dict(tensors)
    return modules.cpu().eval()
