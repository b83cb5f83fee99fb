"""Files of models as their frameworks write them, with one thing changed."""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attacks.mutants import broken, mutants
from attacks.mutated_protos import altered

from neural_mp.api.loading import load_source
from neural_mp.core import hardware

Attacks = Iterator[tuple[str, Callable[[], object]]]
#: Changes the file or folder at a path.
Change = Callable[[Path, random.Random], None]

#: Models of `accepted/keras_nets.py`, by kind of file.
_FROZEN = ("sequential", "transformer", "several")
_SAVED = ("sequential", "TextVectorization", "StringLookup_adapted", "several")
_KERAS = (*_FROZEN, "features", "quantized_int8", "operations")


def _keras_nets(names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    from accepted.keras_nets import MODELS
    from attacks.attacked_nets import keras_net

    yield "net", keras_net()
    yield from ((name, MODELS[name]()) for name in names)


def prepare_frozen(folder: Path) -> None:
    """Write frozen graphs of Keras models."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import (
        convert_variables_to_constants_v2,
    )

    for name, net in _keras_nets(_FROZEN):
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in net.inputs]
        traced = tf.function(lambda *values, net=net: net(list(values))).get_concrete_function(
            *specs
        )
        graph = convert_variables_to_constants_v2(traced).graph.as_graph_def()
        (folder / f"{name}.pb").write_bytes(graph.SerializeToString())


def prepare_saved_models(folder: Path) -> None:
    """Write SavedModels of Keras models, with tables and assets among them."""
    for name, net in _keras_nets(_SAVED):
        net.export(folder / name, verbose=False)


def prepare_keras(folder: Path) -> None:
    """Write files of Keras, one in its older format."""
    for name, net in _keras_nets(_KERAS):
        net.save(folder / f"{name}.keras")
        if name == "net":
            net.save(folder / f"{name}.h5")


def prepare_onnx_files(folder: Path) -> None:
    """Write ONNX files, one with its weights in another file."""
    import onnx
    from attacks.attacked_nets import as_onnx, torch_net

    net = as_onnx(torch_net())
    onnx.save(net, folder / "net.onnx")
    onnx.save(
        net,
        folder / "outside.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=64,
    )
    onnx.save(controlled_onnx(), folder / "controlled.onnx")


def controlled_onnx() -> Any:
    """Return a model with a branch, a loop, a recurrent layer and a function."""
    from onnx import parser

    return parser.parse_model(_CONTROLLED)


_CONTROLLED = """
<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
controlled (float[n, 4, 3] x) => (float[n, 6] y)
<float[1, 8, 3] w = {0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2, 0.3,
                     0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2, 0.3},
 float[1, 8, 2] r = {0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2,
                     0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2},
 float[2, 6] k = {0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0},
 int64[1] first = {0}, int64 trips = {3}, bool going = {1}, float zero = {0}>
{
    turned = Transpose <perm = [1, 0, 2]> (x)
    _, last = LSTM <hidden_size = 2> (turned, w, r)
    flat = Squeeze (last, first)
    product = MatMul (flat, k)
    total = ReduceSum <keepdims = 0> (product)
    positive = Greater (total, zero)
    branch = If (positive) <
        then_branch = then_graph () => (float[n, 6] t) { t = Relu (product) },
        else_branch = else_graph () => (float[n, 6] e) { e = Neg (product) }
    >
    looped = Loop (trips, going, branch) <
        body = body_graph (int64 i, bool c, float[n, 6] v) => (bool d, float[n, 6] u)
        { d = Identity (c)
          u = Add (v, product) }
    >
    y = own.scaled <alpha = 2.0> (looped)
}
<domain: "own", opset_import: ["" : 20]>
scaled <alpha> (a) => (b)
{
    c = Constant <value_float: float = @alpha> ()
    b = Mul (a, c)
}
"""


def prepare_openvino_files(folder: Path) -> None:
    """Write files of OpenVINO."""
    import onnx
    from attacks.attacked_nets import as_onnx, torch_net
    from onnx.inliner import inline_local_functions

    from neural_mp.adaptors.openvino.runtime import ov

    nets = {"net": as_onnx(torch_net()), "controlled": inline_local_functions(controlled_onnx())}
    for name, model in nets.items():
        onnx.save(model, folder / f"{name}.onnx")
        net = ov.convert_model(folder / f"{name}.onnx")
        ov.save_model(net, folder / f"{name}.xml", compress_to_fp16=False)


def prepare_litert(folder: Path) -> None:
    """Write `.tflite` files: in float, in INT8, with weights in blocks of 4 bits, with loops."""
    import keras
    import numpy as np
    import tensorflow as tf
    from attacks.attacked_nets import keras_net

    from neural_mp import MixedPrecision

    steps = keras.Input((4, 32), batch_size=1)
    recurrent = keras.Model(steps, keras.layers.LSTM(4)(steps))
    rows = keras.Input((64,))
    dense = keras.Model(rows, keras.layers.Dense(8)(keras.layers.Dense(64, "silu")(rows)))
    for name, net in (("net", keras_net()), ("loops", recurrent), ("dense", dense)):
        content = tf.lite.TFLiteConverter.from_keras_model(net).convert()
        (folder / f"{name}.tflite").write_bytes(content)
    for name, source, precision in (("int8", "net", "int8"), ("blocks", "dense", "int4")):
        path = folder / f"{source}.tflite"
        shape = keras_net().input_shape[1:] if source == "net" else (64,)
        batch = np.random.default_rng(0).random((4, *shape)).astype(np.float32)
        options = {"precisions": precision, "objective": "modelsize", "calib_dataloader": [batch]}
        result = MixedPrecision(model=str(path), workspace=folder / "workspace", **options)()
        result.save(folder / f"{name}.tflite")


def frozen_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on a frozen graph."""
    from tensorflow.core.framework.graph_pb2 import GraphDef

    changes = (_message(GraphDef), _message(GraphDef), _bytes)
    return _attacks(sorted(folder.glob("*.pb")), changes, scratch, f"frozen {seed}", count)


def saved_model_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on the folder of a SavedModel."""
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    def message(path: Path, drawn: random.Random) -> None:
        _message(SavedModel)(path / "saved_model.pb", drawn)

    sources = sorted(path.parent for path in folder.glob("*/saved_model.pb"))
    changes = (message, message, _a_file)
    return _attacks(sources, changes, scratch, f"saved {seed}", count)


def keras_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on a file of Keras."""
    sources = [*folder.glob("*.keras"), *folder.glob("*.h5")]
    changes = (_configuration, _configuration, _member, _bytes)
    return _attacks(sorted(sources), changes, scratch, f"keras {seed}", count)


def onnx_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on an ONNX file."""
    from onnx import ModelProto

    changes = (_message(ModelProto), _message(ModelProto), _bytes, _sibling)
    return _attacks(sorted(folder.glob("*.onnx")), changes, scratch, f"onnx {seed}", count)


def openvino_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on a file of OpenVINO."""
    changes = (_element, _element, _element, _bytes, _sibling)
    sources = sorted(folder.glob("*.xml"))
    return _attacks(sources, changes, scratch, f"xml {seed}", count)


def litert_attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack on a `.tflite` file."""
    changes = (_contents, _contents, _contents, _bytes)
    sources = sorted(folder.glob("*.tflite"))
    return _attacks(sources, changes, scratch, f"litert {seed}", count)


def _contents(path: Path, drawn: random.Random) -> None:
    """Change what a well-formed flatbuffer says."""
    from hostile_flatbuffers import damage_contents

    content = path.read_bytes()
    while (damaged := damage_contents(content, drawn)) is None:
        pass
    path.write_bytes(damaged[1])


def _attacks(
    sources: list[Path], changes: tuple[Change, ...], scratch: Path, seed: str, count: int
) -> Attacks:
    """Yield attacks that change a copy of each source in turn, in each way in turn."""
    for number in range(count):
        source = sources[number % len(sources)]
        change = changes[number // len(sources) % len(changes)]

        def call(source: Path = source, change: Change = change, number: int = number) -> None:
            home = scratch / "changed"
            shutil.rmtree(home, ignore_errors=True)
            target = home / source.name
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                home.mkdir()
                for file in source.parent.iterdir():
                    if file.is_file():
                        shutil.copy(file, home)
            change(target, random.Random(f"{seed} {number}"))
            use(target)

        yield f"{source.name} {getattr(change, '__name__', '')} {number}", call


def use(path: Path) -> None:
    """Do with a model what `inspect`, `benchmark` and `convert` do."""
    model = load_source(str(path), None, None)
    inputs = model.example_inputs(2)
    model(inputs)
    space = model.adaptor.space(model.held, hardware.detect())
    tunable = model.in_space(space).with_calibration([inputs])
    tunable.convert_by_plan(space.resolve(space.fastest_plan()))(inputs)


def _bytes(path: Path, drawn: random.Random) -> None:
    """Change bytes of a file."""
    path.write_bytes(broken(path.read_bytes(), drawn)[1])


def _a_file(path: Path, drawn: random.Random) -> None:
    """Change bytes of a file of a folder."""
    _bytes(drawn.choice(sorted(file for file in path.rglob("*") if file.is_file())), drawn)


def _sibling(path: Path, drawn: random.Random) -> None:
    """Change bytes of the weights beside a file, or take them away."""
    files = [file for file in sorted(path.parent.iterdir()) if file.suffix == ".bin"]
    file = drawn.choice(files)
    if drawn.random() < 0.1:
        file.unlink()
    else:
        _bytes(file, drawn)


def _message(kind: type[Any]) -> Change:
    """Return the change of a file that contains a message."""

    def change(path: Path, drawn: random.Random) -> None:
        message = kind()
        message.ParseFromString(path.read_bytes())
        for _ in range(drawn.choice((1, 1, 2))):
            altered(message, drawn)
        path.write_bytes(message.SerializeToString())

    change.__name__ = "message"
    return change


def _configuration(path: Path, drawn: random.Random) -> None:
    """Change a value of the configuration in a file of Keras."""

    def changed(text: Any) -> str:
        (mutant,) = mutants(json.loads(text), str(drawn.random()), 1)
        return json.dumps(mutant[1])

    if path.suffix == ".h5":
        import h5py

        with h5py.File(path, "r+") as file:
            # Attributes of more than 64 KB, which some changes need, are refused by HDF5.
            text = changed(file.attrs["model_config"])
            file.attrs["model_config"] = text[: 2**15] if len(text) > 2**15 else text
        return
    name = drawn.choice(("config.json", "config.json", "config.json", "metadata.json"))
    _in_archive(path, name, lambda data: changed(data).encode())


def _member(path: Path, drawn: random.Random) -> None:
    """Change bytes of the weights in a file of Keras."""
    if path.suffix == ".h5":
        _bytes(path, drawn)
        return
    _in_archive(path, "model.weights.h5", lambda data: broken(data, drawn)[1])


def _in_archive(path: Path, member: str, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in members.items():
            new.writestr(name, change(data) if name == member else data)


_VALUES = (
    "",
    "-1",
    "0",
    "1",
    "3",
    "99",
    "1,2",
    "2147483648",
    "9223372036854775807",
    "1e30",
    "nan",
    "x",
    "f32",
    "i64",
    "opset1",
    "opset99",
    "../../etc/passwd",
    "?",
    "-9223372036854775808",
)


def _element(path: Path, drawn: random.Random) -> None:
    """Change an element of a file of OpenVINO: an attribute, its text, or its place."""
    from xml.etree import ElementTree

    tree = ElementTree.parse(path)
    # Kinds of elements are drawn first: ports are many.
    kinds: dict[str, list[tuple[Any, Any]]] = {}
    for above in tree.iter():
        for below in above:
            kinds.setdefault(below.tag, []).append((above, below))
    above, element = drawn.choice(kinds[drawn.choice(sorted(kinds))])
    _, second = drawn.choice(kinds[element.tag])
    kind = drawn.choice(("attribute", "attribute", "attribute", "text", "gone", "twice", "other"))
    if kind == "attribute" and element.attrib:
        key = drawn.choice(sorted(element.attrib))
        element.set(key, drawn.choice((*_VALUES, second.get(key, ""), second.get(key, ""))))
    elif kind == "gone":
        above.remove(element)
    elif kind == "twice":
        above.append(element)
    elif kind == "other":
        above.remove(element)
        above.append(second)
    else:
        element.text = drawn.choice(_VALUES)
    tree.write(path)
