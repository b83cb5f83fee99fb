"""Names of ops of the source, from names that exporters make up."""

from neural_mp.adaptors.common.naming import find_source_op


def test_names_made_up_by_an_exporter_lead_to_no_op_of_the_source():
    names = {"block/conv", "block/conv/Add", "head"}
    assert find_source_op("head/WithoutBiases", names) == "head"
    assert find_source_op("block/conv/Add", names) == "block/conv/Add"
    assert find_source_op("block/conv/Mul", names) == "block/conv"
    assert find_source_op("head/MatMul/Relu/Convolution", names) is None
