"""Outcome of conversions of a drawn net to plans drawn at random, in LiteRT."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from litert_drawn_nets import DrawnNet
from litert_files import find_contradiction
from litert_nets import run_signature

from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.adaptors.litert.model import LiteRtModel
from neural_mp.core.enums import CalibrationAlgorithm
from neural_mp.core.hardware import Hardware
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.space import TuningSpace, limit_to_reached, list_effective_ops
from neural_mp.testing.graphs.graph_check import MAX_INT8_NSR, Outcome, Verdict, nsr, outcome_of

#: Plans drawn for a net, beside that with all ops in INT8.
_PLANS = 3
#: Probability that an op of a drawn plan runs in INT8.
_INT8_RATIO = 0.7
Arrays = Mapping[str, np.ndarray]
Run = Callable[[Arrays], Arrays]
ADAPTOR = LiteRtAdaptor()


def check_net(net: DrawnNet, machine: Hardware | None = None) -> Outcome:
    """Convert a net to several plans; return the first failure, else the first outcome.

    Checked are the types of tensors in the file, noise, outputs in a plain interpreter, and outputs
    of the restored model.
    """
    return outcome_of(net, _check_plans, machine)


def _check_plans(net: DrawnNet, machine: Hardware) -> Outcome:
    model = ADAPTOR.load(net.content)
    size = _find_batch_size(model)
    parts = [part for feeds in net.feeds for part in split_feeds(feeds, size)]
    space = ADAPTOR.space(model, machine).restricted_to([Precision.INT8])
    observed = ADAPTOR.observe(model, [_order(model, part) for part in parts], space)
    space = limit_to_reached(space, observed.ranges)
    reference = partial(run_in_parts, partial(run_signature, net.content), net.batch)
    first = None
    for number, plan in enumerate(_draw_plans(space)):
        resolved = space.resolve(plan)
        converted = ADAPTOR.convert(model, resolved, observed, space)
        content = ADAPTOR.native(converted)
        planned = list_effective_ops(space, resolved)
        words = find_contradiction(planned, ADAPTOR.native(model), content)
        if words:
            return Outcome(Verdict.WRONG_KERNEL, f"plan {number}: {words}")
        with tempfile.TemporaryDirectory() as folder:
            ADAPTOR.save(converted, Path(folder))
            restored = ADAPTOR.restore(Path(folder))
        runs = _Runs(
            reference,
            *(partial(run_in_parts, partial(_predict, one), size) for one in (converted, restored)),
            partial(run_in_parts, partial(run_signature, content), size),
        )
        words = _find_difference(net, runs)
        if words:
            return Outcome(Verdict.WRONG_NUMBERS, f"plan {number}: {words}")
        lowered = Verdict.RIGHT if resolved.has_low_precision else Verdict.UNCHANGED
        first = first or Outcome(lowered)
    assert first is not None
    return first


@dataclass(frozen=True)
class _Runs:
    """Functions of inputs by name: the given file, and three runs of the converted one."""

    reference: Run
    converted: Run
    restored: Run
    plain: Run


def _find_batch_size(model: LiteRtModel) -> int | None:
    """Return the number of samples that a model is fixed to."""
    return model.signature.inputs[0].shape[0]


def split_feeds(feeds: Arrays, size: int | None) -> Iterator[Arrays]:
    """Yield parts of a batch with a number of samples each; None for the whole."""
    samples = len(next(iter(feeds.values())))
    for start in range(0, samples, size or samples):
        yield {name: array[start:][: size or samples] for name, array in feeds.items()}


def run_in_parts(run: Run, size: int | None, feeds: Arrays) -> Arrays:
    """Return the outputs of a batch that is run in parts."""
    return _join([run(part) for part in split_feeds(feeds, size)])


def _order(model: LiteRtModel, feeds: Arrays) -> list[np.ndarray]:
    """Return inputs in the order of a signature."""
    return [feeds[port.name] for port in model.signature.inputs]


def _predict(model: LiteRtModel, feeds: Arrays) -> Arrays:
    predicted = ADAPTOR.predict(model, _order(model, feeds))
    arrays = predicted if isinstance(predicted, list) else [predicted]
    return dict(zip((port.name for port in model.signature.outputs), arrays, strict=True))


def _draw_plans(space: TuningSpace) -> Iterator[PrecisionPlan]:
    """Yield the plan with as much INT8 as possible, and plans drawn op by op."""
    yield space.fastest_plan()
    random = np.random.default_rng(0)
    for _ in range(_PLANS):
        configs = {}
        for op in space.graph:
            lower = list(filter(_is_drawable, space.capabilities[op.name].configs))
            if lower and random.random() < _INT8_RATIO:
                configs[op.name] = lower[random.integers(len(lower))]
        yield space.fp32_plan().replacing(configs)


def _is_drawable(config: OpConfig) -> bool:
    """Whether a configuration is lower than float, and clips no value of the calibration."""
    if config.precision is Precision.FP32 or config.needs_data:
        return False
    return config.activation is None or config.activation.algorithm is CalibrationAlgorithm.MINMAX


def _find_difference(net: DrawnNet, runs: _Runs) -> str:
    """Return how outputs differ from float, or from those of other readers; "" if they do not."""
    single = {name: array[:1] for name, array in net.feeds[0].items()}
    whole = [_compare_readers(runs, feeds) for feeds in net.feeds]
    partial_batches = [] if net.batch and net.batch > 1 else [_compare_readers(runs, single)]
    for words, _ in (*whole, *partial_batches):
        if words:
            return words
    expected = _join([runs.reference(feeds) for feeds in net.feeds])
    outputs = _join([arrays for _, arrays in whole])
    if outputs.keys() != expected.keys():
        return f"outputs are {', '.join(outputs)}, not {', '.join(expected)}"
    for name, array in outputs.items():
        if array.dtype != expected[name].dtype:
            return f"{name} is {array.dtype}, not {expected[name].dtype}"
        noise = nsr(expected[name], array)
        if not noise <= MAX_INT8_NSR:
            return f"{name} has an NSR of {noise:.2g}"
    return ""


def _join(batches: list[Arrays]) -> Arrays:
    """Return the outputs of batches, one behind the other."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _compare_readers(runs: _Runs, feeds: Arrays) -> tuple[str, Arrays]:
    """Return how the outputs of other readers differ, and the outputs."""
    outputs = runs.converted(feeds)
    others = {"plain interpreter": runs.plain(feeds), "restored model": runs.restored(feeds)}
    for reader, arrays in others.items():
        for name, array in outputs.items():
            if name not in arrays or not np.array_equal(arrays[name], array):
                return f"{name} differs in the {reader}", outputs
    return "", outputs
