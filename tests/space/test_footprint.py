"""The memory of activations, against sums done by hand."""

from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import Capability, TuningSpace, peak_activation_bytes

INT8 = OpConfig(
    Precision.INT8,
    QuantSpec("int8", "symmetric", "per_channel"),
    QuantSpec("uint8", "asymmetric", "per_tensor"),
)
BF16 = OpConfig(Precision.BF16)
VALUES = {"x": 100.0, "a": 1000.0, "relu": 1000.0, "b": 400.0, "sum": 400.0}


def space(emulated=frozenset()):
    """x → a → relu → b → sum, in which `a` and `b` have a choice."""
    graph = OpGraph(
        [
            Op("a", "conv", ("x",)),
            Op("relu", "relu", ("a",), fusion_group="a"),
            Op("b", "conv", ("relu",)),
            Op("sum", "add", ("b", "b")),
        ],
        ["x"],
        ["sum"],
    )
    layer = Capability((INT8, BF16, FP32), emulated=emulated)
    plain = Capability((FP32,))
    return TuningSpace(graph, {"a": layer, "relu": plain, "b": layer, "sum": plain})


def bytes_of(plan, emulated=frozenset()):
    tuning_space = space(emulated)
    return peak_activation_bytes(tuning_space, tuning_space.resolve(PrecisionPlan(plan)), VALUES)


def test_the_two_largest_neighbours_are_the_most_in_fp32():
    assert bytes_of({}) == 4 * (1000 + 1000)  # while relu reads a and writes its own


def test_within_an_int8_kernel_nothing_is_kept():
    # a quantized copy of x, x itself, relu in bytes; then relu in bytes and b in floats
    assert bytes_of({"a": INT8, "b": INT8}) == max(
        4 * 100 + 100 + 1000, 1000 + 4 * 400, 4 * 400 + 4 * 400
    )


def test_a_float_tensor_that_int8_reads_has_a_copy_in_bytes():
    # relu in floats, its copy in bytes, and b in floats are there at once; less than a and relu
    assert bytes_of({"b": INT8}) == max(8000, 4 * 1000 + 1000 + 4 * 400)


def test_16_bits_halve_what_an_op_writes():
    assert bytes_of({"a": BF16}) == max(4 * 100 + 2 * 1000, 2 * 1000 + 4 * 1000, 4 * 1400)


def test_emulated_16_bits_take_the_memory_of_fp32():
    assert bytes_of({"a": BF16}, emulated=frozenset({Precision.BF16})) == 8000
