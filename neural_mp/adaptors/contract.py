"""The base class of adaptors: the members of a framework, and the pipelines that call them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from neural_mp.adaptors.common import conversion
from neural_mp.adaptors.common.capabilities import SIXTEEN_BITS, build_op_capability
from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights
from neural_mp.amp import FourLists
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import KeptOutputs, Observations
from neural_mp.core.precision import Precision
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.util.json_fields import Count, JsonFields

#: A model as its adaptor represents it: opaque to others, except for `warnings` and `counts`.
M = TypeVar("M")


@dataclass(frozen=True)
class ConversionCounts(JsonFields):
    """The number of conversions that a model runs per inference."""

    casts: Count = 0
    quantize: Count = 0
    dequantize: Count = 0


class Adaptor(Framework[M]):
    """The base class of adaptors: a framework with the pipelines that all frameworks share.

    An adaptor provides only framework-specific parts, the members of `Framework`: loading, running,
    observing and converting models, and the available kernels. Everything else is optional.

    A model may have `warnings`, notes to the user from loading, and `counts`, a `ConversionCounts`.

    An adaptor never chooses a precision and never evaluates accuracy. Conversion is deterministic:
    equal models, plans and observations yield equal results.
    """

    def space(
        self, model: M, hardware: Hardware, lists: Mapping[Precision, FourLists] | None = None
    ) -> TuningSpace:
        """Return the graph with the capabilities of every op.

        `lists` are the four lists of the 16-bit precisions, by default the framework's own.
        """
        if lists is None:
            lists = {p: self.amp_lists(p) for p in SIXTEEN_BITS}
        kernels = self.kernels(model, hardware)
        hardware = replace(hardware, stored=self.stored_precisions)
        supports = {precision: hardware.support(precision) for precision in SIXTEEN_BITS}
        # Many ops share their kernels, and then their capability.
        distinct = {id(own): own for own in kernels.values()}
        shared = {key: build_op_capability(own, supports) for key, own in distinct.items()}
        capabilities = {op: shared[id(own)] for op, own in kernels.items()}
        return TuningSpace(self.graph(model), capabilities, lists)

    def observe(
        self,
        model: M,
        batches: Iterable[Any],
        space: TuningSpace,
        collected: KeptOutputs | None = None,
    ) -> Observations:
        """Calibrate in one pass over the inputs, in memory that does not grow with their number.

        The outputs are `collected` if the adaptor offers it.
        """
        return conversion.collect_observations(self, model, batches, space, collected)

    def convert(
        self,
        model: M,
        plan: ResolvedPlan,
        observations: Observations,
        space: TuningSpace,
        corrected: CorrectedWeights[M] | None = None,
    ) -> M:
        """Return the model in the precisions of a plan; `model` itself for an all-FP32 plan.

        `corrected` are the corrected weights of the model, by default made without data.

        Raises:
            ConversionError: a quantized tensor was not observed, or the framework rejects the plan.
            PlanError: a correction in the plan cannot be applied.
        """
        if not plan.changes_model:
            return model
        prepared, ranges = conversion.prepare_conversion(
            self, model, plan, observations, space, corrected
        )
        return self.convert_graph(prepared, plan, ranges)
