"""Tuning runs of a second or two, each in a process of its own, which an attack can kill.

The processes are forked off one that has imported all there is to import.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sqlite3
import time
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.errors import HistoryError, NeuralMPError
from neural_mp.runs.lease import RUN_TABLE
from neural_mp.testing import digits

logger = logging.getLogger(__name__)

#: In the environment of a run and of all that it starts: which run it is.
MARK = "NEURAL_MP_ATTACK_MARK"
NET, ARRAYS = "net.onnx", "net.npz"
_PASSES = "passes.txt"
_IMPORTS = (
    "attacks.short_runs",
    "neural_mp",
    "neural_mp.runs.history",
    "neural_mp.tuning.executors.local",
    "neural_mp.adaptors.onnxrt.adaptor",
    "onnxruntime",
    "optuna",
    "sqlalchemy",
    "scipy.stats",
    "neural_mp.strategies.optuna_search",
    "optuna.samplers",
    "loky",
    "sklearn.datasets",
)


@dataclass(frozen=True)
class Setting:
    """What a run is.

    Attributes:
        strategy: its strategy.
        workers: how many; 0 is the same as 1, and says so by leaving the option alone.
        framework: `onnx` or `pytorch`.
        pause: seconds that a pass over the data takes at least.
        trials: how many at most.
    """

    strategy: str = "basic"
    workers: int = 0
    framework: str = "onnx"
    pause: float = 0.05
    trials: int = 6


class Trouble:
    """What happens to the machine of a run; nothing here."""

    def before(self, tuner: MixedPrecision, folder: Path) -> None:
        """In the process of the run, when everything is set."""

    def after(self, result: OptimizedModel, folder: Path) -> None:
        """When there is a result."""

    def over(self) -> None:
        """Before it is written down what came of the run."""


class Noting:
    """Accuracy that notes in a file when a pass begins."""

    def __init__(self, folder: Path, pause: float) -> None:
        self.about = {"file": folder / _PASSES, "pause": pause}  # nothing that is measured
        self.right = self.all = 0

    def reset(self) -> None:
        self.right = self.all = 0

    def update(self, preds: Any, labels: Any) -> None:
        if not self.all:
            self._note()
        self.right += int((np.asarray(preds).argmax(1) == np.asarray(labels)).sum())
        self.all += len(labels)

    def _note(self) -> None:
        with self.about["file"].open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(self.about["pause"])

    def result(self) -> float:
        return self.right / self.all


@cache
def _fitted() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Weights and biases of three dense layers that know digits, one hard to quantize."""
    from sklearn.neural_network import MLPClassifier

    train, _ = digits()
    fitted = MLPClassifier((32, 16), max_iter=120, tol=0.01, random_state=0)
    fitted.fit(train.images.reshape(len(train), -1), train.labels)
    layers = tuple(zip(fitted.coefs_, fitted.intercepts_, strict=True))
    layers[0][0][:, 0] *= 1024  # one channel larger by far than the others
    layers[0][1][0] *= 1024
    layers[1][0][0] /= 1024
    return layers


