"""ONNX files of opsets 7 to the newest: of PyTorch's two exporters and of the onnx package."""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from accepted.cases import Case, Cases, Result, example, outcomes
from accepted.export_calls import Build
from accepted.export_nets import NETS
from accepted.export_sequences import SEQUENCES
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.loader import DATA_DIR

CASES = Cases()
OLDEST, NEWEST = 7, onnx.defs.onnx_opset_version()
#: Newest opset of the exporter by TorchScript, and oldest of the exporter by TorchDynamo.
_NEWEST_TRACED, _OLDEST_DYNAMO = 20, 18
#: Version of the format from which initializers are no inputs.
_IR_OF_CONSTANTS = 4
#: Nets that are exported with every opset.
_DYNAMO = ("resnet", "lstm", "encoder")
_BUILDS = {**NETS, **SEQUENCES}


def _exported(name: str, build: Build, opset: int, dynamo: bool) -> None:
    def make(path: Path) -> None:
        torch.manual_seed(0)
        call = build()
        quiet = contextlib.redirect_stdout(io.StringIO())
        with quiet, contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
            module = call.module.eval()
            torch.onnx.export(module, call.args, path, opset_version=opset, dynamo=dynamo)
        if onnx.load(path, load_external_data=False).opset_import[0].version != opset:
            raise ValueError("the exporter does not write this opset")

    CASES.add(f"{'dynamo' if dynamo else 'traced'}_{name}_{opset}.onnx", make)


for _name, _build in _BUILDS.items():
    for _opset in range(OLDEST, _NEWEST_TRACED + 1):
        _exported(_name, _build, _opset, dynamo=False)
for _name in _DYNAMO:
    for _opset in range(_OLDEST_DYNAMO, NEWEST + 1):
        _exported(_name, _BUILDS[_name], _opset, dynamo=True)


def _stored(folder: Path) -> None:
    """Add a file of the onnx package, which PyTorch or onnx itself wrote."""

    def make(path: Path) -> None:
        shutil.copy(folder / "model.onnx", path)

    CASES.add(f"{folder.parent.name}_{folder.name}.onnx", make)


for _folder in sorted(path.parent for path in Path(DATA_DIR).glob("*/*/model.onnx")):
    _stored(_folder)


def _weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _net(quantized: bool) -> onnx.GraphProto:
    """Return a convolutional net, by ops that no opset changed, with quantized inputs if wanted."""
    weights = {"w": _weight(4, 3, 3, 3), "v": _weight(5, 4), "b": _weight(5)}
    norms = {f"n{index}": np.abs(_weight(4)) + 0.5 for index in range(4)}
    scales = {"s": np.array(0.05, np.float32), "z": np.array(3, np.int8)} if quantized else {}
    node = helper.make_node
    entry = "x"
    nodes = []
    if quantized:
        nodes = [
            node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        ]
        entry = "d"
    nodes += [
        node("Conv", [entry, "w"], ["c"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", *norms], ["n"]),
        node("Relu", ["n"], ["r"]),
        node("MaxPool", ["r"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["m"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Gemm", ["f", "v", "b"], ["h"], transB=1),
        node("Softmax", ["h"], ["y"], axis=1),
    ]
    tensors = [
        numpy_helper.from_array(value, name)
        for name, value in {**weights, **norms, **scales}.items()
    ]
    input_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])
    output_info = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 5])
    return helper.make_graph(nodes, "net", [input_info], [output_info], tensors)


def _controlled() -> onnx.GraphProto:
    """Return a branch and a loop around products of matrices."""
    node, value = helper.make_node, helper.make_tensor_value_info
    branch = value("taken", TensorProto.FLOAT, None)
    then = helper.make_graph([node("MatMul", ["x", "w"], ["taken"])], "then", [], [branch])
    else_branch = helper.make_graph([node("Identity", ["x"], ["taken"])], "other", [], [branch])
    body = helper.make_graph(
        [node("Identity", ["going"], ["on"]), node("MatMul", ["state", "w"], ["next"])],
        "body",
        [
            value("count", TensorProto.INT64, []),
            value("going", TensorProto.BOOL, []),
            value("state", TensorProto.FLOAT, None),
        ],
        [value("on", TensorProto.BOOL, []), value("next", TensorProto.FLOAT, None)],
    )
    constants = {"w": _weight(4, 4), "trips": np.array(3, np.int64), "true": np.array(True)}
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    nodes = [
        node("If", ["chosen"], ["b"], then_branch=then, else_branch=else_branch),
        node("Loop", ["trips", "true", "b"], ["y"], body=body),
    ]
    inputs = [value("x", TensorProto.FLOAT, ["n", 4]), value("chosen", TensorProto.BOOL, [])]
    outputs = [value("y", TensorProto.FLOAT, ["n", 4])]
    return helper.make_graph(nodes, "controlled", inputs, outputs, tensors)


def _written(name: str, graph: Callable[[], onnx.GraphProto], opset: int) -> None:
    def make(path: Path) -> None:
        opsets = [helper.make_opsetid("", opset)]
        model = helper.make_model_gen_version(graph(), opset_imports=opsets)
        if model.ir_version < _IR_OF_CONSTANTS:
            model.graph.input.extend(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                for tensor in model.graph.initializer
            )
        onnx.checker.check_model(model)
        onnx.save(model, path)

    CASES.add(f"helper_{name}_{opset}.onnx", make)


for _opset in range(OLDEST, NEWEST + 1):
    _written("net", lambda: _net(quantized=False), _opset)
    _written("controlled", _controlled, _opset)
    if _opset >= 10:
        _written("quantized", lambda: _net(quantized=True), _opset)

_KINDS = {"tensor(string)": "string", "tensor(float)": "float32", "tensor(double)": "float64"}


def _expected(path: Path, feeds: Mapping[str, Any] | None) -> tuple[Any, list[Any]]:
    """Return inputs, those stored with a file or random ones, and ONNX Runtime's outputs."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = {}
    for seed, port in enumerate(session.get_inputs()):
        if not port.type.startswith("tensor("):
            raise TypeError(f"no inputs of type {port.type}")
        dtype = _KINDS.get(port.type, port.type.removeprefix("tensor(").removesuffix(")"))
        sizes = [size if isinstance(size, int) else None for size in port.shape]
        inputs[port.name] = np.ones(sizes, bool) if dtype == "bool" else example(dtype, sizes, seed)
    return inputs, _flat(session.run(None, inputs))


def _flat(outputs: Iterable[Any]) -> list[Any]:
    """Return the arrays of outputs, whose sequences are lists."""
    return [
        array for output in outputs for array in (output if isinstance(output, list) else [output])
    ]


def _given(path: Path, feeds: Any) -> list[Any]:
    from neural_mp.adaptors.registry import adaptor_for

    adaptor = adaptor_for(str(path))
    model = adaptor.load(str(path))
    result = adaptor.predict(model, feeds)
    outputs = result if len(model.signature.outputs) > 1 else [result]
    return _flat(outputs)


def results(cases: Iterable[Case], folder: Path) -> Iterator[Result]:
    """Yield the outcome of every case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from outcomes(cases, folder, _expected, _given)
