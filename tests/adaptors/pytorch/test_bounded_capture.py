"""Captures and exports whose symbolic sizes grow without bound end, with a reason.

They have fewer dynamic axes, or fewer modules.
"""

import logging

import pytest
import sympy
import torch
from still_clock import StillClock
from torch import nn
from torch.nn import functional

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch.capture import graph_capture, module_capture, taken_paths
from neural_mp.adaptors.pytorch.files import onnx_export, storage
from neural_mp.adaptors.pytorch.graph import dynamic_shapes, tracing
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import SIZES, find_fixed_axes
from neural_mp.adaptors.pytorch.pt2 import archive
from neural_mp.errors import CaptureError, ConversionError, DataError, ModelLoadError
from neural_mp.util.system import watched_thread

WINDOWS = (5, 3, 7, 4)


class Windows(nn.Module):
    """Windows of pictures that are padded to whole windows, shifted, joined and halved."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(4, 4) for _ in WINDOWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for window, dense in zip(WINDOWS, self.dense, strict=True):
            batch, height, width, channels = x.shape
            padding = (0, 0, 0, -width % window, 0, -height % window)
            x = functional.pad(x, padding)
            rows, columns = x.shape[1] // window, x.shape[2] // window
            parts = x.reshape(batch, rows, window, columns, window, channels)
            parts = dense(parts.transpose(2, 3).reshape(-1, window * window, channels))
            parts = parts.reshape(batch, rows, columns, window, window, channels)
            x = parts.transpose(2, 3).reshape(batch, rows * window, columns * window, channels)
            x = x[:, :height, :width][:, ::2, ::2]
        return x.mean((1, 2))


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setattr(tracing, "MAX_EXPORT_SECONDS", 0.2)
    monkeypatch.setattr(tracing, "MAX_EXPORT_SECONDS_PER_LAYER", 0.0)


@pytest.fixture
def clock(limit, monkeypatch):
    """The clock of the limit, on which seconds pass only in code that a test slows down."""
    clock = StillClock()
    monkeypatch.setattr(watched_thread, "_read_clock_seconds", lambda _: clock.now)
    clock.keep_time_of(monkeypatch, module_capture)
    return clock


@pytest.mark.slow
@pytest.mark.usefixtures("limit", "quick_runs")
def test_a_capture_that_takes_too_long_has_fewer_dynamic_axes(tmp_path):
    torch.manual_seed(0)
    net, batches = Windows().eval(), [torch.randn(2, 40, 40, 4) for _ in range(2)]
    converter = MixedPrecision(
        model=net,
        precisions="int8",
        objective="modelsize",
        calib_dataloader=[(batch, None) for batch in batches],
        workspace=tmp_path / "workspace",
    )
    result = converter()
    assert any("CPU seconds" in warning for warning in result.report.warnings)
    with torch.no_grad():
        expected = net(batches[0])
    assert (result(batches[0]) - expected).norm() <= 0.1 * expected.norm()  # 20 dB
    result.save(tmp_path / "saved")
    assert torch.equal(neural_mp.load(tmp_path / "saved")(batches[0]), result(batches[0]))


class Named(nn.Module):
    def forward(self, *, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first.reshape(-1, 6) * 2 + second.reshape(-1, 1)


def test_fixed_axes_belong_to_their_inputs():
    second, first = torch.randn(4, 1), torch.randn(4, 6)
    call = CallArgs((), {"second": second, "first": first})
    graph = graph_capture.capture_module(Named(), call)
    fixed = find_fixed_axes(graph, call.args, call.kwargs, graph.meta[SIZES])
    assert fixed == {id(first): {1}, id(second): {1}}


def grow_expressions(clock: StillClock) -> None:
    """Expand expressions without end, beyond the limit."""
    clock.sleep(1)
    x, y = sympy.symbols("x y", integer=True, positive=True)
    while True:
        sympy.expand((x + y) ** 12)
        sympy.core.cache.clear_cache()


def slow_down_exports(monkeypatch, clock: StillClock, fewest: int) -> None:
    """Let exports of graphs with as many dynamic axes never end."""
    export = graph_capture.export_program

    def export_slowly(module, call, axes, strict=False):
        if not isinstance(axes, str):
            known = [axis for tensor in axes for axis in tensor]
            if sum(axis.least != axis.largest for axis in known) >= fewest:
                grow_expressions(clock)
        return export(module, call, axes, strict)

    monkeypatch.setattr(graph_capture, "export_program", export_slowly)


@pytest.fixture
def sequence_result(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    batches = [torch.randn(2, 5, 6) for _ in range(2)]
    result = MixedPrecision(
        model=net,
        precisions="int8",
        objective="modelsize",
        calib_dataloader=[(batch, None) for batch in batches],
        workspace=tmp_path / "workspace",
    )()
    assert result(torch.randn(3, 7, 6)).shape == (3, 7, 4)  # two dynamic axes
    return result


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_a_folder_whose_export_takes_too_long_holds_fewer_dynamic_axes(
    sequence_result, tmp_path, monkeypatch, caplog, request
):
    clock = request.getfixturevalue("clock")
    for fewest, accepted, refused in ((2, (3, 5), (2, 7)), (1, (2, 5), (3, 5))):
        slow_down_exports(monkeypatch, clock, fewest)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            sequence_result.save(tmp_path / f"saved_{fewest}")
        assert "CPU seconds" in caplog.text
        loaded, batch = neural_mp.load(tmp_path / f"saved_{fewest}"), torch.randn(*accepted, 6)
        assert torch.equal(loaded(batch), sequence_result(batch))
        with pytest.raises(DataError, match="expected [25]"):
            loaded(torch.randn(*refused, 6))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_files_whose_export_takes_too_long_hold_fewer_dynamic_axes(
    sequence_result, tmp_path, monkeypatch, caplog, request
):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    slow_down_exports(monkeypatch, request.getfixturevalue("clock"), 2)
    for name in ("model.onnx", "model.pt2"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            sequence_result.save(tmp_path / name)
        assert "CPU seconds" in caplog.text
    (port,) = onnx.load(tmp_path / "model.onnx").graph.input
    batch, length, _ = port.type.tensor_type.shape.dim
    assert (batch.dim_param, length.dim_value) == ("batch", 5)
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert program(torch.randn(3, 5, 6)).shape == (3, 5, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_decompositions_that_take_too_long_with_fixed_sizes_are_an_error(
    sequence_result, tmp_path, monkeypatch, request
):
    pytest.importorskip("onnxscript")
    clock = request.getfixturevalue("clock")
    monkeypatch.setattr(onnx_export, "_is_decomposed", lambda *_: True)
    decompose = torch.export.ExportedProgram.run_decompositions
    calls: list[object] = []

    def decompose_slowly(program, table=None, **options):
        if table:
            calls.append(program)
            grow_expressions(clock)
        return decompose(program, table, **options)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", decompose_slowly)
    with pytest.raises(ConversionError, match="CPU seconds"):
        sequence_result.export_onnx(tmp_path / "model.onnx")
    assert len(calls) == 3


@pytest.mark.parametrize("step", ["deserialize", "check_arguments"])
def test_a_program_whose_sizes_take_too_long_is_refused(step, clock, tmp_path, monkeypatch):
    batch = {"input": {0: torch.export.Dim("batch")}}
    program = torch.export.export(nn.Linear(4, 2), (torch.randn(3, 4),), dynamic_shapes=batch)
    torch.export.save(program, tmp_path / "model.pt2")
    assert storage.load_program(tmp_path / "model.pt2").range_constraints
    monkeypatch.setattr(archive, step, lambda *_: grow_expressions(clock))
    with pytest.raises(ModelLoadError, match=r"model\.pt2' must have sizes that are read within"):
        storage.load_program(tmp_path / "model.pt2")


def test_a_given_program_whose_sizes_take_too_long_is_refused(clock, monkeypatch):
    program = torch.export.export(nn.Linear(4, 2), (torch.randn(3, 4),))
    monkeypatch.setattr(graph_capture, "collect_size_bounds", lambda _: grow_expressions(clock))
    with pytest.raises(CaptureError, match="export the program with fewer dynamic axes"):
        MixedPrecision(model=program, precisions="int8", objective="modelsize")()


class Branching(nn.Module):
    """Four layers, and a branch on a value, which torch.export cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if x.sum() > 0 else -x


