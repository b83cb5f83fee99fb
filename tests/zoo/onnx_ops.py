"""One small model for every op of ONNX's op sets, from the test data of the onnx package.

Of each op the first test that ONNX Runtime runs is taken. Products with constant matrices stand
before its first input and behind its outputs where they are float32, so that the op lies among
integers; its further inputs are constants, as a trained model has them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx_node_tests import node_tests
from zoo.harness import Built, Case, flat

_DOMAINS = ("", "ai.onnx.ml")
#: Further tests of an op, by what their names hold: recurrent layers in all their forms, and ops
#: that an attribute makes another one.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "LSTM": ("initial_bias", "peepholes", "reverse", "bidirectional"),
    "GRU": ("initial_bias", "seq_length", "reverse", "bidirectional"),
    "RNN": ("initial_bias", "seq_length", "reverse", "bidirectional"),
    "Attention": ("attention_3d", "4d_causal", "4d_gqa", "past_and_present", "4d_softcap"),
    "AveragePool": ("1d_default", "2d_ceil", "2d_dilations", "3d_default"),
    "Conv": ("strides_padding", "autopad_same"),
    "ConvTranspose": ("1d", "3d", "group_2", "autopad_same"),
    "If": ("if_seq", "if_opt"),
    "Loop": ("loop13_seq", "loop16_seq_none"),
    "MaxPool": ("1d_default", "2d_dilations", "with_argmax_2d", "3d_default"),
    "Pad": ("edge", "reflect", "wrap"),
    "Resize": ("scales_linear", "scales_cubic", "sizes_nearest", "crop_and_resize"),
    "Scan": ("scan_sum", "scan9_multi_state"),
}
_NO_KERNEL = "ONNX Runtime has no kernel for it on the CPU"
#: Op → why it has no case.
WITHOUT: Mapping[str, str] = {"ImageDecoder": _NO_KERNEL, "SwiGLU": _NO_KERNEL}
#: Ops for learners of other kinds than networks, of those that the onnx package has tests for.
LEARNERS = ("ArrayFeatureExtractor", "Binarizer", "LabelEncoder", "TreeEnsemble")
_SELECTS = "selects by comparison"
_ROUNDS = "rounds to whole numbers"
#: Op type → why a small error of its input may change its outputs without bound.
DISCONTINUOUS: Mapping[str, str] = {
    "ArgMax": _SELECTS,
    "ArgMin": _SELECTS,
    "Binarizer": "compares numbers",
    "BitCast": "reads floats as bits",
    "Ceil": _ROUNDS,
    "DynamicQuantizeLinear": _ROUNDS,
    "Floor": _ROUNDS,
    "Hardmax": _SELECTS,
    "OneHot": "compares numbers",
    "QuantizeLinear": _ROUNDS,
    "Round": _ROUNDS,
    "Unique": "compares numbers",
}
#: Ops of which the shape alone is read: without another reader, what computes the input is dropped.
_READS_SHAPES = frozenset({"Shape", "Size"})
#: Ops all of whose float inputs are computed where they are used, rather than constant.
_COMPUTED = frozenset(
    {"Add", "Attention", "Concat", "Div", "Einsum", "LinearAttention", "Max", "Mean", "Min", "Mul"}
    | {"RotaryEmbedding", "Sub", "Sum", "Where"}
)
#: Op sets to try where ONNX Runtime has no kernel for the op set of a test.
_OLDER = (23, 22, 21, 20, 18, 16, 13, 11)
#: The first version of the file format in which constants need not be inputs as well.
_LEAST_IR_VERSION = 4
#: Columns of the products behind an op, and the most of an input before which one stands.
_WIDTH, _MAX_WIDTH = 6, 256


def cases(elsewhere: Collection[str]) -> Iterator[Case]:
    """Yield one case for every op and every variant.

    Args:
        elsewhere: ops that have a case of another kind.
    """
    schemas = onnx.defs.get_all_schemas()
    named = {schema.name for schema in schemas if not schema.domain} - {*WITHOUT, *elsewhere}
    for op_type in sorted({*named, *LEARNERS}):
        for variant in ("", *VARIANTS.get(op_type, ())):
            name = f"{op_type} {variant.replace('_', ' ')}".strip()
            discontinuous = DISCONTINUOUS.get(op_type, "")
            yield Case(name, partial(built, op_type, variant), discontinuous=discontinuous)


def built(op_type: str, variant: str) -> Built:
    """Return the first test of a variant that ONNX Runtime runs, between products."""
    tests = ranked(single_op_tests()[op_type], variant)
    test = next(filter(None, map(runnable, tests)), None)
    assert test is not None, f"{op_type} {variant}: ONNX Runtime runs none of {len(tests)} tests"
    if not any(map(takes_product, test[1].values())):
        test = in_floats(*test) or test
    return embedded(*test)


@cache
def single_op_tests() -> dict[str, list[TestCase]]:
    """Return op type → its single-op tests in the onnx package."""
    groups: dict[str, list[TestCase]] = {}
    for test in node_tests():
        node, *rest = test.model.graph.node
        if not rest and node.domain in _DOMAINS and "expanded" not in test.name:
            groups.setdefault(node.op_type, []).append(test)
    return groups


def ranked(tests: Sequence[TestCase], variant: str) -> list[TestCase]:
    """Return the tests of a variant, those first whose input a product can compute."""
    fitting = [test for test in tests if variant in test.name]
    return sorted(
        fitting, key=lambda test: not takes_product(next(iter(feeds_of(test).values()), 0))
    )


def runnable(test: TestCase) -> tuple[onnx.ModelProto, dict[str, Any], list[Any]] | None:
    """Return model, inputs and outputs of a test; None where ONNX Runtime does not run it."""
    feeds = feeds_of(test)
    for version in (test.model.opset_import[0].version, *_OLDER):
        model = onnx.ModelProto.FromString(test.model.SerializeToString())
        model.opset_import[0].version = version
        model.ir_version = max(model.ir_version, _LEAST_IR_VERSION)
        try:
            onnx.checker.check_model(model)
            return model, feeds, outputs_of(model, feeds)
        except Exception:  # noqa: BLE001 - the bindings' own types
            continue
    return None


def in_floats(
    model: onnx.ModelProto, feeds: dict[str, Any], results: Sequence[Any]
) -> tuple[onnx.ModelProto, dict[str, Any], list[Any]] | None:
    """Return the test of an op for floats, from one for other numbers; None for ops without."""
    (node,) = model.graph.node
    schema = onnx.defs.get_schema(node.op_type, model.opset_import[0].version, node.domain)
    if not schema.inputs or not schema.outputs:
        return None
    variable = schema.inputs[0].type_str

    def follows(position: int, items: Sequence[Any]) -> bool:
        return bool(items[min(position, len(items) - 1)].type_str == variable)

    changed, inputs = onnx.ModelProto.FromString(model.SerializeToString()), dict(feeds)
    for position, value in enumerate(changed.graph.input):
        number = inputs[value.name]
        if follows(position, schema.inputs):
            if not isinstance(number, np.ndarray) or number.dtype.kind not in "fiu":
                return None
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            inputs[value.name] = number.astype(np.float32)
    for position, value in enumerate(changed.graph.output):
        if follows(position, schema.outputs):
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    try:
        onnx.checker.check_model(changed)
        return changed, inputs, outputs_of(changed, inputs)
    except Exception:  # noqa: BLE001 - the bindings' own types
        return None


def feeds_of(test: TestCase) -> dict[str, Any]:
    """Return name → input of a test."""
    names = [value.name for value in test.model.graph.input]
    return {name: _plain(value) for name, value in zip(names, test.data_sets[0][0], strict=False)}


def _plain(value: Any) -> Any:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return value if value is None or isinstance(value, list) else np.asarray(value)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    """Return a session of plain ONNX Runtime."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def outputs_of(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    """Return what plain ONNX Runtime computes."""
    return list(session(model).run(None, dict(feeds)))


def takes_product(value: Any) -> bool:
    """Whether a product with a constant matrix can compute a value, or read it."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.float32
        and bool(value.ndim and value.size and value.shape[-1] <= _MAX_WIDTH)
        and bool(np.isfinite(value).all())
    )


