"""Estimated cost of plans on a target, and the shares of widths in their multiplications.

Times are measured on devices only; the estimate orders plans, and is called an estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from neural_mp.core.precision import FP32, OpConfig
from neural_mp.targets.profile import TargetProfile
from neural_mp.targets.widths import Widths

#: Bytes of a float element, in which ops outside of integers read and write on average.
_FLOAT_BYTES = 4.0


@dataclass(frozen=True)
class TargetCosts:
    """The work of a model's ops, and its estimated cost on a target.

    Attributes:
        profile: the target.
        macs: op → multiplications with one sample.
        elements: op → elements that the op writes with one sample.
    """

    profile: TargetProfile
    macs: Mapping[str, float]
    elements: Mapping[str, float]

    def of_op(self, op: str, config: OpConfig) -> float:
        """Return the estimated cost of an op in a config."""
        widths, cost = Widths.from_config(config), self.profile.cost
        if widths is None:
            per_mac, size = cost.float_mac, _FLOAT_BYTES
        else:
            size = widths.activation_bits / 8
            per_mac = cost.macs.get(widths, size)
        return self.macs.get(op, 0.0) * per_mac + self.elements.get(op, 0.0) * cost.element * size

    def of_plan(self, configs: Mapping[str, OpConfig]) -> float:
        """Return the estimated cost of a plan; ops that are not named are in float."""
        return sum(self.of_op(op, configs.get(op, FP32)) for op in self.elements)

    def estimate_objectives(self, configs: Mapping[str, OpConfig]) -> dict[str, float]:
        """Return the estimated cost of a plan as objectives: in units, and relative to float."""
        cost, in_float = self.of_plan(configs), self.of_plan({})
        return {"target": cost, "relative_target": cost / in_float if in_float else 1.0}

    def multiplication_shares(self, configs: Mapping[str, OpConfig]) -> dict[str, float]:
        """Return the word of the widths → their fraction of all multiplications.

        Products of two activations count as `w8a8` or `w16a16`, by the type of both factors, and
        ops in float as the precision in which the target computes them.
        """
        counts: dict[str, float] = defaultdict(float)
        for op, macs in self.macs.items():
            config = configs.get(op, FP32)
            word = str(Widths.from_config(config) or self.profile.float_type or config.precision)
            counts[_OF_PRODUCTS.get(word, word)] += macs
        total = sum(counts.values())
        return {word: macs / total for word, macs in counts.items() if macs} if total else {}


_OF_PRODUCTS = {Widths.A8.value: Widths.W8A8.value, Widths.A16.value: Widths.W16A16.value}