def load_in_modules(seconds_each: float, clock: StillClock, monkeypatch):
    """Load a model in modules whose captures take some CPU seconds each, of 0.2 for all."""
    capture = graph_capture.capture_module

    def capture_slowly(module, call):
        clock.sleep(seconds_each)
        return capture(module, call)

    monkeypatch.setattr(graph_capture, "capture_module", capture_slowly)
    monkeypatch.setattr(module_capture, "MAX_EXPORTS", 1.0)
    return module_capture.capture_modules(Branching().eval(), CallArgs((torch.randn(2, 4),)))


def test_modules_that_remain_after_the_time_stay_as_in_the_model(clock, monkeypatch):
    captured = load_in_modules(0.25, clock, monkeypatch)
    assert list(captured.graphs) == ["layers.0"]
    (warning,) = captured.warnings
    assert "3 modules from 'layers.1' on stayed as in the model" in warning


def test_the_error_says_that_the_time_for_modules_has_passed(clock, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_EXPORT_SECONDS", -1.0)
    with pytest.raises(CaptureError, match="1 module from 'layers' on stayed"):
        load_in_modules(0.0, clock, monkeypatch)


class Rounded(nn.Module):
    """A Python number computed from a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : int(x.shape[1] * 0.01) + 1]


def test_bounds_by_a_slow_equation_are_narrower_but_hold(monkeypatch):
    call = CallArgs((torch.randn(2, 250),))
    least, largest = bounds_of_length(call)
    assert (least, largest) == (200, 299)
    monkeypatch.setattr(dynamic_shapes, "MAX_SCAN_SECONDS", 0.0)
    least, largest = bounds_of_length(call)
    assert 200 <= least <= 250 <= largest <= 299
    assert largest - least < 99


def bounds_of_length(call: CallArgs) -> tuple[int, int]:
    sizes = graph_capture.capture_module(Rounded(), call).meta[SIZES]
    return sizes[0][1].least, sizes[0][1].largest


class Doubled(nn.Module):
    """A condition on a size computed from itself several times in each step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        for divisor in range(3, 3 + self.steps):
            size = size // divisor + size % divisor + 1
        return x + 1 if size > 2 else x - 1


def test_a_condition_that_is_too_long_leaves_its_sizes_fixed(monkeypatch):
    call = CallArgs((torch.randn(2, 50),))
    axis = graph_capture.capture_module(Doubled(1), call).meta[SIZES][0][1]
    assert axis.conditions
    assert axis.least != axis.largest
    monkeypatch.setattr(dynamic_shapes, "MAX_CONDITION_PARTS", 4)
    axis = graph_capture.capture_module(Doubled(1), call).meta[SIZES][0][1]
    assert (axis.least, axis.largest) == (50, 50)


class Padded(nn.Module):
    """Needless conditions: a padding that is left out where it would be empty."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rests = [x.shape[1] % divisor for divisor in (2, 3, 5)]
        return sum((functional.pad(x, (0, n)) if n else x).sum(1) for n in rests)


def test_conditions_that_remain_after_some_runs_stay(monkeypatch):
    runs: list[nn.Module] = []
    run_once = taken_paths.run_once

    def count_runs(module, call):
        runs.append(module)
        return run_once(module, call)

    monkeypatch.setattr(taken_paths, "run_once", count_runs)
    found = {}
    for most in (0, 1, 2, taken_paths.MAX_RUNS):
        runs.clear()
        monkeypatch.setattr(taken_paths, "MAX_RUNS", most)
        graph = graph_capture.capture_module(Padded(), CallArgs((torch.randn(2, 17),)))
        found[most] = set(graph.meta[SIZES][0][1].conditions)
        assert len(runs) <= most
    assert found[0] == found[1] > found[taken_paths.MAX_RUNS]
