import pickle

import pytest

from neural_mp.core.precision import OpConfig, Precision, parse_precisions
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import NeuralMPError, PlanError, UnknownPrecisionError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("bf16", (Precision.BF16,)),
        ("int8,bf16", (Precision.INT8, Precision.BF16)),
        (" BF16 , int8 ", (Precision.INT8, Precision.BF16)),
        (["int8", "bf16"], (Precision.INT8, Precision.BF16)),
        (["fp16", "fp16"], (Precision.FP16,)),
        (Precision.FP32, (Precision.FP32,)),
        ((Precision.BF16, "fp32"), (Precision.BF16, Precision.FP32)),
    ],
)
def test_precisions_are_read_however_they_are_written(written, meant):
    assert parse_precisions(written) == meant


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("int9", "'int9' does not exist; did you mean 'int8'"),
        ("int8,", "'' does not exist"),
        ([], "at least one precision, got none"),
        (8, "must be a string, e.g. 'int8,bf16'"),
        (None, "NoneType"),
    ],
)
def test_a_precision_that_does_not_exist_is_named(written, message):
    with pytest.raises(UnknownPrecisionError, match=message):
        parse_precisions(written)
    assert issubclass(UnknownPrecisionError, NeuralMPError)


def test_a_precision_compares_equal_to_its_name():
    assert OpConfig(Precision.INT8).precision == "int8"
    assert f"{Precision.BF16}" == "bf16"


def test_precisions_compare_equal_to_a_list_of_their_names():
    precisions = parse_precisions("bf16,fp32")
    assert precisions == ["bf16", "fp32"]
    assert ["bf16", "fp32"] == precisions  # noqa: SIM300
    assert precisions == ("bf16", "fp32")
    assert precisions != ["bf16"]
    assert (precisions != ["bf16", "fp32"]) is False
    assert precisions != "bf16,fp32"
    assert precisions in {(Precision.BF16, Precision.FP32)}
    assert pickle.loads(pickle.dumps(precisions)) == precisions


def test_a_quant_spec_reads_back_what_it_wrote():
    spec = QuantSpec("uint8", "asymmetric", "per_tensor", "kl")
    assert QuantSpec.parse(str(spec)) == spec
    assert QuantSpec.parse("kl per_tensor uint8 asymmetric") == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("uint8 asymetric per_tensor", "'asymetric'.*did you mean 'asymmetric'"),
        ("uint8 asymmetric", "must contain a granularity"),
        ("uint8 int8 asymmetric per_tensor", "must contain one dtype"),
    ],
)
def test_a_malformed_quant_spec_names_the_word(text, message):
    with pytest.raises(PlanError, match=message):
        QuantSpec.parse(text)


def test_a_quant_spec_takes_known_words_only():
    with pytest.raises(PlanError, match="dtype.*'int5'"):
        QuantSpec("int5", "symmetric", "per_tensor")


def test_four_bits_come_in_groups_with_a_size_and_only_for_weights():
    spec = QuantSpec.parse("uint4 asymmetric per_group 128")
    assert (spec.dtype, spec.group_size) == ("uint4", 128)
    assert str(spec) == "uint4 asymmetric per_group 128 minmax"
    with pytest.raises(PlanError, match="granularity of int4 must be per_group, got per_tensor"):
        QuantSpec("int4", "symmetric", "per_tensor")
    with pytest.raises(PlanError, match="int8_inputs requires .* per_channel, got per_tensor"):
        QuantSpec.parse("int8 symmetric per_tensor int8_inputs")
    for written in ("uint8 asymmetric per_group 32", "int8 symmetric per_channel"):
        assert str(QuantSpec.parse(f"{written} int8_inputs")) == f"{written} minmax int8_inputs"
    for size in (None, 0, 2**21):
        with pytest.raises(PlanError, match=f"a group size from 1 to 1048576, got {size}"):
            QuantSpec("int4", "symmetric", "per_group", group_size=size)
    with pytest.raises(PlanError, match="group size 8 requires granularity per_group"):
        QuantSpec("int8", "symmetric", "per_channel", group_size=8)
    with pytest.raises(PlanError, match="one group_size, got 128 and '64'"):
        QuantSpec.parse("uint4 asymmetric per_group 128 64")


def test_an_op_in_int4_has_a_weight_of_four_bits_and_floats_as_inputs():
    spec = QuantSpec.parse("uint4 asymmetric per_group 32")
    config = OpConfig(Precision.INT4, spec)
    assert config.approach == "weight_only"
    assert str(config) == "int4 (weight only)"
    byte = QuantSpec("int8", "symmetric", "per_channel")
    with pytest.raises(PlanError, match="the weight of an op in int8 must have 8 bits, got 4"):
        OpConfig(Precision.INT8, spec)
    with pytest.raises(PlanError, match="the weight of an op in int4 must have 4 bits, got 8"):
        OpConfig(Precision.INT4, byte)
    with pytest.raises(PlanError, match="an op in int4 computes in float; remove its activation"):
        OpConfig(Precision.INT4, spec, byte)
    with pytest.raises(PlanError, match="an activation of an op in int8 must have 8 bits"):
        OpConfig(Precision.INT8, byte, spec)


def test_repairs_are_known_words_of_int8_in_one_order():
    config = OpConfig(Precision.INT8, corrections=("bias_correction", "smooth"))
    assert config.corrections == ("smooth", "bias_correction")
    with pytest.raises(
        PlanError, match=r"correction 'smoth' does not exist; did you mean 'smooth'"
    ):
        OpConfig(Precision.INT8, corrections=("smoth",))
    with pytest.raises(PlanError, match="'smooth' requires precision int8, got bf16"):
        OpConfig(Precision.BF16, corrections=("smooth",))
    with pytest.raises(PlanError, match="scale the same channels; remove one"):
        OpConfig(Precision.INT8, corrections=("smooth", "equalize"))


def test_learned_weights_have_a_scale_per_channel_and_need_data():
    learned = OpConfig(Precision.INT8, corrections=("learned_scale", "adaround"))
    assert learned.corrections == ("adaround", "learned_scale")
    assert learned.is_reconstructed
    assert learned.needs_data
    assert not OpConfig(Precision.INT8, corrections=("bias_correction",)).needs_data
    spec = QuantSpec.parse("uint4 asymmetric per_group 32")
    with pytest.raises(PlanError, match="'adaround' is for weights .* add 'autoround'"):
        OpConfig(Precision.INT4, spec, corrections=("adaround",))
