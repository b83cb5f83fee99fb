"""Times and kernels of the ops of LiteRT models."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert")
pytest.importorskip("tensorflow")

import keras
from keras import layers
from litert_kernel_nets import draw_feeds, make_float_file, make_int8_file
from litert_nets import as_litert

from neural_mp import MixedPrecision
from neural_mp.adaptors.litert.graph.program import Program
from neural_mp.adaptors.litert.model import LiteRtModel, Structure
from neural_mp.adaptors.litert.ops import Role, has_role
from neural_mp.adaptors.litert.profiler import TABLE_KERNEL, time_ops, trace_kernels
from neural_mp.adaptors.litert.quantizer import DYNAMIC, WEIGHT, Step, make_recipe, quantize_tree
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.precision import Precision


def load(content: bytes) -> tuple[LiteRtModel, np.ndarray]:
    """Return a model and a batch of its input."""
    [batch] = draw_feeds(Program.parse(content))
    return get_adaptor_named("litert").load(content, example=batch), batch


@pytest.mark.parametrize("name", ["hard_swish", "silu", "attention", "loops"])
@pytest.mark.parametrize("make", [make_float_file, make_int8_file])
def test_every_op_has_a_time_in_every_run(name, make):
    model, batch = load(make(name))
    seconds = time_ops(model, batch, 5)
    ops = {op for op in model.structure.ops if not has_conversion(model, op)}
    assert ops <= set(seconds) <= set(model.structure.ops)
    assert all(len(times) == 5 and min(times) >= 0 for times in seconds.values())
    assert all(sum(run) > 0 for run in zip(*seconds.values(), strict=True))


def has_conversion(model: LiteRtModel, op: str) -> bool:
    """Whether an op converts between precisions."""
    return has_role(model.structure.get_type(op), Role.CONVERSION)


def test_ops_have_the_names_of_the_unconverted_graph_and_conversions_their_own():
    model, batch = load(make_int8_file("silu"))
    kinds = {name: model.structure.get_type(name) for name in model.structure.ops}
    renamed = {
        name: f"original {name}" for name in kinds if kinds[name] not in ("QUANTIZE", "DEQUANTIZE")
    }
    converted = replace(model, ops=renamed)
    seconds, traces = time_ops(converted, batch, 2), trace_kernels(converted, batch)
    conversions = {name for name in kinds if name not in renamed}
    assert conversions  # at the input and the output
    assert set(seconds) <= {*renamed.values(), *conversions}
    assert set(traces) <= set(renamed.values())
    assert not conversions & set(traces)


@pytest.mark.parametrize(
    ("make", "precision"), [(make_float_file, Precision.FP32), (make_int8_file, Precision.INT8)]
)
@pytest.mark.parametrize("name", ["hard_swish", "silu", "attention", "unrolled"])
def test_layers_compute_in_the_precision_of_their_tensors(name, make, precision):
    model, batch = load(make(name))
    traces = trace_kernels(model, batch)
    layers = [
        op for op in model.structure.ops if has_role(model.structure.get_type(op), Role.LAYER)
    ]
    assert layers
    for op in layers:
        assert traces[op].precision is precision, op
        assert traces[op].reads_int8 == (precision is Precision.INT8)
        assert not traces[op].equals_float
        # Neither roundings nor reshapes of inputs.
        assert len(traces[op].kernels) == 1


def test_moving_ops_pass_int8_without_computing():
    model, batch = load(make_int8_file("attention"))
    traces = trace_kernels(model, batch)
    moving = [op for op in traces if has_role(model.structure.get_type(op), Role.MOVING)]
    assert moving
    assert all(traces[op].precision is None and traces[op].reads_int8 for op in moving)


def test_a_float_op_in_a_table_between_int8_ops_equals_the_float_op():
    model, batch = load(make_int8_file("attention"))
    traces = trace_kernels(model, batch)
    negations = [op for op in traces if model.structure.get_type(op) == "NEG"]
    assert negations
    assert all(traces[op].equals_float for op in negations)
    assert {traces[op].precision for op in negations} == {Precision.INT8}


def test_the_multiplication_of_a_silu_is_fused_in_int8_only():
    float_model, batch = load(make_float_file("silu"))
    int8_model, _ = load(make_int8_file("silu"))
    shared = []
    for model in (float_model, int8_model):
        traces = trace_kernels(model, batch)
        products = [traces[op] for op in traces if model.structure.get_type(op) == "MUL"]
        assert len(products) == 5
        shared.append(sum(trace.kernels[0].startswith(TABLE_KERNEL) for trace in products))
    assert shared == [0, 4]
    seconds = time_ops(int8_model, batch, 3)
    products = [op for op in seconds if int8_model.structure.get_type(op) == "MUL"]
    # Time counts once, with the LOGISTIC.
    assert sum(any(seconds[op]) for op in products) <= 1


@pytest.mark.parametrize(
    ("form", "precision"), [(DYNAMIC, Precision.INT8), (WEIGHT, Precision.FP32)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_integer_weights_alone_are_read_and_dynamic_ones_multiplied(form, precision, bits):
    program = Program.parse(make_float_file("silu"))
    structure = Structure(program)
    types = ("CONV_2D", "DEPTHWISE_CONV_2D") if bits == 8 else ()
    chosen = [op for op in structure.ops if structure.get_type(op) in (*types, "FULLY_CONNECTED")]
    steps = [Step(structure.get_scope(op), replace(form, bits=bits)) for op in chosen]
    model, batch = load(Program.wrap(quantize_tree(program.tree, make_recipe(steps), {})).content)
    traces = trace_kernels(model, batch)
    assert {traces[op].precision for op in chosen} == {precision}
    assert all(traces[op].reads_int8 for op in chosen)
    others = set(traces) - set(chosen)
    assert {(traces[op].precision, traces[op].reads_int8) for op in others} == {
        (Precision.FP32, False)
    }


def test_loops_have_a_time_and_a_kernel():
    model, batch = load(make_float_file("loops"))
    loops = [op for op in model.structure.ops if model.structure.get_type(op) == "WHILE"]
    seconds, traces = time_ops(model, batch, 3), trace_kernels(model, batch)
    assert len(loops) == 2
    for op in loops:
        assert traces[op].kernels == ("WHILE",)
        assert min(seconds[op]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "mish"])
def test_the_audit_finds_the_kernel_of_every_op_of_an_activation(activation):
    keras.utils.set_random_seed(0)
    image = keras.Input((16, 16, 8))
    x = layers.Conv2D(8, 3, activation=activation)(layers.Conv2D(8, 3)(image))
    net = keras.Model(image, layers.Conv2D(4, 1)(x))
    batch = np.random.default_rng(0).normal(size=(8, 16, 16, 8)).astype(np.float32)
    audit = MixedPrecision(
        model=as_litert(net), precisions="int8", objective="modelsize", calib_dataloader=[batch]
    )().audit()
    assert audit.holds, [(op.planned.type, op.verdict) for op in audit.findings]
    assert all(op.ran is not None for op in audit.ops if op.planned.type == "MUL")
