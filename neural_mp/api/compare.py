"""Comparison of two models of one origin on the user's data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from neural_mp.adaptors.common.naming import find_source_op
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.api.input_data import DEFAULT_SAMPLES, iterate_file_inputs, read_first_inputs
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel, load
from neural_mp.api.saved_model import is_saved_model
from neural_mp.core.plan import PrecisionPlan
from neural_mp.io.limits import trusting
from neural_mp.tuning.evaluation.batches import Batches, FirstBatch
from neural_mp.tuning.measurement.comparison import Comparison, compare_models
from neural_mp.util.user_calls import ReraiseUserErrors

#: A model, and its plan if known.
_Taken = tuple[AnyModel, PrecisionPlan | None]


@ReraiseUserErrors()
def compare(a: object, b: object, batches: object, *, framework: str | None = None) -> Comparison:
    """Compare two models of one origin: their outputs, and each op.

    Args:
        a: reference model, e.g. the FP32 model: an object of its framework, a file, a folder
            written by `OptimizedModel.save`, or an `OptimizedModel`.
        b: model to compare with `a`, e.g. the conversion of `a`; same types as `a`.
        batches: inputs, or pairs of inputs and labels: a dataloader, a list of batches, or one
            batch as an array. A generator is read once and not cached.
        framework: framework of the models; default: detected.

    Returns:
        The comparison over all batches.

    Raises:
        ComparisonError: the models are not of one origin.
        DataError: the batches are empty, or a model fails on a batch.
        ModelLoadError: a model cannot be loaded.
    """
    begin, walked = _split_first_batch(batches)

    def load_pair_for_batch(first: FirstBatch) -> tuple[_Taken, _Taken]:
        reference, candidate = (
            _load_model_and_plan(source, framework, first.inputs) for source in (a, b)
        )
        if begin.is_ambiguous:
            with begin.blame_batch():
                reference[0](first.inputs)
        return reference, candidate

    reference, candidate = begin.choose_reading(load_pair_for_batch)
    walked.reading = begin.reading
    with walked.blame_batch():
        scaled = _differently_scaled_ops(reference, candidate)
        return compare_models(reference[0], candidate[0], walked.iterate_inputs(), scaled)


@ReraiseUserErrors()
def compare_files(
    a: str,
    b: str,
    data: str | Path | None = None,
    *,
    samples: int = DEFAULT_SAMPLES,
    batch_size: int | None = None,
    framework: str | None = None,
    inputs: object = None,
    trust: Iterable[str] = (),
) -> Comparison:
    """Compare two models given by name; see `compare`.

    `a` and `b` are model files, saved folders, or `module:attribute`; see `iterate_file_inputs`.
    """
    example = (
        read_first_inputs(data, batch_size, trust)
        if data is not None and inputs is None
        else inputs
    )
    with trusting(trust):
        reference, candidate = (
            _load_model_and_plan(source, framework, example) for source in (a, b)
        )
    batches = iterate_file_inputs(data, reference[0], batch_size, samples, trust)
    with batches.blame_batch():
        scaled = _differently_scaled_ops(reference, candidate)
        return compare_models(reference[0], candidate[0], batches, scaled)


def _split_first_batch(batches: object) -> tuple[Batches, Batches]:
    """Return the first batch and all batches; a generator can be read only once."""
    if hasattr(batches, "shape"):
        batches = [batches]
    if not isinstance(batches, Iterator):
        reusable = Batches(batches, "batches")
        return reusable, reusable
    begin = list(itertools.islice(batches, 1))
    whole = Batches(lambda: itertools.chain(begin, batches), "batches")
    return Batches(begin, "batches"), whole


def _load_model_and_plan(source: object, framework: str | None, example: object) -> _Taken:
    if isinstance(source, str | Path) and is_saved_model(source):
        source = load(source)
    if isinstance(source, OptimizedModel):
        return source.loaded, source.plan
    if isinstance(source, LoadedModel):
        return source, None
    return load_source(source, framework, None, example=example), None


def _differently_scaled_ops(reference: _Taken, candidate: _Taken) -> frozenset[str]:
    plans = [plan or PrecisionPlan({}) for _, plan in (reference, candidate)]
    corrections = [{op: c.corrections for op, c in plan.items() if c.corrections} for plan in plans]
    if corrections[0] == corrections[1]:
        return frozenset()
    untouched = next((model for model, plan in (reference, candidate) if plan is None), None)
    if untouched is not None:
        # A plan may be of another runtime, whose ops have other names.
        graph, scaled = untouched.adaptor.graph(untouched.held), frozenset[str]()
        for plan in plans:
            owners = {
                op: find_source_op(op, graph) for op, config in plan.items() if config.corrections
            }
            configs = {source: plan[op] for op, source in owners.items() if source is not None}
            scaled |= untouched.find_rescaled_ops(PrecisionPlan(configs))
        return scaled
    # Converted models lack the ops between two layers, so the inputs of the second layer decide.
    graph = reference[0].observable_ops
    corrected = [op for changes in corrections for op in changes if op in graph]
    return frozenset(source for op in corrected for source in graph[op].inputs)
