"""Submit a command to a Slurm cluster, with one torchrun per node.

    python -m patchloom.runs.slurm --nodes 4 --processes 8 -- train DATA --model M --recipe R --out RUN

A job that is preempted or reaches its time limit is queued again and resumes from its last checkpoint.
Needs submitit, in the extra `slurm`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.install import needed


@dataclass
class Launch:
    """What runs on each node. `words` are those of the patchloom command."""

    words: list[str]
    processes: int = 1

    def __call__(self) -> int:
        command = [sys.executable, "-m", "torch.distributed.run", *self._rendezvous(), "-m", "patchloom", *self._now()]
        # a store of its own for each attempt: restarted processes do not read addresses of those before them
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.run(command, check=True, env=environment).returncode

    def checkpoint(self, *_: Any) -> Any:
        """Called by submitit before a preemption or a timeout: queue again."""
        # Called with the same object, so that `__call__` runs again and finds the run begun.
        return import_module("submitit").helpers.DelayedSubmission(self)

    def _now(self) -> list[str]:
        """`resume RUN` once the run exists: a job that was queued again continues."""
        out = self.words[self.words.index("--out") + 1] if "--out" in self.words else None
        began = out is not None and any((Path(out) / name).exists() for name in ("recipe.yaml", "stages.json"))
        return ["resume", str(out)] if began else self.words

    def _rendezvous(self) -> list[str]:
        """The words of torchrun that tell the nodes of this job where to meet."""
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
        if nodes == "1":
            return ["--standalone", "--nproc-per-node", str(self.processes)]
        first = subprocess.run(
            ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[0]
        # The first node of the job's list is the meeting point of all; c10d needs no other server.
        endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29500"]
        return ["--nnodes", nodes, "--nproc-per-node", str(self.processes), *endpoint, "--max-restarts", "3"]


def submit(
    words: Sequence[str],
    *,
    nodes: int = 1,
    processes: int = 1,
    hours: float = 24,
    partition: str | None = None,
    cluster: str | None = None,
    folder: str = "slurm",
) -> Any:
    """Queue a patchloom command; gives submitit's job. `cluster="local"` runs it here, for a trial."""
    with needed("Submitting needs submitit", "slurm"):
        submitit = import_module("submitit")
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    executor.update_parameters(name="patchloom", nodes=nodes, tasks_per_node=1, timeout_min=round(hours * 60))
    if cluster != "local":
        # The signal comes 120 seconds before the limit: time for a last checkpoint.
        executor.update_parameters(slurm_gpus_per_node=processes, slurm_signal_delay_s=120)
        if partition:
            executor.update_parameters(slurm_partition=partition)
    return executor.submit(Launch(list(words), processes))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m patchloom.runs.slurm",
        description="Submit a command to a Slurm cluster, with one torchrun per node. A job that is preempted or "
        "reaches its time limit is queued again and resumes from its last checkpoint.",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes per node, usually one per GPU (default: 1)"
    )
    parser.add_argument("--hours", type=float, default=24, metavar="H", help="time limit in hours (default: 24)")
    parser.add_argument("--partition", metavar="NAME", help="Slurm partition (default: that of the cluster)")
    parser.add_argument("--cluster", metavar="NAME", help="'local' for a trial on this machine (default: Slurm)")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the patchloom command")
    options = parser.parse_args()
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        parser.error("there is no patchloom command after --")
    try:
        job = submit(
            words,
            nodes=options.nodes,
            processes=options.processes,
            hours=options.hours,
            partition=options.partition,
            cluster=options.cluster,
        )
    except PatchloomError as error:
        sys.exit(f"patchloom: {error}")
    print(f"Submitted as job {job.job_id}; its output is in {job.paths.stdout}.")


if __name__ == "__main__":
    main()
