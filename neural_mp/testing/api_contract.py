"""Contract of the basic API uses: a model alone, a YAML file, a metric and data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from neural_mp import MixedPrecision, common
from neural_mp.errors import DataError, UnsupportedPrecisionError
from neural_mp.testing.fixtures import Accuracy, machine
from neural_mp.testing.on_digits import OnDigits

CONF = """
model: {{name: digits, framework: {framework}}}
mixed_precision: {{precisions: "int8,bf16"}}
quantization:
  calibration:
    sampling_size: 200
    dataloader: {{batch_size: 50, dataset: {{numpy: {{path: train.npz}}}}}}
evaluation:
  accuracy:
    metric: {{topk: 1}}
    dataloader: {{batch_size: 100, dataset: {{numpy: {{path: test.npz}}}}}}
tuning:
  objective: modelsize  # so small a net need not be faster in INT8
  accuracy_criterion: {{absolute: 0.02, higher_is_better: true}}
  exit_policy: {{max_trials: 20}}
"""


class ModelFormContract(OnDigits):
    """API contract of one form of a model: how it reads data and a YAML file.

    Subclasses define the fixtures `model` and `reference`.
    """

    framework: str
    #: Type of the framework's own object.
    native: type
    #: Op type of a convolution.
    convolution: str
    #: Name of the net's input.
    image = "image"
    #: Number of casts in BF16; None if every result is rounded by casts.
    casts: int | None = 2

    @pytest.fixture
    def model(self) -> Any:
        """A trained digits net with six convolutions."""
        raise NotImplementedError

    @pytest.fixture
    def reference(self, digits) -> np.ndarray:
        """The framework's own outputs for the test images."""
        raise NotImplementedError

    @pytest.fixture
    def accuracy(self) -> Accuracy:
        """A new metric for each test."""
        return Accuracy()

    def test_a_yaml_file(self, monkeypatch, tmp_path, model, digits):
        monkeypatch.setenv("FORCE_BF16", "1")
        for name, split in zip(("train", "test"), digits, strict=True):
            np.savez(tmp_path / f"{name}.npz", inputs=split.images, labels=split.labels)
        (tmp_path / "conf.yaml").write_text(CONF.format(framework=self.framework))

        converter = MixedPrecision("./conf.yaml")
        converter.model = model
        output_model = converter()

        assert output_model.met
        report = output_model.report
        assert report.baseline_accuracy is not None
        assert report.target == pytest.approx(report.baseline_accuracy - 0.02)
        assert output_model.observations.samples == 200
        assert report.op_counts[self.convolution] == {"int8": 6}

    def test_a_metric_and_data(self, monkeypatch, model, reference, digits, accuracy):
        monkeypatch.setenv("FORCE_BF16", "1")
        dataset = digits[1]

        converter = MixedPrecision()
        converter.metric = accuracy
        converter.precisions = "bf16"
        converter.eval_dataloader = common.DataLoader(dataset)
        converter.model = model
        output_model = converter()

        assert output_model.met
        report = output_model.report
        expected = (reference.argmax(1) == dataset.labels).mean()
        assert report.baseline_accuracy == pytest.approx(expected)
        assert report.accuracy == output_model.trials[-1].accuracy
        assert self.casts is None or report.casts == self.casts
        assert report.evaluations == accuracy.evaluations == 2
        assert report.op_counts[self.convolution] == {"bf16": 6}

    def test_dicts_with_labels_in_them(self, model, reference, digits, accuracy):
        (train, test), name = digits, self.image
        batch = {"labels": test.labels, name: test.images}

        converter = MixedPrecision()
        converter.metric = accuracy
        converter.precisions = "int8"
        converter.eval_dataloader = [batch]
        converter.calib_dataloader = [{name: train.images[:100], "labels": train.labels[:100]}]
        converter.objective = "modelsize"
        converter.model = model
        result = converter()

        expected = (reference.argmax(1) == test.labels).mean()
        assert result.report.baseline_accuracy == pytest.approx(expected)
        assert result.met
        np.testing.assert_array_equal(result(**batch), result(test.images))
        np.testing.assert_array_equal(result(batch), result(test.images))


