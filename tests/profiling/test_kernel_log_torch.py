"""Which kernels PyTorch runs, caught in this process; and those of a converted ONNX model."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest
import torch
from machine import machine
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.precision import Precision
from neural_mp.errors import KernelLogError
from neural_mp.profiling import kernel_log, read_kernel_log
from neural_mp.testing import uniform

pytestmark = pytest.mark.slow

INT8 = Precision.INT8


@pytest.fixture
def layer():
    return nn.Conv2d(3, 16, 3).eval()


@pytest.fixture
def images():
    return torch.rand(4, 3, 16, 16)


def in_integers(adaptor, source, images):
    """A model with all that can be in INT8."""
    model = adaptor.load(source, example=images)
    space = adaptor.space(model, machine())
    observed = adaptor.observe(model, [images], space)
    return adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space)


def convolutions(net):
    return sum(isinstance(layer, nn.Conv2d) for layer in net.modules())


class TestOfThisProcess:
    def test_every_kernel_of_the_block_is_there_and_no_other(self, layer, images):
        layer(images)
        with torch.no_grad(), kernel_log() as log:
            assert log.calls == ()
            for _ in range(3):
                layer(images)
        layer(images)
        convolutions = [call for call in log.calls if call.primitive == "convolution"]
        assert len(convolutions) == 3
        assert {call.precision for call in convolutions} == {"fp32"}
        assert {call.prop_kind for call in convolutions} <= {
            "forward_training",
            "forward_inference",
        }
        assert log.total == pytest.approx(sum(row.milliseconds for row in log.by("primitive")))
        assert log.malformed == 0
        assert log.library.startswith("oneDNN")

    def test_the_cpu_is_told_by_every_log_though_onednn_says_it_once(self, layer, images):
        logs = []
        for _ in range(2):
            with kernel_log() as log:
                layer(images)
            logs.append(log)
        assert logs[0].isa
        assert logs[0].isa == logs[1].isa

    def test_what_is_printed_meanwhile_comes_out_in_its_order(self, layer, images, capfd):
        with kernel_log() as log:
            os.write(1, b"one\n")
            layer(images)
            subprocess.run(["echo", "of a child"], check=True)
            layer(images)
            os.write(1, b"no newline")
        os.write(1, b" after\n")
        assert log.calls
        out = capfd.readouterr().out
        assert out.endswith("one\nof a child\nno newline after\n")
        assert "_verbose" not in out

    def test_an_error_of_the_block_passes_and_the_log_is_kept(self, layer, images):
        with pytest.raises(ZeroDivisionError), kernel_log() as log:
            layer(images).sum().item() / 0
        assert log.calls
        with kernel_log() as again:
            layer(images)
        assert again.calls

    def test_an_empty_log_says_why(self):
        with kernel_log() as log:
            torch.ones(3).add(1)
        assert log.by("isa") == []
        assert "no oneDNN kernels" in log.empty_because

    def test_where_onednn_is_off_that_is_said(self):
        with (
            torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
            pytest.raises(KernelLogError, match=r"torch\.backends\.mkldnn\.enabled = True"),
            kernel_log(),
        ):
            pass

    def test_only_one_log_is_kept_at_a_time(self, layer, images):
        with kernel_log() as log:
            with pytest.raises(KernelLogError, match="already being recorded"), kernel_log():
                pass
            layer(images)
        assert log.calls


def test_a_converted_model_runs_integer_kernels(net, digits):
    images = digits[1].images[:8]
    adaptor = PyTorchAdaptor()
    converted = in_integers(adaptor, net, images)
    with kernel_log() as log:
        adaptor.predict(converted, images)
    precisions = [call.precision for call in log.calls if call.primitive == "convolution"]
    assert precisions == ["int8"] * convolutions(net)
    assert "int8" in [row.name for row in log.by("precision")]


def test_a_converted_model_of_onnx_runs_integer_kernels(net, digits, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    from onnx_nets import as_onnx

    from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor

    images = digits[1].images[:8]
    adaptor = OnnxRuntimeAdaptor()
    converted = in_integers(adaptor, as_onnx(net), images)
    adaptor.save(converted, tmp_path)
    (file,) = tmp_path.glob("*.onnx")
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    session = onnxruntime.InferenceSession(file, options)
    session.run(None, {session.get_inputs()[0].name: np.asarray(images)})
    log = read_kernel_log(session.end_profiling())
    rows = {row.name: row.calls for row in log.by("implementation")}
    assert rows["QLinearConv:CPU"] == convolutions(net)
