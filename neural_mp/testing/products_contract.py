"""Contract of INT8 kernels at the ends of the range, against integer arithmetic in numpy.

On x86 without VNNI, sums of two products saturate at 16 bits; results must nevertheless be within
one quantization step of the exact values on every CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.enums import Approach
from neural_mp.core.int8_accumulation import WEIGHT_LIMITS
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.testing.fixtures import machine

INT8 = Precision.INT8

SIDE, ROWS = 9, 6


@dataclass(frozen=True)
class Case:
    """Test case: a layer with channels first."""

    inputs: int
    outputs: int
    groups: int = 1
    dense: bool = False
    relu: bool = False
    residual: bool = False

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """[outputs, inputs per group, 3, 3], or [outputs, inputs]."""
        shape = (self.outputs, self.inputs // self.groups)
        return shape if self.dense else (*shape, 3, 3)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """[batch, inputs, side, side], or [rows, inputs]."""
        return (ROWS, self.inputs) if self.dense else (2, self.inputs, SIDE, SIDE)


CASES = {
    "dense": Case(64, 32, dense=True),
    "dense, ReLU": Case(64, 32, dense=True, relu=True),
    "dense, odd": Case(37, 5, dense=True),
    "convolution": Case(16, 24),
    "convolution, ReLU": Case(16, 24, relu=True),
    "convolution of images": Case(3, 16),
    "convolution, residual sum": Case(16, 16, residual=True),
    "convolution, residual sum, ReLU": Case(16, 16, relu=True, residual=True),
    "depthwise": Case(16, 16, groups=16),
    "depthwise, ReLU": Case(24, 24, groups=24, relu=True),
    "grouped": Case(16, 32, groups=4),
    "multiplied channels": Case(8, 16, groups=8),
}


def stored_input(shape: tuple[int, ...], worst: bool) -> tuple[np.ndarray, float]:
    """Return floats that uint8 represents exactly, and their step; in the worst case mostly 255.

    Every channel spans the whole range, so that a scale per channel has the same step.
    """
    draw = np.random.default_rng(0)
    stored = draw.choice([255, 255, 255, 0], shape) if worst else draw.integers(0, 256, shape)
    stored[0] = 255 if worst else stored[0]
    stored.reshape(-1)[:2] = 0, 255
    if len(shape) > 2:
        stored[0, :, 0, :2] = 0, 255
    step, zero = 1 / 64, 0 if worst else 96
    return ((stored - zero) * step).astype(np.float32), step


def weight_for(case: Case, worst: bool) -> np.ndarray:
    """Return weights; in the worst case all of maximum magnitude, with one sign per output."""
    draw = np.random.default_rng(1)
    if worst:
        signs = draw.choice([-1.0, 1.0], (case.outputs, *[1] * (len(case.weight_shape) - 1)))
        return (np.ones(case.weight_shape) * signs / 8).astype(np.float32)
    return draw.uniform(-1, 1, case.weight_shape).astype(np.float32)


def whole_numbers(weight: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight quantized to ±`limit`, and the step of each output."""
    steps = np.abs(weight.astype(np.float64)).reshape(len(weight), -1).max(1) / limit
    return np.rint(weight / steps.reshape(-1, *[1] * (weight.ndim - 1))).astype(np.int64), steps


