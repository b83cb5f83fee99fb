"""Words about a run with a file of Intel Neural Compressor, and about its result."""

import itertools

import pytest
from onnx_nets import as_onnx

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.compat.inc.experimental import Quantization
from neural_mp.config import parse_settings


@pytest.fixture
def onnx_net(net):
    return as_onnx(net)


def test_a_scheme_that_no_kernel_offers_is_ignored_as_there(onnx_net, digits, quick_runs):
    """ONNX Runtime's kernels take asymmetric activations only."""
    quantizer = MixedPrecision(
        parse_settings(
            "version: 1\nmodel: {framework: onnxrt_qlinearops}\n"
            "quantization: {model_wise: {activation: {scheme: sym}, weight: {scheme: sym}}}"
        )
    )
    quantizer.model, quantizer.precisions = onnx_net, "int8"
    quantizer.calib_dataloader = digits[1].loader()
    quantizer.exit_policy = ExitPolicy(performance_only=True)
    result = quantizer.fit()
    count = result.plan.counts()["int8"]
    assert count > 0
    assert [warning for warning in result.report.warnings if "model_wise" in warning] == [
        f"model_wise activation.scheme is ignored for {count} ops, which cannot run with "
        "symmetric here"
    ]


FP32 = "{weight: {dtype: fp32}, activation: {dtype: fp32}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"version: 1\nquantization: {{op_wise: {{'.*': {FP32}}}}}",
            "no plan was evaluated: no op supports a lower precision",
        ),
        ("version: 1\ntuning: {exit_policy: {max_trials: 2}}", "no plan met the target of"),
    ],
)
def test_the_reason_for_fp32_is_true(onnx_net, digits, quick_runs, caplog, tmp_path, text, reason):
    (tmp_path / "conf.yaml").write_text(text)
    quantizer = Quantization(str(tmp_path / "conf.yaml"))
    quantizer.model, quantizer.calib_dataloader = onnx_net, digits[1].loader()
    values = itertools.chain([1.0], itertools.repeat(0.0))
    quantizer.eval_func = lambda model: next(values)
    quantizer.fit()
    (line,) = [
        message for message in caplog.messages if "Neural Compressor returns None" in message
    ]
    assert line.startswith(reason)
    assert "the result is the FP32 model, where Intel Neural Compressor returns None" in line
