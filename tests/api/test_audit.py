"""An audit says what ran: it catches a plan that promises more than that, in every framework."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from machine import machine
from nets import small_net
from onnx_nets import as_onnx, graph, op

import neural_mp
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.onnxrt.graph.sessions import ALL, PLAIN
from neural_mp.adaptors.onnxrt.subgraph_outputs import with_outputs
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core.observations import Observations
from neural_mp.core.op_timings import OpTrace
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.errors import PlanError
from neural_mp.profiling.audit import Audit, AuditedOp, Verdict, audit_model, audit_ops
from neural_mp.reporting import summarize_audit_lines
from neural_mp.runs.report import Report
from neural_mp.space import EffectiveOp, TuningSpace, list_effective_ops
from neural_mp.testing import uniform

INT8, BF16 = Precision.INT8, Precision.BF16

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """An untrained net in a framework, and what calibration saw of it."""

    framework: str
    adaptor: Any
    model: Any
    space: TuningSpace
    observed: Observations

    def result(self, plan: PrecisionPlan, said: PrecisionPlan | None = None) -> OptimizedModel:
        """The net converted by a plan; the result says that it was another one, if it is given."""
        converted = self.adaptor.convert(
            self.model, self.space.resolve(plan), self.observed, self.space
        )
        resolved = self.space.resolve(said or plan)
        planned = list_effective_ops(self.space, resolved)
        return OptimizedModel(
            LoadedModel(self.adaptor, converted), resolved.plan, Report(), planned=planned
        )

    @property
    def all_int8(self) -> PrecisionPlan:
        return uniform(self.space, INT8)

    @property
    def dense(self) -> str:
        """The dense layer at the end."""
        return self.space.tunable_ops[-1]


@cache
def _taken_in(framework: str) -> Case:
    images = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32)
    if framework == "tensorflow":
        keras_nets = pytest.importorskip("keras_nets")
        source, images = keras_nets.small_net(), images.transpose(0, 2, 3, 1)
    else:
        torch.manual_seed(0)
        source = small_net().eval()
        source = as_onnx(source) if framework == "onnxrt" else source
    adaptor = adaptor_for(source)
    model = adaptor.load(source, example=images)
    space = adaptor.space(model, machine(BF16))
    return Case(framework, adaptor, model, space, adaptor.observe(model, [images], space))


@pytest.fixture(scope="module", params=["pytorch", "onnxrt", "tensorflow"])
def case(request) -> Case:
    return _taken_in(request.param)


@pytest.fixture(scope="module")
def torch_case() -> Case:
    return _taken_in("pytorch")


@pytest.fixture(scope="module")
def onnx_case() -> Case:
    return _taken_in("onnxrt")


def _with_a_float_dense_layer(case: Case, model: Any) -> Any:
    """A converted model in which the dense layer alone is a float one again."""
    return {"pytorch": _swap_torch, "onnxrt": _swap_onnx, "tensorflow": _swap_tensorflow}[
        case.framework
    ](case.dense, model)


def _swap_torch(dense: str, model: Any) -> Any:
    from neural_mp.adaptors.pytorch.graph import graph_edit
    from neural_mp.adaptors.pytorch.kernels.lowering import rewrite_graphs

    def with_float_weight(module: torch.fx.GraphModule) -> None:
        layer = graph_edit.map_op_nodes(module)[dense]
        stored = graph_edit.get_arguments(layer)["weight"]
        weight = stored.target(*(graph_edit.get_constant(module, part) for part in stored.args))
        added = graph_edit.add_constant(module, "float_weight", weight, layer)
        graph_edit.set_arguments(layer, weight=added)

    return rewrite_graphs(model, with_float_weight)


def _swap_onnx(dense: str, model: Any) -> Any:
    program = model.program.clone()
    node = next(node for node in program.graph if node.name == dense)
    assert node.op_type == "MatMulIntegerToFloat"
    stored, weight, scale, steps, zero, _, bias = node.inputs
    real = np.float32(weight.const_value.numpy()) * steps.const_value.numpy()
    constant = ir.Value(name="float_weight", const_value=ir.tensor(real, name="float_weight"))
    program.graph.register_initializer(constant)
    widened = ir.node("DequantizeLinear", [stored, scale, zero], name="widened")
    floats = ir.node("Gemm", [widened.outputs[0], constant, bias], name=dense)
    floats.outputs[0].name = "floats"
    program.graph.insert_before(node, [widened, floats])
    program.graph.outputs[0] = floats.outputs[0]
    floats.outputs[0].name, node.outputs[0].name = node.outputs[0].name, "unused"
    floats.outputs[0].type, floats.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    program.graph.remove(node, safe=True)
    return replace(model, program=program, _runners={})


def _swap_tensorflow(dense: str, model: Any) -> Any:
    import tensorflow as tf

    from neural_mp.adaptors.tensorflow.graph.tensor_graph import make_node

    (name,) = [n for n, node in model.graph.nodes.items() if node.op == "_QuantizedMatMul"]
    assert model.written[name] == dense
    graph = model.graph.copy_graph()
    stored, weight, _, low, high = list(graph[name].input)[:5]
    columns = model.graph.constant_value(weight).shape
    floats = np.ones(columns, np.float32)
    del graph.nodes[name]
    graph.put_node("Dequantize", "widened", [stored, low, high], T=tf.quint8, dtype=tf.float32)
    constant = graph.put_constant("float_weight", floats)
    graph.add_node(make_node("MatMul", name, ["widened", constant], T=tf.float32))
    return model.with_graph(graph)


def test_a_result_that_was_converted_as_its_plan_says_holds(case):
    audit = case.result(case.all_int8).audit()
    assert audit.holds
    assert audit.complete
    assert not audit.findings
    assert [op.name for op in audit.ops] == [op.name for op in case.space.graph]
    assert audit.counts()[Verdict.AS_PLANNED] >= len(case.space.tunable_ops) - 2


def test_a_kernel_that_was_swapped_for_a_float_one_is_found(case):
    result = case.result(case.all_int8)
    swapped = _with_a_float_dense_layer(case, result.held)
    result.loaded = replace(result.loaded, held=swapped)
    audit = result.audit()
    assert not audit.holds
    (lie,) = audit.findings
    assert (lie.name, lie.planned.precision, lie.ran_in) == (case.dense, INT8, Precision.FP32)
    assert lie.verdict is Verdict.HIGHER
    assert lie.kernels


def test_bf16_that_ran_in_float_is_found(case):
    ran = uniform(case.space, BF16)
    missing = case.dense
    audit = case.result(ran.replacing({missing: FP32}), said=ran).audit()
    assert missing in {op.name for op in audit.findings if op.verdict is Verdict.HIGHER}
    assert not audit.holds


def test_what_computes_lower_than_planned_is_found_and_contradicts_the_plan(case):
    claimed = case.all_int8.replacing({case.dense: FP32})
    audit = case.result(case.all_int8, said=claimed).audit()
    assert not audit.holds
    lower = [op for op in audit.findings if op.verdict is Verdict.LOWER]
    assert [(op.name, op.ran_in) for op in lower] == [(case.dense, INT8)]


@pytest.mark.parametrize("planned", [FP32.precision, BF16])
def test_what_only_moves_values_and_passes_int8_on_is_found_and_contradicts_nothing(planned):
    moved = {"move": EffectiveOp("reshape", planned, moves_data=True)}
    in_bytes, in_reals = OpTrace(("k",), None, True), OpTrace(("k",), planned, False)
    audit = audit_ops(moved, {"move": in_bytes}, lambda _: True)
    assert [op.verdict for op in audit.findings] == [Verdict.PASSED_INT8]
    assert audit.holds
    assert audit.counts() == {Verdict.PASSED_INT8: 1}
    assert not audit_ops(moved, {"move": in_reals}, lambda _: True).findings
    stored = {"move": EffectiveOp("reshape", INT8, moves_data=True)}
    assert not audit_ops(stored, {"move": in_bytes}, lambda _: True).findings


def test_an_integer_op_of_the_models_own_runs_as_planned():
    planned = {"op": EffectiveOp("ConvInteger", FP32.precision)}
    own = OpTrace(("ConvInteger",), INT8, True)
    assert audit_ops(planned, {"op": own}, lambda _: True).holds
    lowered = {"op": EffectiveOp("Conv", FP32.precision)}
    quantized = OpTrace(("QLinearConv",), INT8, True)
    assert not audit_ops(lowered, {"op": quantized}, lambda _: True).holds


def test_an_op_that_the_model_itself_has_in_16_bits_runs_as_planned():
    ran = {"op": OpTrace(("kernel",), BF16)}
    assert audit_ops({"op": EffectiveOp("softmax", FP32.precision, source=BF16)}, ran, bool).holds
    assert not audit_ops({"op": EffectiveOp("softmax", FP32.precision)}, ran, bool).holds
    half = EffectiveOp("softmax", FP32.precision, source=Precision.FP16)
    assert not audit_ops({"op": half}, ran, bool).holds


@pytest.mark.parametrize("verdict", Verdict)
def test_a_plan_holds_unless_a_finding_contradicts_it(verdict):
    op = AuditedOp("op", EffectiveOp("conv", INT8), None, verdict)
    contradicts = verdict in (Verdict.HIGHER, Verdict.LOWER, Verdict.NO_KERNEL)
    assert Audit((op,)).holds is not contradicts
    if contradicts:
        assert Audit((op,)).findings == (op,)


def test_a_slice_that_the_runtime_runs_on_integers_is_not_called_as_planned(tmp_path):
    """ONNX Runtime moves a quantization up over what only moves values."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(16, 16)).astype(np.float32) for name in ("v", "w")}
    weights |= {"start": np.array([0]), "stop": np.array([8]), "axis": np.array([1])}
    weights["w"] = weights["w"][:8]
    nodes = [
        op("MatMul", "x v", "h"),
        op("Relu", "h", "r"),
        op("Slice", "r start stop axis", "s"),
        op("MatMul", "s w", "y"),
    ]
    net = graph(nodes, {"x": [None, 16]}, ["y"], weights)
    data = rng.random((8, 16), dtype=np.float32)
    adaptor = adaptor_for(net)
    model = adaptor.load(net, example=data)
    space = adaptor.space(model, machine())
    resolved = space.resolve(uniform(space, INT8))
    converted = adaptor.convert(model, resolved, adaptor.observe(model, [data], space), space)
    audit = audit_model(LoadedModel(adaptor, converted), list_effective_ops(space, resolved))
    sliced = next(op for op in audit.ops if op.planned.type == "Slice")
    assert sliced.ran_in is INT8
    stored = sliced.planned.precision is INT8
    assert sliced.verdict is (Verdict.AS_PLANNED if stored else Verdict.PASSED_INT8)
    assert audit.holds


