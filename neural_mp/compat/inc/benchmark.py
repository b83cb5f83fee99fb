"""`benchmark.fit`: latency, throughput and accuracy of a model, in one or several processes."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import cloudpickle
import numpy as np
from loky import ProcessPoolExecutor

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api import config_objects
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel, load
from neural_mp.api.saved_model import is_saved_model
from neural_mp.api.user_metrics import gather_metrics
from neural_mp.compat.inc.config import BenchmarkConfig
from neural_mp.compat.inc.model import Model, list_existing_ports, runnable
from neural_mp.compat.inc.script_log import logger
from neural_mp.compat.inc.user_objects import list_tensor_names
from neural_mp.config import Settings
from neural_mp.core.criterion import Deadline
from neural_mp.errors import ConfigurationError, DataError, TuningError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.evaluator import Evaluator
from neural_mp.util.pytree import batch_size_of
from neural_mp.util.system.processes import make_worker_environment, restore_environment

#: Default number of timed batches; INC times all data.
_MAX_BATCHES = 100
#: Longest time that an instance waits until the others are ready.
_READY_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Job:
    """Work of every instance.

    Attributes:
        model: the framework's object, or a path.
        batches: model inputs, one item per batch.
        warmup, iterations: numbers of untimed and of timed batches.
        inputs, outputs: names of tensors, if the model does not define them.
    """

    model: Any
    batches: Sequence[Any]
    warmup: int
    iterations: int
    inputs: Sequence[str] | None = None
    outputs: Sequence[str] | None = None


@dataclass(frozen=True)
class Performance:
    """Measured speed of a model.

    Attributes:
        batch_size: samples per batch.
        seconds: instance → seconds of every batch.
        cores: instance → its cores; empty if unrestricted.
    """

    batch_size: int
    seconds: tuple[tuple[float, ...], ...]
    cores: tuple[tuple[int, ...], ...] = ()

    def __iter__(self) -> Iterator[Any]:
        """Unpack as INC's results: accuracy (0), batch size, seconds of every batch."""
        return iter(
            (0.0, self.batch_size, [seconds for instance in self.seconds for seconds in instance])
        )

    @property
    def latency(self) -> float:
        """Seconds per batch: the mean over all instances, as in INC."""
        return float(np.mean(np.concatenate(self.seconds)))

    @property
    def throughput(self) -> float:
        """Samples per second, summed over all instances."""
        return sum(self.batch_size * len(seconds) / sum(seconds) for seconds in self.seconds)

    def log_lines(self) -> list[str]:
        """The results as INC logs them: of every instance, then of all together."""
        rows = [
            line
            for seconds in self.seconds
            for line in _format_speed_lines(self.batch_size, seconds)
        ]
        count = len(self.seconds)
        if count == 1:
            return rows
        cores = f" of {len(self.cores[0])} cores" if self.cores else ""
        return [
            *rows,
            f"Summary of {count} instances{cores}",
            f"Latency average [second/sample]: {self.latency / self.batch_size:.6f}",
            f"Throughput sum [samples/second]: {self.throughput:.3f}",
        ]


@dataclass(frozen=True)
class Accuracy:
    """Measured accuracy of a model.

    Attributes:
        value: the metric; of several unweighted metrics a list.
        batch_size: samples per batch.
        seconds: seconds of every batch.
    """

    value: float | list[float]
    batch_size: int
    seconds: tuple[float, ...]

    def __iter__(self) -> Iterator[Any]:
        """Unpack as INC's results: accuracy, batch size, seconds of every batch."""
        return iter((self.value, self.batch_size, list(self.seconds)))

    def log_lines(self) -> list[str]:
        """The result as INC logs it."""
        values = self.value if isinstance(self.value, list) else [self.value]
        return [
            f"Batch size = {self.batch_size}",
            "Accuracy is " + " ".join(f"{value:.4f}" for value in values),
        ]


