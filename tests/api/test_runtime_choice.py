"""Cost of the choice of a runtime: runs of the source, and of the models that are timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.adaptors.transfer import list_reading_runtimes, transfer_file, transfer_model
from neural_mp.api.runtime_comparison import ReferenceOutputs, compare_outputs
from neural_mp.api.runtimes import RuntimeChoice
from neural_mp.core import hardware
from neural_mp.core.criterion import EFFORT_LIMITS, Effort
from neural_mp.core.precision import Precision
from neural_mp.profiling import measurement as timing
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.calibration_batches import Calibration
from neural_mp.tuning.measurement import objectives
from neural_mp.tuning.measurement.objectives import Measurement
from neural_mp.util.pytree import batch_size_of

BATCHES = 3


@dataclass(frozen=True, eq=False)
class Counted(LoadedModel[Any]):
    """A model that records the sizes of the batches that it runs on."""

    sizes: list[int] = field(default_factory=list)

    def __call__(self, inputs: Any) -> Any:
        self.sizes.append(batch_size_of(inputs))
        return super().__call__(inputs)


def arrays(count: int = BATCHES) -> list[torch.Tensor]:
    return list(torch.rand(count, 8, 4, generator=torch.Generator().manual_seed(0)))


def counted(module: nn.Module | None = None) -> Counted:
    torch.manual_seed(0)
    adaptor, net = get_adaptor_named("pytorch"), module or nn.Sequential(nn.Linear(4, 6), nn.ReLU())
    return Counted(adaptor, adaptor.load(net.eval(), example=arrays()[0]))


def shifted(by: float) -> Counted:
    """Return the net of `counted` with another bias."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
    with torch.no_grad():
        net[0].bias += by
    return counted(net)


@pytest.fixture
def timed(monkeypatch) -> list[Sequence[partial[Any]]]:
    """The runs of each measurement, none of which is made; each is slower than the one before."""
    measured: list[Sequence[partial[Any]]] = []

    def rounds(runs: Sequence[partial[Any]], **_: object) -> list[list[float]]:
        measured.append(runs)
        return [[0.001 * (index + 1)] * 20 for index, _ in enumerate(runs)]

    monkeypatch.setattr(objectives, "time_interleaved_rounds", rounds)
    return measured


def choice_of(
    source: Counted,
    effort: Effort,
    precisions: tuple[Precision, ...] = (Precision.INT8,),
    forced: frozenset[Precision] = frozenset(),
) -> RuntimeChoice:
    assert len(list(list_reading_runtimes(source))) == 2
    calibration = Calibration(Batches(arrays(), "calib_dataloader"), 100)
    measurement = Measurement(arrays()[0], limits=EFFORT_LIMITS[effort])
    machine = replace(hardware.detect(), forced=forced)
    return RuntimeChoice(lambda: source, source, calibration, measurement, machine, precisions)


@pytest.mark.slow
@pytest.mark.usefixtures("timed")
def test_the_source_runs_once_on_each_compared_batch():
    """However many runtimes are compared with it: a batch of eight, an example, and 1 and 3."""
    source = counted()
    figures = choice_of(source, Effort.NORMAL, ()).choose_fastest().figures
    verified = [entry for entry in figures if entry.sqnr_db is not None]
    assert {entry.framework for entry in verified} == {"onnxrt", "openvino"}
    example = batch_size_of(source.example_inputs())
    assert source.sizes == [1, 3, 8, example]


