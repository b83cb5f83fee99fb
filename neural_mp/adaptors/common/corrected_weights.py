"""Corrected weights of a model, made from the moments of inputs in calibration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.adaptor_protocol import Framework
from neural_mp.adaptors.common.cross_layer_scaling import ScalingGroup, rounded_weight
from neural_mp.adaptors.common.factor_folding import factor_groups
from neural_mp.adaptors.common.grouped_weight import (
    Floats,
    GroupedWeight,
    GroupParameters,
    Quantizer,
)
from neural_mp.adaptors.common.optional import GroupedWeights, needed
from neural_mp.adaptors.common.weight_corrections import (
    InputMoments,
    awq_factors,
    corrected_weight,
)
from neural_mp.core.enums import WeightCorrection
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError
from neural_mp.util.pytree import Array

M = TypeVar("M")
logger = logging.getLogger(__name__)

#: Maximum bytes of moments at a time; more layers are observed in further passes.
_MOMENT_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class CorrectedWeights(Generic[M]):
    """The corrected weights of one model; each is made once.

    All weights are made from the float model, whatever the precisions of the layers before. Without
    inputs, every rounding is as good as to nearest: that is the weight of a layer that calibration
    does not reach, e.g. of an expert that no token is routed to.

    Attributes:
        adaptor: the adaptor of the framework.
        model: the float model.
        batches: → calibration inputs; None without data.
    """

    adaptor: Framework[M]
    model: M
    batches: Callable[[], Iterable[Any]] | None = None
    _made: dict[tuple[str, QuantSpec], GroupedWeight] = field(default_factory=dict, repr=False)
    #: Layers with one input, and the quantization → their common factors.
    _factors: dict[tuple[tuple[str, ...], QuantSpec], Floats | None] = field(
        default_factory=dict, repr=False
    )

    def of_plan(self, plan: PrecisionPlan) -> dict[str, GroupedWeight]:
        """Return op → its corrected weight, for the ops of a plan that have corrections.

        Raises:
            PlanError: the corrections require data, and there is none.
            ConversionError: the framework offers no corrected weights.
        """
        specs = {
            op: config.weight
            for op, config in plan.items()
            if config.weight is not None and config.weight.corrections
        }
        made = self.of({op: [spec] for op, spec in specs.items()})
        return {op: made[op, spec] for op, spec in specs.items()}

    def of(
        self, wanted: Mapping[str, Collection[QuantSpec]]
    ) -> Mapping[tuple[str, QuantSpec], GroupedWeight]:
        """Return (op, quantization) → corrected weight; errors as for `of_plan`."""
        missing = {
            op: [spec for spec in specs if (op, spec) not in self._made]
            for op, specs in wanted.items()
        }
        missing = {op: specs for op, specs in missing.items() if specs}
        if missing:
            offered = needed(
                self.adaptor.grouped_weights, self.adaptor.framework, "corrections of weights"
            )
            self._make(offered, missing)
        return self._made

    def quantizer(self, spec: QuantSpec) -> Quantizer:
        """Return the quantizer of a weight in groups, for the kernels of the framework."""
        offered = self.adaptor.grouped_weights
        return Quantizer(spec, GroupParameters.BFLOAT16 if offered is None else offered.parameters)

    def grouped(self, op: str, weight: Array, spec: QuantSpec) -> GroupedWeight:
        """Return a weight in groups: the corrected one if made, or rounded to nearest."""
        return self._made.get((op, spec)) or self.quantizer(spec).nearest(weight)

    def rounded(self, op: str, weight: Array, spec: QuantSpec) -> NDArray[np.float32]:
        """Return a weight [outputs, inputs] as its stored form, `grouped` or INT8, restores it."""
        if spec.group_size is not None:
            return self.grouped(op, weight, spec).floats()
        return rounded_weight(weight, weight_qmax(spec), (1,)).astype(np.float32)

    def _make(
        self, offered: GroupedWeights[M], missing: Mapping[str, Collection[QuantSpec]]
    ) -> None:
        weights = offered.weights(self.model)
        observed = [op for op, specs in missing.items() if any(spec.needs_data for spec in specs)]
        if observed and self.batches is None:
            op = observed[0]
            spec = next(spec for spec in missing[op] if spec.needs_data)
            raise PlanError(
                f"correction '{spec.corrections[0]}' of op {op!r} requires calibration data; give "
                f"calibration data, or set the weight to {str(spec.uncorrected)!r}"
            )
        for op in missing.keys() - set(observed):
            for spec in missing[op]:
                self._made[op, spec] = corrected_weight(weights[op], self.quantizer(spec))
        sizes = {op: 4 * weights[op].shape[1] ** 2 for op in observed}
        for part in portions(sizes, _MOMENT_BYTES):
            assert self.batches is not None
            moments = offered.input_moments(self.model, self.batches(), part)
            unread = [op for op in part if op not in moments]
            if unread:
                logger.warning(
                    "calibration did not reach %s; their weights are rounded to nearest, give "
                    "data that reaches them",
                    ", ".join(map(repr, unread)),
                )
            for op in part:
                weight = weights[op]
                for spec in missing[op]:
                    quantizer, seen = self.quantizer(spec), moments.get(op)
                    factors = self._common_factors(op, quantizer, seen, weights)
                    found = corrected_weight(weight, quantizer, seen, factors)
                    self._made[op, spec] = found

    @cached_property
    def groups(self) -> tuple[ScalingGroup, ...]:
        """The groups of layers whose factors of inputs may be folded into the op before."""
        return factor_groups(self.adaptor, self.model)

    def _common_factors(
        self,
        op: str,
        quantizer: Quantizer,
        moments: InputMoments | None,
        weights: Mapping[str, Array],
    ) -> Floats | None:
        """Return the factors that a layer shares with the other readers of its input, if any."""
        if WeightCorrection.AWQ not in quantizer.spec.corrections or moments is None:
            return None
        group = next((found for found in self.groups if op in found.consumers), None)
        if group is None or any(reader not in weights for reader in group.consumers):
            return None
        key = group.consumers, quantizer.spec
        if key not in self._factors:
            readers = [weights[reader] for reader in group.consumers]
            self._factors[key] = awq_factors(readers, quantizer, moments)
        return self._factors[key]


def portions(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield ops that take at most `most` bytes together, in order, without ops of no bytes.

    A larger op is alone.
    """
    part: list[str] = []
    held = 0
    for op, size in sizes.items():
        if part and held + size > most:
            yield part
            part, held = [], 0
        if size:
            part.append(op)
            held += size
    if part:
        yield part
