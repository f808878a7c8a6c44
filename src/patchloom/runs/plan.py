"""The plan of a run, made by its task: sizes, steps and an estimate of the time. Nothing is written."""

from __future__ import annotations

from typing import Any

from patchloom.console import Console, choose_console
from patchloom.devices import Device
from patchloom.tasks.spec import Context, RunConfig
from patchloom.training.processes import join_processes


def measure_plan(
    config: RunConfig, console: Console | None = None, strict: bool = False, device: Device = "auto"
) -> dict[str, Any]:
    """Resolve everything, print sizes and an estimate of the time, and return them."""
    console, processes = choose_console(console), join_processes(device)
    console.quiet = console.quiet or not processes.is_main_process
    console.say(*config.notes)
    return config.spec.plan(config, Context(processes, console, strict=strict, writes=False, opened=config.opened))
