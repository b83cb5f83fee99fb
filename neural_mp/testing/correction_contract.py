"""Contract of the corrections of INT8 layers in all frameworks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neural_mp.adaptors.common.optional import Corrections
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights, CorrectionOptions
from neural_mp.adaptors.common.weights.corrections import apply_corrections, score_corrections
from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerParams
from neural_mp.adaptors.common.weights.reconstruction import reconstructable_layers
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.replay import convert_with_plan
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.errors import PlanError
from neural_mp.search.corrections import (
    apply_correction_nsr,
    choose_best_corrections,
    with_corrections,
)
from neural_mp.testing.fixtures import Split, machine, signal_to_noise, uniform
from neural_mp.testing.on_digits import OnDigits

INT8 = Precision.INT8
MACHINE = machine()
#: Scale of the outlier channels.
FACTOR = 1024.0
#: Corrections that learn weights.
LEARNED = ("adaround", "learned_scale")


class CorrectionCase:
    """Net with its tuning space, observations and plans before conversion."""

    def __init__(self, source: object, images: np.ndarray) -> None:
        self.source, self.images = source, images
        self.adaptor = adaptor_for(source)
        self.model = self.adaptor.load(source, example=images)
        self.space = self.adaptor.space(self.model, MACHINE).restricted_to([INT8])
        observations = self.adaptor.observe(self.model, [images], self.space)
        self.observed = score_corrections(self.adaptor, self.model, self.space, observations)
        self.plain = uniform(self.space, INT8)
        self.best = choose_best_corrections(self.observed)
        self.corrected = with_corrections(self.plain, self.space, self.best)
        self.reference = self.run(self.model)

    def run(self, model: object) -> np.ndarray:
        outputs = self.adaptor.predict(model, self.images)
        outputs = outputs[0] if isinstance(outputs, list | tuple) else outputs
        return np.asarray(next(iter(outputs.values())) if isinstance(outputs, dict) else outputs)

    def convert(self, plan: PrecisionPlan) -> Any:
        return self.adaptor.convert(self.model, self.space.resolve(plan), self.observed, self.space)

    def reconstructed(self, plan: PrecisionPlan, folder: Path | None = None) -> Any:
        """Return the model of a plan that learns from the images, with kept weights in a folder."""
        options = CorrectionOptions(folder=folder)
        corrected = CorrectedWeights(self.adaptor, self.model, lambda: [self.images], options)
        resolved = self.space.resolve(plan)
        converted = self.adaptor.convert(self.model, resolved, self.observed, self.space, corrected)
        self.layer_errors = corrected.layer_errors
        return converted

    @property
    def _offered(self) -> Corrections[Any]:
        assert self.adaptor.corrections is not None
        return self.adaptor.corrections

    @property
    def layers(self) -> Mapping[str, LayerParams]:
        return self._offered.layer_params(self.model)

    def values(self, tensors: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the values of tensors, in one part."""
        collected: dict[str, list[np.ndarray]] = {}
        assert self._offered.values is not None
        for name, part in self._offered.values(self.model, [self.images], tensors):
            collected.setdefault(name, []).append(np.array(part))
        yield from ((name, np.concatenate(parts)) for name, parts in collected.items())

    def in_fp32(self, plan: PrecisionPlan) -> Any:
        """Return the FP32 model with the corrections of a plan."""
        resolved = self.space.resolve(plan).plan
        return apply_corrections(self.adaptor, self.model, resolved, self.observed, self.space)[0]

    def with_corrections_of(self, op: str, *corrections: str) -> PrecisionPlan:
        return self.plain.replacing({op: replace(self.plain[op], corrections=corrections)})

    def with_all(self, *corrections: str) -> PrecisionPlan:
        """Return the corrected plan with further corrections of all layers."""
        able = reconstructable_layers(self.adaptor, self.model)
        changes = {
            op: replace(config, corrections=(*config.corrections, *corrections))
            for op, config in self.corrected.items()
            if op in able
        }
        return self.corrected.replacing(changes)


