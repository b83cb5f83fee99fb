"""What must hold for every framework; each framework's test subclasses `AdaptorContract`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.errors import ConversionError
from neural_mp.space import TuningSpace

INT8, BF16, FP16 = Precision.INT8, Precision.BF16, Precision.FP16


def signal_to_noise(reference: np.ndarray, given: np.ndarray) -> float:
    """In decibels."""
    noise = np.linalg.norm(reference - given)
    return float(20 * np.log10(np.linalg.norm(reference) / max(noise, 1e-12)))


def uniform(space: TuningSpace, precision: Precision) -> PrecisionPlan:
    """Every op in `precision` where it can."""
    return PrecisionPlan(
        {op: space.capabilities[op].config(precision) or FP32 for op in space.decided}
    )


class AdaptorContract:
    """Subclasses give `source` and `reference` as fixtures."""

    framework: str
    #: A 16-bit precision that the framework has kernels for, and the casts the net needs in it.
    casts_in_16_bits = (BF16, 2)

    @pytest.fixture
    def source(self) -> Any:
        """A trained digits net of the framework."""
        raise NotImplementedError

    @pytest.fixture
    def reference(self, source, images) -> np.ndarray:
        """What the framework itself computes for `images`, without us."""
        raise NotImplementedError

    @pytest.fixture
    def images(self, digits) -> np.ndarray:
        return digits[1].images[:64]

    @pytest.fixture
    def adaptor(self, source) -> Adaptor:
        return adaptor_for(source)

    @pytest.fixture
    def model(self, adaptor, source, images):
        return adaptor.load(source, example=images)

    @pytest.fixture
    def space(self, adaptor, model, all_machine) -> TuningSpace:
        return adaptor.space(model, all_machine)

    @pytest.fixture
    def observations(self, adaptor, model, space, digits) -> Observations:
        batches = [digits[0].images[start : start + 50] for start in (0, 50)]
        return adaptor.observe(model, batches, space)

    @pytest.fixture
    def convert(self, adaptor, model, space, observations):
        return lambda plan: adaptor.convert(model, space.resolve(plan), observations, space)

    def test_the_adaptor_is_found_from_the_model(self, adaptor):
        assert adaptor.framework == self.framework

    def test_loading_changes_no_number(self, adaptor, model, images, reference):
        np.testing.assert_allclose(adaptor.predict(model, images), reference, atol=1e-4)

    def test_every_op_has_a_capability_and_can_run_in_fp32(self, space):
        assert set(space.capabilities) == {op.name for op in space.graph}
        assert all(item.configs[-1] == FP32 for item in space.capabilities.values())

    def test_every_precision_is_offered_or_refused_with_a_reason(self, space):
        for op in space.graph:
            item = space.capabilities[op.name]
            for precision in (INT8, BF16, FP16):
                offered = item.config(precision) is not None
                assert offered != bool(item.reasons.get(precision)), (op, precision)

    @pytest.mark.parametrize(("precision", "decibels"), [(INT8, 25), (BF16, 35), (FP16, 50)])
    def test_one_precision_everywhere_stays_near_fp32(
        self, adaptor, space, convert, images, reference, precision, decibels
    ):
        converted = convert(uniform(space, precision))
        result = adaptor.predict(converted, images)
        assert result.dtype == reference.dtype
        assert signal_to_noise(reference, result) > decibels

    def test_an_fp32_plan_changes_nothing(self, adaptor, model, space, convert, images):
        converted = convert(space.fp32_plan())
        np.testing.assert_array_equal(
            adaptor.predict(converted, images), adaptor.predict(model, images)
        )

    def test_any_mix_of_precisions_runs(self, adaptor, space, convert, images, reference):
        for seed in range(12):
            random = np.random.default_rng(seed)
            plan = PrecisionPlan(
                {
                    op: space.capabilities[op].configs[
                        random.integers(len(space.capabilities[op].configs))
                    ]
                    for op in space.decided
                }
            )
            result = adaptor.predict(convert(plan), images)
            assert signal_to_noise(reference, result) > 10, (seed, plan.to_dict())

    def test_a_plan_may_name_ops_that_run_along(self, adaptor, space, convert, images):
        plan = uniform(space, INT8)
        along = {
            op.name: OpConfig(INT8) for op in space.graph if op.fusion_group or op.quantize_agnostic
        }
        assert along
        np.testing.assert_array_equal(
            adaptor.predict(convert(plan.replacing(along)), images),
            adaptor.predict(convert(plan), images),
        )

    def test_conversion_is_deterministic(self, adaptor, space, convert, images):
        plan = uniform(space, INT8)
        first, second = convert(plan), convert(plan)
        np.testing.assert_array_equal(
            adaptor.predict(first, images), adaptor.predict(second, images)
        )
        assert adaptor.fingerprint(first) == adaptor.fingerprint(second)

    def test_converting_leaves_the_model_as_it_was(self, adaptor, model, space, convert, images):
        before, digest = adaptor.predict(model, images), adaptor.fingerprint(model)
        convert(uniform(space, INT8))
        np.testing.assert_array_equal(adaptor.predict(model, images), before)
        assert adaptor.fingerprint(model) == digest

    def test_any_batch_size_runs(self, adaptor, space, convert, digits):
        converted = convert(uniform(space, INT8))
        for size in (1, 3, 100):
            assert len(adaptor.predict(converted, digits[1].images[:size])) == size

    def test_16_bits_take_two_casts(self, adaptor, space, convert):
        precision, casts = self.casts_in_16_bits
        converted = convert(uniform(space, precision))
        assert adaptor.conversion_counts(converted).casts == casts

    def test_weights_shrink(self, adaptor, model, space, convert):
        full = adaptor.size(model)
        assert adaptor.size(convert(uniform(space, BF16))) < 0.55 * full
        assert adaptor.size(convert(uniform(space, INT8))) < 0.35 * full

    def test_int8_without_observations_names_the_tensor(self, adaptor, model, space):
        with pytest.raises(ConversionError, match="tensor '.*' must be quantized"):
            adaptor.convert(model, space.resolve(uniform(space, INT8)), Observations(), space)

    def test_ranges_hold_what_calibration_saw(self, observations, digits):
        low, high = observations.ranges[self.input_name]["minmax"]
        seen = digits[0].images[:100]
        assert (low, high) == (seen.min(), seen.max())
        assert observations.samples == 100

    def test_saving_and_restoring_changes_nothing(self, adaptor, space, convert, images, tmp_path):
        converted = convert(uniform(space, INT8))
        adaptor.save(converted, tmp_path)
        restored = adaptor.restore(tmp_path)
        np.testing.assert_array_equal(
            adaptor.predict(restored, images), adaptor.predict(converted, images)
        )
        counts = adaptor.conversion_counts
        assert counts(restored) == counts(converted)

    def test_every_op_that_runs_is_profiled(self, adaptor, model, space, images):
        seconds = adaptor.profile(model, images)
        assert set(space.decided) <= set(seconds)
        assert all(value >= 0 for value in seconds.values())

    def test_nan_is_traced_to_where_it_begins(self, adaptor, model, images):
        assert adaptor.first_non_finite(model, images) is None
        poisoned = images.copy()
        poisoned[0, 0, 0, 0] = np.nan
        first = next(iter(adaptor.graph(model))).name
        assert adaptor.first_non_finite(model, poisoned) == first
