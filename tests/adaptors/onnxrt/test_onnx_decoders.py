"""Exported decoders with a key-value cache: loaded, tuned, and decoded with the cache."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_decoders as decoders
import pytest
from onnx_nets import session

import neural_mp
from neural_mp import AccuracyCriterion, MixedPrecision, convert_with_plan
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ModelLoadError, PlanError

MAKERS = {"genai": decoders.genai, "optimum": decoders.optimum}
IDS = np.random.default_rng(0).integers(0, decoders.WORDS, (8, 10))
FEEDS = decoders.feeds(IDS[:2])


@pytest.fixture(scope="module", params=MAKERS)
def model(request):
    return MAKERS[request.param]()


def _convert(model: onnx.ModelProto, plan: PrecisionPlan) -> neural_mp.OptimizedModel:
    try:
        return convert_with_plan(model, plan, inputs=FEEDS)
    except PlanError as error:
        if "does not support INT8 with weight" not in str(error):
            raise
        pytest.skip(f"this build of ONNX Runtime multiplies no bytes in groups: {error}")


def _plan(model: onnx.ModelProto, spec: str, precision: Precision) -> PrecisionPlan:
    constants = {tensor.name for tensor in model.graph.initializer}
    config = OpConfig(precision, QuantSpec.parse(spec))
    dense = [n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in constants]
    return PrecisionPlan({node.name: config for node in dense})


def test_the_file_and_the_folder_of_a_converted_decoder_write_the_same_tokens(model, tmp_path):
    plan = _plan(model, "uint8 asymmetric per_group 32 int8_inputs", Precision.INT8)
    converted = _convert(model, plan)
    assert converted.audit().holds
    assert len(plan) == 7 * decoders.LAYERS + 1
    converted.export_onnx(tmp_path / "decoder.onnx")
    exported = session(str(tmp_path / "decoder.onnx"))
    written = decoders.generate(exported, IDS[:1], 8)
    converted.save(tmp_path / "saved")
    again = neural_mp.load(tmp_path / "saved")
    assert decoders.generate(session(again.model), IDS[:1], 8) == written
    assert len(set(written)) > 1
    reference = session(model).run(None, FEEDS)[0]
    noise = np.linalg.norm(converted(FEEDS)[0] - reference) / np.linalg.norm(reference)
    assert 0 < noise < 0.05


def test_inputs_and_outputs_of_the_cache_keep_names_types_and_axes(model, tmp_path):
    plan = _plan(model, "uint4 asymmetric per_group 32 int8_inputs", Precision.INT4)
    convert_with_plan(model, plan, inputs=FEEDS).export_onnx(tmp_path / "decoder.onnx")
    exported, original = session(str(tmp_path / "decoder.onnx")), session(model)
    for ports in ("get_inputs", "get_outputs"):
        expected, actual = (
            [(port.name, port.type, port.shape) for port in getattr(runner, ports)()]
            for runner in (original, exported)
        )
        assert expected == actual
    kinds = [node.op_type for node in onnx.load(tmp_path / "decoder.onnx").graph.node]
    assert kinds.count("MatMulNBits") == len(plan)
    attention = [node.op_type for node in model.graph.node].count("GroupQueryAttention")
    assert kinds.count("GroupQueryAttention") == attention


def test_steps_with_the_cache_equal_one_pass(model):
    plan = _plan(model, "uint8 asymmetric per_group 32 int8_inputs", Precision.INT8)
    converted = _convert(model, plan)
    whole = converted(decoders.feeds(IDS[:1]))[0]
    _, *present = converted(decoders.feeds(IDS[:1, :6]))
    names = [name for name in FEEDS if name.startswith("past")]
    past = dict(zip(names, present, strict=True))
    rest = converted(decoders.feeds(IDS[:1, 6:], past))[0]
    np.testing.assert_allclose(rest, whole[:, 6:], atol=0.05 * np.abs(whole).max())


@pytest.mark.slow
def test_a_search_by_perplexity_stores_most_weights_in_four_bits(model, tmp_path):
    data = [(decoders.feeds(IDS[i : i + 2]), IDS[i : i + 2]) for i in (0, 2, 4, 6)]
    converter = MixedPrecision(precisions="int4,int8", workspace=tmp_path, cache=False)
    converter.model, converter.objective, converter.metric = model, "footprint", "perplexity"
    converter.eval_dataloader = data
    # With eight texts, the bound on other texts alone takes some percent.
    converter.accuracy_criterion = AccuracyCriterion(0.1)
    result = converter()
    assert result.met
    assert result.report.size < 0.3 * result.report.baseline_size
    assert result.plan.counts()[Precision.INT4] >= decoders.LAYERS
    assert result.report.evaluations <= 5
    assert result.audit().holds


def test_openvino_refuses_attention_that_would_corrupt_its_memory(tmp_path):
    pytest.importorskip("openvino")
    from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor

    path = tmp_path / "decoder.onnx"
    onnx.save(decoders.genai(), path)
    with pytest.raises(ModelLoadError, match="GroupQueryAttention for one sequence at a time"):
        OpenVinoAdaptor().load(str(path), example=FEEDS)
    model = decoders.genai()
    for port in model.graph.input:
        port.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, path)
    adaptor, feeds = OpenVinoAdaptor(), decoders.feeds(IDS[:1])
    loaded = adaptor.load(str(path), example=feeds)
    expected = session(decoders.genai()).run(None, feeds)
    np.testing.assert_allclose(adaptor.predict(loaded, feeds)[0], expected[0], atol=1e-4)
