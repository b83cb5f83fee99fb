"""A tuning run in a process of its own, which a test can kill; every evaluation leaves a line.

Usage: tuning_script.py MODEL DATA SECONDS_A_BATCH {new,resume} STRATEGY WORKERS

The model is an ONNX file: PyTorch would be imported for seconds in every process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import psutil
import pytest
from quick_runs import give_nominal_times

from neural_mp import ExitPolicy, MixedPrecision

if TYPE_CHECKING:
    from neural_mp.testing import Split

#: Where evaluations leave their lines.
EVALUATIONS = "evaluations.txt"


class CountingAccuracy:
    """Writes a line when an evaluation begins and one when it ends, in whatever process."""

    def __init__(self, pause: float) -> None:
        self.about = {"pause": pause}  # no option: it says nothing of what is measured
        self.file = Path(EVALUATIONS).resolve()  # processes of a cluster run in other folders

    def _note(self, event: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()} {event}\n")

    def reset(self) -> None:
        self.right = self.all = 0
        self._note("begin")

    def update(self, preds, labels) -> None:
        time.sleep(self.about["pause"])
        self.right += int((preds.argmax(1) == labels).sum())
        self.all += len(labels)

    def result(self) -> float:
        self._note("end")
        return self.right / self.all


def evaluations(folder: Path) -> list[tuple[str, str]]:
    """The process and the word of every line so far."""
    file = folder / EVALUATIONS
    lines = file.read_text().splitlines() if file.exists() else []
    return [(process, event) for process, event in (line.split() for line in lines)]


@dataclass(frozen=True)
class Resumed:
    """What came of a run that was killed.

    Attributes:
        outcome: what the process that resumed it printed.
        ended: evaluations that had ended when it was killed.
        begun: evaluations that were begun after that.
        left: processes of the killed run that do not end.
    """

    outcome: dict[str, Any]
    ended: int
    begun: int
    left: list[str]

    @property
    def repeated(self) -> int:
        """Evaluations that were begun though they had ended before; FP32 has one, too."""
        return self.begun - (1 + self.outcome["trials"] - self.ended)


def write_inputs(folder: Path, model: onnx.ModelProto, split: Split) -> None:
    """Write what the script reads."""
    onnx.save(model, folder / "net.onnx")
    np.savez(folder / "data.npz", images=split.images, labels=split.labels)


def killed_and_resumed(
    folder: Path, strategy: str, workers: str, least: int = 4, pause: float = 0.05
) -> Resumed:
    """Kill a run in the middle of a trial, and have another process resume it, alone.

    Args:
        folder: holds `net.onnx` and `data.npz`; see `write_inputs`.
        strategy: that of the run.
        workers: the same, as a word.
        least: evaluations that must have ended before, that of FP32 among them.
        pause: seconds that a batch takes at least.
    """

    def command(pause: float, mode: str, workers: str) -> list[str]:
        net = str(folder / "net.onnx")  # nodes of a cluster have working directories of their own
        arguments = (net, "data.npz", str(pause), mode, strategy, workers)
        return [sys.executable, __file__, *arguments]

    process = subprocess.Popen(
        command(pause, "new", workers), cwd=folder, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 600
    while True:
        events = evaluations(folder)
        latest, ended = dict(events), [event for _, event in events].count("end")
        workers_words = {event for pid, event in latest.items() if pid != str(process.pid)}
        # Who has another plan has handed over what came of the one before.
        if ended >= least and (workers_words or set(latest.values())) == {"begin"}:
            break
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = subprocess.run(
        command(0, "resume", "1"), cwd=folder, check=True, capture_output=True, text=True
    )
    new_events = [event for pid, event in evaluations(folder) if pid not in latest]
    # On a busy machine, workers may end after a short run that began after them.
    deadline = time.monotonic() + 600
    while survivors := [pid for pid in latest if psutil.pid_exists(int(pid))]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return Resumed(json.loads(resumed.stdout), ended, new_events.count("begin"), survivors)


def main() -> None:
    model, data, pause, mode, strategy, workers = sys.argv[1:7]
    give_nominal_times(pytest.MonkeyPatch())
    arrays = np.load(data)
    batches = [
        (arrays["images"][start : start + 100], arrays["labels"][start : start + 100])
        for start in range(0, len(arrays["labels"]), 100)
    ]
    converter = MixedPrecision()
    converter.model = model
    converter.precisions = "int8"
    converter.strategy = strategy
    converter.objective = "modelsize"  # latencies this short are the machine's mood
    converter.metric = CountingAccuracy(float(pause))
    converter.eval_dataloader = batches
    converter.exit_policy = ExitPolicy(max_trials=10)
    converter.workers = workers
    converter.resume = mode == "resume"
    result = converter()
    outcome = {
        "met": result.met,
        "trials": len(result.trials),
        "plans": len({trial.plan for trial in result.trials}),
        "int8": result.plan.counts().get("int8", 0),
        "accuracy": result.report.accuracy,
    }
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