class ApiContract(ModelFormContract):
    """API contract; subclasses define the fixtures `model`, `reference` and `hostile_net`."""

    @pytest.fixture
    def hostile_net(self) -> Any:
        """A net of eight convolutions and a dense layer, with an outlier.

        Between the second and the third convolution, one channel is scaled by 1024, and the weights
        that consume it by 1/1024.
        """
        raise NotImplementedError

    def test_memory_of_a_run_is_the_same_on_every_call(self, model, digits):
        """Derived from the graph, so independent of other memory in the process."""
        reports = []
        for _ in range(2):
            converter = MixedPrecision()
            converter.precisions = "int8"
            converter.model = model
            converter.calib_dataloader = digits[0].loader(64)
            reports.append(converter().report)
        baseline, converted = reports[0].baseline_footprint, reports[0].footprint
        assert baseline is not None
        assert converted is not None
        assert (reports[1].baseline_footprint, reports[1].footprint) == (baseline, converted)
        assert baseline - reports[0].baseline_size >= digits[0].images[:64].nbytes
        assert reports[0].size < converted < baseline

    @pytest.mark.parametrize("precisions", ["bf16", ["int8", "bf16"], "fp16"])
    def test_a_model_alone(self, monkeypatch, model, reference, digits, precisions):
        monkeypatch.setenv("FORCE_BF16", "1")
        monkeypatch.setenv("FORCE_FP16", "1")

        converter = MixedPrecision()
        converter.precisions = precisions
        converter.model = model
        optimized_model = converter()

        lowest = "fp16" if precisions == "fp16" else "bf16"
        # Means overflow FP16 and are on its DENY list.
        assert {config.precision for config in optimized_model.plan.values()} - {"fp32"} == {lowest}
        assert optimized_model.report.op_counts[self.convolution] == {lowest: 6}
        assert optimized_model.met is None
        warnings = optimized_model.report.warnings
        assert any("accuracy was not checked" in warning for warning in warnings)
        outputs = optimized_model(digits[1].images)
        assert (outputs.argmax(1) == reference.argmax(1)).mean() > 0.97
        assert outputs.dtype == np.float32
        assert isinstance(optimized_model.model, self.native)

    @pytest.mark.parametrize("wrong", ["dtype", "key", "shape"])
    @pytest.mark.parametrize(
        "loader", ["eval_dataloader", "calib_dataloader", "performance.dataloader"]
    )
    def test_the_loader_at_fault_is_named(self, tmp_path, model, digits, accuracy, loader, wrong):
        images, labels = digits[1].images[:32], digits[1].labels[:32]
        bad = {
            "dtype": (np.full(images.shape, "a"), labels),
            "key": ({self.image: images, "other": images}, labels),
            "shape": (images[..., None], labels),
        }[wrong]
        good = (images, labels)
        converter = MixedPrecision()
        if loader.startswith("performance"):
            if wrong != "shape":
                pytest.skip("files hold arrays of numbers alone")
            np.savez(tmp_path / "bad.npz", inputs=bad[0], labels=labels)
            data = "{dataset: {numpy: {path: bad.npz}}}"
            (tmp_path / "conf.yaml").write_text(
                f"model: {{name: digits, framework: {self.framework}}}\n"
                f"evaluation: {{performance: {{dataloader: {data}}}}}\n"
            )
            converter = MixedPrecision(tmp_path / "conf.yaml")
        converter.metric = accuracy
        converter.precisions = "int8"
        converter.eval_dataloader = converter.calib_dataloader = [good]
        converter.model = model
        if not loader.startswith("performance"):
            setattr(converter, loader, [bad])
        with pytest.raises(DataError, match=f"batch 1 of {loader}"):
            converter()

    def test_bf16_alone_without_hardware_is_refused(self, model):
        converter = MixedPrecision()
        converter.hardware = machine()
        converter.precisions = "bf16"
        converter.model = model
        with pytest.raises(UnsupportedPrecisionError, match=r"avx512_bf16.*FORCE_BF16=1"):
            converter()

    @pytest.mark.parametrize("strategy", ["basic", "mincut"])
    def test_one_bad_channel_does_not_cost_the_rest(self, hostile_net, digits, accuracy, strategy):
        """The INT8-hostile net: all-INT8 misses the target, but most layers stay in INT8."""
        converter = MixedPrecision()
        converter.hardware = machine()
        converter.precisions = "int8"
        converter.strategy = strategy
        # The result is the smallest plan that met the target, since differences of microseconds in
        # latency depend on the load of the machine.
        converter.objective = "modelsize"
        converter.metric = accuracy
        converter.calib_dataloader = digits[0].loader()
        converter.eval_dataloader = digits[1].loader()
        converter.model = hostile_net
        result = converter()
        assert result.met
        int8_ops = [op for op, config in result.plan.items() if config.precision == "int8"]
        trials = [(trial.accuracy, trial.plan) for trial in result.trials]
        if strategy == "mincut":  # corrects the channel
            assert len(result.trials) <= 3, trials
            assert len(int8_ops) >= 7, trials
        else:
            assert not result.trials[0].met  # all INT8
            assert len(result.trials) <= 12, trials
            assert len(int8_ops) >= 7, trials
