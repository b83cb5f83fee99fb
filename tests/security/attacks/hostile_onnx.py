"""ONNX files that read other files, run other code, or declare what is not there."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from attacks.hostile import Attacks

from neural_mp.api.loading import load_source
from neural_mp.api.named_models import benchmark_models

ONNX = Attacks()


@functools.cache
def _bytes() -> bytes:
    from attacks.attacked_nets import as_onnx, torch_net

    data: bytes = as_onnx(torch_net()).SerializeToString()
    return data


def _net() -> Any:
    import onnx

    return onnx.load_from_string(_bytes())


def _written(folder: Path, edit: Callable[[Any], None]) -> Path:
    """The net, edited, as a file."""
    net = _net()
    edit(net)
    path = folder / "net.onnx"
    path.write_bytes(net.SerializeToString())
    return path


def _load_and_run(path: Path) -> None:
    load_source(str(path), None, None)
    benchmark_models([str(path)], 2, 0, 1)


def _outside(tensor: Any, **fields: Any) -> None:
    """Let a tensor lie in a file."""
    import onnx

    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in fields.items():
        tensor.external_data.add(key=key, value=str(value))


def _largest(net: Any) -> Any:
    return max(net.graph.initializer, key=lambda tensor: len(tensor.raw_data))


def _secret(folder: Path) -> Path:
    secret = folder / "secret.bin"
    secret.write_bytes(np.ones(100_000, np.float32).tobytes())
    return secret


@ONNX.here("weights that lie at", "../secret.bin", "absolute", "link", "sub/../../secret.bin", "")
def _lies_elsewhere(folder: Path, canary: Path, where: str) -> None:
    secret = _secret(folder)
    inner = folder / "model"
    (inner / "sub").mkdir(parents=True)
    if where == "link":
        (inner / "link").symlink_to(secret)
    location = str(secret) if where == "absolute" else where
    _load_and_run(_written(inner, lambda net: _outside(_largest(net), location=location)))


@ONNX.here("weights that lie in", "a pipe", "a folder", "a device")
def _lies_in_no_file(folder: Path, canary: Path, what: str) -> None:
    if what == "a pipe":
        os.mkfifo(folder / "weights")
    elif what == "a folder":
        (folder / "weights").mkdir()
    else:
        (folder / "weights").symlink_to("/dev/zero")
    _load_and_run(_written(folder, lambda net: _outside(_largest(net), location="weights")))


_PLACES: dict[str, dict[str, Any]] = {
    "before the file": {"offset": -4096},
    "behind the file": {"offset": 2**40},
    "for a terabyte": {"length": 2**40},
    "for less than nothing": {"length": -1},
    "at no number": {"offset": "0x10; rm"},
    "for less than declared": {"length": 4},
    "past the largest number": {"offset": 2**70},
}


@ONNX.here("weights that are said to lie", *_PLACES)
def _lies(folder: Path, canary: Path, where: str) -> None:
    secret = _secret(folder)
    fields = {"location": secret.name, **_PLACES[where]}
    _load_and_run(_written(folder, lambda net: _outside(_largest(net), **fields)))


@ONNX.here("weights with sizes", [2**40, 2**20], [-1, 4], [2**31, 2**31, 2**31])
def _has_sizes(folder: Path, canary: Path, sizes: list[int]) -> None:
    def edit(net: Any) -> None:
        tensor = _largest(net)
        del tensor.dims[:]
        tensor.dims.extend(sizes)

    _load_and_run(_written(folder, edit))


@ONNX.here("a constant of a node that lies in another file")
def _is_a_constant(folder: Path, canary: Path) -> None:
    import onnx

    secret = _secret(folder)

    def edit(net: Any) -> None:
        value = onnx.numpy_helper.from_array(np.ones(2, np.float32), "v")
        _outside(value, location=str(secret))
        node = onnx.helper.make_node("Constant", [], ["added"], value=value)
        net.graph.node.insert(0, node)

    _load_and_run(_written(folder, edit))


def _in_branches(path: Path, location: str) -> None:
    """A net with a branch, whose weights lie in a file."""
    import onnx
    from onnx import helper

    weight = onnx.numpy_helper.from_array(np.ones((4,), np.float32), "w")
    _outside(weight, location=location)
    value = helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, None)
    branch = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["r"])], "branch", [], [value], [weight]
    )
    else_branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["r"])], "other", [], [value]
    )
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["yes"], to=onnx.TensorProto.BOOL),
        helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=else_branch),
    ]
    input_info = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4])
    output_info = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "graph", [input_info], [output_info])
    imports = [helper.make_opsetid("", 20)]
    path.write_bytes(
        helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
    )


@ONNX.here("weights of a branch that lie in another file")
def _is_in_a_branch(folder: Path, canary: Path) -> None:
    (folder / "model").mkdir()
    _in_branches(folder / "model" / "net.onnx", str(_secret(folder)))
    _load_and_run(folder / "model" / "net.onnx")


@ONNX.here("weights beside the file", refused=False)
def _lies_beside(folder: Path, canary: Path) -> None:
    def edit(net: Any) -> None:
        tensor = _largest(net)
        (folder / "weights.bin").write_bytes(tensor.raw_data)
        _outside(tensor, location="weights.bin")

    _load_and_run(_written(folder, edit))


@ONNX.here("an op", "EPContext", "PythonOp", "ATen")
def _has_an_op(folder: Path, canary: Path, kind: str) -> None:
    import onnx

    def edit(net: Any) -> None:
        node = onnx.helper.make_node(
            kind, ["x"], ["added"], domain="com.microsoft", ep_cache_context="/etc/hostname"
        )
        node.input[0] = net.graph.input[0].name
        net.graph.node.append(node)
        net.opset_import.add(domain="com.microsoft", version=1)

    _load_and_run(_written(folder, edit))


@ONNX.here("settings for sessions in the model, and a variable that says so", refused=False)
def _has_settings(folder: Path, canary: Path) -> None:
    def edit(net: Any) -> None:
        text = '{"session_options": {"enable_profiling": 1}}'
        net.metadata_props.add(key="ort_config", value=text)

    path = _written(folder, edit)
    environment, cwd = dict(os.environ), Path.cwd()
    os.environ["ORT_LOAD_CONFIG_FROM_MODEL"] = "1"
    os.chdir(folder)
    try:
        _load_and_run(path)
    finally:
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
    assert {file.name for file in folder.iterdir()} == {"net.onnx"}


@ONNX.here("a model that begins as ONNX Runtime's own format", refused=False)
def _begins_as_another(folder: Path, canary: Path) -> None:
    def edit(net: Any) -> None:
        net.ir_version = 8
        net.producer_name = "ORTM" + "x" * 20

    _load_and_run(_written(folder, edit))


@ONNX.here("a file of", "ONNX Runtime's own format", "a pickle", "zeros", "long numbers")
def _is_another(folder: Path, canary: Path, what: str) -> None:
    import onnxruntime as ort

    path = folder / "net.onnx"
    if what == "a pickle":
        path.write_bytes(b"\x80\x04cos\nsystem\n" + f"(Vtouch {canary}\ntR.".encode())
    elif what == "ONNX Runtime's own format":
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(folder / "net.ort")
        options.add_session_config_entry("session.save_model_format", "ORT")
        ort.InferenceSession(_bytes(), options)
        (folder / "net.ort").rename(path)
    else:
        path.write_bytes({"zeros": bytes(10**6), "long numbers": b"\xff" * 10**6}[what])
    _load_and_run(path)


@ONNX.here("messages in messages", 200, 5_000)
def _is_nested(folder: Path, canary: Path, depth: int) -> None:
    """Types of sequences of sequences, and so on."""

    def message(number: int, content: bytes) -> bytes:
        size, groups = len(content), []
        while size > 127:
            groups.append(size & 127 | 128)
            size >>= 7
        return bytes([number << 3 | 2, *groups, size]) + content

    kind = b"\x0a\x04\x08\x01\x12\x00"
    for _ in range(depth):
        kind = message(4, message(1, kind))
    value = message(1, b"deep") + message(2, kind)
    net = _net()
    graph = net.graph.SerializeToString() + message(13, value)
    net.ClearField("graph")
    (folder / "net.onnx").write_bytes(net.SerializeToString() + message(7, graph))
    load_source(str(folder / "net.onnx"), None, None)


def _function(name: str, calls: list[str]) -> Any:
    from onnx import helper

    names = ["x", *(f"v{index}" for index in range(len(calls)))]
    nodes = [
        helper.make_node(call, [names[i]], [names[i + 1]], domain="mine" if call != "Relu" else "")
        for i, call in enumerate(calls)
    ]
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    return helper.make_function("mine", name, ["x"], [names[-1]], nodes, imports)


@ONNX.here("functions that", "call themselves", "call each other", "multiply")
def _has_functions(folder: Path, canary: Path, what: str) -> None:
    def edit(net: Any) -> None:
        if what == "call themselves":
            functions = [_function("f0", ["f0"])]
        elif what == "call each other":
            functions = [_function("f0", ["f1"]), _function("f1", ["f0"])]
        else:
            functions = [_function(f"f{i}", [f"f{i + 1}"] * 10) for i in range(9)]
            functions.append(_function("f9", ["Relu"]))
        net.functions.extend(functions)
        net.opset_import.add(domain="mine", version=1)
        last = net.graph.node[-1]
        output = last.output[0]
        last.output[0] = "before"
        net.graph.node.add(op_type="f0", domain="mine", input=["before"], output=[output])

    _load_and_run(_written(folder, edit))


@ONNX.here("a result of ours whose weights were moved elsewhere")
def _is_ours(folder: Path, canary: Path) -> None:
    import onnx

    from neural_mp.adaptors.onnxrt.files import storage

    loaded = load_source(_net(), None, None)
    (folder / "saved").mkdir()
    storage.save_model(loaded.held, folder / "saved")
    path = folder / "saved" / storage.MODEL_FILE
    net = onnx.load(path)
    _outside(_largest(net), location=str(_secret(folder)))
    path.write_bytes(net.SerializeToString())
    storage.restore_model(folder / "saved", "CPUExecutionProvider")


@ONNX.here("a result of ours whose details are nested")
def _has_details(folder: Path, canary: Path) -> None:
    from neural_mp.adaptors.onnxrt.files import storage

    storage.save_model(load_source(_net(), None, None).held, folder)
    (folder / storage.DETAILS_FILE).write_text("[" * 200_000)
    storage.restore_model(folder, "CPUExecutionProvider")


@ONNX.command("the command, with weights from another file")
def _is_inspected(folder: Path, canary: Path) -> list[str]:
    _secret(folder)
    (folder / "model").mkdir()
    edit = functools.partial(_outside_largest, location="../secret.bin")
    return ["inspect", str(_written(folder / "model", edit))]


def _outside_largest(net: Any, **fields: Any) -> None:
    _outside(_largest(net), **fields)
