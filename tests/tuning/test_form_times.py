"""Times of the forms of a decoder's layers: every form, at every number of rows, once a shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from neural_mp.adaptors.loaded_model import AnyTunableModel, LoadedModel
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.profiler import make_layer_run
from neural_mp.core.enums import Capture
from neural_mp.core.hardware import detect
from neural_mp.core.op_timings import Workload, describe_timed_form
from neural_mp.core.precision import Precision
from neural_mp.tuning.measurement import op_timing
from neural_mp.tuning.measurement.op_timing import time_layer_forms

WORKLOAD = Workload(0.8, 0.2, 16)


class Blocks(nn.Module):
    """A table, two dense layers of one shape and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.relu(self.first(self.table(x)))))


def _tunable(capture: Capture) -> AnyTunableModel:
    torch.manual_seed(0)
    adaptor = PyTorchAdaptor()
    ids = torch.ones(2, 7, dtype=torch.long)
    source = adaptor.load(Blocks().eval(), inputs=ids, capture=capture)
    model = LoadedModel(adaptor, source).in_space(adaptor.space(source, detect()))
    return model.with_calibration([ids])


@pytest.fixture(scope="module")
def model() -> AnyTunableModel:
    return _tunable(Capture.LAYERS)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of runs that were timed together; each run is called once."""
    counts: list[int] = []

    def once(runs: list[Callable[[], object]], **options: float) -> list[float]:
        counts.append(len(runs))
        for run in runs:
            run()
        return [float(index + 1) for index in range(len(runs))]

    monkeypatch.setattr(op_timing, "time_interleaved_medians", once)
    return counts


def test_every_form_of_every_dense_layer_is_timed_at_both_row_counts(model, timed):
    times = time_layer_forms(model, WORKLOAD)
    assert {*times} == {
        op for op in model.space.tunable_ops if model.space.graph[op].type == "linear"
    }
    for op, by in times.items():
        assert {*by} == {form for c in model.space.choices(op) if (form := describe_timed_form(c))}
        assert all({*durations} == {"1", "16"} for durations in by.values())


def test_layers_of_one_shape_are_timed_once(model, timed):
    times = time_layer_forms(model, WORKLOAD)
    assert len(times) == 3
    assert len(timed) == 2 * len(WORKLOAD.row_counts)


def test_a_model_that_is_one_graph_has_no_times_of_layers():
    assert time_layer_forms(_tunable(Capture.WHOLE), WORKLOAD) == {}


@pytest.mark.parametrize("rows", [1, 16])
def test_a_timed_run_computes_the_packed_layer_on_that_many_rows(model, rows):
    op = next(op for op in model.space.tunable_ops if model.space.graph[op].type == "linear")
    config = model.space.choice(op, Precision.INT4)
    plan = model.space.resolve(model.space.fp32_plan().replacing({op: config}))
    exact = make_layer_run(model.held, op, rows)()
    rounded = make_layer_run(model.convert_by_plan(plan).held, op, rows)()
    assert exact.shape[-2] == rows
    error = (rounded - exact).norm() / exact.norm()
    assert 0.001 < error < 0.2
