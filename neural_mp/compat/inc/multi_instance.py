"""One model run by several processes at once, each on cores of its own."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from loky import ProcessPoolExecutor

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel, load
from neural_mp.api.saved_model import is_saved_model
from neural_mp.errors import TuningError
from neural_mp.util.processes import restore_environment, worker_environment
from neural_mp.util.pytree import count_samples

#: Seconds that an instance waits for the others to be ready.
_PATIENCE = 600.0


@dataclass(frozen=True)
class Job:
    """What every instance does.

    Attributes:
        model: the framework's object, or a path.
        batches: the inputs of batches.
        warmup, iterations: batches that are not counted, and those that are.
        inputs, outputs: names of tensors, where the model does not say them.
    """

    model: Any
    batches: Sequence[Any]
    warmup: int
    iterations: int
    inputs: Sequence[str] | None = None
    outputs: Sequence[str] | None = None


@dataclass(frozen=True)
class Performance:
    """How fast a model is.

    Attributes:
        batch_size: samples in a batch.
        seconds: instance → what every batch took.
        cores: instance → the cores it ran on; empty where it had all.
    """

    batch_size: int
    seconds: tuple[tuple[float, ...], ...]
    cores: tuple[tuple[int, ...], ...] = ()

    @property
    def latency(self) -> float:
        """Seconds a batch, the median of all instances."""
        return float(np.median(np.concatenate(self.seconds)))

    @property
    def throughput(self) -> float:
        """Samples a second, of all instances together."""
        return sum(self.batch_size * len(taken) / sum(taken) for taken in self.seconds)

    def words(self) -> list[str]:
        """The same in lines of text."""
        count = len(self.seconds)
        cores = f", {len(self.cores[0])} cores each" if self.cores else ""
        return [
            f"Batch size = {self.batch_size}",
            f"Latency: {1000 * self.latency / self.batch_size:.3f} ms",
            f"Throughput: {self.throughput:.3f} samples/sec"
            + (f" ({count} instances{cores})" if count > 1 else ""),
        ]


def loaded_model(
    model: Any, inputs: Sequence[str] | None = None, outputs: Sequence[str] | None = None
) -> AnyModel:
    """A model, or what was saved of one, with its adaptor.

    Raises:
        ModelLoadError: it cannot be read.
    """
    if isinstance(model, OptimizedModel):
        return model.loaded
    if is_saved_model(model):
        return load(model).loaded
    return load_source(model, None, list(inputs or ()) or None, outputs=outputs)


def run_here(job: Job) -> Performance:
    """One instance, in this process, on all its cores."""
    return Performance(count_samples(job.batches[0]), (_timed(job),))


def run_instances(job: Job, shares: Sequence[Sequence[int]]) -> Performance:
    """Several instances at once.

    Args:
        job: what every one of them does.
        shares: the cores of every instance.

    Raises:
        TuningError: an instance ended before it was done.
    """
    threads = {name: str(len(shares[0])) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with tempfile.TemporaryDirectory() as scratch:
        ready, saved = Path(scratch) / "ready", Path(scratch) / "model"
        ready.mkdir()
        if isinstance(job.model, OptimizedModel):  # it may hold what cannot be sent
            job.model.save(saved)
            job = replace(job, model=str(saved))
        task = cloudpickle.dumps(job)
        with ProcessPoolExecutor(len(shares), env=worker_environment(threads)) as pool:
            runs = [
                pool.submit(_instance, task, list(cores), ready, len(shares)) for cores in shares
            ]
            found = [run.result() for run in runs]
    return Performance(
        count_samples(job.batches[0]), tuple(found), tuple(tuple(cores) for cores in shares)
    )


def _instance(task: bytes, cores: list[int], folder: Path, count: int) -> tuple[float, ...]:
    restore_environment()
    # First of all: frameworks look at it when they make their threads.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    job: Job = cloudpickle.loads(task)

    def all_are_ready() -> None:
        (folder / str(cores[0])).touch()
        deadline = time.monotonic() + _PATIENCE
        while len(list(folder.iterdir())) < count:
            if time.monotonic() > deadline:
                raise TuningError("an instance waited for the others in vain")
            time.sleep(0.01)

    return _timed(job, all_are_ready)


def _timed(job: Job, before: Callable[[], object] = lambda: None) -> tuple[float, ...]:
    """Seconds of every batch that counts."""
    model = loaded_model(job.model, job.inputs, job.outputs)
    batches = itertools.cycle(job.batches)
    for batch in itertools.islice(batches, max(1, job.warmup)):
        model(batch)
    before()
    taken = []
    for batch in itertools.islice(batches, job.iterations):
        start = time.perf_counter()
        model(batch)
        taken.append(time.perf_counter() - start)
    return tuple(taken)