def _format_speed_lines(batch_size: int, seconds: Sequence[float]) -> list[str]:
    latency = float(np.mean(seconds)) / batch_size
    return [
        f"Batch size = {batch_size}",
        f"Latency: {1000 * latency:.3f} ms",
        f"Throughput: {1 / latency:.3f} images/sec",
    ]


def log_result(result: Performance | Accuracy, heading: str) -> None:
    """Log a heading and the lines of a result."""
    for line in (heading, *result.log_lines()):
        logger.info(line)


def fit(
    model: object,
    conf: BenchmarkConfig | None = None,
    config: BenchmarkConfig | None = None,
    b_dataloader: object = None,
    b_func: Callable[[Any], Any] | None = None,
    **ignored: object,
) -> Performance | Any:
    """Measure the speed of a model.

    Args:
        model: the framework's object, a path, a `Model` or a result.
        conf: warmup, iterations, cores and instances. Several instances run at once, each in its
            own process on its own cores; their throughput is summed. One instance on all cores if
            the machine has fewer.
        config: alias of `conf`.
        b_dataloader: the batches.
        b_func: called with the framework's object in place of the measurement.
        **ignored: other arguments of INC's `fit`.

    Returns:
        The performance; with `b_func`, its result.

    Raises:
        DataError: there are no batches.
    """
    conf = conf or config or BenchmarkConfig()
    if b_func is not None:
        return b_func(Model(model).model)
    if b_dataloader is None:
        raise DataError("b_dataloader must be set to batches of model inputs, got None")
    performance = measure_speed(
        runnable(model),
        b_dataloader,
        conf.warmup,
        conf.iteration,
        *limit_instances(conf.cores_per_instance, conf.num_of_instance or 1),
        (list_tensor_names(conf.inputs), list_tensor_names(conf.outputs)),
    )
    log_result(performance, "benchmark result:")
    return performance


def measure_speed(
    model: object,
    loader: object,
    warmup: int,
    iterations: int,
    cores: int | None,
    instances: int,
    ports: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
) -> Performance:
    """Measure latency and throughput of a model.

    Args:
        model: the framework's object, or a path.
        loader: the batches; restarted if too few.
        warmup: number of untimed batches.
        iterations: number of timed batches; -1 for all, at most 100.
        cores: cores per instance; None to divide all.
        instances: number of concurrent processes.
        ports: names of inputs and outputs, if the model does not define them.
    """
    batches = list(itertools.islice(Batches(loader, "b_dataloader").iterate_inputs(), _MAX_BATCHES))
    count = iterations if iterations > 0 else len(batches)
    job = Job(model, batches, max(0, warmup), count, *ports)
    if instances == 1 and cores is None:  # in this process, on all its cores
        return Performance(batch_size_of(batches[0]), (_time_batches(job),))
    return run_instances(job, _split_cores(cores, instances))


def measure_accuracy(
    settings: Settings,
    model: object,
    loader: object,
    metric: object,
    postprocess: Callable[[Any], Any] | None,
) -> Accuracy:
    """Measure the accuracy of a model, an object or a path, on all data.

    `metric` and `postprocess` are those of the configuration if None.
    """
    batches = Batches(loader, "b_dataloader")
    metrics = gather_metrics(metric, settings, batches, None)
    if not metrics:
        raise ConfigurationError("metric must be set to measure accuracy, got none")
    postprocess = postprocess or config_objects.build_postprocess(settings)
    loaded = load_runnable(
        model, *list_existing_ports(model, settings.options.inputs, settings.options.outputs)
    )
    evaluator = Evaluator(batches, metrics, None, postprocess)
    timer = _Timer(loaded)
    accuracy = evaluator(cast(AnyModel, timer), Deadline())
    value = list(evaluator.values.values()) if metrics.every else accuracy
    return Accuracy(value, timer.batch_size, tuple(timer.seconds))