class CorrectionContract(OnDigits):
    """Contract of corrections; subclasses define fixtures of nets over [batch, 1, 8, 8] or NHWC.

    `net`: convolution, ReLU, grouped convolution, ReLU, max pooling, convolution, ReLU, a layer
    norm over the channels, and two dense layers, whose product is the output. One output channel of
    each of the first two convolutions and the norm is scaled by `FACTOR`, and the weights that
    consume it by 1/`FACTOR`. `residual`: convolution, ReLU, and a second convolution whose input is
    added to its output. `two_outputs`: the same two convolutions, with the intermediate tensor as a
    second output. `normed`: a layer norm over the last axis with such an outlier, and a dense
    layer.
    """

    #: Number of layers that read each tensor with an outlier.
    readers: tuple[int, ...] = (1, 1, 2)
    #: Least gain of learned weights in dB of the outputs; small where every result is in INT8,
    #: whose noise is larger than that of the weights.
    learned_gain_db: float = 1

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls) -> Any:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def residual(cls) -> Any:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def two_outputs(cls) -> Any:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def normed(cls) -> Any:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls, digits: tuple[Split, Split]) -> np.ndarray:
        return digits[1].images[:200]

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, net, images) -> CorrectionCase:
        return CorrectionCase(net, images)

    def test_every_tensor_with_an_outlier_gets_a_correction(self, case):
        readers = [t.consumers for t in case.space.tensors if t.name in case.best]
        assert tuple(sorted(len(ops) for ops in readers)) == self.readers

    def test_the_noise_that_is_predicted_falls(self, case):
        nsr = apply_correction_nsr(case.observed, case.best)
        for tensor in case.best:
            assert nsr[tensor] < 0.1 * case.observed.nsr[tensor]

    @pytest.mark.parametrize("correction", ["equalize", "smooth"])
    def test_in_fp32_the_model_stays_as_it_was(self, case, correction):
        able = {t: correction for t in case.best if correction in case.observed.corrected_nsr[t]}
        # Norms have no equalization.
        assert len(able) == (len(self.readers) if correction == "smooth" else 2)
        model = case.in_fp32(with_corrections(case.plain, case.space, able))
        assert signal_to_noise(case.reference, case.run(model)) > 100

    def test_in_int8_much_is_gained(self, case):
        baseline = signal_to_noise(case.reference, case.run(case.convert(case.plain)))
        corrected = signal_to_noise(case.reference, case.run(case.convert(case.corrected)))
        assert corrected > baseline + 20
        assert corrected > 30

    def test_the_model_given_is_untouched(self, case):
        fingerprint = case.adaptor.fingerprint(case.model)
        case.convert(case.corrected)
        assert case.adaptor.fingerprint(case.model) == fingerprint
        np.testing.assert_array_equal(case.run(case.model), case.reference)

    def test_a_plan_file_replays_them(self, case, tmp_path):
        path = tmp_path / "plan.yaml"
        path.write_text(case.corrected.to_yaml(observations=case.observed))
        plan, observed = load_plan_file(path)
        assert plan == case.corrected
        assert any(config.corrections for config in plan.values())
        assert observed == case.observed
        replayed = convert_with_plan(case.source, path, inputs=(case.images,), hardware=MACHINE)
        converted = case.run(case.convert(case.corrected))
        np.testing.assert_array_equal(np.asarray(replayed(case.images)), converted)

    def test_a_saved_model_gives_the_same(self, case, tmp_path):
        converted = case.convert(case.corrected)
        case.adaptor.save(converted, tmp_path)
        restored = case.adaptor.restore(tmp_path)
        np.testing.assert_array_equal(case.run(restored), case.run(converted))

    def test_a_corrected_bias_takes_the_mean_error_away(self, normed, images):
        case = CorrectionCase(normed, images)
        (dense,) = case.space.tunable_ops
        plans = [
            case.with_corrections_of(dense, "smooth"),
            case.with_corrections_of(dense, "smooth", "bias_correction"),
        ]
        errors = [case.run(case.convert(plan)) - case.reference for plan in plans]
        baseline, corrected = (
            np.abs(error.reshape(-1, error.shape[-1]).mean(0)) for error in errors
        )
        assert corrected.mean() < 0.2 * baseline.mean()
        # Only rounding errors of the weight are corrected, so the change is small.
        assert signal_to_noise(case.reference, case.reference + errors[1]) > 30

    @pytest.mark.parametrize("correction", ["equalize", "smooth", "bias_correction"])
    def test_a_correction_that_an_op_cannot_have_is_refused_by_name(self, case, correction):
        first = case.space.tunable_ops[0]  # consumes the images, which have no producer
        with pytest.raises(PlanError, match=first):
            case.convert(case.with_corrections_of(first, correction))

    def test_a_correction_of_an_op_without_weights_is_refused_by_name(self, case):
        passing = next(op.name for op in case.space.graph if op.quantize_agnostic)
        plan = case.plain.replacing({passing: OpConfig(INT8, corrections=("smooth",))})
        with pytest.raises(PlanError, match=passing):
            case.convert(plan)

    def test_the_rows_of_a_layer_times_its_weight_are_its_results(self, case):
        able = reconstructable_layers(case.adaptor, case.model)
        assert able == {op for op, layer in case.layers.items() if layer.inputs is not None}
        sources = {op: case.space.graph[op].inputs[0] for op in able}
        values = dict(case.values({*sources.values(), *able}))
        for op in able:
            layer = case.layers[op]
            matrix, rows = layer.as_matrix(), layer.extract_rows(values[sources[op]], 1 << 30, 0)
            weight = matrix.reshape(*matrix.shape[:2], -1)
            product = np.einsum("gri,goi->rgo", rows, weight).reshape(len(rows[0]), -1)
            real = np.moveaxis(values[op], layer.axis, -1).reshape(product.shape).astype(np.float64)
            bias = (real - product).mean(axis=0)
            assert signal_to_noise(real - bias, product) > 100, op

    @pytest.mark.parametrize(
        "corrections", [["adaround"], ["learned_scale"], [*LEARNED], ["bias_correction", *LEARNED]]
    )
    def test_reconstruction_reduces_the_error_of_every_layer_and_of_the_outputs(
        self, case, corrections
    ):
        baseline = signal_to_noise(case.reference, case.run(case.convert(case.corrected)))
        model = case.reconstructed(case.with_all(*corrections))
        assert case.layer_errors.keys() == reconstructable_layers(case.adaptor, case.model)
        gained = [errors.learned / errors.nearest for errors in case.layer_errors.values()]
        assert max(gained) <= 1
        assert np.mean(gained) < 0.9
        reconstructed = signal_to_noise(case.reference, case.run(model))
        # Scales alone gain little if INT8 weights are limited to 7 bits.
        is_exact = case.adaptor.int8_accumulation(MACHINE)["dense"] == "exact"
        is_large = is_exact or "adaround" in corrections
        assert reconstructed > baseline + (self.learned_gain_db if is_large else 0)

    def test_reconstruction_needs_data(self, case):
        op = case.space.tunable_ops[0]
        with pytest.raises(PlanError, match=f"{op}.*calibration data"):
            case.convert(case.with_corrections_of(op, "adaround"))

    def test_a_reconstruction_resumes_bit_for_bit(self, case, tmp_path):
        plan = case.with_all("bias_correction", *LEARNED)
        first = case.run(case.reconstructed(plan, tmp_path))
        files = sorted(tmp_path.iterdir())
        assert len(files) == len(case.layer_errors)
        files[0].unlink()  # as if interrupted
        again = case.run(case.reconstructed(plan, tmp_path))
        assert len(case.layer_errors) == 1  # the others are kept
        np.testing.assert_array_equal(again, first)

    @pytest.mark.parametrize("kind", ["residual", "two_outputs"])
    def test_what_is_added_or_given_out_is_never_scaled(self, request, images, kind):
        case = CorrectionCase(request.getfixturevalue(kind), images)
        assert not case.observed.corrected_nsr
        second = case.space.tunable_ops[1]
        for correction in ("equalize", "smooth"):
            with pytest.raises(PlanError, match=second):
                case.convert(case.with_corrections_of(second, correction))
