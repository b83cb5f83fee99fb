"""Graphs in stages: equal results, and runs of what lies behind a change alone."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_nets import graph, op
from test_qdq_models import Planned, batches, mixed  # noqa: F401 (a fixture)

from neural_mp.adaptors.onnxrt.graph.sessions import Runner
from neural_mp.adaptors.onnxrt.targets import switch_model
from neural_mp.adaptors.onnxrt.targets.stages import (
    PreparedStage,
    StagedRun,
    fix_inputs,
    split_graph,
)


def branched():
    """A sum behind a skip, whose branches read an outer value; two outputs, one of them early."""
    branch = {
        name: onnx.helper.make_graph(
            [op(kind, "c", f"{name}/y")],
            name,
            [],
            [onnx.helper.make_tensor_value_info(f"{name}/y", onnx.TensorProto.FLOAT, None)],
        )
        for name, kind in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }
    nodes = [
        op("Exp", "x", "a"),
        op("Tanh", "a", "b"),
        op("Mul", "a b", "c"),
        op("Sin", "c", "d"),
        op("If", "flag", "e", **branch),
        op("Add", "d e", "f"),
        op("Mul", "f a", "g"),
        op("Cos", "g", "h"),
    ]
    flag = {"flag": np.asarray(True)}
    return graph(nodes, {"x": ["batch", 4]}, ["h", "b"], flag, opset=21)


def staged(program, count, feeds, fixed=None):
    """A run in stages, and the list that the names of the run stages go to."""
    ran, parts = [], []
    for number, stage in enumerate(split_graph(program, count)):
        names = list(stage.outputs)

        def runs(part, kind, number=number, names=names):
            session = Runner(part, None)

            def compute(given):
                ran.append((number, kind))
                known = {port.name for port in session.session.get_inputs()}
                return session({k: v for k, v in given.items() if k in known}, names)

            return compute

        plain = fix_inputs(stage.program, fixed or {})
        parts.append(PreparedStage(stage, runs(stage.program, "free"), runs(plain, "fixed")))
    outputs = [str(value.name) for value in program.graph.outputs]
    return StagedRun(parts, outputs, feeds), ran


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_stages_compute_what_the_graph_does(count):
    """Skips, outer values of branches and early outputs pass the cuts."""
    net = branched()
    feeds = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}
    program = ir.from_proto(onnx.shape_inference.infer_shapes(net))
    whole, _ = staged(program, count, feeds)
    session = ort.InferenceSession(net.SerializeToString(), providers=["CPUExecutionProvider"])
    for changes in ({}, {"x": feeds["x"] * 0.5}):
        expected = session.run(None, {**feeds, **changes})
        for actual, values in zip(whole.run(changes), expected, strict=True):
            np.testing.assert_allclose(actual, values, rtol=1e-6)


def test_value_of_unknown_type_passes_no_cut():
    program = ir.from_proto(branched())
    for node in program.graph:
        for value in node.outputs:
            value.type = None
    assert len(split_graph(program, 4)) == 1


def test_only_the_stages_behind_a_switch_run(mixed, monkeypatch):  # noqa: F811
    """Every switch runs its own stage with switches, and the later ones without."""
    for name, value in (("_LEAST_IN_STAGE", 2), ("_MAX_STAGES", 6)):
        monkeypatch.setattr(switch_model, name, value)
    data = batches()
    planned = Planned(mixed, "qnn", data)
    switched = built_switch_model(planned, data, monkeypatch)
    feeds = {**planned.held.signature.bind_inputs(data[0]), **switched.unswitched}
    whole, ran = staged(switched.program, 6, feeds, switched.unswitched)
    reference = whole.run({})
    assert {kind for _, kind in ran} == {"fixed"}
    count = len(whole.stages)
    assert count >= 4
    firsts = set()
    for switch in switched.switch_names:
        ran.clear()
        outputs = whole.run({switch: np.asarray(True)})
        first = ran[0][0]
        firsts.add(first)
        later = [(number, "fixed") for number in range(first + 1, count)]
        assert ran == [(first, "free"), *later]
        assert all(np.isfinite(output).all() for output in outputs)
    assert len(firsts) >= 4
    np.testing.assert_array_equal(whole.run({})[0], reference[0])


@pytest.mark.parametrize("stages", [1, 5])
def test_noise_does_not_depend_on_the_number_of_stages(mixed, monkeypatch, stages):  # noqa: F811
    data = batches()
    planned = Planned(mixed, "qnn", data)

    def noises(count):
        monkeypatch.setattr(switch_model, "_LEAST_IN_STAGE", 1)
        monkeypatch.setattr(switch_model, "_MAX_STAGES", count)
        figures = planned.adaptor.width_figures(planned.held, data[0], planned.observed)
        return np.array([tensor.noise_at_bits(8) for tensor in figures.tensors])

    np.testing.assert_allclose(noises(stages), noises(12), rtol=1e-3, atol=1e-9)


def built_switch_model(planned, data, monkeypatch):
    """The model with switches that the adaptor measures noise by."""
    built = []
    module = "neural_mp.adaptors.onnxrt.targets.adaptor.build_switch_model"

    def keep(*arguments):
        built.append(switch_model.build_switch_model(*arguments))
        return built[0]

    monkeypatch.setattr(module, keep)
    planned.adaptor.width_figures(planned.held, data[0], planned.observed)
    return built[0]