class _Timer:
    """A model that records the seconds of every call and the size of the first batch."""

    def __init__(self, model: AnyModel) -> None:
        self._model = model
        self.seconds: list[float] = []
        self.batch_size = 0

    def __call__(self, inputs: object) -> Any:
        """Run one batch."""
        started = time.perf_counter()
        outputs = self._model(inputs)
        self.seconds.append(time.perf_counter() - started)
        self.batch_size = self.batch_size or batch_size_of(inputs)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def limit_instances(cores: int | None, instances: int) -> tuple[int | None, int]:
    """Return cores per instance and instances; one instance on all cores if too many.

    Files and scripts are written for servers, and run unchanged on any machine.
    """
    available = len(_list_usable_cores())
    if (cores or 1) * instances <= available:
        return cores, instances
    logger.warning(
        "num_of_instance is %d with %d cores each, which exceeds the %d available cores; measuring "
        "one instance on all of them",
        instances,
        cores or 1,
        available,
    )
    return None, 1


def _list_usable_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return cores or list(range(os.cpu_count() or 1))


def _split_cores(cores: int | None, instances: int) -> list[list[int]]:
    available = _list_usable_cores()
    share = cores if cores is not None else len(available) // instances
    if share < 1 or share * instances > len(available):
        raise ConfigurationError(
            f"num_of_instance is {instances} with {share or 1} cores each, which exceeds the "
            f"{len(available)} available cores; set fewer"
        )
    return [available[number * share : (number + 1) * share] for number in range(instances)]


def load_runnable(
    model: object, inputs: Sequence[str] | None = None, outputs: Sequence[str] | None = None
) -> AnyModel:
    """Load a model or a saved result together with its adaptor."""
    if isinstance(model, OptimizedModel):
        return model.loaded
    if is_saved_model(model):
        return load(model).loaded
    return load_source(model, None, list(inputs or ()) or None, outputs=outputs)


def run_instances(job: Job, shares: Sequence[Sequence[int]]) -> Performance:
    """Run one instance at once on each set of cores."""
    threads = {name: str(len(shares[0])) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with tempfile.TemporaryDirectory() as scratch:
        ready, saved = Path(scratch) / "ready", Path(scratch) / "model"
        ready.mkdir()
        if isinstance(job.model, OptimizedModel):  # may contain objects that cannot be pickled
            job.model.save(saved)
            job = replace(job, model=str(saved))
        task = cloudpickle.dumps(job)
        with ProcessPoolExecutor(len(shares), env=make_worker_environment(threads)) as pool:
            runs = [
                pool.submit(_run_instance, task, list(cores), ready, len(shares))
                for cores in shares
            ]
            seconds = [run.result() for run in runs]
    return Performance(
        batch_size_of(job.batches[0]), tuple(seconds), tuple(tuple(cores) for cores in shares)
    )


def _run_instance(task: bytes, cores: list[int], folder: Path, count: int) -> tuple[float, ...]:
    restore_environment()
    # Before any import: frameworks read the affinity when they create their threads.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    job: Job = cloudpickle.loads(task)

    def all_are_ready() -> None:
        (folder / str(cores[0])).touch()
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        while len(list(folder.iterdir())) < count:
            if time.monotonic() > deadline:
                raise TuningError(
                    f"{count} instances must be ready within {_READY_TIMEOUT_SECONDS:g} seconds, "
                    f"got {len(list(folder.iterdir()))}"
                )
            time.sleep(0.01)

    return _time_batches(job, all_are_ready)


def _time_batches(job: Job, wait: Callable[[], object] = lambda: None) -> tuple[float, ...]:
    """Return the seconds of every timed batch."""
    model = load_runnable(job.model, job.inputs, job.outputs)
    batches = itertools.cycle(job.batches)
    for batch in itertools.islice(batches, max(1, job.warmup)):
        model(batch)
    wait()
    seconds = []
    for batch in itertools.islice(batches, job.iterations):
        start = time.perf_counter()
        model(batch)
        seconds.append(time.perf_counter() - start)
    return tuple(seconds)