def write_nets(folder: Path) -> None:
    """Write nets of these layers."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    layers = _fitted()
    nodes, weights, name = [], [], "x"
    for index, (kernel, bias) in enumerate(layers):
        weights.append(numpy_helper.from_array(kernel.astype(np.float32), f"w{index}"))
        weights.append(numpy_helper.from_array(bias.astype(np.float32), f"b{index}"))
        last = index == len(layers) - 1
        out = "scores" if last else f"a{index}"
        nodes.append(
            helper.make_node("Gemm", [name, f"w{index}", f"b{index}"], [out], f"dense{index}")
        )
        name = out
        if not last:
            nodes.append(helper.make_node("Relu", [out], [f"r{index}"], f"relu{index}"))
            name = f"r{index}"
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "digits",
        [value("x", TensorProto.FLOAT, ["n", 64])],
        [value("scores", TensorProto.FLOAT, ["n", 10])],
        weights,
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), folder / NET)
    kernels = {f"w{index}": pair[0] for index, pair in enumerate(layers)}
    biases = {f"b{index}": pair[1] for index, pair in enumerate(layers)}
    np.savez(folder / ARRAYS, **kernels, **biases)


def _model(folder: Path, framework: str) -> Any:
    if framework == "onnx":
        return str(folder / NET)
    import torch
    from torch import nn

    torch.set_num_threads(1)
    arrays = np.load(folder / ARRAYS)
    first, second, third = nn.Linear(64, 32), nn.Linear(32, 16), nn.Linear(16, 10)
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)
    for index, layer in enumerate((first, second, third)):
        layer.weight.data = torch.from_numpy(arrays[f"w{index}"].T.astype(np.float32).copy())
        layer.bias.data = torch.from_numpy(arrays[f"b{index}"].astype(np.float32))
    return net.eval()


def converter(nets: Path, folder: Path, setting: Setting) -> MixedPrecision:
    """What tunes as a setting says, with its workspace in a folder."""
    _, test = digits()
    images = test.images.reshape(len(test), -1)
    batches = [(images[s : s + 100], test.labels[s : s + 100]) for s in range(0, len(test), 100)]
    tuner = MixedPrecision(
        model=_model(nets, setting.framework),
        precisions="bf16" if setting.strategy == "auto_mixed_precision" else "int8",
        strategy=setting.strategy,
        objective="modelsize",  # latencies this short are the machine's mood
        metric=Noting(folder, setting.pause),
        eval_dataloader=batches,
        accuracy_criterion=AccuracyCriterion(0.01),
        exit_policy=ExitPolicy(max_trials=setting.trials),
        workspace=folder / "workspace",
    )
    if setting.workers:
        tuner.workers = setting.workers
    return tuner


def run(
    nets: Path, folder: Path, setting: Setting, resume: bool, mark: str, trouble: Trouble
) -> None:
    """Tune, in this process; a run that was killed before there was anything begins anew."""
    os.environ[MARK] = mark
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["FORCE_BF16"] = "1"
    os.setsid()
    # Who cleans up behind this process must not be who cleans up behind the attacker.
    resource_tracker._resource_tracker.__init__()
    _measure_briefly()
    tuner = converter(nets, folder, setting)
    tuner.resume = resume
    try:
        trouble.before(tuner, folder)
        result = _tuned(tuner, folder)
        trouble.after(result, folder)
    except Exception as error:
        logger.debug("a run failed", exc_info=True)
        kind = "refused" if isinstance(error, NeuralMPError) else "traceback"
        trouble.over()
        _write(folder / f"{mark}.json", {"end": kind, "words": repr(error)})
        raise SystemExit(1) from None
    trouble.over()
    _write(
        folder / f"{mark}.json",
        {
            "end": "right",
            "best": result.plan.to_dict(),
            "accuracy": result.report.accuracy,
            "met": result.met,
            "trials": [[trial.plan.to_dict(), trial.accuracy] for trial in result.trials],
            "warnings": list(result.report.warnings),
            "run": result.record.name,
        },
    )


def _tuned(tuner: MixedPrecision, folder: Path) -> OptimizedModel:
    """The result; a run that was killed before there was anything to resume begins anew."""
    try:
        return tuner()
    except HistoryError as error:
        if not tuner.resume or "no run to resume" not in str(error) or run_count(folder):
            raise
    tuner.resume = False
    return tuner()


def _write(file: Path, values: dict[str, Any]) -> None:
    scratch = file.with_suffix(".scratch")
    scratch.write_text(json.dumps(values))
    scratch.replace(file)


def _measure_briefly() -> None:
    from neural_mp.api import job_builder
    from neural_mp.tuning.listener import Listener
    from neural_mp.tuning.measurement import objectives

    objectives._LEAST_SECONDS = 0.001
    efforts = job_builder.EFFORT_LIMITS.items()
    job_builder.EFFORT_LIMITS = {e: replace(limits, patience=1.0) for e, limits in efforts}
    Listener.wants_hints = False  # no other runtime is timed at the end of a run


def started(
    nets: Path, folder: Path, setting: Setting, resume: bool, trouble: Trouble | None = None
) -> multiprocessing.Process:
    """A process that tunes, with its mark in `process.name`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTS])
    mark = f"{folder.name}-{time.monotonic_ns()}"
    arguments = (nets, folder, setting, resume, mark, trouble or Trouble())
    process = context.Process(target=run, args=arguments, name=mark)
    process.start()
    return process  # type: ignore[return-value]


def outcome(process: multiprocessing.Process, folder: Path) -> dict[str, Any] | None:
    """What came of a run, under `end` how it ended; None where it was killed."""
    file = folder / f"{process.name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def passes(folder: Path) -> int:
    """How many passes over the data have begun."""
    file = folder / _PASSES
    return len(file.read_text().splitlines()) if file.exists() else 0


@dataclass(frozen=True)
class Kept:
    """What a database holds.

    Attributes:
        trials: plan and accuracy of every trial, as JSON.
        baseline: whether FP32 was measured.
        words: what SQLite says of the file; `ok` if nothing is wrong.
    """

    trials: tuple[str, ...] = ()
    baseline: bool = False
    words: str = "ok"


def kept(folder: Path) -> Kept:
    """What the database of a run holds now."""
    file = folder / "workspace" / "history.db"
    if not file.exists():
        return Kept()
    with sqlite3.connect(file, timeout=30) as connection:
        integrity = connection.execute("PRAGMA integrity_check").fetchone()[0]
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        if "trial_user_attributes" not in names:
            return Kept(words=integrity)
        query = "SELECT value_json FROM trial_user_attributes WHERE key = 'trial'"
        texts = [json.loads(json.loads(row[0])) for row in connection.execute(query)]
        query = "SELECT COUNT(*) FROM study_user_attributes WHERE key = 'baseline'"
        baseline = bool(connection.execute(query).fetchone()[0])
    trials = tuple(as_text([text["plan"], text["accuracy"]]) for text in texts)
    return Kept(trials, baseline, integrity)


def as_text(trial: Any) -> str:
    """A plan with its accuracy."""
    return json.dumps(trial, sort_keys=True)


def run_count(folder: Path) -> int:
    """How many runs the database of a folder holds that say what they are about."""
    file = folder / "workspace" / "history.db"
    if not file.exists():
        return 0
    with sqlite3.connect(file, timeout=30) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        if RUN_TABLE not in names:
            return 0
        return int(connection.execute(f"SELECT COUNT(*) FROM {RUN_TABLE}").fetchone()[0])


def left(mark: str, pid: int, seconds: float = 120.0) -> list[str]:
    """What a run has left behind this many seconds after its end: processes and semaphores."""
    until = time.monotonic() + seconds
    while True:
        leftovers = [*_processes(mark), *_semaphores(pid)]
        if not leftovers or time.monotonic() > until:
            return leftovers
        time.sleep(0.1)


def _processes(mark: str) -> list[str]:
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except psutil.Error:
            continue
    return processes


def _semaphores(pid: int) -> list[str]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []
    return [path.name for path in folder.iterdir() if f"loky-{pid}-" in path.name]