@pytest.mark.slow
def test_slow_models_that_just_ran_are_warmed_up_once(monkeypatch):
    """By a clock on which each run of a model takes a second: INT8 runs when it is converted."""
    called: list[LoadedModel[Any]] = []
    call = LoadedModel.__call__

    def recorded(self: LoadedModel[Any], inputs: Any) -> Any:
        called.append(self)
        return call(self, inputs)

    clock = SimpleNamespace(perf_counter=lambda: float(len(called)))
    monkeypatch.setattr(LoadedModel, "__call__", recorded)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(objectives, "time_interleaved_rounds", timing.time_interleaved_rounds)
    choice_of(counted(), Effort.NORMAL).choose_fastest()
    runs = Counter(id(model) for model in called if model.conversions.quantize)
    converted, warm_up, rounds = 1, 1, 3  # as few rounds as there may be
    assert sorted(runs.values()) == [converted + warm_up + rounds] * 3  # all as fast in FP32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("effort", "converted"), [(Effort.QUICK, 0), (Effort.NORMAL, 2), (Effort.THOROUGH, 2)]
)
def test_the_effort_decides_how_many_runtimes_are_timed_in_int8(effort, converted, timed):
    figures = choice_of(counted(), effort).choose_fastest().figures
    assert sum(entry.int8_latency is not None for entry in figures) == converted
    assert sum(entry.latency is not None for entry in figures) == 3
    assert [len(models) for models in timed] == ([3] if not converted else [3, 3 + converted])


@pytest.mark.slow
@pytest.mark.parametrize(("third", "is_compared"), [(1.2e-3, True), (1.6e-3, False)])
def test_a_runtime_is_compared_in_int8_or_said_to_be_compared_in_fp32(
    monkeypatch, third, is_compared
):
    """The third runtime in FP32: nearly as fast as the second, or much slower."""
    fp32_seconds = {"pytorch": 0.9e-3, "openvino": 1e-3, "onnxrt": third}

    def rounds(runs: Sequence[partial[Any]], **_: object) -> list[list[float]]:
        return [
            [4e-4 if run.func.conversions.quantize else fp32_seconds[run.func.adaptor.framework]]
            * 20
            for run in runs
        ]

    monkeypatch.setattr(objectives, "time_interleaved_rounds", rounds)
    figures = choice_of(counted(), Effort.NORMAL).choose_fastest().figures
    onnxrt = next(entry for entry in figures if entry.framework == "onnxrt")
    assert (onnxrt.int8_latency is not None) is is_compared
    assert ("timed in FP32 only" in onnxrt.reason) is not is_compared


@pytest.mark.slow
def test_each_runtime_competes_with_its_fastest_plan_in_int8_and_in_16_bit_floats(monkeypatch):
    """On a clock by which 16-bit floats take a tenth of the time of INT8, and only in OpenVINO.

    OpenVINO's FP32 is the slowest of three.
    """

    def rounds(runs: Sequence[partial[Any]], **_: object) -> list[list[float]]:
        return [[seconds_of(run.func)] * 20 for run in runs]

    def seconds_of(model: LoadedModel[Any]) -> float:
        is_fast = model.adaptor.framework == "openvino"
        if model.conversions.quantize:
            return 1e-3
        if model.size == fp32_bytes:
            return 4e-3 if is_fast else 3e-3
        return 1e-4 if is_fast else 1e-2

    fp32_bytes = counted().size

    monkeypatch.setattr(objectives, "time_interleaved_rounds", rounds)
    bf16 = frozenset({Precision.BF16})
    choice = choice_of(counted(), Effort.NORMAL, (Precision.INT8, *bf16), bf16).choose_fastest()
    figures = {entry.framework: entry for entry in choice.figures}
    assert choice.model.adaptor.framework == "openvino"
    assert figures["openvino"].low_float_latency == 1e-4
    assert figures["openvino"].int8_latency is None
    others = [figures[name] for name in ("pytorch", "onnxrt")]
    assert all(entry.low_float_latency is None for entry in others)
    assert [entry.int8_latency for entry in others] == [1e-3, 1e-3]


def read_by(batches: Sequence[torch.Tensor]) -> Callable[[], Iterator[torch.Tensor]]:
    """Return a loader that writes every batch to the same memory."""
    memory = torch.empty_like(batches[0])

    def read() -> Iterator[torch.Tensor]:
        for batch in batches:
            memory.copy_(batch)
            yield memory

    return read


def test_kept_outputs_belong_to_their_batches():
    source = counted()
    reference = ReferenceOutputs(source, read_by(arrays()))
    for _ in range(2):
        pairs = [(inputs.clone(), outputs.clone()) for inputs, outputs in reference]
        for (inputs, outputs), expected in zip(pairs, arrays(), strict=True):
            assert torch.equal(inputs, expected)
            assert torch.equal(outputs, source.native(expected))
    assert source.sizes == [8] * BATCHES


