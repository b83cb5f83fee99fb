"""Files that could end the process are refused in one line; files of the converter are not."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest

pytest.importorskip("ai_edge_litert")

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from hostile_flatbuffers import damage_bytes, damage_contents, run_in_children
from small_flatbuffers import OP, TYPE, Net, dense_net, half_net, pack, run

from neural_mp.adaptors.litert.files.checks import check_flatbuffer
from neural_mp.errors import ModelLoadError

#: Hostile files that are run, and of those that are not.
HOSTILE = 1000
#: Part of good files that may be refused.
MAX_REFUSED_RATIO = 0.02


def refusal(content: bytes) -> str:
    with pytest.raises(ModelLoadError) as caught:
        check_flatbuffer(content, "'net.tflite'")
    message = str(caught.value)
    assert message.startswith("'net.tflite' is refused: ")
    assert "\n" not in message
    return message


def split_net() -> Net:
    net = Net()
    axis, x = net.tensor("axis", (), "int32", [1]), net.tensor("x", (1, 4))
    halves = [net.tensor(name, (1, 2)) for name in ("left", "right")]
    options = schema.SplitOptionsT()
    options.numSplits = 2
    net.op(OP.SPLIT, [axis, x], halves, options)
    net.graph.inputs, net.graph.outputs = [x], halves
    return net


def loop_net() -> Net:
    """x + x while x is below 9; graph 1 is the condition, graph 2 the body."""
    net = Net()
    main = net.graph
    for number in (0, 1, 2):
        if number:
            net.graph = schema.SubGraphT()
            net.graph.tensors, net.graph.operators = [], []
            net.tree.subgraphs.append(net.graph)
        x, y = net.tensor("x", (1,)), net.tensor("y", (1,))
        net.graph.inputs, net.graph.outputs = [x], [y]
        if number == 0:
            options = schema.WhileOptionsT()
            options.condSubgraphIndex, options.bodySubgraphIndex = 1, 2
            net.op(OP.WHILE, [x], [y], options)
        elif number == 1:
            net.graph.tensors[y].type = TYPE.BOOL
            net.op(OP.LESS, [x, net.tensor("most", (1,), "float32", [9])], [y])
        else:
            net.op(OP.ADD, [x, x], [y], schema.AddOptionsT())
    net.graph = main
    return net


NETS = {"dense": dense_net, "split": split_net, "loop": loop_net, "half": half_net}


@pytest.mark.parametrize("name", NETS)
def test_good_files_are_accepted(name):
    content = pack(NETS[name]().tree)
    check_flatbuffer(content, "'net.tflite'")
    assert run(content)


def quantize(tree, scale, zero_point=0, axis=0):
    values = schema.QuantizationParametersT()
    values.scale, values.zeroPoint = np.array(scale, np.float32), np.array([zero_point], np.int64)
    values.quantizedDimension = axis
    tree.subgraphs[0].tensors[1].quantization = values


def _call(tree, **numbers):
    vars(tree.subgraphs[0].operators[0].builtinOptions).update(numbers)


#: What is wrong → net, change, words of the message.
FAULTS = {
    "an operand is left out": (
        "dense",
        lambda t: t.subgraphs[0].operators[0].inputs.__setitem__(1, -1),
        "op FULLY_CONNECTED before tensor 'h' lacks operand 1",
    ),
    "operands are missing": (
        "dense",
        lambda t: t.subgraphs[0].operators[0].inputs.__delitem__(slice(1, None)),
        "op FULLY_CONNECTED before tensor 'h' must have 2 operands",
    ),
    "an operand is no tensor": (
        "dense",
        lambda t: t.subgraphs[0].operators[1].inputs.__setitem__(0, 1 << 20),
        "must be among 5 tensors, got 1048576",
    ),
    "an input is constant": (
        "dense",
        lambda t: t.subgraphs[0].inputs.__setitem__(0, 1),
        "tensor 'w' must be an input or a constant",
    ),
    "a tensor is read before it is computed": (
        "dense",
        lambda t: t.subgraphs[0].operators.reverse(),
        "op RELU before tensor 'y' reads tensor 'h' before it is computed",
    ),
    "an op reads its own result": (
        "dense",
        lambda t: t.subgraphs[0].operators[1].inputs.__setitem__(0, 4),
        "reads tensor 'y' before it is computed",
    ),
    "a tensor is computed twice": (
        "dense",
        lambda t: t.subgraphs[0].operators[1].outputs.__setitem__(0, 3),
        "op RELU before tensor 'h' writes a tensor that has a value before",
    ),
    "an output is never computed": (
        "dense",
        lambda t: t.subgraphs[0].operators.pop(),
        "tensor 'y' is an output that no op computes",
    ),
    "a constant is too small": (
        "dense",
        lambda t: setattr(t.subgraphs[0].tensors[1], "shape", [300, 4]),
        "tensor 'w' must have 4800 bytes, got 48",
    ),
    "a buffer does not exist": (
        "dense",
        lambda t: setattr(t.subgraphs[0].tensors[1], "buffer", 77),
        "tensor 'w' must be in one of 3 buffers, got 77",
    ),
    "a buffer is behind the file": (
        "dense",
        lambda t: vars(t.buffers[1]).update(data=None, offset=1000, size=48_000),
        "buffer 1 must end at byte",
    ),
    "weights are elsewhere": (
        "dense",
        lambda t: setattr(t.subgraphs[0].tensors[1], "externalBuffer", 1),
        "tensor 'w' is in another file",
    ),
    "weights are sparse": (
        "dense",
        lambda t: setattr(t.subgraphs[0].tensors[1], "sparsity", schema.SparsityParametersT()),
        "tensor 'w' has sparse weights",
    ),
    "a size is negative": (
        "dense",
        lambda t: setattr(t.subgraphs[0].tensors[3], "shape", [-4, 3]),
        "tensor 'h' must have at most 8 sizes of at least 0",
    ),
    "tensors do not fit into memory": (
        "dense",
        lambda t: setattr(t.subgraphs[0].tensors[3], "shape", [1 << 30, 1 << 30]),
        "its tensors must have at most 17179869184 bytes",
    ),
    "text": (
        "dense",
        lambda t: setattr(t.subgraphs[0].tensors[0], "type", TYPE.STRING),
        "tensor 'x' has the type STRING",
    ),
    "a scale is no number": (
        "dense",
        lambda t: quantize(t, [float("nan")]),
        "tensor 'w' must have scales from 1e-30 to 1e+30, got nan",
    ),
    "a scale is zero": ("dense", lambda t: quantize(t, [0]), "tensor 'w' must have scales"),
    "scales do not fit the channels": (
        "dense",
        lambda t: quantize(t, [1, 1]),
        "tensor 'w' must have one scale for each of its channels",
    ),
    "a zero point is too large": (
        "dense",
        lambda t: quantize(t, [1], 1 << 40),
        "tensor 'w' must have zero points from",
    ),
    "integers have no scale": (
        "dense",
        lambda t: [setattr(x, "type", TYPE.INT8) for x in t.subgraphs[0].tensors[3:]],
        "whose type INT8 requires a scale",
    ),
    "types differ": (
        "dense",
        lambda t: setattr(t.subgraphs[0].tensors[4], "type", TYPE.INT32),
        "op RELU before tensor 'y' must read and write one type, got FLOAT32 and INT32",
    ),
    "a custom op": (
        "dense",
        lambda t: vars(t.operatorCodes[1]).update(
            builtinCode=32, deprecatedBuiltinCode=32, customCode=b"Mine"
        ),
        "op 'Mine' is custom: its code is in another library; convert the model without it",
    ),
    "an unknown op": (
        "dense",
        lambda t: vars(t.operatorCodes[1]).update(builtinCode=9999),
        "op '9999' is not supported",
    ),
    "another version": ("dense", lambda t: setattr(t, "version", 2), "its version must be 3"),
    "no graph": ("dense", lambda t: setattr(t, "subgraphs", []), "it contains no graph"),
    "other results than are stated": (
        "split",
        lambda t: _call(t, numSplits=5),
        "op SPLIT before tensor 'left' must have 5 results, got 2",
    ),
    "no window": (
        "dense",
        lambda t: [
            vars(t.operatorCodes[1]).update(builtinCode=17, deprecatedBuiltinCode=17),
            vars(t.subgraphs[0].operators[1]).update(
                builtinOptionsType=5, builtinOptions=schema.Pool2DOptionsT()
            ),
        ],
        "op MAX_POOL_2D before tensor 'y' must have strideW from 1 to 65536, got 0",
    ),
    "a graph that does not exist": (
        "loop",
        lambda t: _call(t, bodySubgraphIndex=9),
        "op WHILE before tensor 'y' must call one of 3 graphs, got 9",
    ),
    "a graph that calls itself": (
        "loop",
        lambda t: [
            t.subgraphs[2].operators.__setitem__(0, t.subgraphs[0].operators[0]),
        ],
        "its graphs call each other in a circle",
    ),
    "a condition that is a number": (
        "loop",
        lambda t: _call(t, condSubgraphIndex=2),
        "op WHILE before tensor 'y' calls graph 2 with other tensors than that has",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_contents_are_refused_with_the_name_of_the_tensor_or_op(fault):
    net, change, words = FAULTS[fault]
    tree = NETS[net]().tree
    change(tree)
    assert words in refusal(pack(tree))


def test_a_signature_of_no_tensor_is_refused():
    tree, entry, signature = dense_net().tree, schema.TensorMapT(), schema.SignatureDefT()
    entry.name, entry.tensorIndex = b"x", 99
    signature.inputs, signature.outputs, signature.signatureKey = [entry], [], b"main"
    tree.signatureDefs = [signature]
    for index in (99, 3):  # no tensor, and none of the inputs
        entry.tensorIndex = index
        named = f"signature 'main' must name tensors among the inputs [0] of its graph, got {index}"
        assert named in refusal(pack(tree))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scales", 1 << 20, "must have a constant of type FLOAT16"),
        ("scales", 0, "must have a constant of type FLOAT16"),
        ("zeroPoints", 2, "no zero points"),
        ("blockSize", 0, "must have blocks of 32, 64, 128, 256"),
        ("blockSize", 1 << 30, "must have blocks of 32, 64, 128, 256"),
        ("blockSize", 32, None),
    ],
)
def test_scales_of_blocks_must_be_there(name, value, message):
    net = Net()
    data = net.tensor("x", (1, 64))
    weight = net.tensor("w", (8, 64), "int8", np.zeros((8, 32), np.int8))
    scales = net.tensor("s", (8, 2), "float16", np.ones((8, 2), np.float16))
    result = net.tensor("y", (1, 8))
    tensor = net.graph.tensors[weight]
    tensor.type = schema.TensorType.INT4
    tensor.quantization = schema.QuantizationParametersT()
    tensor.quantization.detailsType = schema.QuantizationDetails.BlockwiseQuantization
    tensor.quantization.details = schema.BlockwiseQuantizationT()
    vars(tensor.quantization.details).update(scales=scales, blockSize=32, zeroPoints=-1)
    setattr(tensor.quantization.details, name, value)
    net.op(OP.FULLY_CONNECTED, [data, weight, -1], [result])
    net.graph.inputs, net.graph.outputs = [data], [result]
    content = pack(net.tree)
    if message is None:
        check_flatbuffer(content, "the file")
    else:
        assert message in refusal(content)


@pytest.mark.parametrize("content", [b"", b"TFL3", b"\x08\0\0\0TFL3", bytes(1000), b"PK\3\4" * 99])
def test_other_files_are_refused(content):
    assert "it must be a whole .tflite file" in refusal(content)


def test_a_file_that_is_cut_off_is_refused_wherever_it_ends():
    content = pack(dense_net().tree)
    # The last bytes are padding.
    for end in range(0, len(content) - 8, 4):
        refusal(content[:end])


@pytest.mark.slow
def test_the_same_table_read_again_and_again_is_refused_early():
    """Ten thousand references to one table of a thousand tensors would take a minute."""
    net = dense_net()
    for number in range(2000):
        net.tensor(f"t{number}", (1,))
    content = bytearray(pack(net.tree))
    (root,) = struct.unpack_from("<I", content)
    layout = root - struct.unpack_from("<i", content, root)[0]
    field = root + struct.unpack_from("<H", content, layout + 4 + 2 * 2)[0]
    vector = field + struct.unpack_from("<I", content, field)[0]
    graph = vector + 4 + struct.unpack_from("<I", content, vector + 4)[0]
    start, count = len(content), 10_000
    assert start % 4 == 0
    struct.pack_into("<I", content, field, start - field)
    content += struct.pack("<I", count) + bytes(4 * count)
    # References lead forwards only: the table is copied behind them.
    content += content[:start]
    for number in range(count):
        position = start + 4 + 4 * number
        target = start + 4 + 4 * count + graph
        struct.pack_into("<I", content, position, target - position)
    began = time.process_time()
    assert "read again and again" in refusal(bytes(content))
    assert time.process_time() - began < 2


@pytest.mark.slow
def test_large_weights_take_no_time():
    content = pack(dense_net(rows=1_300_000).tree)
    assert len(content) > 20_000_000
    began = time.process_time()
    check_flatbuffer(content, "'net.tflite'")
    assert time.process_time() - began < 0.02


@pytest.mark.slow
def test_files_of_the_converter_are_accepted_but_for_ops_of_other_libraries():
    from converted_files import REFUSED, convert_all

    files = convert_all()
    assert len(files) >= 100
    messages = {}
    for name, content in files.items():
        try:
            check_flatbuffer(content, repr(name))
        except ModelLoadError as error:
            messages[name] = str(error)
    assert set(messages) == set(REFUSED)
    for name, words in REFUSED.items():
        assert words in messages[name]
    assert len(messages) <= MAX_REFUSED_RATIO * len(files)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_no_hostile_file_that_passes_ends_the_process(tmp_path, seed):
    """Bytes and contents of converted files are changed at random; LiteRT may refuse the files."""
    from converted_files import REFUSED, convert_all

    sources = [content for name, content in convert_all().items() if name not in REFUSED]
    drawn, cases = random.Random(seed), {}
    while len(cases) < HOSTILE:
        source = drawn.choice(sources)
        damaged = damage_contents(source, drawn) if drawn.random() < 0.8 else None
        case, content = damaged or ("bytes", damage_bytes(source, drawn))
        cases[tmp_path / f"{len(cases)}.tflite"] = case, content
    accepted: list[Path] = []
    for path, (_, content) in cases.items():
        try:
            check_flatbuffer(content, str(path))
        except ModelLoadError:
            continue
        path.write_bytes(content)
        accepted.append(path)
    assert len(accepted) > HOSTILE / 10
    outcomes = run_in_children(accepted)
    crashes = {cases[path][0]: words for path, words in outcomes.items() if "CRASH" in words}
    assert not crashes
