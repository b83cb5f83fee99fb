"""Corrected weights of a model, made from the moments of inputs in calibration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.adaptor_protocol import Framework
from neural_mp.adaptors.common.cross_layer_scaling import rounded_weight
from neural_mp.adaptors.common.grouped_weight import GroupedWeight, GroupParameters, Quantizer
from neural_mp.adaptors.common.optional import GroupedWeights, needed
from neural_mp.adaptors.common.weight_corrections import corrected_weight
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError
from neural_mp.util.pytree import Array

M = TypeVar("M")

#: Maximum bytes of moments at a time; more layers are observed in further passes.
_MOMENT_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class CorrectedWeights(Generic[M]):
    """The corrected weights of one model; each is made once.

    All weights are made from the float model, whatever the precisions of the layers before.

    Attributes:
        adaptor: the adaptor of the framework.
        model: the float model.
        batches: → calibration inputs; None without data.
    """

    adaptor: Framework[M]
    model: M
    batches: Callable[[], Iterable[Any]] | None = None
    _made: dict[tuple[str, QuantSpec], GroupedWeight] = field(default_factory=dict, repr=False)

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
            for op in part:
                if op not in moments:
                    raise PlanError(
                        f"the weight of op {op!r} cannot be corrected with data: calibration did "
                        f"not reach the op, or it multiplies nothing by its weight; set the "
                        f"correction hqq or rtn"
                    )
                weight = weights[op]
                for spec in missing[op]:
                    quantizer = self.quantizer(spec)
                    self._made[op, spec] = corrected_weight(weight, quantizer, moments[op])


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
