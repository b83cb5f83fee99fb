"""Corrections of weights in groups in ONNX Runtime and OpenVINO: files, losses and searches."""

from __future__ import annotations

from functools import cache, partial

import hostile_decoder as decoder
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx_nets import MACHINE
from ov_nets import read, require_low_bits

import neural_mp
from neural_mp import AccuracyCriterion, MixedPrecision, PrecisionPlan, convert_with_plan
from neural_mp.adaptors.common import conversion
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.openvino.runtime import make_core
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError

pytestmark = pytest.mark.slow
SPEC = "uint4 asymmetric per_group 32 int8_inputs"
RUNTIMES = ("onnxrt", "openvino")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return decoder.exported(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def batches():
    rows, _ = decoder.windows()
    return [{"ids": batch} for batch in np.split(rows[:64, :-1], 8)]


def _dense(path) -> list[str]:
    """Return the dense layers except the head, which OpenVINO names like the output."""
    graph = onnx.load(path).graph
    constants = {tensor.name for tensor in graph.initializer}
    dense = [n for n in graph.node if n.op_type == "MatMul" and n.input[1] in constants]
    return [node.name for node in dense if node.name != "head"]


def _plan(path, spec: str) -> PrecisionPlan:
    config = OpConfig(Precision.INT4, QuantSpec.parse(spec))
    return PrecisionPlan(dict.fromkeys(_dense(path), config))


def _source(path, runtime):
    if runtime == "onnxrt":
        return str(path)
    require_low_bits()
    return read(onnx.load(path))


def _converted(path, batches, spec, runtime="onnxrt"):
    source, plan = _source(path, runtime), _plan(path, spec)
    return convert_with_plan(source, plan, inputs=batches[0], calibration=batches)


@pytest.fixture(scope="module")
def converted(path, batches):
    """Return the result for a quantization and a runtime, converted once."""
    return cache(partial(_converted, path, batches))


def _own_loss(result, folder, runtime) -> float:
    """Return the loss of a saved file that the runtime alone loads and runs."""
    if runtime == "onnxrt":
        result.export_onnx(folder / "decoder.onnx")
        session = onnxruntime.InferenceSession(
            str(folder / "decoder.onnx"), providers=["CPUExecutionProvider"]
        )
        return decoder.loss(lambda ids: session.run(None, {"ids": ids})[0])
    result.save(folder / "decoder.xml")
    compiled = make_core().compile_model(
        str(folder / "decoder.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    return decoder.loss(lambda ids: compiled([ids])[0])


@pytest.fixture(scope="module", params=RUNTIMES)
def losses(request, path, converted, tmp_path_factory):
    """Rounding → the increase of the loss in percent."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    reference = decoder.loss(lambda ids: session.run(None, {"ids": ids})[0])
    increases = {}
    for method in ("rtn", "awq", "gptq", "awq gptq"):
        result = converted(f"{SPEC} {method}", request.param)
        assert result.audit().holds
        folder = tmp_path_factory.mktemp("files")
        increases[method] = 100 * (_own_loss(result, folder, request.param) / reference - 1)
    return increases


def test_each_correction_gains_on_text_that_calibration_has_not_seen(losses):
    assert losses["rtn"] > 1
    assert losses["awq"] < 0.5 * losses["rtn"]
    assert losses["gptq"] < 0.7 * losses["rtn"]
    assert losses["awq gptq"] < 0.7 * losses["awq"]


def _stored(graph: onnx.GraphProto, op: str) -> np.ndarray:
    """Return the weight [outputs, inputs] of a MatMulNBits of 4 bits in groups of 32."""
    node = next(node for node in graph.node if node.name == op)
    tensors = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    codes, scales, zeros = (tensors[name] for name in node.input[1:4])
    scales = scales.reshape(len(codes), -1)
    codes, zeros = (
        np.stack([a & 15, a >> 4], -1).reshape(len(codes), -1).astype(np.float32)
        for a in (codes, zeros.reshape(len(codes), -1))
    )
    zeros = np.repeat(zeros[:, : scales.shape[1]], 32, axis=1)
    return (codes - zeros) * np.repeat(scales, 32, axis=1)


def test_errors_of_layers_shrink_on_the_inputs_that_they_read(path, batches):
    op = "blocks.1.down"
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.name == op)
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    model.graph.output.append(onnx.ValueInfoProto(name=node.input[0]))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    rows = np.concatenate([session.run([node.input[0]], feeds)[0] for feeds in batches])
    rows, weight = rows.reshape(-1, decoder.HIDDEN), weights[node.input[1]].T
    errors = {}
    for method in ("rtn", "gptq"):
        spec = f"{SPEC} {method}".replace("int8_inputs", "float_inputs")
        graph = _converted(path, batches, spec).model.graph
        change = _stored(graph, op) - weight
        errors[method] = np.square(rows @ change.T).mean()
    assert errors["gptq"] < 0.6 * errors["rtn"]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_corrections_with_data_ask_for_calibration(path, batches, runtime):
    source = _source(path, runtime)
    with pytest.raises(PlanError, match=r"'awq' of op '.*' requires calibration data"):
        convert_with_plan(source, _plan(path, f"{SPEC} awq"), inputs=batches[0])


def test_kernels_with_whole_zero_points_offer_no_hqq(path, batches):
    with pytest.raises(PlanError, match="does not support INT4 with weight .* hqq"):
        _converted(path, batches, f"{SPEC} hqq")


def test_layers_that_calibration_does_not_reach_are_rounded_to_nearest(path, batches, caplog):
    adaptor = OnnxRuntimeAdaptor()
    model = adaptor.load(str(path), example=batches[0])
    space = adaptor.space(model, MACHINE)
    without_batches = LoadedModel(adaptor, model).in_space(space, lambda: [])
    logits = []
    for method in ("rtn", "gptq"):
        plan = space.resolve(_plan(path, f"{SPEC} {method}"))
        converted = without_batches.convert_by_plan(plan)
        logits.append(converted(batches[0]))
    assert np.array_equal(*logits)
    assert "calibration did not reach 'blocks.0.q'" in caplog.text


def test_a_search_corrects_weights(path, tmp_path):
    rows, _ = decoder.windows()
    converter = MixedPrecision(precisions="int4", workspace=tmp_path, cache=False)
    converter.model, converter.objective, converter.metric = str(path), "footprint", "perplexity"
    converter.eval_dataloader = [({"ids": r[:, :-1]}, r[:, :-1]) for r in np.split(rows[:64], 8)]
    converter.accuracy_criterion = AccuracyCriterion(0.02)
    result = converter()
    assert result.met
    assert result.plan.counts()[Precision.INT4] >= 12
    assert {config.weight.rounding for config in result.plan.values() if config.weight} <= {
        "awq gptq",
        "rtn",
    }
    result.save(tmp_path / "saved")
    again = neural_mp.load(tmp_path / "saved")
    assert np.array_equal(again({"ids": rows[:2, :-1]}), result({"ids": rows[:2, :-1]}))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_factors_of_inputs_are_folded_into_norms_and_layers(converted, runtime):
    """Only attention has no constant that could hold the factors of the layer behind."""
    plain, scaled = (
        _products(converted(f"{SPEC} {method}", runtime).model) for method in ("rtn", "awq gptq")
    )
    added = set(scaled) - set(plain)
    assert len(added) == len(scaled) - len(plain) <= 2
    assert all(name.startswith(("blocks.0.o", "blocks.1.o")) for name in added)


def _products(model) -> list[str]:
    """Return the names of the nodes that multiply elements."""
    if isinstance(model, onnx.ModelProto):
        return [node.name for node in model.graph.node if node.op_type == "Mul"]
    ops = model.get_ops()
    return [op.get_friendly_name() for op in ops if op.get_type_name() == "Multiply"]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_folded_factors_change_no_result(path, batches, converted, runtime, monkeypatch):
    spec = f"{SPEC} awq gptq"
    folded = converted(spec, runtime)(batches[0])
    monkeypatch.setattr(
        conversion, "fold_factors", lambda adaptor, model, groups, weights, _: (model, weights)
    )
    multiplied = _converted(path, batches, spec, runtime)(batches[0])
    # Inputs rounded to INT8 may fall on either side of the middle between two steps.
    assert np.linalg.norm(folded - multiplied) < 0.01 * np.linalg.norm(multiplied)
