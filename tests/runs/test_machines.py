"""Two machines, each a network namespace of this one: torchrun across them, with one of them lost in mid-epoch."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PATIENCE = 240  # seconds for any one thing to happen
STEPS = 22  # of an epoch
EPOCHS = 4
TRAIN = [
    "train", "digits", "--model", "deit_nano", "--recipe", "deit@small", "model.depth=1", "model.dim=24",
    "model.heads=2", "img_size=16", "batch_size=64", f"epochs={EPOCHS}", "seed=5", "workers=0", "checkpoint_every=5",
]  # fmt: skip
# without the last, a restarted process may read addresses that those of the attempt before left in torchrun's store
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *words]


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=30).stdout


class Machine:
    """A network namespace with one address, and the torchrun in it."""

    def __init__(self, number: int, logs: Path) -> None:
        self.name, self.address = f"patchloom-{os.getpid()}-{number}", f"10.77.0.{number}"
        self.hosts_rendezvous = number == 1
        self.log = logs / f"machine-{number}.log"
        ip("netns", "add", self.name)

    def connect(self, other: Machine) -> None:
        """Join the two by a virtual cable; both ends are made inside, so that this machine's own network has none."""
        ip("link", "add", "veth0", "netns", self.name, "type", "veth", "peer", "name", "veth0", "netns", other.name)
        for machine in (self, other):
            ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "veth0")
            for link in ("lo", "veth0"):
                ip("-n", machine.name, "link", "set", link, "up")

    def start(self, *words: str) -> None:
        """Start torchrun. Both namespaces have the same host name, so that each is told its address and its part."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29500", "--local-addr", self.address]
        rendezvous += ["--rdzv-conf", f"is_host={int(self.hosts_rendezvous)}"]
        command = torchrun("--nnodes", "2", "--nproc-per-node", "1", *rendezvous, "--max-restarts", "3")
        with open(self.log, "a") as log:
            self.agent = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command, "-m", "patchloom", *words],
                stdout=log,
                stderr=log,
                env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "veth0"},
            )

    def kill(self, *, only_worker: bool = False) -> None:
        """SIGKILL to all that runs here, or to all but torchrun."""
        for process in map(int, ip("netns", "pids", self.name).split()):
            if not (only_worker and process == self.agent.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def remove(self) -> None:
        """The cable goes with its ends."""
        self.kill()
        if hasattr(self, "agent"):
            self.agent.wait(30)
        ip("netns", "delete", self.name)

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    if shutil.which("ip") is None:
        pytest.skip("making network namespaces needs `ip` of iproute2")
    made: list[Machine] = []
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated"))  # not without removing them
    try:
        try:
            for number in (1, 2):
                made.append(Machine(number, tmp_path))
            made[0].connect(made[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made[0], made[1]
    finally:
        for machine in made:
            machine.remove()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights that two processes of one machine train."""
    out = tmp_path_factory.mktemp("one machine") / "run"
    command = torchrun("--standalone", "--nproc-per-node", "2", "-m", "patchloom", *TRAIN, "--out", str(out))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    return weights(out)


def weights(out: Path) -> bytes:
    return (out / "export" / "model.safetensors").read_bytes()


def wait_until(condition: Callable[[], bool], machines: tuple[Machine, Machine]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "\n".join(machine.output()[-3000:] for machine in machines)
        time.sleep(0.02)


def last_step(out: Path) -> int:
    return max((int(path.stem[5:]) for path in (out / "checkpoints").glob("step-*.safetensors")), default=0)


def train_into_the_second_epoch(machines: tuple[Machine, Machine], out: Path) -> None:
    for machine in machines:
        machine.start(*TRAIN, "--out", str(out))
    wait_until(lambda: last_step(out) > STEPS, machines)
    assert last_step(out) < STEPS * EPOCHS


def wait_for_the_end(machines: tuple[Machine, Machine]) -> list[int]:
    wait_until(lambda: all(machine.agent.poll() is not None for machine in machines), machines)
    return [machine.agent.returncode for machine in machines]


def check_resumed_once(machines: tuple[Machine, Machine]) -> None:
    output = "".join(machine.output() for machine in machines)
    steps = re.findall(rf"Resuming .* at step (\d+) of {STEPS * EPOCHS}", output)
    assert len(steps) == 1, output[-3000:]
    assert STEPS < int(steps[0]) < STEPS * EPOCHS
    assert "holds a run already" not in output


@pytest.mark.parametrize("lost", [0, 1])
def test_all_processes_resume_to_the_same_bytes_when_one_is_killed(
    lost: int, machines: tuple[Machine, Machine], undisturbed: bytes, tmp_path: Path
) -> None:
    train_into_the_second_epoch(machines, tmp_path / "run")
    machines[lost].kill(only_worker=True)
    assert wait_for_the_end(machines) == [0, 0]
    check_resumed_once(machines)
    assert weights(tmp_path / "run") == undisturbed


def test_a_machine_that_is_lost_and_started_again_joins_the_run(
    machines: tuple[Machine, Machine], undisturbed: bytes, tmp_path: Path
) -> None:
    train_into_the_second_epoch(machines, tmp_path / "run")
    machines[1].kill()
    machines[1].agent.wait(30)
    machines[1].start(*TRAIN, "--out", str(tmp_path / "run"))
    assert wait_for_the_end(machines) == [0, 0]
    check_resumed_once(machines)
    assert weights(tmp_path / "run") == undisturbed


def test_a_run_that_lost_the_machine_of_the_rendezvous_ends_and_can_be_resumed(
    machines: tuple[Machine, Machine], undisturbed: bytes, tmp_path: Path
) -> None:
    train_into_the_second_epoch(machines, tmp_path / "run")
    machines[0].kill()
    assert 0 not in wait_for_the_end(machines)
    for machine in machines:
        machine.start("resume", str(tmp_path / "run"))
    assert wait_for_the_end(machines) == [0, 0]
    check_resumed_once(machines)
    assert weights(tmp_path / "run") == undisturbed
