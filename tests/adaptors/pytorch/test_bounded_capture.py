"""A capture whose symbolic sizes grow without bound ends, with fewer dynamic axes and a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch.capture import graph_capture
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import SIZES, fixed_axes

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
    monkeypatch.setattr(graph_capture, "MAX_EXPORT_SECONDS", 0.2)
    monkeypatch.setattr(graph_capture, "MAX_EXPORT_SECONDS_PER_LAYER", 0.0)


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
    graph = graph_capture.capture(Named(), call)
    fixed = fixed_axes(graph, call.args, call.kwargs, graph.meta[SIZES])
    assert fixed == {id(first): {1}, id(second): {1}}
