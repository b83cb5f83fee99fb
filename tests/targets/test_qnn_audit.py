"""Audit by QNN's emulated NPU: what it refuses, computes in float or computes wrongly is named."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from qdq_models import emulated, gated_net, node_of, normalized_net, put_constant, sample

from neural_mp.adaptors.onnxrt.targets.audit import qnn_audit
from neural_mp.adaptors.onnxrt.targets.audit.qnn_audit import (
    MIN_SQNR_DB,
    audit_by_qnn,
    check_installation,
    find_first_deviation,
)
from neural_mp.adaptors.onnxrt.targets.audit.qnn_kernels import (
    KernelRow,
    read_graphs,
    recover_onnx_name,
)
from neural_mp.adaptors.onnxrt.targets.audit.structural_audit import Rule
from neural_mp.errors import ConversionError, MissingFrameworkError
from neural_mp.targets import load_profile

QNN = load_profile("qnn")
MUL, SIGMOID = "product/raw.Mul", "gate/raw.Sigmoid"
SAMPLES = [sample(0), sample(1)]


def simulate(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """The outputs by ONNX Runtime's CPU provider, without fusions."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(names, feeds), strict=True)) for feeds in SAMPLES]


def audited(model, integer_ops=None):
    return audit_by_qnn(model, QNN, SAMPLES, simulate(model), integer_ops)


@emulated
@pytest.mark.parametrize("bits", [8, 16])
def test_a_file_of_the_profile_is_computed_in_integers_as_simulated(bits):
    audit = audited(gated_net(QNN, bits))
    assert audit.holds, audit.findings
    assert not audit.refused
    assert {"conv/raw.Conv", "scores/raw.Gemm", MUL} <= {name for name, _ in audit.taken}
    kind = f"uint{bits}"
    products = {row.kind: row.types for row in audit.kernels}
    assert products["Conv2d"] == f"{kind},int8,int32→{kind}"
    assert products["FullyConnected"] == f"{kind},int8,int32→{kind}"
    assert audit.sqnr_db > 40
    assert [output["scores/float"].shape for output in audit.outputs] == [(1, 5), (1, 5)]


@emulated
@pytest.mark.parametrize("bits", [8, 16])
def test_the_layer_normalization_of_the_profile_is_an_integer_kernel(bits):
    audit = audited(normalized_net(QNN, bits))
    assert audit.holds, audit.findings
    kernels = {row.kind: row.types for row in audit.kernels}
    assert kernels["LayerNorm"] == f"uint{bits},uint8,int32→uint{bits}"


@emulated
def test_a_refused_op_is_named_and_nothing_runs_on_the_cpu():
    """An int8 scale, which other tools write."""
    rules = replace(QNN, weight=replace(QNN.weight, by_op={}))
    audit = audited(normalized_net(rules))
    (finding,) = audit.findings
    assert (finding.op, finding.rule) == ("norm/raw.LayerNormalization", Rule.REFUSED)
    assert audit.refused == (("norm/raw.LayerNormalization", "LayerNormalization"),)
    assert audit.sqnr_db is None
    assert not audit.outputs


@emulated
def test_an_op_in_integers_with_an_open_ring_is_found_in_float():
    """The provider takes it, so that only the kernels tell."""
    model = gated_net(QNN)
    node_of(model, MUL).input[1] = "gate/raw"
    audit = audited(model, {MUL, "conv/raw.Conv", "scores/raw.Gemm"})
    assert not audit.refused
    assert [(finding.op, finding.rule) for finding in audit.findings] == [(MUL, Rule.FLOAT_KERNEL)]
    assert "fp32,fp32→fp32" in {r.types for r in audit.kernels if r.kind == "ElementWiseMultiply"}


@emulated
def test_a_function_that_is_split_into_float_kernels_is_found():
    """Kernels of a split function have no name of the file; its float result tells."""
    model = gated_net(QNN)
    node_of(model, SIGMOID).op_type = "Mish"
    assert audited(model).holds  # the profile has it in float
    (finding,) = audited(model, {SIGMOID}).findings
    assert (finding.op, finding.op_type, finding.rule) == (SIGMOID, "Mish", Rule.FLOAT_KERNEL)


@emulated
def test_the_first_op_with_wrong_results_is_named():
    """CumSum compiles in 8 bits, and is wrong for a zero point other than 0."""
    model = gated_net(QNN)
    node = node_of(model, MUL)
    node.op_type = "CumSum"
    del node.input[:]
    node.input.extend(["conv/float", put_constant(model, "axis", np.int64(1))])
    deviation = find_first_deviation(model, QNN, SAMPLES[0])
    assert (deviation.op, deviation.op_type, deviation.tensor) == (MUL, "CumSum", "product/float")
    assert deviation.sqnr_db < MIN_SQNR_DB
    (finding,) = audited(model).findings
    assert (finding.op, finding.rule) == (MUL, Rule.NOISE)
    assert "the first op that differs is CumSum" in finding.message


