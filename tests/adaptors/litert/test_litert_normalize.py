"""Graphs in one form compute what they computed before, bit by bit."""

from __future__ import annotations

import pytest

pytest.importorskip("ai_edge_litert")

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from small_flatbuffers import OP, TYPE, Net, dense_net, half_net, pack, run

from neural_mp.adaptors.litert.files.checks import check_flatbuffer
from neural_mp.adaptors.litert.graph.normalize import normalize_tree
from neural_mp.adaptors.litert.graph.program import Program

ACTIVATIONS = {OP.RELU: 1, OP.RELU_N1_TO_1: 2, OP.RELU6: 3}


def normalized(content: bytes) -> Program:
    tree = Program.parse(content).tree
    normalize_tree(tree)
    return Program(tree)


def op_types(program: Program) -> list[str]:
    return [program.op_type(op) for op in program.iterate_ops()]


@pytest.mark.parametrize("code", ACTIVATIONS)
def test_an_activation_becomes_part_of_the_op_before(code):
    content = pack(dense_net(code).tree)
    program = normalized(content)
    (op,) = program.iterate_ops()
    assert op.builtinOptions.fusedActivationFunction == ACTIVATIONS[code]
    assert program.tensor_name(op.outputs[0]) == "y"
    assert run(program.content) == run(content)


def test_an_activation_whose_input_is_read_elsewhere_stays():
    net = dense_net()
    net.graph.outputs.append(3)
    assert op_types(normalized(pack(net.tree))) == ["FULLY_CONNECTED", "RELU"]
    net.graph.outputs.pop()
    negative = net.tensor("n", (1, 3))
    net.op(OP.NEG, [3], [negative])
    net.graph.outputs.append(negative)
    assert op_types(normalized(pack(net.tree))) == ["FULLY_CONNECTED", "RELU", "NEG"]


def test_an_activation_whose_input_is_named_in_a_signature_stays():
    net, entry, signature = dense_net(), schema.TensorMapT(), schema.SignatureDefT()
    entry.name, entry.tensorIndex = b"hidden", 3
    signature.inputs, signature.outputs, signature.signatureKey = [], [entry], b"inner"
    net.tree.signatureDefs = [signature]
    assert op_types(normalized(pack(net.tree))) == ["FULLY_CONNECTED", "RELU"]


def test_a_second_activation_stays():
    net = dense_net()
    again = net.tensor("z", (1, 3))
    net.op(OP.RELU6, [4], [again])
    net.graph.outputs = [again]
    content = pack(net.tree)
    program = normalized(content)
    assert op_types(program) == ["FULLY_CONNECTED", "RELU6"]
    assert run(program.content) == run(content)


def test_an_activation_with_a_scale_of_its_own_stays():
    """Folded, the result would be rounded once in place of twice."""
    net = Net()
    x, hidden, y = (net.tensor(name, (1, 8), "int8") for name in "xhy")
    for index, scale in ((x, 0.1), (hidden, 0.2), (y, 0.15)):
        values = schema.QuantizationParametersT()
        values.scale, values.zeroPoint = [scale], [0]
        net.graph.tensors[index].quantization = values
    net.op(OP.ADD, [x, x], [hidden], schema.AddOptionsT())
    net.op(OP.RELU, [hidden], [y])
    net.graph.inputs, net.graph.outputs = [x], [y]
    assert op_types(normalized(pack(net.tree))) == ["ADD", "RELU"]
    net.graph.tensors[y].quantization.scale = [0.2]
    content = pack(net.tree)
    program = normalized(content)
    assert op_types(program) == ["ADD"]
    assert run(program.content) == run(content)


def test_float16_weights_become_float32_weights():
    content = pack(half_net().tree)
    program = normalized(content)
    assert op_types(program) == ["FULLY_CONNECTED"] * 2
    weights = [program.get_constant(op.inputs[1]) for op in program.iterate_ops()]
    half = half_net().tree.buffers[1].data.view(np.float16).reshape(4, 4)
    assert all(np.array_equal(weight, half.astype(np.float32)) for weight in weights)
    assert run(program.content) == run(content)
    stored = [len(buffer.data) for buffer in program.tree.buffers if buffer.data is not None]
    assert stored == [64], "the half is stored still, or the weights twice"


def test_a_float16_weight_that_is_an_output_stays():
    net = half_net()
    net.graph.outputs.append(2)
    program = normalized(pack(net.tree))
    assert op_types(program) == ["DEQUANTIZE", "FULLY_CONNECTED", "FULLY_CONNECTED"]


def test_older_files_get_the_codes_of_newer_ones():
    """Readers of the newer field alone took every op of such files for an ADD."""
    net = dense_net()
    for code in net.tree.operatorCodes:
        code.builtinCode = 0
    program = normalized(pack(net.tree))
    codes = [(code.builtinCode, code.deprecatedBuiltinCode) for code in program.tree.operatorCodes]
    assert codes == [(OP.FULLY_CONNECTED,) * 2, (OP.RELU,) * 2]
    net = dense_net(OP.GELU)
    program = normalized(pack(net.tree))
    assert program.tree.operatorCodes[1].builtinCode == OP.GELU


def test_a_graph_without_signatures_has_an_empty_list_of_them():
    assert normalized(pack(dense_net().tree)).tree.signatureDefs == []


def test_every_tensor_gets_a_name_of_its_own():
    net = dense_net()
    for tensor, name in zip(net.graph.tensors, (b"x", b"", None, b"x", b"x_3"), strict=True):
        tensor.name = name
    names = [bytes(tensor.name) for tensor in normalized(pack(net.tree)).main.tensors]
    assert names == [b"x", b"tensor_1", b"tensor_2", b"x_3_", b"x_3"]


@pytest.mark.slow
def test_files_of_the_converter_compute_the_same_and_are_rewritten_once():
    """Results are equal bit by bit but for random ones; a second time, nothing changes."""
    from converted_files import REFUSED, convert_all

    rewritten = 0
    for name, content in convert_all().items():
        if name in REFUSED:
            continue
        program = normalized(content)
        check_flatbuffer(program.content, name)
        if name != "random":
            assert run(program.content) == run(content), name
        again = normalized(program.content)
        assert again.content == program.content, name
        rewritten += len(op_types(program)) < len(op_types(Program.parse(content)))
        names = [tensor.name for graph in program.tree.subgraphs for tensor in graph.tensors]
        assert all(names), name
        kinds = {program.main.tensors[i].type for op in program.iterate_ops() for i in op.inputs}
        assert TYPE.FLOAT16 not in kinds, name
    assert rewritten >= 20
