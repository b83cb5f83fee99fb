"""Long graphs are inspected in time and memory that grow with the number of ops."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path
from types import FrameType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.table import Table

from neural_mp.adaptors.common.naming import UniqueNames, reserve_name
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.hardware import detect
from neural_mp.reporting import build_capability_table
from neural_mp.reporting.capabilities import LongTable
from neural_mp.reporting.console import SafeConsole

#: More ops than Python allows nested calls.
OPS = 1200
MAX_GROWTH_RATIO = 2.3
#: An op took 5,350 calls when every cell was laid out and every capability built on its own.
MAX_CALLS_PER_OP = 3000


def write_chain(path: Path, ops: int) -> None:
    """Write products with a bias and an activation, in a row."""
    nodes, constants, value = [], [], "x"
    for index in range(ops):
        kind = ("MatMul", "Add", "Relu")[index % 3]
        inputs = [value]
        if kind != "Relu":
            shape = (4, 4) if kind == "MatMul" else (4,)
            constants.append(numpy_helper.from_array(np.ones(shape, np.float32), f"w{index}"))
            inputs.append(f"w{index}")
        value = f"r{index}"
        nodes.append(helper.make_node(kind, inputs, [value], name=f"n{index}"))
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4]) for n in ("x", value)]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:], constants)
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


def count_calls(path: Path) -> int:
    """Return the function calls of what `inspect` does."""
    adaptor, calls = get_adaptor_named("onnxrt"), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        model = adaptor.load(str(path))
        SafeConsole(file=StringIO(), width=200).print(
            build_capability_table(adaptor.space(model, detect()))
        )
    finally:
        sys.setprofile(None)
    return calls


def test_calls_of_inspect_grow_with_the_ops_and_are_few_per_op(tmp_path):
    calls = {}
    for ops in (30, OPS, 2 * OPS):  # the first imports and probes
        write_chain(tmp_path / "chain.onnx", ops)
        calls[ops] = count_calls(tmp_path / "chain.onnx")
    assert calls[2 * OPS] <= MAX_GROWTH_RATIO * calls[OPS]
    assert (calls[2 * OPS] - calls[OPS]) / OPS <= MAX_CALLS_PER_OP


@pytest.mark.parametrize("ops", [100, OPS])
def test_a_long_row_of_openvino_ops_is_compiled_for_any_shape(ops):
    """The plugin takes 20 s for 2,000 ops of a fixed shape in a row, 0.6 s for free shapes."""
    ov = pytest.importorskip("openvino")
    from openvino import opset13

    from neural_mp.adaptors.openvino.runtime import ShapedRunner

    source = value = opset13.parameter([-1, 4], np.float32)
    for _ in range(ops):
        value = opset13.relu(value)
    runner = ShapedRunner(ov.Model([value], [source]), ((2, 4),))
    (result,) = runner([np.full((2, 4), 3, np.float32)])
    assert (result == 3).all()
    assert (runner._fixed is None) == (ops == OPS)


def test_names_of_unnamed_openvino_ops_grow_with_their_number():
    ov = pytest.importorskip("openvino")
    from openvino import opset13

    from neural_mp.adaptors.openvino.graph.edit import give_stable_names, name_of

    source = value = opset13.parameter([-1, 4], np.float32)
    for _ in range(OPS):
        value = opset13.relu(value)
    model = ov.Model([value], [source])
    give_stable_names(model, {"Relu"})
    names = [name_of(node) for node in model.get_ops()]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 500


def test_numbered_names_are_those_of_a_search_from_the_first():
    used, unique = {"a", "a_2"}, UniqueNames(["a", "a_2"])
    for name in ("a", "a", "b", "a_1", "a", "b"):
        assert unique.reserve(name) == reserve_name(name, used)


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_a_long_table_looks_as_one_of_rich(width):
    rows = [
        (f"op{i}" * (i % 7), "Conv, Relu", "fp32 " * (i % 3), "wide 宽\nline") for i in range(50)
    ]
    expected = Table()
    for heading in ("op", "type", "supported", "reason"):
        expected.add_column(heading, overflow="fold", max_width=20 if heading == "type" else None)
    for row in rows:
        expected.add_row(*row, style="dim")
    columns = {"op": None, "type": 20, "supported": None, "reason": None}
    texts = []
    for table in (expected, LongTable("", columns, [(row, "dim") for row in rows])):
        console = SafeConsole(file=StringIO(), width=width)
        console.print(table)
        texts.append(console.file.getvalue())  # type: ignore[attr-defined]
    assert texts[0] == texts[1]
