"""Times of every form of every layer at the row counts of a workload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.precision import OpConfig
from neural_mp.core.workload import Workload, form_of
from neural_mp.profiling import interleaved_medians

#: Minimum number of rounds, and seconds after which no round starts, for one shape of layer.
_ROUNDS, _TIME_LIMIT = 7, 2.0
#: Form → rows per call, as text → seconds.
_Times = dict[str, dict[str, float]]


def form_times(model: AnyTunableModel, workload: Workload) -> dict[str, _Times]:
    """Return op → form → rows per call, as text → seconds.

    One layer of each shape is timed, in interleaved rounds of all forms. Empty if the framework
    does not run layers alone.
    """
    tunable = {*model.space.tunable_ops}
    alike: defaultdict[tuple[Hashable, frozenset[str]], list[str]] = defaultdict(list)
    for op, shape in model.layer_shapes.items():
        if op in tunable:
            alike[shape, frozenset(_configs(model, op))].append(op)
    times: dict[str, _Times] = {}
    for ops in alike.values():
        times |= dict.fromkeys(ops, _times_of(model, ops[0], workload))
    return times


def _configs(model: AnyTunableModel, op: str) -> Mapping[str, OpConfig]:
    """Return the forms of an op with a configuration of each, the least corrected one."""
    choices = sorted(model.space.choices(op), key=_number_of_corrections, reverse=True)
    return {form: config for config in choices if (form := form_of(config)) is not None}


def _number_of_corrections(config: OpConfig) -> int:
    weight = () if config.weight is None else config.weight.corrections
    return len(weight) + len(config.corrections)


def _times_of(model: AnyTunableModel, op: str, workload: Workload) -> _Times:
    models: dict[str, AnyModel] = {}
    for form, config in _configs(model, op).items():
        plan = model.space.fp32_plan().replacing({op: config})
        models[form] = model.converted(model.space.resolve(plan))
    times: _Times = {form: {} for form in models}
    for rows in workload.rows:
        runs = [converted.layer_run(op, rows) for converted in models.values()]
        seconds = interleaved_medians(runs, iterations=_ROUNDS, time_limit=_TIME_LIMIT)
        for form, duration in zip(models, seconds, strict=True):
            times[form][str(rows)] = duration
    return times
