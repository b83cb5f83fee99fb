"""Serve models of four runtimes while others are tuned and calls are interrupted.

    python tests/security/soak.py                    # one hour
    python tests/security/soak.py --seconds 60 --tunings 0

Threads call one model per runtime with inputs of several sizes; the main thread does so as well,
and is interrupted by signals at random moments; further threads tune models of every framework,
each in a workspace of its own. The exit code is 1 if an output differed from the first one, if a
tuning ended in another way than the first of its kind, if a call or tuning raised or did not
return, or if the memory of the process grew.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from neural_mp import MixedPrecision
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.util.system.memory import FREED

FRAMEWORKS = ("pytorch", "onnxrt", "openvino", "tensorflow")
WIDTH, CLASSES, IMAGES = 64, 10, 200
BATCH_SIZES = (1, 3, 8, 17)
#: Seconds of one call or tuning, after which the thread counts as blocked.
MAX_CALL_SECONDS, MAX_TUNING_SECONDS = 300.0, 1200.0
#: Part of the time after which the memory is measured for the first time.
WARM_UP_RATIO = 0.4
#: Bounds of the seconds to an interrupt.
INTERRUPT_SECONDS = (5e-5, 3e-3)

_draw = np.random.default_rng(0)
WEIGHTS = (
    _draw.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8,
    _draw.normal(size=(WIDTH, CLASSES)).astype(np.float32) / 8,
)
SAMPLES = _draw.normal(size=(IMAGES, WIDTH)).astype(np.float32)
LABELS = (np.maximum(SAMPLES @ WEIGHTS[0], 0) @ WEIGHTS[1]).argmax(1)


class AlarmError(Exception):
    """Raised by the signal handler."""


def build_source(framework: str, folder: Path) -> Any:
    """Return a net of two layers in a framework."""
    if framework == "tensorflow":
        import keras

        hidden = keras.layers.Dense(WIDTH, "relu", use_bias=False)
        net = keras.Sequential(
            [keras.Input((WIDTH,)), hidden, keras.layers.Dense(CLASSES, use_bias=False)]
        )
        net.set_weights(list(WEIGHTS))
        return net
    if framework == "pytorch":
        import torch

        net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH, bias=False),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, CLASSES, bias=False),
        )
        net.load_state_dict(
            {f"{2 * n}.weight": torch.from_numpy(w.T.copy()) for n, w in enumerate(WEIGHTS)}
        )
        return net.eval()
    return write_onnx_net(folder / "net.onnx")


def write_onnx_net(path: Path) -> Path:
    """Write the net as an ONNX file."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def describe(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])

    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["a"], "hidden"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("MatMul", ["b", "second"], ["y"], "scores"),
    ]
    weights = [
        numpy_helper.from_array(weight, name)
        for weight, name in zip(WEIGHTS, ("first", "second"), strict=True)
    ]
    graph = helper.make_graph(
        nodes, "net", [describe("x", WIDTH)], [describe("y", CLASSES)], weights
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def tune(framework: str, folder: Path) -> OptimizedModel:
    """Tune the net of a framework to the default accuracy target."""
    folder.mkdir(parents=True)
    converter = MixedPrecision(
        model=build_source(framework, folder),
        runtime="openvino" if framework == "openvino" else "source",
        precisions="int8",
        metric="accuracy",
        objective="modelsize",
        eval_dataloader=[(SAMPLES[i : i + 50], LABELS[i : i + 50]) for i in range(0, IMAGES, 50)],
        workspace=folder / "workspace",
        cache=False,
    )
    return converter()


@dataclass
class Soak:
    """Counts and failures of all threads.

    Attributes:
        models: framework → served model.
        outputs: framework and batch size → first output.
        counts: what was done → number of times.
        failures: descriptions, in the order of their appearance.
        begun: thread → what is under way, since when, and the seconds that are allowed.
    """

    models: dict[str, OptimizedModel]
    outputs: dict[tuple[str, int], Any] = field(default_factory=dict)
    accuracies: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    begun: dict[int, tuple[str, float, float]] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str) -> None:
        """Count an event."""
        with self.lock:
            self.counts[name] += 1

    @contextmanager
    def watch(self, name: str, seconds: float) -> Iterator[None]:
        """Note that a thread is busy; an exception, but for an interrupt, is a failure."""
        thread = threading.get_ident()
        self.begun[thread] = (name, time.monotonic(), seconds)
        try:
            yield
        except AlarmError:
            raise
        except Exception:  # noqa: BLE001 - any error is a finding
            self.failures.append(f"{name} raised\n{traceback.format_exc()}")
        finally:
            self.begun.pop(thread, None)

    def list_blocked(self) -> list[str]:
        """Return what has not returned in time."""
        now = time.monotonic()
        return [
            f"{name} did not return in {seconds:.0f} seconds"
            for name, begun, seconds in list(self.begun.values())
            if now - begun > seconds
        ]

    def call(self, framework: str, size: int) -> None:
        """Call a model, and compare the output with the first one."""
        output = self.models[framework](SAMPLES[:size])
        expected = self.outputs.setdefault((framework, size), output)
        if not np.allclose(output, expected, rtol=1e-5, atol=1e-5):
            self.failures.append(f"a wrong output of {framework} for {size} samples")

    def serve(self, seed: int) -> None:
        """Call models in a thread until the end."""
        draw = random.Random(seed)
        while not self.ended.is_set():
            framework = draw.choice(list(self.models))
            with self.watch(f"a call of {framework}", MAX_CALL_SECONDS):
                self.call(framework, draw.choice(BATCH_SIZES))
            self.add("calls")
            time.sleep(draw.uniform(0, 0.02))

    def tune_in_turn(self, first: int, folder: Path) -> None:
        """Tune nets of all frameworks in a thread until the end."""
        for number in itertools.count(first):
            if self.ended.is_set():
                return
            framework = FRAMEWORKS[number % len(FRAMEWORKS)]
            with self.watch(f"a tuning of {framework}", MAX_TUNING_SECONDS):
                workspace = folder / f"{first}-{number}"
                accuracy = tune(framework, workspace).report.accuracy
                shutil.rmtree(workspace)
                if self.accuracies.setdefault(framework, accuracy) != accuracy:
                    self.failures.append(f"a tuning of {framework} ended at {accuracy}")
            self.add("tunings")

    def call_with_interrupts(self, seconds: float, draw: random.Random) -> None:
        """Call models for some seconds, interrupted at random moments."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            framework = draw.choice(list(self.models))
            try:
                with self.watch(f"an interrupted call of {framework}", MAX_CALL_SECONDS):
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(*INTERRUPT_SECONDS))
                    # Longer than the timer: an exception within a finalizer is lost.
                    limit = time.monotonic() + 3 * INTERRUPT_SECONDS[1]
                    while time.monotonic() < limit:
                        self.call(framework, draw.choice(BATCH_SIZES))
                        self.add("calls")
                    time.sleep(INTERRUPT_SECONDS[1])
            except AlarmError:
                self.add("interrupts")
            time.sleep(draw.uniform(0, 0.02))


def ring(*_: object) -> None:
    """Interrupt the main thread."""
    raise AlarmError


def read_memory_bytes() -> int:
    """Return the resident memory of this process, without what its allocator holds free."""
    gc.collect()
    FREED.return_memory()
    return psutil.Process().memory_info().rss


def run_soak(soak: Soak, seconds: float, workers: list[Callable[[], None]], seed: int) -> int:
    """Run all threads for some seconds; return the growth of the memory in bytes."""
    draw, base = random.Random(seed), 0
    threads = [threading.Thread(target=worker, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("soak", total=seconds)
        while (passed := time.monotonic() - begun) < seconds and not soak.list_blocked():
            soak.call_with_interrupts(min(2.0, seconds), draw)
            progress.update(bar, completed=passed)
            if passed > WARM_UP_RATIO * seconds and not base:
                base = read_memory_bytes()
    base = base or read_memory_bytes()  # a machine so slow that it was the first pass
    soak.ended.set()
    for thread in threads:
        while thread.is_alive() and not soak.list_blocked():
            thread.join(1.0)
    growth = read_memory_bytes() - base
    soak.failures += soak.list_blocked()
    return growth


def main() -> None:
    """Run the soak, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--threads", type=int, default=8, help="threads that call models")
    parser.add_argument("--tunings", type=int, default=3, help="tunings at once")
    parser.add_argument("--growth", type=float, default=5.0, help="most MB the memory may grow")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, ring)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        soak = Soak({kind: tune(kind, folder / kind) for kind in FRAMEWORKS})
        for framework, size in itertools.product(FRAMEWORKS, BATCH_SIZES):
            soak.call(framework, size)
        workers: list[Callable[[], None]] = []
        for number in range(arguments.threads):
            workers.append(lambda number=number: soak.serve(arguments.seed + number))
        for number in range(arguments.tunings):
            workers.append(lambda number=number: soak.tune_in_turn(number, folder))
        growth = run_soak(soak, arguments.seconds, workers, arguments.seed)
        blocked = bool(soak.list_blocked())
    table = Table("calls", "interrupts", "tunings", "failures", "growth in MB")
    numbers = [soak.counts[key] for key in ("calls", "interrupts", "tunings")]
    table.add_row(*map(str, (*numbers, len(soak.failures))), f"{growth / 1e6:.1f}")
    Console().print(table)
    for failure in soak.failures[:20]:
        print(failure)
    if blocked:
        faulthandler.dump_traceback()
    sys.stdout.flush()
    # Threads that are blocked must not end with the interpreter.
    os._exit(1 if soak.failures or growth > arguments.growth * 1e6 else 0)


if __name__ == "__main__":
    main()