def test_a_runtime_that_fails_early_leaves_the_other_batches_to_the_next():
    source = counted()
    reference = ReferenceOutputs(source, arrays)
    other = shifted(0.5)
    assert [len(compare_outputs(reference, other)[1]) > 0, len(other.sizes)] == [True, BATCHES]
    first = next(iter(ReferenceOutputs(source, arrays)))
    assert torch.equal(first[0], arrays()[0])

    source = counted()
    reference = ReferenceOutputs(source, arrays)
    next(iter(reference))
    assert source.sizes == [8]
    assert compare_outputs(reference, counted())[1] == ""
    assert source.sizes == [8] * BATCHES


def test_outputs_beyond_the_limit_are_computed_again():
    source = counted()
    pair = 8 * 4 * 4 + 8 * 6 * 4  # bytes of a batch and its outputs
    reference = ReferenceOutputs(source, arrays, limit=pair + 1)
    for _ in range(2):
        assert compare_outputs(reference, counted())[1] == ""
    assert len(source.sizes) == 1 + 2 * (BATCHES - 1)


def test_sizes_that_the_source_rejects_are_not_compared():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.reshape(8, 2, 2) * 2

    source = counted(Fixed())
    reference = ReferenceOutputs(
        source, arrays, lambda: (source.example_inputs(size) for size in (1, 3))
    )
    for _ in range(2):
        assert [batch_size_of(inputs) for inputs, _ in reference] == [8] * BATCHES


@pytest.mark.parametrize(
    ("max_seconds", "sizes"), [(0.0, [1, 3]), (float("inf"), [1, 3] + [8] * BATCHES)]
)
def test_a_slow_source_is_compared_on_small_batches_only(max_seconds, sizes):
    """Promise: every runtime and the source run on four samples instead of all, once each."""
    source, runtimes = counted(), [counted(), counted()]
    reference = ReferenceOutputs(
        source,
        arrays,
        lambda: (source.example_inputs(size) for size in (1, 3)),
        max_seconds=max_seconds,
    )
    for runtime in runtimes:
        assert compare_outputs(reference, runtime)[1] == ""
        assert runtime.sizes == sizes
    assert source.sizes == sizes


def test_a_slow_source_of_one_batch_size_is_compared_on_the_data():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.reshape(8, 2, 2) * 2

    source = counted(Fixed())
    reference = ReferenceOutputs(
        source, arrays, lambda: (source.example_inputs(size) for size in (1, 3)), max_seconds=0.0
    )
    assert [batch_size_of(inputs) for inputs, _ in reference] == [8] * BATCHES


def test_a_batch_that_the_source_rejects_is_an_error_for_every_runtime():
    reference = ReferenceOutputs(counted(), lambda: [arrays()[0], torch.rand(8, 5)])
    for _ in range(2):
        with pytest.raises(Exception, match="5"):
            compare_outputs(reference, counted())


def test_runtimes_are_compared_without_damaged_samples():
    damaged = arrays()[0].clone()
    damaged[2, 1] = np.nan
    for _ in range(2):
        reference = ReferenceOutputs(counted(), lambda: [damaged])
        ((inputs, outputs),) = reference
        assert not torch.isnan(inputs).any()
        assert not torch.isnan(outputs).any()


def test_other_runtimes_read_the_weights_from_a_file_beside_the_graph():
    """Promise: no message of all weights is made, which held them three times."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 2048), nn.ReLU(), nn.Linear(2048, 512))
    source, batch = counted(net), arrays()[0]
    weights = sum(parameter.nbytes for parameter in net.parameters())
    file = transfer_file(source)
    assert file.path.stat().st_size < weights / 100
    assert sum(part.stat().st_size for part in file.path.parent.iterdir()) > weights
    for runtime in list_reading_runtimes(source):
        model = transfer_model(source, runtime, file)
        assert torch.allclose(torch.as_tensor(model(batch)), net(batch), atol=1e-5)