def test_emulated_precisions_are_told_apart(case, monkeypatch):
    monkeypatch.setattr("neural_mp.core.hardware.detect", lambda *_: machine(BF16))
    audit = case.result(uniform(case.space, BF16)).audit()
    assert audit.holds
    assert set(audit.counts()) <= {Verdict.EMULATED, Verdict.FUSED}
    kernels = {op.ran_in for op in audit.ops if op.ran is not None}
    assert kernels == {Precision.FP32 if case.framework == "onnxrt" else BF16}


def test_a_saved_result_is_audited_by_the_command(case, run, tmp_path):
    result = case.result(case.all_int8)
    result.save(tmp_path / "true")
    code, out, err = run("audit", str(tmp_path / "true"), "--json", "--all")
    assert code == 0, err
    document = json.loads(out)
    assert document["holds"] is True
    rows = {row["name"]: row for row in document["ops"]}
    assert list(rows) == [op.name for op in case.space.graph]
    assert (rows[case.dense]["planned"], rows[case.dense]["ran_in"]) == ("int8", "int8")

    result.loaded = replace(result.loaded, held=_with_a_float_dense_layer(case, result.held))
    result.save(tmp_path / "lying")
    code, out, _ = run("audit", str(tmp_path / "lying"))
    assert code == 1
    assert "the plan does NOT hold: 1 op not as planned" in out
    assert "ran higher than planned" in next(
        line for line in out.splitlines() if case.dense in line
    )
    assert case.space.tunable_ops[0] not in out  # only what differs has a row


