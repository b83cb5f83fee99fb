"""Quantization-aware training, in the loop of the user or within a search."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.adaptors.common.optional import require_part
from neural_mp.adaptors.common.simulation import (
    LossChoice,
    OptimizerChoice,
    TrainedModel,
    TrainingSchedule,
)
from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel, LoadedModel
from neural_mp.adaptors.transfer import transfer_model
from neural_mp.api import config_objects
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.replay import OpenedPlan, open_plan
from neural_mp.config import Options, Settings
from neural_mp.config.settings import TRAIN
from neural_mp.core import hardware as machine
from neural_mp.core.enums import SOURCE_RUNTIME, Approach, Capture
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import Observations, Range
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS
from neural_mp.errors import ConfigurationError, ConversionError, DataError, PlanError
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.training.loop import LEARNING_RATE, fit
from neural_mp.tuning.job import TuningJob
from neural_mp.util.pytree import Array
from neural_mp.util.user_calls import call_user


@dataclass(frozen=True)
class _Origin:
    """The model and plan that a simulation was made from; shared by its copies.

    `data` are the calibration batches; None without.
    """

    opened: OpenedPlan
    data: list[Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Origin:
        return self


#: Runtime whose models are trained in the framework that they come from.
_FINISHING_RUNTIME = "litert"


def untrainable_message(framework: str) -> str:
    """Return the message for a framework without training, with what there is instead."""
    instead = (
        "train the Keras model with a plan for TensorFlow, and call training.finish(simulation, "
        "runtime='litert')"
        if framework == _FINISHING_RUNTIME
        else "its weights are reconstructed without labels only; name the corrections 'adaround' "
        "and 'learned_scale' in the plan"
    )
    return (
        f"training with a plan is for PyTorch and TensorFlow models, got a model of {framework}: "
        f"{instead}"
    )


def quantization_aware(
    model: object,
    plan: PrecisionPlan | OptimizedModel | str | Path,
    *,
    calibration: Iterable[Any] | None = None,
    observations: Observations | None = None,
    observe_steps: int = 0,
    learn_scales: bool = True,
    norm_steps: int = 0,
    inputs: object = None,
    framework: str | None = None,
    hardware: Hardware | None = None,
    capture: Capture = Capture.WHOLE,
) -> Any:
    """Return a model that computes with the rounding of a plan, to train in the user's own loop.

    The model stays unchanged; the returned one holds copies of its weights, and is in inference
    mode until the loop calls `train`. `finish` converts it after training.

    Args:
        model: the FP32 model: object, path or `module:attribute`.
        plan: a plan, the file of a plan, or a result, whose plan and calibration results are used.
        calibration: batches of inputs, to calibrate if neither `plan` nor `observations` has
            calibration results.
        observations: calibration results, if `plan` is only a plan.
        observe_steps: number of first steps in which ranges follow the data; frozen or learned
            afterwards. A step is one call in training mode.
        learn_scales: whether the optimizer learns the scales with the weights (LSQ).
        norm_steps: number of first steps in which batch norms that were folded into convolutions
            use the statistics of the batch; frozen afterwards. Norms of a model from a file, or of
            a layer that a correction rescales, are always frozen.
        inputs: example inputs, if the model requires them.
        framework: framework of the model; default: detected.
        hardware: hardware of this machine; default: detected.
        capture: see `MixedPrecision`.

    Raises:
        ConfigurationError: the plan quantizes nothing, the model has no weight to train, or an
            option is invalid.
        ConversionError: the framework does not offer training with a plan.
        DataError: calibration data are needed and missing.
        PlanError: the plan is malformed or does not fit the model or the hardware.
    """
    schedule = TrainingSchedule(observe_steps, learn_scales, norm_steps)
    if isinstance(plan, OptimizedModel):
        observations, plan = observations or plan.observations, plan.plan
    elif isinstance(plan, str | Path):
        plan, stored = load_plan_file(plan)
        observations = observations or stored
    if not isinstance(plan, PrecisionPlan):
        raise PlanError(
            f"plan must be a PrecisionPlan, the path of a plan file or an OptimizedModel, got a "
            f"{type(plan).__name__}"
        )
    data = None if calibration is None else list(calibration)
    example = data[0] if data and inputs is None else None
    loaded = load_source(model, framework, inputs, example=example, capture=capture)
    if loaded.adaptor.simulation is None:
        raise ConversionError(untrainable_message(loaded.adaptor.framework))
    opened = open_plan(
        loaded, plan, observations, data, hardware=hardware, target=machine.HOST_TARGET
    )
    if not opened.resolved.has_low_precision:
        raise ConfigurationError(
            "the plan must have at least one op in a lower precision, got none; train the model "
            "itself"
        )
    if opened.needs_ranges and not opened.tunable.observations.ranges:
        if data is None:
            raise DataError(
                "a plan with calibrated ranges requires calibration data, got none; set "
                "calibration to batches of inputs, or give the result of a run as the plan"
            )
        tunable = opened.tunable.with_calibration(data)
        resolved = tunable.space.resolve(opened.resolved.plan)
        warnings = (*opened.warnings, *tunable.observations.notes)
        opened = OpenedPlan(loaded, tunable, resolved, warnings)
    simulation = opened.tunable.simulate_plan(opened.resolved, schedule)
    simulation.record = _Origin(opened, data)
    return simulation


def finish(
    model: object, *, runtime: str = SOURCE_RUNTIME, calibration: Iterable[Any] | None = None
) -> OptimizedModel:
    """Return the converted model with the weights and scales of a trained simulation.

    Args:
        model: a model made by `quantization_aware`, also wrapped by `torch.compile` or
            `DistributedDataParallel`; stays unchanged.
        runtime: `source`, or for a Keras model `litert`.
        calibration: batches of inputs, for tensors that only another runtime quantizes; default:
            those of `quantization_aware`.

    Raises:
        ConfigurationError: the model was not made by `quantization_aware`.
        ConversionError: the runtime cannot take the trained numbers.
        DataError: calibration data are needed and missing.
    """
    started = time.perf_counter()
    simulation: Any = model
    while not isinstance(getattr(simulation, "record", None), _Origin):
        simulation = getattr(simulation, "_orig_mod", None) or getattr(simulation, "module", None)
        if simulation is None:
            raise ConfigurationError(
                f"finish requires a model made by quantization_aware, got a {type(model).__name__}"
            )
    opened: OpenedPlan = simulation.record.opened
    adaptor = opened.loaded.adaptor
    if runtime not in (SOURCE_RUNTIME, adaptor.framework):
        data = simulation.record.data if calibration is None else list(calibration)
        transferred, result = convert_trained(opened, simulation, runtime, data)
        return transferred.build_result(result, started)
    offered = require_part(adaptor.simulation, adaptor.framework, "training with a plan")
    converted = LoadedModel(adaptor, offered.finished(simulation), boundary=opened.loaded.boundary)
    return opened.build_result(converted, started)


#: Time limit of a training that begins at the limit, which ends after one step.
_LEAST_SECONDS = 1e-3
#: Folder of the checkpoints in a workspace.
TRAINING_FOLDER = "training"


@dataclass(frozen=True)
class _Wanted:
    """The training that options and tuning file request; Python overrides the file.

    Attributes:
        batches: batches for the loss; None to train on the calibration batches.
        loss: function of outputs and targets, in the framework's order; None without labels.
        optimizer: optimizer by name; None for the default.
    """

    batches: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: OptimizerChoice | None = None
    learning_rate: float = LEARNING_RATE


@dataclass(frozen=True, eq=False)
class _FirstBatches:
    """The first batches of a loader, in each pass."""

    loader: Iterable[Any]
    most: int

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.most)


def with_training(job: TuningJob, given: Options, settings: Settings) -> TuningJob:
    """Return the job with the training that the options or the tuning file request, if any.

    Raises:
        ConfigurationError: an option is invalid, or the framework of the model cannot be trained.
        DataError: the data that the file names are missing or invalid.
    """
    requested = given.train_func is not None or given.train_dataloader is not None
    if not requested and not given.exit_policy.train_seconds and settings.train is None:
        return job
    if given.train_func is not None and not callable(given.train_func):
        raise ConfigurationError(
            f"train_func must be a function that trains a model, got {given.train_func!r}"
        )
    adaptor = job.model.adaptor
    if adaptor.simulation is None:
        raise ConfigurationError(
            f"{untrainable_message(adaptor.framework)}, or remove train_func, train_dataloader, "
            f"exit_policy.train_seconds and quantization.train, as a search reconstructs by itself"
        )
    setup = _resolve_training_setup(given, settings, adaptor.simulation.loss)
    if (setup.batches is None) != (setup.loss is None):
        raise ConfigurationError(
            "train_dataloader and loss, a function of outputs and targets, must be set together, "
            "in Python or as dataloader and loss of quantization.train; set both, or only "
            "exit_policy.train_seconds to train without labels"
        )
    return replace(job, train=_build_trainer(given, setup, adaptor.simulation.finished))


def _resolve_training_setup(
    given: Options,
    settings: Settings,
    named_loss: Callable[[LossChoice], Callable[[Any, Any], Any]],
) -> _Wanted:
    batches, loss, file = given.train_dataloader, given.loss, settings.train
    if file is None or given.train_func is not None:
        return _Wanted(batches, loss)
    if batches is None:
        batches = config_objects.build_loader(settings, TRAIN)
    if batches is not None and file.max_batches is not None:
        batches = _FirstBatches(batches, file.max_batches)
    with settings.source.locate_errors((*TRAIN, "loss")):
        for name, options in (file.loss or {}).items():
            loss = loss or named_loss(LossChoice(name, **options))
    for name, options in (file.optimizer or {}).items():
        rate = options.get("learning_rate", LEARNING_RATE)
        rest = {key: value for key, value in options.items() if key != "learning_rate"}
        return _Wanted(batches, loss, OptimizerChoice(name, rest), rate)
    return _Wanted(batches, loss)


def _build_trainer(
    given: Options, setup: _Wanted, finished: Callable[[Any], Any]
) -> Callable[[AnyTunableModel, ResolvedPlan, float], AnyModel]:
    """Return FP32 model, plan, seconds → the trained, converted model."""

    def train_and_convert(model: AnyTunableModel, plan: ResolvedPlan, seconds: float) -> AnyModel:
        end = time.monotonic() + seconds
        simulation = model.simulate_plan(plan, TrainingSchedule())
        if given.train_func is not None:
            call_user(given.train_func, simulation, form="train_func(model)")
        else:
            remaining = max(end - time.monotonic(), _LEAST_SECONDS)
            _run_training_loop(given, setup, model, plan, simulation, remaining)
        return LoadedModel(model.adaptor, finished(simulation), boundary=model.boundary)

    return train_and_convert


def _run_training_loop(
    given: Options,
    setup: _Wanted,
    model: AnyTunableModel,
    plan: ResolvedPlan,
    simulation: Any,
    seconds: float,
) -> None:
    """Train in the loop of this package, with checkpoints in the workspace."""
    batches = setup.batches
    if batches is None:
        if model.data is None:
            raise ConfigurationError(
                "training without labels requires calibration data, got none; set "
                "calib_dataloader or train_dataloader"
            )
        batches = list(model.data())
    name = plan_digest(model, plan, setup.optimizer)
    folder = Path(given.workspace) / TRAINING_FOLDER / name
    if not given.resume:
        shutil.rmtree(folder, ignore_errors=True)
    budget = min(given.exit_policy.train_seconds or math.inf, seconds)
    fit(
        simulation,
        batches,
        setup.loss,
        epochs=given.epochs,
        learning_rate=setup.learning_rate,
        optimizer=setup.optimizer,
        seconds=None if math.isinf(budget) else budget,
        folder=folder,
    )


def plan_digest(
    model: AnyTunableModel, plan: ResolvedPlan, optimizer: OptimizerChoice | None
) -> str:
    """Return the name of the checkpoints of a model, a plan and an optimizer."""
    text = f"{model.fingerprint} {plan.plan.to_yaml()}"
    if optimizer is not None:
        text += f" {optimizer.name} {sorted(optimizer.options.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
