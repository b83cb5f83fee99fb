"""Names of ops of the source, from names that exporters make up."""

from neural_mp.adaptors.common.naming import source_op


def test_names_made_up_by_an_exporter_lead_to_no_op_of_the_source():
    known = {"block/conv", "block/conv/Add", "head"}
    assert source_op("head/WithoutBiases", known) == "head"
    assert source_op("block/conv/Add", known) == "block/conv/Add"
    assert source_op("block/conv/Mul", known) == "block/conv"
    assert source_op("head/MatMul/Relu/Convolution", known) is None
