"""Options that several commands have in common, as parents of their parsers."""

from __future__ import annotations

import argparse


def device_options(default: str = "auto", of: str = "computing") -> argparse.ArgumentParser:
    """--device, which every command that computes has; its value is for `patchloom.devices.choose_device`."""
    options = argparse.ArgumentParser(add_help=False)
    meaning = "the accelerator of this machine, else the CPU" if default == "auto" else "on which the file runs too"
    options.add_argument(
        "--device",
        metavar="NAME",
        default=default,
        help=f"device for {of}: auto, cpu, cuda, cuda:1, mps, xpu, ... (default: {default}, {meaning})",
    )
    return options
