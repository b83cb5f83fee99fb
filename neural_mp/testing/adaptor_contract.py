"""Contract of adaptors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.errors import ConversionError
from neural_mp.profiling.audit import Audit, audit_model
from neural_mp.space import TuningSpace, list_effective_ops
from neural_mp.testing.fixtures import Split, machine, signal_to_noise, uniform
from neural_mp.testing.on_digits import OnDigits
from neural_mp.util.pytree import list_float_arrays, tree_leaves

INT4, INT8 = Precision.INT4, Precision.INT8
BF16, FP16 = Precision.BF16, Precision.FP16
#: Plan → converted net.
Convert = Callable[[PrecisionPlan], Any]


def mixed(space: TuningSpace, seed: int) -> PrecisionPlan:
    """Return a plan with a random configuration for each op that needs no data to round weights."""
    draw = np.random.default_rng(seed)
    space = space.without_data()
    forms = {op: space.capabilities[op].configs for op in space.tunable_ops}
    return PrecisionPlan(
        {op: configs[draw.integers(len(configs))] for op, configs in forms.items()}
    )


class AdaptorContract(OnDigits):
    """Contract of an adaptor, tested with a digit classifier.

    Subclasses define the class attributes and two fixtures, `source` and `reference`. Fixtures are
    class-scoped; tests must not modify a model.
    """

    #: Name of the framework.
    framework: str
    #: Name of the net's input in the graph.
    input_name: str
    #: Precision with kernels in the framework → minimum SQNR in dB of the net with all its ops in
    #: this precision.
    least_decibels: Mapping[Precision, float] = MappingProxyType({INT8: 25, BF16: 35, FP16: 50})
    #: Minimum SQNR in dB of any mix of precisions and calibration algorithms; and of those with
    #: weights of 2 or 3 bits, which are rounded without data.
    least_decibels_mixed: float = 20
    least_decibels_below_4_bits: float = 12
    #: A 16-bit precision with kernels in the framework, and the number of casts that the net needs;
    #: None without such kernels.
    casts_in_16_bits: tuple[Precision, int] | None = (BF16, 2)

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls) -> Any:
        """A net of the framework, trained on digits: [batch, 1, 8, 8] or flattened."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, source: object, images: np.ndarray) -> np.ndarray:
        """Return the framework's own outputs for `images`."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def adaptor(cls, source: object) -> Adaptor[Any]:
        """The adaptor, detected from the net."""
        return adaptor_for(source)

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, adaptor: Adaptor[Any], source: object, images: np.ndarray) -> Any:
        """The net in the adaptor's representation."""
        return adaptor.load(source, example=images)

    @pytest.fixture(scope="class")
    @classmethod
    def space(cls, adaptor: Adaptor[Any], model: object) -> TuningSpace:
        """The tuning space with all precisions forced on."""
        return adaptor.space(model, machine(BF16, FP16))

    @pytest.fixture(scope="class")
    @classmethod
    def observations(
        cls, adaptor: Adaptor[Any], model: object, space: TuningSpace, digits: tuple[Split, Split]
    ) -> Observations:
        """Observations of 100 digits, in two batches."""
        batches = [digits[0].images[start : start + 50] for start in (0, 50)]
        return adaptor.observe(model, batches, space)

    @pytest.fixture(scope="class")
    @classmethod
    def convert_anew(
        cls, adaptor: Adaptor[Any], model: object, space: TuningSpace, observations: Observations
    ) -> Convert:
        """Function that converts the net by a plan, on every call."""
        return lambda plan: adaptor.convert(model, space.resolve(plan), observations, space)

    @pytest.fixture(scope="class")
    @classmethod
    def convert(cls, convert_anew: Convert) -> Convert:
        """Function that converts the net by a plan, once per plan."""
        return cache(convert_anew)

    @pytest.fixture(scope="class")
    @classmethod
    def audit_of(
        cls, adaptor: Adaptor[Any], space: TuningSpace, convert: Convert
    ) -> Callable[[PrecisionPlan], Audit]:
        """Function that converts the net by a plan and audits a run."""
        if not adaptor.offers("trace_kernels"):
            pytest.skip(f"{cls.framework} does not say which kernels ran")

        return lambda plan: audit_model(
            LoadedModel(adaptor, convert(plan)), list_effective_ops(space, space.resolve(plan))
        )

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

    @pytest.mark.parametrize("precision", [INT8, BF16, FP16])
    def test_one_precision_everywhere_stays_near_fp32(
        self, adaptor, space, convert, images, reference, precision
    ):
        if precision not in self.least_decibels:
            pytest.skip(f"{self.framework} has no kernels in {precision}")
        converted = convert(uniform(space, precision))
        result = adaptor.predict(converted, images)
        assert result.dtype == reference.dtype
        assert signal_to_noise(reference, result) > self.least_decibels[precision]

    def test_an_fp32_plan_gives_the_model_itself(self, adaptor, model, space, convert, source):
        assert convert(space.fp32_plan()) is model

    def test_any_mix_of_precisions_runs(self, adaptor, space, convert, images, reference):
        for seed in range(12):
            plan = mixed(space, seed)
            result = adaptor.predict(convert(plan), images)
            nearness = signal_to_noise(reference, result)
            low = any(config.precision.bits < INT4.bits for config in plan.values())
            least = self.least_decibels_below_4_bits if low else self.least_decibels_mixed
            assert nearness > least, (seed, plan.to_dict())

    def test_a_plan_may_name_fused_ops(self, adaptor, space, convert, images):
        plan = uniform(space, INT8)
        along = {
            op.name: OpConfig(INT8) for op in space.graph if op.fusion_group or op.quantize_agnostic
        }
        np.testing.assert_array_equal(
            adaptor.predict(convert(plan.replacing(along)), images),
            adaptor.predict(convert(plan), images),
        )

    def test_conversion_is_deterministic(self, adaptor, space, convert_anew, images):
        plan = uniform(space, INT8)
        first, second = convert_anew(plan), convert_anew(plan)
        np.testing.assert_array_equal(
            adaptor.predict(first, images), adaptor.predict(second, images)
        )
        assert adaptor.fingerprint(first) == adaptor.fingerprint(second)

    def test_converting_leaves_the_model_as_it_was(
        self, adaptor, model, space, convert_anew, images
    ):
        expected, digest = adaptor.predict(model, images), adaptor.fingerprint(model)
        convert_anew(uniform(space, INT8))
        np.testing.assert_array_equal(adaptor.predict(model, images), expected)
        assert adaptor.fingerprint(model) == digest

    def test_any_batch_size_runs(self, adaptor, space, convert, digits):
        converted = convert(uniform(space, INT8))
        for size in (1, 3, 100):
            assert len(adaptor.predict(converted, digits[1].images[:size])) == size

    def test_16_bits_take_as_few_casts_as_can_be(self, adaptor, space, convert):
        if self.casts_in_16_bits is None:
            pytest.skip(f"{self.framework} has no kernels in 16 bits")
        precision, casts = self.casts_in_16_bits
        converted = convert(uniform(space, precision))
        assert LoadedModel(adaptor, converted).conversions.casts == casts

    def test_weights_shrink(self, adaptor, model, space, convert):
        full = adaptor.weight_bytes(model)
        if BF16 in self.least_decibels:
            assert adaptor.weight_bytes(convert(uniform(space, BF16))) < 0.55 * full
        assert adaptor.weight_bytes(convert(uniform(space, INT8))) < 0.35 * full

    def test_ops_say_how_many_weights_they_read(self, adaptor, model, space):
        nbytes = 4 * sum(op.weights for op in space.graph)  # bytes in float32
        assert nbytes == 0 or nbytes == pytest.approx(adaptor.weight_bytes(model), rel=0.05)

    def test_int8_without_observations_names_the_tensor(self, adaptor, model, space):
        with pytest.raises(ConversionError, match="tensor '.*' must be quantized"):
            adaptor.convert(model, space.resolve(uniform(space, INT8)), Observations(), space)

    def test_ranges_hold_what_calibration_saw(self, observations, digits):
        low, high = observations.ranges[self.input_name]["minmax"]
        images = digits[0].images[:100]
        assert (low, high) == (images.min(), images.max())
        assert observations.samples == 100

    def test_saving_and_restoring_changes_nothing(self, adaptor, space, convert, images, tmp_path):
        converted = convert(uniform(space, INT8))
        adaptor.save(converted, tmp_path)
        restored = adaptor.restore(tmp_path)
        np.testing.assert_array_equal(
            adaptor.predict(restored, images), adaptor.predict(converted, images)
        )
        original, reloaded = (LoadedModel(adaptor, model) for model in (converted, restored))
        assert reloaded.conversions == original.conversions
        shapes = [
            [np.shape(leaf) for leaf in tree_leaves(loaded.example_inputs())]
            for loaded in (original, reloaded)
        ]
        assert shapes[0] == shapes[1]

    @pytest.mark.parametrize("precision", [INT8, BF16, FP16])
    def test_what_ran_is_what_the_plan_says(self, space, audit_of, precision):
        if precision not in self.least_decibels:
            pytest.skip(f"{self.framework} has no kernels in {precision}")
        resolved = space.resolve(uniform(space, precision))
        audit = audit_of(resolved.plan)
        assert not audit.findings
        assert audit.lowered == sum(p is not Precision.FP32 for p in resolved.effective.values())

    def test_any_mix_of_precisions_runs_as_its_plan_says(self, space, audit_of):
        for seed in range(6):
            assert audit_of(mixed(space, seed)).holds, seed

    def test_what_was_restored_runs_as_its_plan_says(
        self, adaptor, space, convert, audit_of, tmp_path
    ):
        plan = mixed(space, 0)
        adaptor.save(convert(plan), tmp_path)
        restored = LoadedModel(adaptor, adaptor.restore(tmp_path))
        assert audit_model(restored, list_effective_ops(space, space.resolve(plan))).holds

    def test_a_plan_that_says_more_than_ran_does_not_hold(self, adaptor, space, convert, audit_of):
        """All ops planned in INT8 are findings if the model is FP32."""
        planned = list_effective_ops(space, space.resolve(uniform(space, INT8)))
        fp32 = LoadedModel(adaptor, convert(space.fp32_plan()))
        differing = {op.name for op in audit_model(fp32, planned).findings}
        assert differing >= {name for name, op in planned.items() if op.approach is not None}

    def test_every_op_that_runs_is_profiled(self, adaptor, model, space, images):
        if not adaptor.offers("time_ops"):
            pytest.skip(f"{self.framework} does not time single ops")
        runs = LoadedModel(adaptor, model).profile_ops(images)
        assert set(space.tunable_ops) <= set(runs)
        assert all(seconds >= 0 for durations in runs.values() for seconds in durations)

    def test_known_shapes_are_those_of_a_run(self, adaptor, model, images):
        graph = adaptor.graph(model)
        shapes = [graph[name].shape for name in graph.outputs if name in graph]
        results = list_float_arrays(adaptor.predict(model, images))
        for shape, result in zip(shapes, results, strict=True):
            sizes = result.shape if shape is None else shape
            assert len(sizes) == result.ndim
            for size, actual in zip(sizes, result.shape, strict=True):
                assert size in (None, actual)

    def test_elements_are_counted_as_in_a_run(self, adaptor, model, space, images):
        names = [*space.graph.inputs, *(op.name for op in space.graph)]
        counted = adaptor.element_counts(model, images, names)
        assert counted == Adaptor.element_counts(adaptor, model, images, names)
        assert counted[self.input_name] == images.size

    def test_nan_is_traced_to_where_it_begins(self, adaptor, model, images):
        if adaptor.op_outputs is None:
            pytest.skip(f"{self.framework} does not show what single ops compute")
        first_non_finite = adaptor.op_outputs.first_non_finite
        assert first_non_finite(model, images) is None
        poisoned = images.copy()
        poisoned[0, 0, 0, 0] = np.nan
        first = next(iter(adaptor.graph(model))).name
        assert first_non_finite(model, poisoned) == first
