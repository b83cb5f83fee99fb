"""Trained simulations as results of another runtime, with the trained numbers.

Tensors and ops of both runtimes are paired by their values on one batch: converters rename, fuse
and reorder ops, but the floats stay equal up to rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from neural_mp.adaptors.common.optional import require_part
from neural_mp.adaptors.common.simulation import TrainedModel
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.adaptors.transfer import transfer_model
from neural_mp.api.replay import OpenedPlan, open_plan
from neural_mp.core.enums import Approach
from neural_mp.core.observations import Observations, Range
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS
from neural_mp.errors import DataError
from neural_mp.space import TuningSpace
from neural_mp.util.pytree import Array

#: Samples that pair tensors, and largest difference of equal ones, relative to their size.
_SAMPLES, _TOLERANCE = 2, 1e-4
#: Projections of a tensor that are compared.
_PROJECTIONS = 4


def convert_trained(
    opened: OpenedPlan, simulation: Any, runtime: str, data: list[Any] | None
) -> tuple[OpenedPlan, AnyModel]:
    """Return the plan of a trained simulation in another runtime, and the converted model.

    Ops run in INT8 if they did in the simulation. Ranges and scales of weights are the trained
    ones; tensors that only the runtime quantizes are calibrated with `data`, batches of inputs.

    Raises:
        ConversionError: the framework offers no trained model, or the runtime takes no scales.
        DataError: calibration data are needed and missing.
    """
    adaptor = opened.loaded.adaptor
    offered = require_part(adaptor.simulation, adaptor.framework, "training with a plan")
    read = require_part(offered.trained, adaptor.framework, "trained models for other runtimes")
    trained: TrainedModel[Any] = read(simulation)
    source = LoadedModel(adaptor, trained.model, boundary=opened.loaded.boundary)
    loaded = transfer_model(source, runtime)
    pairs = _pair_tensors(source, loaded, source.example_inputs(_SAMPLES))
    graph, effective = opened.tunable.space.graph, opened.resolved.effective
    scales = {
        op: trained.weight_scales[head]
        for op, tensors in pairs.items()
        for tensor in tensors
        if tensor in graph
        for head in [graph[tensor].fusion_group or tensor]
        if head in trained.weight_scales
    }
    loaded = replace(loaded, held=loaded.adaptor.with_weight_scales(loaded.held, scales))
    whole = open_plan(loaded, PrecisionPlan(), None, data)
    space, plan = whole.tunable.space, {}
    for op in space.tunable_ops:
        lowered = [t for t in pairs.get(op, ()) if effective.get(t) is Precision.INT8]
        config = _choose_config(space, op, opened.resolved.plan, lowered)
        if config is not None:
            plan[op] = config
    resolved = space.resolve(PrecisionPlan(plan))
    ranges: dict[str, Mapping[str, Range]] = {
        tensor: {str(algorithm): trained.ranges[name] for algorithm in RANGE_ALGORITHMS}
        for tensor, names in pairs.items()
        for name in names
        if name in trained.ranges
    }
    observations = Observations()
    if not ranges.keys() >= resolved.flow.scale_owner.keys():
        if data is None:
            raise DataError(
                f"{runtime} quantizes tensors that the training did not, which requires "
                f"calibration data, got none; set calibration to batches of inputs"
            )
        observations = whole.tunable.with_calibration(data).observations
    observations = replace(observations, ranges={**observations.ranges, **ranges})
    tunable = replace(whole.tunable, observations=observations)
    converted = tunable.convert_by_plan(resolved)
    return replace(whole, tunable=tunable, resolved=resolved), converted


def _choose_config(
    space: TuningSpace, op: str, plan: PrecisionPlan, lowered: list[str]
) -> OpConfig | None:
    """Return the config of an op of which some names in the source run in INT8."""
    alone = any(
        config is not None and config.approach is Approach.WEIGHT_ONLY
        for config in map(plan.get, lowered)
    )
    wanted = Approach.WEIGHT_ONLY if alone else Approach.STATIC
    configs = space.capabilities[op].configs if lowered else ()
    return next(
        (c for c in configs if c.precision is Precision.INT8 and c.approach is wanted), None
    )


def _pair_tensors(source: AnyModel, target: AnyModel, inputs: Any) -> dict[str, list[str]]:
    """Return tensor of the target → the tensors of the source with the same values."""
    by_size: dict[int, list[tuple[str, Array]]] = defaultdict(list)
    for name, projection in _iterate_projections(source, inputs):
        by_size[int(projection[-1])].append((name, projection))
    pairs: dict[str, list[str]] = {}
    for name, own in _iterate_projections(target, inputs):
        limit = _TOLERANCE * max(float(np.abs(own[:-1]).max()), 1e-12)
        pairs[name] = [
            other
            for other, projection in by_size[int(own[-1])]
            if float(np.abs(projection - own).max()) <= limit
        ]
    return pairs


def _iterate_projections(model: AnyModel, inputs: Any) -> Iterator[tuple[str, Array]]:
    """Yield tensor → its norm, products with fixed signs, and number of values."""
    adaptor = model.adaptor
    offered = require_part(adaptor.corrections, adaptor.framework, "corrections of layers")
    values = require_part(offered.values, adaptor.framework, "values of tensors")
    graph = adaptor.graph(model.held)
    names = [*graph.inputs, *(op.name for op in graph)]
    parts: dict[str, list[Array]] = defaultdict(list)
    fed = inputs if model.boundary is None else model.boundary.bind_arrays(inputs)
    for name, array in values(model.held, [fed], names):
        parts[name].append(np.ravel(np.asarray(array, np.float64)))
    signs: Mapping[int, Array] = _Signs()
    for name, arrays in parts.items():
        flat = np.concatenate(arrays)
        yield name, np.array([np.linalg.norm(flat), *(signs[flat.size] @ flat), flat.size])


class _Signs(dict[int, Array]):
    """Number of values → rows of signs drawn once."""

    def __missing__(self, size: int) -> Array:
        draw = np.random.default_rng(size)
        self[size] = draw.choice([-1.0, 1.0], (_PROJECTIONS, size))
        return self[size]