def product(case: Case, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the exact result in integers; convolutions are zero-padded to the input size."""
    if case.dense:
        return x @ weight.T
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    view = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    of, to = case.inputs // case.groups, case.outputs // case.groups
    parts = [
        np.einsum(
            "nchwij,ocij->nohw", view[:, g * of : (g + 1) * of], weight[g * to : (g + 1) * to]
        )
        for g in range(case.groups)
    ]
    return np.concatenate(parts, axis=1)


class AccumulationContract:
    """Contract of INT8 kernels; subclasses build a model for each case."""

    framework: str
    cases = tuple(CASES)
    approaches: tuple[str, ...] = ("static",)

    def source(self, case: Case, weight: np.ndarray) -> Any:
        """Return a model: [batch, inputs, SIDE, SIDE] or [batch, inputs] → the result.

        Padding is one, without bias; the residual sum adds the input.
        """
        raise NotImplementedError

    @pytest.mark.parametrize("worst", [True, False], ids=["worst", "random"])
    @pytest.mark.parametrize("name", CASES)
    def test_products_of_bytes_are_within_a_step_of_whole_numbers(self, name, worst):
        if name not in self.cases:
            pytest.skip(f"{self.framework} has no such integer kernel")
        self.check(CASES[name], worst, "static")

    @pytest.mark.parametrize("worst", [True, False], ids=["worst", "random"])
    @pytest.mark.parametrize("approach", ["dynamic", "weight_only"])
    def test_so_are_those_without_calibration(self, approach, worst):
        if approach not in self.approaches:
            pytest.skip(f"{self.framework} has no {approach} INT8")
        self.check(CASES["dense"], worst, approach)

    def converted(self, source: Any, x: np.ndarray, approach: str, hardware=None):
        adaptor = get_adaptor_named(self.framework)
        model = adaptor.load(source, example=(x,))
        space = adaptor.space(model, hardware or machine()).with_int8([Approach(approach)])
        plan = {op: space.choice(op, INT8) or FP32 for op in space.tunable_ops}
        observed = adaptor.observe(model, [(x,)], space)
        converted = adaptor.convert(model, space.resolve(PrecisionPlan(plan)), observed, space)
        specs = {config.weight for config in plan.values() if config.weight is not None}
        assert len(specs) == 1
        return adaptor, model, converted, WEIGHT_LIMITS[specs.pop().range]

    def check(self, case: Case, worst: bool, approach: str) -> None:
        x, step = stored_input(case.input_shape, worst)
        weight = weight_for(case, worst)
        adaptor, model, converted, limit = self.converted(self.source(case, weight), x, approach)
        integers, steps = whole_numbers(weight, limit)
        column = steps.reshape(-1) if case.dense else steps.reshape(-1, 1, 1)
        if approach == "weight_only":
            exact = product(case, x.astype(np.float64), integers) * column
        else:
            stored = np.rint(x / step).astype(np.int64)
            exact = product(case, stored, integers) * step * column
        exact = exact + x if case.residual else exact
        exact = np.maximum(exact, 0) if case.relu else exact
        # Intermediate tensors are clipped to the FP32 range.
        fp32 = adaptor.predict(model, (x,))
        low, high = min(fp32.min(), 0.0), max(fp32.max(), 0.0)
        output = adaptor.predict(converted, (x,))
        off = np.abs(np.clip(output, low, high) - np.clip(exact, low, high)).max()
        assert off <= 1.02 * (high - low) / 255, f"{off / ((high - low) / 255):.1f} steps"

    def test_a_plan_for_exact_products_is_wrong_where_they_saturate_and_only_there(self):
        """Full-range weights must fail if the CPU saturates, so the contract is not vacuous."""
        case = CASES["dense"]
        x, _ = stored_input(case.input_shape, True)
        target = machine().for_target("vnni")
        source = self.source(case, weight_for(case, True))
        adaptor, model, wide, limit = self.converted(source, x, "static", target)
        assert limit == 127
        assert adaptor.portability.full_range_kernels(wide) == {"dense"}
        _, _, right, _ = self.converted(self.source(case, weight_for(case, True)), x, "static")
        reference = adaptor.predict(model, (x,))
        off = np.abs(adaptor.predict(wide, (x,)) - reference).max() / np.abs(reference).max()
        exact = adaptor.int8_accumulation(machine())["dense"] == "exact"
        assert (off < 0.02) == exact
        mended = adaptor.portability.with_reduced_range(wide)
        assert not adaptor.portability.full_range_kernels(mended)
        for model_here in (right, mended):
            result = adaptor.predict(model_here, (x,))
            assert np.abs(result - reference).max() < 0.02 * np.abs(reference).max()
