"""Models bundled with their adaptor, tuning space and observations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from neural_mp.adaptors.common.calibration import CalibrationInputs
from neural_mp.adaptors.common.conversion import prepare_conversion
from neural_mp.adaptors.common.fusion_check import check_fusions
from neural_mp.adaptors.common.op_outputs import OpOutput
from neural_mp.adaptors.common.optional import OpOutputs, require_part
from neural_mp.adaptors.common.sensitivity import (
    estimate_weight_sensitivity,
    measure_layer_noise,
    measure_weight_noise,
)
from neural_mp.adaptors.common.signatures.boundary import Boundary
from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights, CorrectionOptions
from neural_mp.adaptors.common.weights.corrections import find_rescaled_ops, score_corrections
from neural_mp.adaptors.common.weights.reconstruction import reconstructable_in_minutes
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.observations import KeptOutputs, Observations, WidthFigures
from neural_mp.core.op_timings import FULL_PROFILE, OpRuns, ProfileRuns
from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import DataError
from neural_mp.space import ResolvedPlan, TuningSpace, without_non_finite
from neural_mp.util.pytree import list_float_arrays, tree_leaves
from neural_mp.util.system.watched_thread import watch_calls
from neural_mp.util.validators import integer_between, shape_of_array, validate_option

M = TypeVar("M")

#: Model → machine → its whole space.
_SPACES: MutableMapping[AnyModel, dict[Hardware, TuningSpace]] = WeakKeyDictionary()
#: Calibrated model → plan → converted model, while that is in use.
_CONVERTED: MutableMapping[AnyTunableModel, MutableMapping[ResolvedPlan, AnyModel]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True, eq=False)
class LoadedModel(Generic[M]):
    """An executable model, original or converted.

    Attributes:
        held: the model as the adaptor represents it.
        boundary: the calls in the source framework, if the model was transferred from another one.
    """

    adaptor: Adaptor[M]
    held: M
    boundary: Boundary | None = field(default=None, kw_only=True)

    @watch_calls("the model")
    def __call__(self, inputs: object) -> Any:
        """Return the outputs for one batch: numpy arrays if the inputs are numpy arrays."""
        if self.boundary is None:
            return self.adaptor.predict(self.held, inputs)
        arrays, tensors = self.boundary.bind_inputs(inputs)
        try:
            outputs = self.adaptor.predict(self.held, arrays)
        except DataError:
            self.boundary.bind_arrays(inputs)  # the error in the names of the source, if the cause
            raise
        return self.boundary.restore_outputs(outputs, self._source_tensor if tensors else None)

    def prepare(self) -> None:
        """Make what the first run would make, e.g. a session; see `Adaptor.prepare`."""
        self.adaptor.prepare(self.held)

    @cached_property
    def _source_tensor(self) -> Callable[[Any], Any] | None:
        """Conversion of an array to a tensor of the source framework, if any."""
        assert self.boundary is not None
        offered = get_adaptor_named(self.boundary.framework).transfer
        return None if offered is None else offered.tensor

    def _adapt_inputs(self, inputs: object) -> Any:
        """Return the inputs of a batch in the form that the adaptor accepts."""
        return inputs if self.boundary is None else self.boundary.bind_arrays(inputs)

    def run_float_outputs(self, inputs: object) -> list[np.ndarray]:
        """Return the floating-point arrays among the outputs for one batch."""
        return list_float_arrays(self(inputs))

    def drop_damaged_samples(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Return batches without the samples that calibration leaves out for their NaN."""
        return CalibrationInputs(batches, self)

    def example_inputs(self, batch_size: int | None = None) -> Any:
        """Return inputs that the model can run on; see `Adaptor.example_inputs`.

        Raises:
            ConfigurationError: a batch of that size exceeds the memory limit.
        """
        if batch_size is not None:
            validate_option("batch_size", integer_between(1), batch_size)
            example = self.adaptor.example_inputs(self.held, 1)
            size = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(example))
            validate_option("batch_size", shape_of_array(size), (batch_size,))
        return self.adaptor.example_inputs(self.held, batch_size)

    def profile_ops(self, inputs: object, runs: ProfileRuns = FULL_PROFILE) -> OpRuns:
        """Return op → seconds of each of several runs.

        Raises:
            ConversionError: the framework does not time single ops.
        """
        durations = self.adaptor.time_ops(self.held, self._adapt_inputs(inputs), sum(runs))
        return {op: tuple(seconds[-runs.timed :]) for op, seconds in durations.items()}

    @property
    def layer_shapes(self) -> Mapping[str, Hashable]:
        """Dense layers that run alone → their shapes; empty if the framework runs none alone."""
        offered = self.adaptor.layer_timing
        return {} if offered is None else offered.shapes(self.held)

    def make_layer_run(self, op: str, rows: int) -> Callable[[], object]:
        """Return a function that runs one of the `layer_shapes` on a number of rows.

        Raises:
            ConversionError: the framework does not run layers alone.
        """
        timing = require_part(self.adaptor.layer_timing, self.adaptor.framework, "times of layers")
        return timing.run(self.held, op, rows)

    def first_non_finite(self, inputs: object) -> str | None:
        """Return the first op with NaN or Inf in its result; None if there is none or unknown."""
        offered = self.adaptor.op_outputs
        if offered is None:
            return None
        return offered.first_non_finite(self.held, self._adapt_inputs(inputs))

    @property
    def _op_output_part(self) -> OpOutputs[M]:
        return require_part(
            self.adaptor.op_outputs, self.adaptor.framework, "results of single ops"
        )

    @cached_property
    def observable_ops(self) -> OpGraph:
        """The ops whose results a run can return; see `OpOutputs`.

        Raises:
            ConversionError: the framework does not expose results of single ops.
        """
        return self._op_output_part.observable_ops(self.held)

    def make_op_outputs(self, ops: Collection[str]) -> Callable[[Any], Mapping[str, OpOutput]]:
        """Return a function from a batch to the results of ops; see `OpOutputs`."""
        run = self._op_output_part.op_outputs(self.held, ops)
        return run if self.boundary is None else lambda inputs: run(self._adapt_inputs(inputs))

    @property
    def full_range_kernels(self) -> frozenset[KernelKind]:
        """The kinds of integer kernels that are correct only with exact accumulation."""
        offered = self.adaptor.portability
        return frozenset() if offered is None else offered.full_range_kernels(self.held)

    def find_rescaled_ops(self, plan: PrecisionPlan) -> frozenset[str]:
        """Return the ops whose channel scales change under the corrections of a plan."""
        return find_rescaled_ops(self.adaptor, self.held, plan, self.adaptor.graph(self.held))

    @property
    def native(self) -> Any:
        """The framework's own object."""
        return self.adaptor.native(self.held)

    @property
    def callable_object(self) -> Any:
        """The object that a user's function receives: `native`, unless transferred."""
        return self.native if self.boundary is None else TransferredModel(self)

    @cached_property
    def size(self) -> int:
        """Size of the weights in bytes."""
        return self.adaptor.weight_bytes(self.held)

    @property
    def conversions(self) -> ConversionCounts:
        """The number of casts, quantizations and dequantizations per run."""
        counts: ConversionCounts = getattr(self.held, "counts", ConversionCounts())
        return counts

    @property
    def warnings(self) -> tuple[str, ...]:
        """Notes to the user from loading the model."""
        return tuple(getattr(self.held, "warnings", ()))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of ops and weights, computed once."""
        return self.adaptor.fingerprint(self.held)

    def whole_space(self, hardware: Hardware) -> TuningSpace:
        """Return the space without constraints; the runtime is asked for its kernels once."""
        spaces = _SPACES.setdefault(self, {})
        if hardware not in spaces:
            spaces[hardware] = self.adaptor.space(self.held, hardware)
        return spaces[hardware]

    def prepare_for_streams(self, count: int | None) -> LoadedModel[M]:
        """Return the model for concurrent calls, if its runtime prepares for these.

        None, for one call at a time, returns the model itself.
        """
        model = self.held if count is None else self.adaptor.with_streams(self.held, count)
        return self if model is self.held else replace(self, held=model)

    def in_space(
        self,
        space: TuningSpace,
        data: Callable[[], Iterable[Any]] | None = None,
        corrections: CorrectionOptions | None = None,
    ) -> TunableModel[M]:
        """Return the model with a tuning space, calibration inputs and options of corrections.

        Without inputs, the space is reduced to weights that are rounded without data.
        """
        space = space.without_data() if data is None else space
        options = corrections or CorrectionOptions()
        return TunableModel(
            self.adaptor, self.held, space, data=data, options=options, boundary=self.boundary
        )


@dataclass(frozen=True, eq=False)
class TransferredModel:
    """A model in another runtime, called as in its source framework."""

    loaded: LoadedModel[Any]

    def __call__(self, *inputs: object, **named: object) -> Any:
        """Run one batch: inputs as separate arguments, or all in one object.

        Raises:
            DataError: the inputs do not fit the model.
        """
        if named and inputs:
            raise DataError("inputs must be given either by position or by name, got both")
        return self.loaded(named or (inputs[0] if len(inputs) == 1 else inputs))

    def eval(self) -> TransferredModel:
        """Return the model itself: it has no other mode than inference."""
        return self


@dataclass(frozen=True, eq=False)
class TunableModel(LoadedModel[M]):
    """An FP32 model that can be converted.

    Attributes:
        space: the capabilities of every op.
        observations: the calibration results; empty before `with_calibration`.
        data: → calibration inputs for corrected weights; None without data.
        options: options of the corrections of weights.
    """

    space: TuningSpace
    observations: Observations = field(default_factory=Observations)
    data: Callable[[], Iterable[Any]] | None = None
    options: CorrectionOptions = field(default_factory=CorrectionOptions)

    @cached_property
    def corrected_weights(self) -> CorrectedWeights[M]:
        """The corrected weights, made as they are needed."""
        data = self.data
        batches = None if data is None else lambda: map(self._adapt_inputs, data())
        return CorrectedWeights(self.adaptor, self.held, batches, self.options)

    @property
    def reconstructable_layers(self) -> frozenset[str]:
        """The layers whose INT8 weight can be learned in minutes; empty without data."""
        if self.data is None:
            return frozenset()
        return reconstructable_in_minutes(self.adaptor, self.held, self.options.learning)

    def in_space(
        self,
        space: TuningSpace,
        data: Callable[[], Iterable[Any]] | None = None,
        corrections: CorrectionOptions | None = None,
    ) -> TunableModel[M]:
        """Return the model with another tuning space, not calibrated."""
        data, options = data or self.data, corrections or self.options
        return replace(self, space=space, observations=Observations(), data=data, options=options)

    def with_calibration(
        self, batches: Iterable[Any], kept: KeptOutputs | None = None
    ) -> TunableModel[M]:
        """Return the model with observations of one calibration pass and scored corrections.

        The outputs of the pass are `kept`, unless they are arranged for another framework. Tensors
        that held NaN or Inf stay float in the space of the returned model.

        Raises:
            ConversionError: no output holds a finite value.
            DataError: NaN in every sample reaches the outputs.
        """
        kept = None if self.boundary is not None else kept
        observed = self.adaptor.observe(
            self.held, map(self._adapt_inputs, batches), self.space, kept
        )
        return self.with_observations(
            score_corrections(self.adaptor, self.held, self.space, observed)
        )

    def with_observations(self, observations: Observations) -> TunableModel[M]:
        """Return the model with earlier calibration results, its space as in `with_calibration`."""
        space = without_non_finite(self.space, observations.non_finite)
        return replace(self, observations=observations, space=space)

    def convert_by_plan(self, plan: ResolvedPlan) -> LoadedModel[M]:
        """Return the model in the precisions of a plan; `self` if the plan changes nothing.

        The model of a plan is made once while it is in use. Errors as in `Adaptor.convert`.
        """
        in_use = _CONVERTED.setdefault(self, WeakValueDictionary())
        converted: LoadedModel[M] | None = in_use.get(plan)
        if converted is None:
            model = self.adaptor.convert(
                self.held, plan, self.observations, self.space, self.corrected_weights
            )
            if model is self.held:
                return self
            converted = in_use[plan] = LoadedModel(self.adaptor, model, boundary=self.boundary)
        return converted

    def check_fusions(self, converted: LoadedModel[M], inputs: object) -> None:
        """Check a converted model on one batch; see `fusion_check.check_fusions`.

        Raises:
            ConversionError: the model does not run, or does not compute what was converted.
        """
        if converted is not self:
            check_fusions(self.adaptor, self.held, converted.held, self._adapt_inputs(inputs))

    def simulate_plan(self, plan: ResolvedPlan, schedule: TrainingSchedule) -> Any:
        """Return the trainable simulation of the model in the precisions of a plan.

        Raises:
            ConversionError: as in `Adaptor.convert`; or the framework offers no simulation.
            ConfigurationError: the model has no weight to train.
            PlanError: a correction in the plan cannot be applied.
        """
        offered = require_part(
            self.adaptor.simulation, self.adaptor.framework, "training with a plan"
        )
        prepared, ranges = prepare_conversion(
            self.adaptor, self.held, plan, self.observations, self.space, self.corrected_weights
        )
        return offered.simulated(self.held, prepared, plan, ranges, schedule)

    def find_faster_kernels(self, inputs: object, ops: Collection[str]) -> Mapping[str, str]:
        """Return op → a kernel that is faster on a batch; see `Adaptor.faster_kernels`."""
        return self.adaptor.faster_kernels(self.held, self._adapt_inputs(inputs), ops)

    def count_tensor_values(self, inputs: object) -> dict[str, float]:
        """Return op or graph input → its number of floating-point elements for one batch."""
        graph = self.space.graph
        names = [*graph.inputs, *(op.name for op in graph)]
        return self.adaptor.element_counts(self.held, self._adapt_inputs(inputs), names)

    def measure_width_figures(self, inputs: object) -> WidthFigures:
        """Return the noise of every tensor and weight by width; see `Adaptor.width_figures`."""
        return self.adaptor.width_figures(self.held, self._adapt_inputs(inputs), self.observations)

    def count_op_work(self, inputs: object) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return the work of every op; see `Adaptor.op_work`."""
        return self.adaptor.op_work(self.held, self._adapt_inputs(inputs))

    def measure_weight_sensitivity(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return op with an INT8 weight → sensitivity, from second derivatives.

        Raises:
            ConversionError: the framework has no gradients.
        """
        inputs = map(self._adapt_inputs, batches)
        return estimate_weight_sensitivity(self.adaptor, self.held, inputs, self.space)

    def measure_weight_noise(self, batches: Iterable[Any]) -> dict[str, dict[str, float]]:
        """Return op → quantization of its weight → noise of the rounding: see `fisher`.

        Without gradients, the noise at the results of each layer, from its inputs; empty if the
        framework offers neither.
        """
        inputs = map(self._adapt_inputs, batches)
        if self.adaptor.gradients is not None:
            return measure_weight_noise(
                self.adaptor, self.held, inputs, self.space, self.corrected_weights
            )
        if self.adaptor.layer_inputs is not None:
            return measure_layer_noise(
                self.adaptor, self.held, inputs, self.space, self.corrected_weights
            )
        return {}


#: Models of any framework, for code that treats them as opaque.
AnyModel = LoadedModel[Any]
AnyTunableModel = TunableModel[Any]
