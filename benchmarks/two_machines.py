"""A tuning run on two machines, one of which is lost in the middle of a round, beside one process.

    sudo python -m benchmarks.two_machines [--lose cut|kill|nothing] [--strategy exhaustive]

Two network namespaces stand for the machines: each has an address and a Ray node with one CPU, and
a cable joins them. `cut` takes the cable away while the second machine has a plan, so that it falls
silent without a word; `kill` ends all of its processes. Trials, order and accuracies have to be
those of a run of one process. Needs Linux, root, `ip` of iproute2 and the extra `ray`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import child_command
from benchmarks.measurement.search_data import BATCH, Digits
from benchmarks.real.case import Accuracy

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 6379
#: Bytes of the store of a node.
STORE = 400 << 20
#: Seconds that every batch takes beside its own work, so that a plan can be cut off in its middle.
PAUSE = 0.2
#: Plans of a round.
ROUND = 8
#: Seconds after which a run is given up.
PATIENCE = 900


class MarkedAccuracy(Accuracy):
    """Accuracy that takes its time, and writes down when and on which machine."""

    def __init__(self, marks: Path, pause: float) -> None:
        self._marks, self._pause = marks, pause
        super().__init__()

    def _mark(self, event: str) -> None:
        machine = os.environ.get("MACHINE", "alone")
        with self._marks.open("a") as file:
            file.write(f"{time.time():.3f} {machine} {event}\n")

    def update(self, preds: Any, labels: Any) -> None:
        if not self.all:
            self._mark("begin")
        time.sleep(self._pause)
        super().update(preds, labels)

    def result(self) -> float:
        self._mark("end")
        return super().result()


@dataclass(frozen=True)
class Mark:
    """A line that `MarkedAccuracy` wrote."""

    moment: float
    machine: str
    word: str


def marks_in(file: Path) -> list[Mark]:
    lines = file.read_text().splitlines() if file.exists() else []
    parts = [line.split() for line in lines]
    return [Mark(float(moment), machine, event) for moment, machine, event in parts]


def tune(folder: Path, strategy: str, trials: int, workers: str) -> None:
    """Tune in this process, and write down what came of it."""
    from benchmarks.nets.search_nets import search_net
    from neural_mp import MixedPrecision, common

    def loader(split: str) -> common.DataLoader:
        return common.DataLoader(Digits(split), batch_size=BATCH)

    converter = MixedPrecision(
        model=search_net("residual1"),
        precisions="int8",
        strategy=strategy,
        objective="modelsize",  # which of two plans is faster is another thing on every run
        metric=MarkedAccuracy(folder / "marks.txt", 0.0 if workers == "1" else PAUSE),
        eval_dataloader=loader("test"),
        calib_dataloader=loader("train"),
        exit_policy={"max_trials": trials},
        workspace=folder / "workspace",
        workers=workers,
    )
    started = time.monotonic()
    result = converter()
    summary = {
        "trials": [
            [trial.number, trial.outcome.value, trial.accuracy, trial.plan.to_dict()]
            for trial in result.trials
        ],
        "plan": result.plan.to_dict(),
        "nodes": sorted({trial.node for trial in result.trials}),
        "warnings": [warning for warning in result.report.warnings if "cluster" in warning],
        "seconds": time.monotonic() - started,
    }
    (folder / "told.json").write_text(json.dumps(summary))


class TwoMachines:
    """Two network namespaces that a cable joins; with what they take away again in the end."""

    def __init__(self, folder: Path) -> None:
        from neural_mp.tuning.executors.ray_cluster import WATCHFUL

        self._folder = folder
        self._names = [f"nmp-{letter}-{os.getpid()}" for letter in "ab"]
        self._token = secrets.token_hex(24)
        self._watchful = dict(WATCHFUL)

    def __enter__(self) -> TwoMachines:
        first, second = self._names
        for name in self._names:
            ip("netns", "add", name)
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "cable", "netns", second)
        for name, address in zip(self._names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for machine, name in enumerate(self._names):
            self.kill(machine)
            ip("netns", "delete", name)

    def start_nodes(self) -> None:
        head, worker = ADDRESSES
        ray = (sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1")
        store = (f"--object-store-memory={STORE}", "--disable-usage-stats")
        first = ("--head", f"--port={PORT}", f"--temp-dir={self._folder}/ray")
        first += ("--include-dashboard=false", f"--node-ip-address={head}")
        self.run(0, *ray, *store, *first)
        self.run(1, *ray, *store, f"--address={head}:{PORT}", f"--node-ip-address={worker}")

    def run(self, machine: int, *command: str) -> None:
        """Run a command on a machine; what it says is shown where it fails."""
        process = self.started(machine, *command)
        if process.wait(PATIENCE):
            log = (self._folder / f"said-{machine}.txt").read_text(errors="replace")
            raise SystemExit(f"{' '.join(command)} failed:\n{log}")

    def started(self, machine: int, *command: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **self._watchful,
            # Else what Ray starts gives way to whatever else runs.
            "RAY_worker_niceness": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "MACHINE": "AB"[machine],
        }
        inside = ("ip", "netns", "exec", self._names[machine], *command)
        # To a file: the daemons that a command leaves behind would hold a pipe open.
        with (self._folder / f"said-{machine}.txt").open("wb") as log:
            return subprocess.Popen(inside, env=environment, stdout=log, stderr=log)

    def lose(self, how: str) -> None:
        """Take the second machine away."""
        if how == "cut":
            ip("-n", self._names[0], "link", "set", "cable", "down")
        else:
            self.kill(1)

    def kill(self, machine: int) -> None:
        pids = ip("netns", "pids", self._names[machine])
        for process in map(int, pids.split()):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue


def ip(*arguments: str) -> str:
    done = subprocess.run(("ip", *arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def watched(driver: subprocess.Popen[bytes], marks: Path, lose: Callable[[], None]) -> float:
    """Lose the second machine with one of the last plans of the first round; when that was.

    The other one then soon has nothing else to do, so that all of the stall is seen.
    """
    until, lost_at = time.monotonic() + PATIENCE, 0.0
    while driver.poll() is None and time.monotonic() < until:
        entries = marks_in(marks)
        events = [mark.word for mark in entries if mark.machine == "B"]
        begun = sum(mark.word == "begin" for mark in entries) - 1  # that of FP32
        if not lost_at and begun >= ROUND - 1 and events[-1:] == ["begin"]:
            lost_at = time.time()
            lose()
        time.sleep(0.05)
    return lost_at


def stall(marks: list[Mark], lost_at: float) -> float:
    """The longest time in which the machine that is left did nothing, in seconds.

    Within the round, at the end of which this process measures latencies. The first evaluation is
    that of FP32; what the other machine ended, the one that is left need not do.
    """
    # Both share a disk, so that what the other one does without its cable is written down, too.
    ended = [mark for mark in marks if (mark.machine, mark.word) == ("B", "end")]
    finished = sum(mark.moment < lost_at for mark in ended)
    own = [mark for mark in marks if mark.machine == "A"][: 2 * (1 + ROUND - finished)]
    pauses = [
        current.moment - max(previous.moment, lost_at)
        for previous, current in itertools.pairwise(own)
        if previous.word == "end"
    ]
    return max(0.0, *pauses)


def together(folder: Path, chosen: argparse.Namespace) -> float | None:
    """Tune on two machines; the seconds of stall, or None where none was lost."""
    folder.mkdir()
    with TwoMachines(folder) as machines:
        started = time.monotonic()
        machines.start_nodes()
        print(f"two nodes started in {time.monotonic() - started:.0f} s", flush=True)
        options = ("--strategy", chosen.strategy, "--trials", str(chosen.trials))
        workers = f"ray:{ADDRESSES[0]}:{PORT}"
        own = child_command("two_machines", "--tune", workers, "--folder", folder)
        driver = machines.started(0, *own, *options)
        marks = folder / "marks.txt"

        def lose() -> None:
            if chosen.lose != "nothing":
                machines.lose(chosen.lose)

        lost_at = watched(driver, marks, lose)
        if driver.poll() != 0:
            raise SystemExit((folder / "said-0.txt").read_text(errors="replace"))
        if chosen.lose == "nothing":
            return None
        if not lost_at:
            raise SystemExit("the second machine never was in the middle of a plan")
        return stall(marks_in(marks), lost_at)


def table_of(single: dict[str, Any], cluster: dict[str, Any], counts: Counter[str]) -> Table:
    table = Table("", "one process", "two machines", "equal")
    same = {
        "trials, their order, outcomes, accuracies": "trials",
        "ops of the chosen plan, their precisions": "plan",
    }
    for label, key in same.items():
        equal = "yes" if single[key] == cluster[key] else "NO"
        table.add_row(label, str(len(single[key])), str(len(cluster[key])), equal)
    table.add_row("seconds of the run", f"{single['seconds']:.0f}", f"{cluster['seconds']:.0f}", "")
    begun = f"{counts['A']} and {counts['B']}"
    table.add_row("evaluations begun, FP32 among them", "", begun, "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lose", choices=("cut", "kill", "nothing"), default="cut")
    parser.add_argument("--strategy", default="exhaustive")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--tune", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.tune:
        tune(chosen.folder, chosen.strategy, chosen.trials, chosen.tune)
        return
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise SystemExit("network namespaces need root, and the command ip of iproute2")
    with tempfile.TemporaryDirectory(prefix="nmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        seconds = together(folder / "both", chosen)
        (folder / "alone").mkdir()
        tune(folder / "alone", chosen.strategy, chosen.trials, "1")
        single, cluster = (
            json.loads((folder / run / "told.json").read_text()) for run in ("alone", "both")
        )
        counts = Counter(
            mark.machine for mark in marks_in(folder / "both" / "marks.txt") if mark.word == "begin"
        )
    console = Console()
    console.print(table_of(single, cluster, counts))
    for warning in cluster["warnings"]:
        console.print(f"warning: {warning}")
    if seconds is not None:
        console.print(f"stall: {seconds:.1f} s in which the machine that was left did nothing")
    if single["trials"] != cluster["trials"] or single["plan"] != cluster["plan"]:
        raise SystemExit("the two runs differ")


if __name__ == "__main__":
    main()
