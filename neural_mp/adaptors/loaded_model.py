"""A model together with all that belongs to it, so that nobody carries the parts by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from neural_mp.adaptors.common.conversion import profile
from neural_mp.adaptors.common.corrections import rescaled_ops, score_corrections
from neural_mp.adaptors.common.hessian import weight_sensitivity
from neural_mp.adaptors.common.op_outputs import OpOutput
from neural_mp.adaptors.common.optional import OpOutputs, needed
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.core.graph import OpGraph
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.util.pytree import float_arrays, tree_leaves
from neural_mp.util.validators import integer_between, shape_of_array, validate_option

M = TypeVar("M")


@dataclass(frozen=True, eq=False)
class LoadedModel(Generic[M]):
    """A model that can be run: as it was, or converted.

    Attributes:
        adaptor: the framework.
        held: the model as the adaptor holds it.
    """

    adaptor: Adaptor[M]
    held: M

    def __call__(self, inputs: Any) -> Any:
        """The outputs for one batch: numpy arrays where the inputs were numpy arrays."""
        return self.adaptor.predict(self.held, inputs)

    def float_outputs(self, inputs: Any) -> list[np.ndarray]:
        """The arrays of floating-point numbers among the outputs for one batch."""
        return float_arrays(self(inputs))

    def example_inputs(self, batch_size: int | None = None) -> Any:
        """Inputs that the model can be run on; see `Adaptor.example_inputs`.

        Raises:
            ConfigurationError: a batch of that size would fill the memory.
        """
        if batch_size is not None:
            validate_option("batch_size", integer_between(1), batch_size)
            held = self.adaptor.example_inputs(self.held, 1)
            size = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(held))
            validate_option("batch_size", shape_of_array(size), (batch_size,))
        return self.adaptor.example_inputs(self.held, batch_size)

    def profile(self, inputs: Any) -> Mapping[str, float]:
        """Op → seconds of one run.

        Raises:
            ConversionError: the framework does not time single ops.
        """
        timing = needed(self.adaptor.op_timing, self.adaptor.framework, "times of single ops")
        return profile(timing, self.held, inputs)

    def first_non_finite(self, inputs: Any) -> str | None:
        """The first op whose result holds NaN or Inf; None if there is none, or it is not known."""
        offered = self.adaptor.op_outputs
        return None if offered is None else offered.first_non_finite(self.held, inputs)

    @property
    def _op_outputs(self) -> OpOutputs[M]:
        return needed(self.adaptor.op_outputs, self.adaptor.framework, "results of single ops")

    @cached_property
    def results(self) -> OpGraph:
        """The ops whose results a run has; see `OpOutputs`.

        Raises:
            ConversionError: the framework does not show results of single ops.
        """
        return self._op_outputs.results(self.held)

    def values(self, ops: Collection[str]) -> Callable[[Any], Mapping[str, OpOutput]]:
        """A function that runs one batch and gives the results of ops; see `OpOutputs`."""
        return self._op_outputs.values(self.held, ops)

    @property
    def wide_kernels(self) -> frozenset[KernelKind]:
        """The kinds of integer kernels that are right only where products are exact."""
        offered = self.adaptor.portability
        return frozenset() if offered is None else offered.wide_kernels(self.held)

    def rescaled_by(self, plan: PrecisionPlan) -> frozenset[str]:
        """The ops whose channels have other scales where repairs of a plan are in the model."""
        return rescaled_ops(self.adaptor, self.held, plan, self.adaptor.graph(self.held))

    @property
    def native(self) -> Any:
        """The framework's own object."""
        return self.adaptor.native(self.held)

    @cached_property
    def size(self) -> int:
        """Bytes the weights take."""
        return self.adaptor.weight_bytes(self.held)

    @property
    def conversions(self) -> ConversionCounts:
        """The casts, quantizations and dequantizations of one run."""
        counts: ConversionCounts = getattr(self.held, "counts", ConversionCounts())
        return counts

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of how the model was taken in."""
        return tuple(getattr(self.held, "warnings", ()))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the ops and weights, which are read for it once."""
        return self.adaptor.fingerprint(self.held)

    def in_space(self, space: TuningSpace) -> TunableModel[M]:
        """The model with what its ops may run in."""
        return TunableModel(self.adaptor, self.held, space)


@dataclass(frozen=True, eq=False)
class TunableModel(LoadedModel[M]):
    """An FP32 model that can be converted.

    Attributes:
        space: what every op may run in.
        observations: what calibration saw; nothing before `calibrated`.
    """

    space: TuningSpace
    observations: Observations = field(default_factory=Observations)

    def calibrated(self, batches: Iterable[Any]) -> TunableModel[M]:
        """The model with what one pass over calibration inputs saw, and what repairs would bring.

        Raises:
            ConversionError: a tensor held NaN or Inf.
        """
        seen = self.adaptor.observe(self.held, batches, self.space)
        return self.observed(score_corrections(self.adaptor, self.held, self.space, seen))

    def observed(self, observations: Observations) -> TunableModel[M]:
        """The model with what an earlier calibration saw."""
        return replace(self, observations=observations)

    def converted(self, plan: ResolvedPlan) -> LoadedModel[M]:
        """The model in the precisions of a plan; itself where the plan lowers nothing.

        Raises:
            ConversionError: a quantized tensor was never observed, or the framework refuses.
            PlanError: an op cannot be repaired as the plan says.
        """
        held = self.adaptor.convert(self.held, plan, self.observations, self.space)
        return self if held is self.held else LoadedModel(self.adaptor, held)

    def tensor_values(self, inputs: Any) -> dict[str, float]:
        """Op or graph input → how many floating-point numbers it holds in a run of one batch."""
        graph = self.space.graph
        names = [*graph.inputs, *(op.name for op in graph)]
        found: dict[str, float] = {}
        for name, seen in self.adaptor.observe_tensors(self.held, [inputs], names):
            found[name] = found.get(name, 0.0) + seen.count * len(seen.power)
        return found

    def weight_sensitivity(self, batches: Iterable[Any]) -> dict[str, float]:
        """Op with an INT8 weight → harm of rounding it, by second derivatives.

        Raises:
            ConversionError: the framework has no gradients.
        """
        return weight_sensitivity(self.adaptor, self.held, batches, self.space)


#: Models of any framework, for what does not look into them.
AnyModel = LoadedModel[Any]
AnyTunableModel = TunableModel[Any]
