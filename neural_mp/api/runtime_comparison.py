"""Comparison of a model in other runtimes: its outputs, and a hint at a faster one in FP32."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.adaptors.transfer import (
    TransferFile,
    list_reading_runtimes,
    transfer_file,
    transfer_model,
)
from neural_mp.errors import NeuralMPError, one_line
from neural_mp.io.measurement_cache import MeasurementCache
from neural_mp.profiling import estimate_latency_ratio, estimate_uncontended_latency
from neural_mp.runs.report import RuntimeHint
from neural_mp.tuning.measurement.objectives import Measurement
from neural_mp.util.batch_cache import copy_batch, count_batch_bytes
from neural_mp.util.json_fields import to_plain
from neural_mp.util.noise import compute_mean_nsr, nsr_to_decibels
from neural_mp.util.pytree import (
    batch_size_of,
    build_output_structure,
    convert_to_numpy,
    tree_leaves,
)
from neural_mp.util.system.environment import read_package_versions
from neural_mp.util.text import describe_value_shape
from neural_mp.util.validators import optional, record

logger = logging.getLogger(__name__)

#: Speedup over the source, at its lower bound, from which a runtime is worth a hint.
MIN_HINTED_SPEEDUP = 1.2
#: Seconds that transfer and runs may cost each, or fraction of the run.
_SECONDS, _SECONDS_OF_RUNS, _SHARE = 5.0, 1.0, 0.1
#: Runs of every model, for verification, warm-up and measurement.
_RUNS = 6
#: Cost of the transfer to other runtimes, in durations of loading the model.
_TRANSFER_COST = 2.0
_KEY = "runtime hint"
_CACHED = record({"hint": optional(RuntimeHint.from_dict)})
#: SQNR in dB that FP32 in another runtime must reach, with the source as reference.
MIN_RUNTIME_SQNR_DB = 90.0
#: Largest fraction of integers or booleans that may differ, where rounding decides a near tie.
_MAX_DIFFERENT = 1e-3
#: Sizes of batches on which runtimes must agree, at least.
_LEAST_SIZES = 2
#: Maximum bytes of the batches whose outputs are kept for further runtimes.
MAX_REFERENCE_BYTES = 256 << 20


@dataclass
class ReferenceOutputs:
    """Batches on which runtimes must agree, each with the outputs of the source.

    The source runs once on a batch, whatever the number of runtimes, unless the batches before and
    their outputs exceed `limit`. Runtimes differ in what ops make of NaN, so batches are without
    damaged samples.

    Attributes:
        source: the model in its own framework.
        batches: returns the inputs of batches that the source accepts.
        optional: returns small batches, left out if the source does not run on them.
        limit: maximum bytes that are kept.
        max_seconds: maximum CPU seconds of the source on a batch, once small batches of two sizes
            were compared.
    """

    source: AnyModel
    batches: Callable[[], Iterable[Any]]
    optional: Callable[[], Iterable[Any]] = tuple
    limit: int = MAX_REFERENCE_BYTES
    max_seconds: float = math.inf
    _kept: list[tuple[Any, Any]] = field(default_factory=list)
    _bytes: int = 0
    _is_complete: bool = False

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        yield from tuple(self._kept)
        if self._is_complete:
            return
        for inputs in islice(
            self.source.drop_damaged_samples(self._read_inputs()), len(self._kept), None
        ):
            outputs = next((ran for small, ran, _ in self._small if small is inputs), None)
            if outputs is None:
                inputs = copy_batch(inputs)
                outputs = self.source(inputs)
            outputs = copy_batch(outputs)  # a model may return the same buffers again
            self._keep_outputs(inputs, outputs)
            yield inputs, outputs
        self._is_complete = self._bytes <= self.limit

    def _read_inputs(self) -> Iterator[Any]:
        seconds = {batch_size_of(inputs): spent for inputs, _, spent in self._small}
        yield from (inputs for inputs, _, _ in self._small)
        for inputs in self.batches():
            size = batch_size_of(inputs)
            is_needed = len(seconds) < _LEAST_SIZES
            if is_needed or min(seconds.values()) * size <= self.max_seconds:
                yield inputs

    @cached_property
    def _small(self) -> list[tuple[Any, Any, float]]:
        """The small batches that the source runs on: inputs, outputs, CPU seconds of a sample."""
        ran = []
        for inputs in self.optional():
            started = time.process_time()
            try:
                outputs = self.source(inputs)
            except Exception:
                # A model of a fixed batch size may fail in any way.
                logger.debug("another batch size does not run", exc_info=True)
                continue
            spent = time.process_time() - started
            outputs = copy_batch(outputs)  # a model may return the same buffers again
            ran.append((inputs, outputs, spent / max(1, batch_size_of(inputs))))
        return ran

    def _keep_outputs(self, inputs: object, outputs: object) -> None:
        self._bytes += count_batch_bytes(inputs) + count_batch_bytes(outputs)
        if self._bytes <= self.limit:
            self._kept.append((inputs, outputs))


def compare_outputs(
    reference: Iterable[tuple[Any, Any]], candidate: AnyModel
) -> tuple[float | None, str]:
    """Compare outputs with those of the source: `reference` has inputs and outputs of batches.

    Returns:
        The lowest SQNR over all batches in dB, None without float outputs; and the reason why the
        candidate is ruled out, or an empty text.
    """
    lowest: float | None = None
    for inputs, expected in reference:
        try:
            actual = candidate(inputs)
        except (NeuralMPError, RuntimeError, ValueError) as error:
            return lowest, f"fails on a batch that the source accepts: {one_line(error)}"
        reason = _describe_difference(expected, actual)
        if reason:
            return lowest, reason
        pairs = zip(_list_output_arrays(expected), _list_output_arrays(actual), strict=True)
        for reference, output in ((a, b) for a, b in pairs if a.dtype.kind == "f"):
            sqnr_db = nsr_to_decibels(compute_mean_nsr([reference], [output]))
            lowest = sqnr_db if lowest is None else min(lowest, sqnr_db)
    if lowest is not None and lowest < MIN_RUNTIME_SQNR_DB:
        return lowest, (
            f"the outputs must have an SQNR of at least {MIN_RUNTIME_SQNR_DB:g} dB relative to the "
            f"source, got {lowest:.1f} dB"
        )
    return lowest, ""


def _list_output_arrays(outputs: object) -> list[np.ndarray]:
    leaves = (leaf for leaf in tree_leaves(outputs, sort_keys=True) if leaf is not None)
    return [convert_to_numpy(leaf) for leaf in leaves]


def _describe_difference(expected: object, actual: object) -> str:
    """Return a difference of structure, names, dtypes, shapes or integers; empty without one."""
    if build_output_structure(expected) != build_output_structure(actual):
        return "the structure or the names of the outputs differ"
    for reference, output in zip(
        _list_output_arrays(expected), _list_output_arrays(actual), strict=True
    ):
        if reference.dtype != output.dtype or reference.shape != output.shape:
            return (
                f"an output must be {reference.dtype}{list(reference.shape)}, got "
                f"{output.dtype}{list(output.shape)}"
            )
        if reference.dtype.kind != "f" and reference.size:
            different = float(np.mean(reference != output))
            if different > _MAX_DIFFERENT:
                return f"{different:.2%} of the values of an integer output differ"
    return ""


@dataclass(frozen=True)
class HintSearch:
    """Search for a runtime that is faster than the source in FP32.

    Attributes:
        source: the model in its own framework.
        measurement: latency measurement of the run.
        cache: measurements of the model on this machine.
    """

    source: AnyModel
    measurement: Measurement
    cache: MeasurementCache

    def __call__(self, seconds: Mapping[str, float], latency: float) -> RuntimeHint | None:
        """Return the fastest other runtime if it gains enough; None if not, or too costly.

        Args:
            seconds: phase of the run → its duration.
            latency: seconds per batch of the source in FP32, or per token with a workload.
        """
        try:
            names = [
                name for name in list_reading_runtimes(self.source) if FRAMEWORKS[name].is_installed
            ]
            return self._cached_or_measured_hint(names, seconds, latency) if names else None
        except (Exception, KeyboardInterrupt):
            # Runtimes raise errors of any type, and the result of the run does not depend on them.
            logger.debug("no hint at another runtime", exc_info=True)
            return None

    def _cached_or_measured_hint(
        self, names: list[str], seconds: Mapping[str, float], latency: float
    ) -> RuntimeHint | None:
        cache = self.cache.scope_to(
            runtimes=json.dumps(read_package_versions(FRAMEWORKS[name].package for name in names)),
            inputs=describe_value_shape(self.measurement.inputs),
            **self.measurement.cache_conditions,
        )
        _, cached = cache.get_entry(_KEY, _CACHED)
        if cached is not None:
            return cached["hint"]
        share = _SHARE * sum(seconds.values())
        if _TRANSFER_COST * seconds.get("load", 0.0) > max(_SECONDS, share):
            return None
        if self._estimate_seconds(len(names), latency) > max(_SECONDS_OF_RUNS, share):
            return None
        hint = self._measure_hint(names)
        cache.put_entry(_KEY, {"hint": to_plain(hint)})
        return hint

    def _estimate_seconds(self, count: int, latency: float) -> float:
        """Return the seconds that all runs cost if the others are as fast as the source."""
        if self.measurement.workload is not None:
            started = time.perf_counter()
            self.source(self.measurement.inputs)
            latency = time.perf_counter() - started
        return _RUNS * (1 + count) * latency

    def _measure_hint(self, names: list[str]) -> RuntimeHint | None:
        file = transfer_file(self.source)
        reference = [(self.measurement.inputs, self.source(self.measurement.inputs))]
        candidates = [self._transfer_and_verify(name, file, reference) for name in names]
        models = [model for model in candidates if model is not None]
        if not models:
            return None
        brief = replace(self.measurement, warmup=2, iterations=10, time_limit=1.0)
        own, *rounds = brief.measure_interleaved([self.source, *models])
        seconds, best = min(
            zip(rounds, models, strict=True), key=lambda pair: estimate_uncontended_latency(pair[0])
        )
        gain = estimate_latency_ratio(own, seconds)
        if gain.low < MIN_HINTED_SPEEDUP:
            return None
        return RuntimeHint(best.adaptor.framework, gain.value, gain.low, gain.high)

    def _transfer_and_verify(
        self, name: str, file: TransferFile, reference: Iterable[tuple[Any, Any]]
    ) -> AnyModel | None:
        """Return the model in another runtime; None if that computes other outputs, or fails."""
        try:
            model = transfer_model(self.source, name, file).prepare_for_streams(
                self.measurement.streams
            )
            _, reason = compare_outputs(reference, model)
        except Exception:
            # Of any type; another runtime may run the model.
            logger.debug("no hint at %s", name, exc_info=True)
            return None
        return None if reason else model
