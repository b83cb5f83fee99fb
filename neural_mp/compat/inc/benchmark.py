"""`benchmark.fit`: how fast a model is, in one process or in several at once, and how accurate."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from neural_mp.api import config_objects
from neural_mp.api.user_metrics import gather_metrics
from neural_mp.compat.inc.config import BenchmarkConfig
from neural_mp.compat.inc.model import native, runnable
from neural_mp.compat.inc.multi_instance import (
    Job,
    Performance,
    loaded_model,
    run_here,
    run_instances,
)
from neural_mp.compat.inc.user_objects import tensor_names
from neural_mp.config import Settings
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.tuning.batches import Batches
from neural_mp.tuning.evaluator import Deadline, Evaluator

logger = logging.getLogger(__name__)

#: Batches that are timed where nothing is said: theirs goes through all data.
_MOST = 100
MODES = ("performance", "accuracy")


def fit(
    model: object,
    conf: BenchmarkConfig | None = None,
    config: BenchmarkConfig | None = None,
    b_dataloader: object = None,
    b_func: Callable[[Any], Any] | None = None,
    **ignored: object,
) -> Performance | Any:
    """Measure how fast a model is.

    Args:
        model: the framework's object, a path, a `Model` or a result.
        conf: warmup, iterations, cores and instances; several instances run at once, each in a
            process of its own on cores of its own, and their throughput is summed.
        config: another name for it.
        b_dataloader: batches to run it on.
        b_func: called with the model in place of all this.
        **ignored: what their `fit` takes for other purposes.

    Returns:
        What was found; of `b_func`, what it returns.

    Raises:
        ConfigurationError: there are fewer cores than the instances need.
        DataError: there are no batches.
    """
    conf = conf or config or BenchmarkConfig()
    if b_func is not None:
        return b_func(native(model))
    if b_dataloader is None:
        raise DataError("benchmark.fit needs b_dataloader, batches to run the model on")
    return timed(
        runnable(model),
        b_dataloader,
        conf.warmup,
        conf.iteration,
        conf.cores_per_instance,
        conf.num_of_instance or 1,
        (tensor_names(conf.inputs), tensor_names(conf.outputs)),
    )


def timed(
    model: object,
    loader: object,
    warmup: int,
    iterations: int,
    cores: int | None,
    instances: int,
    ports: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
) -> Performance:
    """Latency and throughput of a model.

    Args:
        model: the framework's object, or a path.
        loader: batches to run it on; they are begun again where they end too early.
        warmup: batches that are not counted.
        iterations: batches that are; -1 for as many as there are, up to a hundred.
        cores: how many an instance has; None for all.
        instances: processes that run at once.
        ports: names of inputs and outputs, where the model does not say them.

    Raises:
        ConfigurationError: there are fewer cores than the instances need.
        DataError: there are no batches.
    """
    batches = list(itertools.islice(Batches(loader, "b_dataloader").inputs(), _MOST))
    count = iterations if iterations > 0 else len(batches)
    job = Job(model, batches, max(0, warmup), count, *ports)
    found = (
        run_here(job)
        if instances == 1 and cores is None
        else run_instances(job, _shares(cores, instances))
    )
    for line in found.words():
        logger.info(line)
    return found


def measured(
    settings: Settings,
    model: object,
    mode: str,
    loader: object,
    function: Callable[[Any], Any] | None,
    metric: object,
    postprocess: Callable[[Any], Any] | None,
) -> Any:
    """What `Benchmark` of version 1 finds.

    Args:
        settings: the configuration.
        model: the framework's object, or a path.
        mode: `performance` or `accuracy`.
        loader: batches; None for those that the configuration describes.
        function: called with the model in place of all else.
        metric: None for that of the configuration.
        postprocess: None for that of the configuration.

    Raises:
        ConfigurationError: the mode is neither, or nothing says which metric.
        DataError: there are no batches.
    """
    if mode not in MODES:
        raise ConfigurationError(f"mode must be {' or '.join(MODES)}, got {mode!r}")
    if function is not None:
        return function(model)
    if loader is None and mode == "performance":
        loader = config_objects.loader(settings, config_objects.PERFORMANCE)
    if loader is None:
        loader = config_objects.loader(settings, config_objects.ACCURACY)
    if loader is None:
        raise DataError(f"there is nothing to measure {mode} on: set b_dataloader")
    if mode == "performance":
        wanted = settings.evaluation.performance
        return timed(model, loader, wanted.warmup, wanted.iteration, wanted.cores_per_instance, 1)
    return _accuracy(settings, model, Batches(loader, "b_dataloader"), metric, postprocess)


def _accuracy(
    settings: Settings,
    model: object,
    batches: Batches,
    metric: object,
    postprocess: Callable[[Any], Any] | None,
) -> float | list[float]:
    """The accuracy; of several metrics without weights, the value of each in a list, as there."""
    metrics = gather_metrics(metric, settings, batches, None)
    if not metrics:
        raise ConfigurationError("there is no metric to measure accuracy by: set metric")
    postprocess = postprocess or config_objects.postprocess(settings)
    loaded = loaded_model(model, settings.model.inputs or None, settings.model.outputs or None)
    evaluator = Evaluator(batches, metrics, None, postprocess)
    accuracy = evaluator(loaded, Deadline())
    return list(evaluator.values.values()) if metrics.every else accuracy


def _shares(cores: int | None, instances: int) -> list[list[int]]:
    """The cores of every instance, each its own."""
    there = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    there = there or list(range(os.cpu_count() or 1))
    each = cores if cores is not None else len(there) // instances
    if each < 1 or each * instances > len(there):
        raise ConfigurationError(
            f"num_of_instance is {instances} with {each or 1} cores each, and there are "
            f"{len(there)} cores"
        )
    return [there[number * each : (number + 1) * each] for number in range(instances)]