def test_a_saved_result_is_audited_in_a_process_of_its_own(onnx_case, tmp_path):
    onnx_case.result(onnx_case.all_int8).save(tmp_path / "saved")
    command = [sys.executable, "-m", "neural_mp.cli.app", "audit", "saved"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    lowered = 1 + len(onnx_case.all_int8)  # with the pooling
    assert f"{lowered} as planned, 5 within another kernel\nthe plan holds\n" in done.stdout


def test_a_folder_of_an_earlier_version_is_judged_by_its_plan(onnx_case, run, tmp_path):
    onnx_case.result(onnx_case.all_int8).save(tmp_path / "saved")
    file = tmp_path / "saved" / "neural_mp.json"
    manifest = json.loads(file.read_text())
    del manifest["ops"]
    file.write_text(json.dumps(manifest))
    audit = neural_mp.load(tmp_path / "saved").audit()
    assert audit.holds
    assert not audit.complete
    assert {op.name for op in audit.ops} >= set(onnx_case.all_int8)
    assert "saved by an earlier version" in run("audit", str(tmp_path / "saved"))[1]


def test_a_model_without_a_plan_has_nothing_to_audit(run):
    code, _, err = run("audit", "net.onnx")
    assert code == 2
    assert "'net.onnx' is not a saved result" in err
    assert "nothing to audit" in err
    assert "--plan" in err


def test_a_model_is_audited_with_a_plan(onnx_case, run, tmp_path):
    onnx_case.adaptor.single_file.save_file(onnx_case.model, tmp_path / "net.onnx", {})
    plan = PrecisionPlan({onnx_case.dense: onnx_case.all_int8[onnx_case.dense]})
    plan.save(tmp_path / "plan.yaml", observations=onnx_case.observed)
    code, out, err = run("audit", "net.onnx", "--plan", "plan.yaml", "--all")
    assert code == 0, err
    assert "MatMulIntegerToFloat" in next(
        line for line in out.splitlines() if onnx_case.dense in line
    )
    code, _, err = run("audit", "net.onnx", "--plan", "nothing.yaml")
    assert code == 2
    assert "nothing.yaml" in err


def test_an_empty_plan_has_nothing_to_audit(torch_case):
    result = OptimizedModel(
        LoadedModel(torch_case.adaptor, torch_case.model), PrecisionPlan(), Report()
    )
    with pytest.raises(PlanError, match="nothing to audit"):
        result.audit()


def test_an_excluded_op_in_an_integer_kernel_of_equal_numbers_contradicts_nothing():
    """ONNX Runtime computes a Sigmoid between quantized tensors as QLinearSigmoid."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(4, 4, 3, 3)).astype(np.float32) for name in ("v", "w")}
    nodes = [op("Conv", "x v", "h"), op("Sigmoid", "h", "s"), op("Conv", "s w", "y")]
    net = graph(nodes, {"x": [None, 4, 9, 9]}, ["y"], weights)
    data = rng.random((8, 4, 9, 9), dtype=np.float32)
    adaptor = adaptor_for(net)
    model = adaptor.load(net, example=data)
    space = adaptor.space(model, machine())
    (sigmoid,) = [op.name for op in space.graph if op.type == "Sigmoid"]
    resolved = space.resolve(uniform(space, INT8).replacing({sigmoid: FP32}))
    observed = adaptor.observe(model, [data], space)
    converted = adaptor.convert(model, resolved, observed, space)
    audit = audit_model(LoadedModel(adaptor, converted), list_effective_ops(space, resolved))
    (finding,) = audit.findings
    assert (finding.name, finding.planned.precision) == (sigmoid, Precision.FP32)
    assert (finding.ran_in, finding.kernels) == (INT8, ("QLinearSigmoid",))
    assert finding.verdict is Verdict.EQUAL_INT8
    assert audit.holds
    assert "computes 1 op planned in fp32 with an integer kernel" in summarize_audit_lines(audit)
    # The integers after the op are those of the float op, but for one step of rounding.
    program = with_outputs(converted.program, ["s/uint8"])
    (fused,), (unfused,) = (
        converted.create_session(program, level=level)({"x": data}, ["s/uint8"])
        for level in (ALL, PLAIN)
    )
    assert np.ptp(unfused) > 100
    assert np.abs(fused.astype(int) - unfused.astype(int)).max() <= 1
