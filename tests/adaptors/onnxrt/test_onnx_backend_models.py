"""ONNX's own test models: single ops, what torch's exporter wrote, small whole models."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import DATA_DIR
from onnx_nets import MACHINE, session
from onnx_node_tests import node_tests

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.errors import ModelLoadError

pytestmark = pytest.mark.slow

#: The largest error that rounding may make, as a share of the largest number that comes out.
TOLERANCES = {Precision.INT8: 0.05, Precision.BF16: 0.05, Precision.FP16: 0.004}
#: What may be further off, and why.
FURTHER_OFF = {
    "large_number": "differences of 1 between numbers near 10,000, which BF16 has in steps of 64",
    "dynamicquantizelinear": "whole numbers, made of rounded ones",
    r"test_tan$": "slopes of 50 near the poles make much of a rounded input",
    "training_dropout": "another draw on every run",
}

FILES = sorted(Path(DATA_DIR).glob("*/*/model.onnx"))


def read(path: Path, kind: str):
    """A stored input."""
    parsers = {
        "tensor_type": (onnx.TensorProto, onnx.numpy_helper.to_array),
        "sequence_type": (onnx.SequenceProto, onnx.numpy_helper.to_list),
        "optional_type": (onnx.OptionalProto, onnx.numpy_helper.to_optional),
    }
    message, convert = parsers[kind]
    return convert(message.FromString(path.read_bytes()))


def fed(model: onnx.ModelProto, values) -> dict:
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    return {value.name: feed for value, feed in zip(inputs, values, strict=False)}


def same(first, second) -> bool:
    """Bit by bit."""
    if isinstance(first, list):
        return (
            isinstance(second, list) and all(map(same, first, second)) and len(first) == len(second)
        )
    if first is None or second is None:
        return first is second
    first, second = np.asarray(first), np.asarray(second)
    if first.dtype.hasobject:
        return bool(np.array_equal(first, second))
    return (first.dtype, first.shape, first.tobytes()) == (
        second.dtype,
        second.shape,
        second.tobytes(),
    )


def as_list(result, count: int) -> list:
    return list(result) if count > 1 else [result]


def check(name: str, model: onnx.ModelProto, values) -> bool:
    """Load, run in FP32, convert whole and run again; False where ONNX Runtime cannot run it."""
    adaptor = OnnxRuntimeAdaptor()
    with adaptor.threads(1):  # to start more of them takes longer than to run models this small
        return _checked(adaptor, name, model, values)


def _checked(adaptor: OnnxRuntimeAdaptor, name: str, model: onnx.ModelProto, values) -> bool:
    try:
        runner = session(model, intra_op_num_threads=1)
    except Exception:  # noqa: BLE001 - the bindings' own types
        with pytest.raises(ModelLoadError, match="ONNX Runtime"):
            adaptor.load(model)
        return False
    loaded = adaptor.load(model)
    feeds = fed(model, values)
    try:
        reference = runner.run(None, feeds)
    except Exception:  # noqa: BLE001 - types that its Python interface does not take
        return False
    space = adaptor.space(loaded, MACHINE)
    count = len(reference)
    untouched = adaptor.convert(loaded, space.resolve(space.fp32_plan()), Observations(), space)
    results = as_list(adaptor.predict(untouched, feeds), count)
    assert same(results, reference), name
    for precision, tolerance in TOLERANCES.items():
        plan = PrecisionPlan(
            {
                op: space.capabilities[op].config(precision) or FP32
                for op in space.tunable_ops
                if precision is Precision.INT8
            }
            or {
                op.name: OpConfig(precision)
                for op in space.graph
                if space.capabilities[op.name].config(precision)
            }
        )
        tensors = precision is Precision.INT8 and any(c != FP32 for c in plan.values())
        observed = adaptor.observe(loaded, [feeds], space) if tensors else Observations()
        converted = adaptor.convert(loaded, space.resolve(plan), observed, space)
        if converted is loaded:  # no op has a kernel in this precision: the same as above
            continue
        outputs = as_list(adaptor.predict(converted, feeds), count)
        if not any(re.search(pattern, name) for pattern in FURTHER_OFF):
            for output, expected in zip(outputs, reference, strict=True):
                assert_near(output, expected, tolerance, (name, precision))
    return True


def assert_near(actual, reference, tolerance: float, what) -> None:
    if isinstance(reference, list):
        for item, expected in zip(actual, reference, strict=True):
            assert_near(item, expected, tolerance, what)
        return
    if not isinstance(reference, np.ndarray):
        assert same(actual, reference), what
        return
    assert (actual.dtype, actual.shape) == (reference.dtype, reference.shape), what
    if reference.dtype.kind != "f":
        assert same(actual, reference), what
        return
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(reference), err_msg=str(what))
    if finite.any():
        largest = max(float(np.abs(reference[finite]).max()), 1e-6)
        assert np.abs(actual[finite] - reference[finite]).max() <= tolerance * largest, what


def distinct_tests() -> list[TestCase]:
    """All tests of ops; of bodies of functions, the first with the same types of ops."""
    bodies, cases = set(), []
    for case in node_tests():
        types = frozenset(node.op_type for node in case.model.graph.node)
        if "_expanded" not in case.name or types not in bodies:
            cases.append(case)
        if "_expanded" in case.name:
            bodies.add(types)
    return cases


@pytest.mark.parametrize("part", range(4))
def test_single_ops(part):
    ran = 0
    for case in distinct_tests()[part::4]:
        values = [v if isinstance(v, list | None) else np.asarray(v) for v in case.data_sets[0][0]]
        ran += check(case.name, case.model, values)
    assert ran > 300  # ONNX Runtime has no kernels for the others


@pytest.mark.parametrize("kind", sorted({path.parts[-3] for path in FILES}))
def test_models_in_files(kind):
    ran = 0
    for path in (path for path in FILES if path.parts[-3] == kind):
        model = onnx.load(path)
        inputs = list(fed(model, model.graph.input).values())
        stored = [
            read(path.parent / "test_data_set_0" / f"input_{i}.pb", v.type.WhichOneof("value"))
            for i, v in enumerate(inputs)
            if (path.parent / "test_data_set_0" / f"input_{i}.pb").exists()
        ]
        ran += check(str(path.parent), model, stored)
    assert ran
