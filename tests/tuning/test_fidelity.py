"""Without a metric, the outputs are compared with those of FP32 on calibration samples."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.observations import KeptOutputs
from neural_mp.tuning.measurement import sqnr
from neural_mp.tuning.measurement.objectives import Measurement
from neural_mp.tuning.measurement.sqnr import OutputNoise, TimedRun, output_sqnr_db
from neural_mp.util.noise import compute_mean_nsr


@pytest.fixture
def converter(net, digits):
    tuner = MixedPrecision()
    tuner.model, tuner.precisions = net, "int8"
    tuner.calib_dataloader = digits[0].loader(50)
    return tuner


def test_the_report_holds_the_signal_to_noise_ratio_on_calibration_samples(converter, net, digits):
    result = converter()
    assert result.met is None
    images = digits[0].images[: converter.sampling_size]
    with torch.no_grad():
        exact = net(torch.from_numpy(images)).numpy().astype(np.float64)
    noise = [
        np.square(result(images[part]) - exact[part]).mean() / np.square(exact[part]).mean()
        for part in (slice(0, 50), slice(50, 100))
    ]
    assert result.report.output_sqnr_db == pytest.approx(-10 * math.log10(np.mean(noise)), abs=0.05)
    assert result.report.output_sqnr_db > 25
    assert not any("SQNR" in warning for warning in result.report.warnings)


def test_outputs_that_differ_much_come_with_a_warning(converter, monkeypatch):
    monkeypatch.setattr(sqnr, "MIN_SQNR_DB", 100.0)
    result = converter()
    (warning,) = [w for w in result.report.warnings if "SQNR" in w]
    assert f"{result.report.output_sqnr_db:.1f} dB" in warning
    assert "set a metric" in warning


class CancellingOutput(nn.Module):
    """Many outputs of common size, and a small difference of large features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 64), nn.Linear(64, 8)
        with torch.no_grad():
            self.body.bias.fill_(20.0)
        self.small = nn.Linear(64, 8, bias=False)
        with torch.no_grad():
            self.small.weight -= self.small.weight.mean(dim=1, keepdim=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = torch.relu(self.body(x))
        output = self.head(features)
        return (*(output * factor for factor in range(1, 100)), self.small(features))


def test_a_single_output_that_differs_much_comes_with_a_warning(converter):
    torch.manual_seed(0)
    converter.model, batches = CancellingOutput().eval(), [torch.randn(8, 16) for _ in range(3)]
    converter.calib_dataloader = [(batch, None) for batch in batches]
    result = converter()
    with torch.no_grad():
        exact = [converter.model(batch)[99].numpy().astype(np.float64) for batch in batches]
    noise = [
        np.square(np.asarray(result(batch)[99]) - values).mean() / np.square(values).mean()
        for batch, values in zip(batches, exact, strict=True)
    ]
    lowest = -10 * math.log10(np.mean(noise))
    assert result.report.output_sqnr_db > 20 > lowest
    (warning,) = [w for w in result.report.warnings if "SQNR" in w]
    assert warning.startswith("output 100 of 100 floating-point outputs differs from that of FP32")
    assert f"its SQNR is {lowest:.1f} dB" in warning


class PredictedLength(nn.Module):
    """A sequence as long as a dense layer says, as the frames of synthesized speech."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.length = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = self.length(torch.relu(self.body(x))).abs().sum() * 1e4
        return torch.ones(int(frames.item()) % 1000 + 1)


def test_an_output_of_another_length_comes_with_a_warning(converter):
    torch.manual_seed(0)
    converter.model = PredictedLength().eval()
    converter.capture = "modules"
    converter.calib_dataloader = [(torch.randn(8, 16), None) for _ in range(3)]
    result = converter()
    (warning,) = [w for w in result.report.warnings if "output" in w and "shape" in w]
    assert warning.startswith("output 1 of 1 has another shape than in FP32")


@pytest.mark.slow
def test_a_model_against_itself_has_no_noise(net, digits):
    adaptor = PyTorchAdaptor()
    images = digits[1].images[:10]
    model = LoadedModel(adaptor, adaptor.load(net, example=images))
    assert output_sqnr_db(model, model, [images]) == math.inf
    assert output_sqnr_db(model, model, []) is None


def test_outputs_that_are_no_numbers_are_as_bad_as_can_be():
    reference = [np.ones(3, np.float32)]
    assert compute_mean_nsr(reference, [np.array([1, np.nan, 1], np.float32)]) == 1e9
    assert compute_mean_nsr(reference, [np.full(3, 1.1, np.float32)]) == pytest.approx(
        0.01, rel=1e-3
    )
    for outputs in (np.ones(4, np.float32), np.ones((3, 1), np.float32)):
        assert compute_mean_nsr(reference, [outputs]) == 1e9, "outputs of another length"


def test_equal_nan_and_inf_are_neither_noise_nor_signal():
    masked = np.array([1, -np.inf, np.nan, 2, np.inf], np.float32)
    noisy = masked + np.array([0.1, 0, 0, -0.2, 0], np.float32)
    assert compute_mean_nsr([masked], [masked]) == 0
    assert compute_mean_nsr([masked], [noisy]) == pytest.approx(0.01, rel=1e-3)
    for index, value in ((1, np.inf), (1, 0), (2, 0), (3, np.nan), (4, np.nan)):
        outputs = masked.copy()
        outputs[index] = value
        assert compute_mean_nsr([masked], [outputs]) == 1e9, (index, value)
    assert compute_mean_nsr([masked, masked[:0]], [noisy, masked[:0]]) == pytest.approx(
        0.01, rel=1e-3
    )


class Clock:
    """Models that return their inputs, and take given seconds for each call in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.runs = 0.0, list[str]()
        monkeypatch.setattr(sqnr.time, "perf_counter", lambda: self.now)

    def model(self, name: str, seconds: list[float]) -> Any:
        def run(inputs: np.ndarray) -> np.ndarray:
            self.now += seconds[self.runs.count(name)]
            self.runs.append(name)
            return inputs

        return run


def test_compared_batches_are_the_first_latency_rounds(monkeypatch) -> None:
    clock, (like, shorter) = Clock(monkeypatch), (np.ones((4, 2)), np.ones((3, 2)))
    models = clock.model("fp32", [1.0, 1.1, 9.0, 1.2]), clock.model("int8", [0.5, 0.5, 9.0, 0.5])
    noise = OutputNoise(*models, Measurement(like))
    noise.measure_fidelity([like, like, shorter, like])
    assert noise.seconds[0] == pytest.approx([1.0, 1.1, 1.2])
    assert noise.seconds[1] == pytest.approx([0.5, 0.5, 0.5])
    # The models begin in turn, so that neither always finds the caches of the other.
    assert clock.runs == ["fp32", "int8", "int8", "fp32"] * 2


def test_a_cold_start_is_timed_again(monkeypatch) -> None:
    clock, like = Clock(monkeypatch), np.ones((4, 2))
    models = clock.model("fp32", [1.1, 1.0, 1.1]), clock.model("int8", [2.0, 0.5, 0.5, 0.4])
    noise = OutputNoise(*models, Measurement(like))
    noise.measure_fidelity([like] * 3)
    assert noise.seconds[0] == pytest.approx([1.1, 1.0, 1.1])
    assert noise.seconds[1] == pytest.approx([0.4, 0.5, 0.5])


def test_a_run_just_made_is_the_first_of_the_comparison(monkeypatch) -> None:
    clock, like = Clock(monkeypatch), np.ones((4, 2))
    models = clock.model("fp32", [1.0, 1.1]), clock.model("int8", [0.5, 0.5])
    noise = OutputNoise(*models, Measurement(like), TimedRun.run_timed(models[0], like))
    assert noise.measure_fidelity([like.copy(), like]).sqnr_db == math.inf
    assert noise.seconds == (pytest.approx([1.0, 1.1]), pytest.approx([0.5, 0.5]))
    assert clock.runs == ["fp32", "int8", "int8", "fp32"]


def test_a_run_on_other_samples_is_not_part_of_the_comparison(monkeypatch) -> None:
    clock, like = Clock(monkeypatch), np.ones((4, 2))
    models = clock.model("fp32", [9.0, 1.0, 1.1]), clock.model("int8", [0.5] * 2)
    noise = OutputNoise(*models, Measurement(like), TimedRun.run_timed(models[0], like * 2))
    assert noise.measure_fidelity([like, like]).sqnr_db == math.inf
    assert noise.seconds == (pytest.approx([1.0, 1.1]), pytest.approx([0.5, 0.5]))


@pytest.fixture
def kept():
    """Outputs that differ from those of FP32, which the models of `Clock` return: a tenth more."""
    outputs = KeptOutputs()
    for inputs in (np.ones((4, 2)), np.full((4, 2), 2.0), np.full((4, 2), 3.0)):
        outputs.add_outputs([inputs * 1.1])
        outputs.end_batch(inputs)
    return outputs


@pytest.mark.parametrize("fp32", [1.0, 0.1])
def test_of_known_outputs_few_runs_of_fp32_show_that_it_is_far_slower(monkeypatch, kept, fp32):
    clock, batches = Clock(monkeypatch), [np.full((4, 2), value) for value in (1.0, 2.0, 3.0)]
    times = clock.model("fp32", [fp32] * 3), clock.model("int8", [0.3 * fp32] * 9)
    noise = OutputNoise(*times, Measurement(batches[0]), kept=kept)
    # The first two batches have the outputs of the run, the other those that were kept.
    decibels = noise.measure_fidelity(batches).sqnr_db
    assert decibels == pytest.approx(-10 * math.log10(1 / 3 * (1 / 11) ** 2), abs=1e-3)
    is_long = fp32 == 1.0
    assert clock.runs.count("fp32") == 3
    assert [len(seconds) for seconds in noise.seconds] == ([3, 5] if is_long else [3, 3])
    assert Measurement(None).is_clear(noise.seconds) is is_long


def test_fp32_runs_on_known_outputs_as_long_as_its_time_is_in_doubt(monkeypatch, kept):
    clock, batches = Clock(monkeypatch), [np.full((4, 2), value) for value in (1.0, 2.0, 3.0)]
    models = clock.model("fp32", [1.0] * 3), clock.model("int8", [0.8] * 3)
    noise = OutputNoise(*models, Measurement(batches[0]), kept=kept)
    assert noise.measure_fidelity(batches).sqnr_db == math.inf
    assert noise.seconds == ([pytest.approx(1.0)] * 3, [pytest.approx(0.8)] * 3)


def test_runs_without_fp32_do_not_count_once_one_of_them_is_slow(monkeypatch, kept):
    clock, batches = Clock(monkeypatch), [np.full((4, 2), value) for value in (1.0, 2.0, 3.0)]
    models = clock.model("fp32", [1.0] * 3), clock.model("int8", [0.3, 0.3, 0.9, 0.3])
    noise = OutputNoise(*models, Measurement(batches[0]), kept=kept)
    noise.measure_fidelity(batches)
    assert noise.seconds == ([pytest.approx(1.0)] * 3, [pytest.approx(0.3)] * 3)


def test_fp32_does_not_run_on_known_outputs_if_nothing_is_timed(monkeypatch, kept):
    clock, inputs = Clock(monkeypatch), np.ones((4, 2))
    models = clock.model("fp32", []), clock.model("int8", [0.3])
    noise = OutputNoise(*models, kept=kept)
    assert noise.measure_fidelity([inputs]).sqnr_db == pytest.approx(20 * math.log10(11), abs=1e-3)


def test_outputs_beyond_the_limit_are_not_kept():
    cache, inputs = KeptOutputs(limit=100), np.ones((2, 3), np.float32)
    for number in range(5):
        if cache.is_open:
            cache.add_outputs([inputs + number])
            cache.end_batch(inputs + number)
    cached = [cache.get_outputs(inputs + number) for number in range(5)]
    assert [outputs is not None for outputs in cached] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("fp32", "int8", "clear"),
    [
        ([1.0] * 4, [0.3] * 4, True),
        ([0.3] * 4, [1.0] * 4, True),
        ([1.0] * 2, [0.3] * 7, True),
        ([1.0] * 2, [0.3] * 6, False),  # too few runs
        ([1.0] * 3, [0.3] * 3, False),  # too few rounds
        ([1.0] * 4, [0.8] * 4, False),  # too small a gain
        ([1.0] * 4, [0.3, 0.3, 0.3, 0.9], False),  # one round in doubt
        ([0.01] * 4, [0.003] * 4, False),  # short rounds cost nothing
    ],
)
def test_slow_rounds_end_only_when_all_of_them_agree(fp32, int8, clear) -> None:
    assert Measurement(None).is_clear([fp32, int8]) is clear