@emulated
def test_no_op_of_a_correct_file_deviates():
    assert find_first_deviation(gated_net(QNN), QNN, SAMPLES[0]) is None


@emulated
def test_outputs_that_differ_from_the_simulation_without_a_wrong_op_are_a_finding():
    model = gated_net(QNN)
    others = [{name: -array for name, array in item.items()} for item in simulate(model)]
    audit = audit_by_qnn(model, QNN, SAMPLES, others)
    (finding,) = audit.findings
    assert (finding.op, finding.rule) == ("", Rule.NOISE)
    assert "no op alone" in finding.message
    assert audit.sqnr_db < 0


@emulated
def test_a_compilation_beyond_the_limit_is_an_error():
    with pytest.raises(ConversionError, match=r"within 0\.01 seconds"):
        audit_by_qnn(gated_net(QNN), QNN, max_seconds=0.01)


@pytest.mark.slow
def test_a_compiler_that_crashes_is_a_finding(monkeypatch):
    """In place of the compiler, a program runs that ends with an error."""
    monkeypatch.setattr(qnn_audit, "check_installation", lambda: None)
    monkeypatch.setattr(qnn_audit, "_WORKER", "json.tool")
    audit = audit_by_qnn(gated_net(QNN), QNN, SAMPLES)
    (finding,) = audit.findings
    assert finding.rule == Rule.COMPILE
    assert "ended without a result: " in finding.message
    assert not audit.holds
    with pytest.raises(ConversionError, match="QNN must run the file"):
        find_first_deviation(gated_net(QNN), QNN, SAMPLES[0])


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(qnn_audit.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(qnn_audit.sys, "version_info", (3, 12))
    with pytest.raises(MissingFrameworkError, match="requires the package onnxruntime-qnn") as e:
        check_installation()
    assert "[qnn]" in str(e.value)


def test_python_3_10_is_named():
    version = type("Version", (tuple,), {"major": 3, "minor": 10})((3, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qnn_audit.sys, "version_info", version)
        with pytest.raises(
            MissingFrameworkError, match=r"requires Python 3\.11 or later, got 3\.1"
        ):
            check_installation()


def tensor(kind: int) -> dict[str, object]:
    return {"data_type": kind, "dims": [1, 8], "type": 3}


def node(kind: str, inputs: list[str], outputs: list[str]) -> dict[str, object]:
    return {"type": kind, "input_names": inputs, "output_names": outputs, "package": "qti.aisw"}


def test_kernels_of_a_description_have_types_and_ops_of_the_file(tmp_path):
    """The form of onnxruntime-qnn 2.7.0: a layer in the layout of the NPU, and a split function."""
    graph = {
        "tensors": {
            **{"x": tensor(0x0408), "w": tensor(0x0308), "b": tensor(0x0332)},
            **{"c/stored": tensor(0x0408), "c/float": tensor(0x0232), "m/raw": tensor(0x0232)},
        },
        "nodes": {
            "conv_token_1": node("Conv2d", ["x", "w", "b"], ["c/stored"]),
            "c/float": node("Dequantize", ["c/stored"], ["c/float"]),
            "Softplus66": node("ElementWiseNeuron", ["c/float"], ["m/raw"]),
        },
    }
    sources = [{"name": "conv_token_1", "type": "OP"}, {"name": "w/float", "type": "TENSOR"}]
    mappings = [{"dst_name": "conv_token_1", "dst_qnn_op_type": "Conv2d", "sources": sources}]
    trace = {"subgraph_traces": [{"graph_name": "first", "op_mappings": mappings}]}
    (tmp_path / "first.json").write_text(json.dumps({"graph": graph}))
    (tmp_path / "first_tensor_log.json").write_text("{}")
    (tmp_path / "qnn_op_trace.json").write_text(json.dumps(trace))
    compiled = read_graphs(tmp_path, frozenset({"conv", "mish"}))
    assert [kernel.ops for kernel in compiled.kernels] == [("conv",), (), ()]
    assert [kernel.is_float for kernel in compiled.kernels] == [False, False, True]
    assert compiled.float_tensors == {"c/float", "m/raw"}
    assert KernelRow(1, "Conv2d", "uint8,int8,int32→uint8") in compiled.kernel_rows
    assert not compiled.float_ops


def test_another_form_of_the_description_is_an_error(tmp_path):
    (tmp_path / "first.json").write_text('{"nodes": {}}')
    with pytest.raises(ConversionError, match="expected the key 'graph'"):
        read_graphs(tmp_path, frozenset())


def test_names_of_the_optimized_graph_lead_to_those_of_the_file():
    names = {"conv", "x_token_1"}
    assert recover_onnx_name("conv_token_7", names) == "conv"
    assert recover_onnx_name("conv_token_7/duplicated", names) == "conv"
    assert recover_onnx_name("x_token_1", names) == "x_token_1"
    assert recover_onnx_name("Transpose_token_3", names) == "Transpose_token_3"