def mixing(width: int) -> np.ndarray:
    """Return a matrix whose product with rows stays within their range."""
    matrix = np.eye(width) + 0.02 * np.random.default_rng(0).random((width, width))
    return (matrix / matrix.sum(0)).astype(np.float32)


def embedded(model: onnx.ModelProto, feeds: dict[str, Any], results: Sequence[Any]) -> Built:
    """Return an op between products with constant matrices."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    graph, inputs = model.graph, dict(feeds)
    (node,) = graph.node
    declared = {value.name: value for value in graph.input}
    retained = [*feeds] if node.op_type in _COMPUTED else [*feeds][:1]
    input_nodes, output_nodes = [], []
    for name, value in feeds.items():
        is_tensor = declared[name].type.HasField("tensor_type")
        if name not in retained and isinstance(value, np.ndarray) and is_tensor:
            graph.initializer.append(numpy_helper.from_array(value, name))
            graph.input.remove(declared[name])
            del inputs[name]
        elif is_tensor and takes_product(value):
            outer, matrix = f"{name}_given", f"{name}_mixing"
            graph.initializer.append(numpy_helper.from_array(mixing(value.shape[-1]), matrix))
            input_nodes.append(
                helper.make_node("MatMul", [outer, matrix], [name], name=f"to_{name}")
            )
            declared[name].name = outer
            inputs[outer] = inputs.pop(name)
            if node.op_type in _READS_SHAPES:
                graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    for value, result in zip(list(graph.output), results, strict=False):
        is_tensor = value.type.HasField("tensor_type")
        if is_tensor and takes_product(result) and node.op_type != "Unique":
            matrix, shape = f"{value.name}_head", (result.shape[-1], _WIDTH)
            weight = np.random.default_rng(1).normal(size=shape).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(weight, matrix))
            head = f"{value.name}_product"
            output_nodes.append(helper.make_node("MatMul", [value.name, matrix], [head], name=head))
            value.CopyFrom(helper.make_tensor_value_info(head, TensorProto.FLOAT, None))
    graph.ClearField("node")
    graph.node.extend([*input_nodes, node, *output_nodes])
    if not any(opset.domain == "" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("", _OLDER[0]))
    return Built(model, [inputs], [flat(outputs_of(model, inputs))])
