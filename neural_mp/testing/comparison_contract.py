"""Contract of the op-by-op comparison of two models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.int8_accumulation import KernelKind, weight_qmax, weight_quant_spec
from neural_mp.core.precision import Precision
from neural_mp.testing.fixtures import machine, signal_to_noise, uniform
from neural_mp.testing.on_digits import OnDigits
from neural_mp.testing.products_contract import whole_numbers
from neural_mp.tuning.measurement import comparison
from neural_mp.tuning.measurement.comparison import Comparison, compare_models

INT8, BF16 = Precision.INT8, Precision.BF16


class ComparisonContract(OnDigits):
    """Contract of an adaptor with `op_outputs`.

    Subclasses define a net of 8 convolutions with ReLU, a max pooling after the fourth, and a dense
    layer.
    """

    framework: str
    #: Op type of a convolution.
    convolution: str
    #: Difference of the SQNR of a result, if fetched with other results: larger than rounding only
    #: for frameworks that fuse ops according to the fetched results.
    sqnr_tolerance_db: float = 1e-6

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls) -> Any:
        """The net as an object of the framework."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def planted(cls, source: Any) -> Callable[[float], Any]:
        """Function: factor → loadable net with weights and bias of convolution 6 scaled by it.

        Op names must not change.
        """
        raise NotImplementedError

    @staticmethod
    def own(source: Any, images: np.ndarray) -> np.ndarray:
        """Return the framework's own output of convolution 6, before its ReLU."""
        raise NotImplementedError

    @staticmethod
    def first_layer(source: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return weight, [outputs, inputs, height, width], and bias of convolution 1."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, source: Any, planted: Any, images: np.ndarray) -> Made:
        """The net in several versions."""
        return Made(cls, source, planted, images)

    def test_a_planted_difference_is_found_at_its_op_and_has_the_figures_of_numpy(
        self, made, source, images
    ):
        comparison = made.compared(made.float, made.planted(1.1), [images[:40], images[40:]])
        names = [layer.name for layer in comparison.layers]
        first = comparison.first
        assert first is not None
        assert first.name == made.convolutions[5]
        assert all(math.isinf(x.sqnr) for x in comparison.layers[: names.index(first.name)])
        exact = self.own(source, images).astype(np.float64)
        result = next(
            x for x in comparison.layers[names.index(first.name) :] if x.name in made.biased
        )
        assert result.sqnr == pytest.approx(20, abs=1e-3)  # a tenth of the amplitude
        assert result.cosine == pytest.approx(1, abs=1e-7)
        assert result.max_abs_error == pytest.approx(0.1 * np.abs(exact).max(), rel=1e-3)
        assert (comparison.samples, comparison.batches) == (64, 2)

    def test_outputs_have_the_figures_of_numpy(self, made, images):
        comparison = made.compared(made.float, made.int8, [images[:40], images[40:]])
        reference, converted = (np.asarray(model(images)) for model in (made.float, made.int8))
        (output,) = comparison.outputs
        assert output.sqnr == pytest.approx(signal_to_noise(reference, converted), abs=1e-3)
        assert output.max_abs_error == pytest.approx(np.abs(reference - converted).max(), rel=1e-4)
        dot = (reference * converted).sum() / np.linalg.norm(reference) / np.linalg.norm(converted)
        assert output.cosine == pytest.approx(dot, abs=1e-6)
        assert comparison.layers[-1].sqnr == pytest.approx(output.sqnr, abs=0.01)

    def test_integers_are_read_with_the_scale_of_their_own_tensor(self, made, source, images):
        """Integer reference of the first convolution with ReLU, in numpy."""
        weight, bias = self.first_layer(source)
        image, size = made.scales(made.graph.inputs[0])
        out_scale, out_zero = made.scales(made.relus[0])
        products = made.adaptor.int8_accumulation(machine())[KernelKind.CONVOLUTION]
        whole, steps = whole_numbers(weight, weight_qmax(weight_quant_spec(products)))
        batch = self.channels_first(images)
        stored = integers(batch, image, size) - size
        sums = convolved(stored, whole) * (image * steps)[:, None, None]
        result = np.maximum(sums + bias[:, None, None], 0)
        real = (integers(result, out_scale, out_zero) - out_zero) * out_scale
        exact = np.maximum(convolved(batch, weight) + bias[:, None, None], 0)
        expected = signal_to_noise(exact, real)
        row = made.compared(made.float, made.int8, [images]).layers[0]
        assert row.dtypes == ("float32", row.dtypes[1])
        assert "uint8" in row.dtypes[1]
        assert row.sqnr == pytest.approx(expected, abs=0.1)

    @staticmethod
    def channels_first(images: np.ndarray) -> np.ndarray:
        """Return the images as [batch, channels, height, width]."""
        return images

    def test_ops_within_a_kernel_are_left_out_and_named_with_its_result(self, made, images):
        comparison = made.compared(made.float, made.int8, [images])
        (reason, within), *remaining = comparison.left_out.items()
        assert reason == "are fused into another op in B"
        assert not remaining
        assert set(made.convolutions) <= set(within)
        compared = {layer.name: layer for layer in comparison.layers}
        assert not set(within) & set(compared)
        along = {name for layer in comparison.layers for name, _ in layer.fused_ops}
        assert along == set(within)
        relu = compared[made.relus[1]]
        assert made.convolutions[1] in dict(relu.fused_ops)
        assert relu.inputs == (made.relus[0],)

    def test_a_wrong_integer_layer_is_found_among_right_ones(self, made, images):
        comparison = made.compared(made.float, made.wrong_int8, [images])
        assert comparison.first is not None
        assert comparison.first.name == made.relus[5]
        assert comparison.first.sqnr < 20
        assert comparison.first in comparison.worst(1)

    def test_two_converted_models_are_compared(self, made, images):
        comparison = made.compared(made.int8, made.bf16, [images])
        assert {x.name for x in comparison.layers} >= set(made.relus)
        assert min(x.sqnr for x in comparison.layers) > 25
        back = made.compared(made.bf16, made.int8, [images])
        assert back.left_out == {
            why.replace("in A", "in B"): names for why, names in comparison.left_out.items()
        }

    def test_a_restored_model_has_the_same_results(self, made, images, tmp_path):
        made.adaptor.save(made.int8.held, tmp_path)
        restored = LoadedModel(made.adaptor, made.adaptor.restore(tmp_path))
        assert made.compared(made.float, restored, [images]) == made.compared(
            made.float, made.int8, [images]
        )

    def test_few_results_are_held_at_once(self, made, images, monkeypatch):
        whole = made.compared(made.float, made.int8, [images[:32]] * 2 + [images])
        limit = 1 << 19  # bytes of one result: 32 channels, 64 pixels, 64 images
        monkeypatch.setattr(comparison, "HELD_BYTES", limit)
        values, sizes = LoadedModel.make_op_outputs, list[list[int]]()

        def watch_sizes(model, ops):
            run = values(model, ops)

            def call_watched(inputs):
                outputs = run(inputs)
                sizes.append([value.real.nbytes for value in outputs.values()])
                return outputs

            return call_watched

        monkeypatch.setattr(LoadedModel, "make_op_outputs", watch_sizes)
        parts = made.compared(made.float, made.int8, [images[:32]] * 2 + [images])
        # The sizes of the first results of both models are not known in advance.
        assert len(sizes) > 12
        assert all(sum(nbytes) <= limit or len(nbytes) == 1 for nbytes in sizes[2:])
        assert parts.left_out == whole.left_out
        for actual, expected in zip(parts.layers, whole.layers, strict=True):
            assert (actual.name, actual.inputs) == (expected.name, expected.inputs)
            assert actual.sqnr == pytest.approx(expected.sqnr, abs=self.sqnr_tolerance_db)


class Made:
    """Versions of the net."""

    def __init__(self, contract: Any, source: Any, planted: Any, images: np.ndarray) -> None:
        self.adaptor = adaptor_for(source)
        self.images, self._planted = images, planted
        self.float = LoadedModel(self.adaptor, self.adaptor.load(source, example=images))
        self.graph = self.float.observable_ops
        self.convolutions = [op.name for op in self.graph if op.type == contract.convolution]
        self.relus = [op.name for op in self.graph if op.type.lower() == "relu"]
        readers = (self.graph.consumer_names(name)[0] for name in self.convolutions)
        biases = [name for name in readers if name not in self.relus]
        self.biased = biases or self.convolutions
        self.int8, self.bf16 = self.converted(self.float, INT8), self.converted(self.float, BF16)
        self.wrong_int8 = self.converted(self.planted(2.0), INT8)

    def planted(self, factor: float) -> LoadedModel[Any]:
        return LoadedModel(self.adaptor, self._planted(factor))

    def converted(self, model: LoadedModel[Any], precision: Precision) -> LoadedModel[Any]:
        native, adaptor = model.held, self.adaptor
        space = adaptor.space(native, machine(BF16))
        observations = adaptor.observe(native, [self.images], space)
        if model is self.float:
            self.observed = observations
        plan = space.resolve(uniform(space, precision))
        return LoadedModel(adaptor, adaptor.convert(native, plan, observations, space))

    def scales(self, tensor: str) -> tuple[float, int]:
        low, high = self.observed.ranges[tensor]["minmax"]
        scale = (max(high, 0) - min(low, 0)) / 255
        return scale, round(-min(low, 0) / scale)

    def compared(self, a: Any, b: Any, batches: Sequence[np.ndarray]) -> Comparison:
        return compare_models(a, b, batches)


def integers(values: np.ndarray, scale: float, zero_point: int) -> np.ndarray:
    """Return the uint8 values of quantized floats."""
    return np.clip(np.floor(values / scale + zero_point + 0.5), 0, 255)


def convolved(images: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return a 3×3 convolution with zero padding in float64."""
    padded = np.pad(images.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, weight.astype(np.float64))
