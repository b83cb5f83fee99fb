"""Kernels of LiteRT's profiler and the ops that they belong to."""

from collections import defaultdict
from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert")
pytest.importorskip("tensorflow")

from litert_kernel_nets import (
    NETS,
    draw_feeds,
    fix_batch,
    make_float_file,
    make_int8_file,
    recurrent_net,
)
from litert_nets import as_litert

from neural_mp.adaptors.litert import profiled_run
from neural_mp.adaptors.litert.graph.program import Program, get_sizes
from neural_mp.adaptors.litert.profiler import assign_events, is_available, record_events
from neural_mp.adaptors.litert.runtime import find_undelegated
from neural_mp.errors import ConversionError

#: First words of kernel names → the op types that they may run.
WORDS = {
    "Convolution": {"CONV_2D", "DEPTHWISE_CONV_2D"},
    "Fully Connected": {"CONV_2D", "FULLY_CONNECTED"},
    "Batch Matrix": {"BATCH_MATMUL"},
    "HardSwish": {"HARD_SWISH"},
    "Sigmoid": {"LOGISTIC"},
    "TanH": {"TANH"},
    "GELU": {"GELU"},
    "Softmax": {"SOFTMAX"},
    "Mean": {"MEAN"},
    "Multiply": {"MUL"},
    "Add": {"ADD"},
    "Negate": {"NEG"},
    "Squared Difference": {"SQUARED_DIFFERENCE"},
    "Reciprocal Square Root": {"RSQRT"},
    "Transpose": {"TRANSPOSE"},
    "Static Reshape": {"RESHAPE", "FULLY_CONNECTED"},
    "Copy": {"CONCATENATION", "SPLIT", "PACK", "UNPACK"},
    "Convert": {"QUANTIZE", "DEQUANTIZE"},
    "Slice": {"STRIDED_SLICE"},
    "Invalid Unary": {"LOGISTIC", "NEG"},
}
FILES = [(name, make) for name in NETS for make in (make_float_file, make_int8_file)]


def record(content: bytes, batch: int = 1, runs: int = 1, threads: int = 1):
    """Return a program, the kernels of its runs, and the ops of the first run's."""
    program = Program.parse(content)
    events = record_events(content, draw_feeds(program, batch), runs, threads)
    return program, events, assign_events(program, events[0])


@pytest.mark.parametrize(("name", "make"), FILES)
def test_every_op_has_a_kernel_of_its_type_or_is_in_a_table(name, make):
    program, [events], owners = record(make(name))
    ops = list(program.iterate_ops())
    types = [program.op_type(op) for op in ops]
    kernels = defaultdict(list)
    for event, owner in zip(events, owners, strict=True):
        kernels[owner].append(event.name)
        if event.is_delegated:
            [fitting] = [types for word, types in WORDS.items() if event.name.startswith(word)]
            assert types[owner] in fitting, event
        else:
            assert (event.op_type, event.position) == (types[owner], owner)
    without = set(range(len(ops))) - set(kernels)
    tables = [op for op, names in kernels.items() if names[0].startswith("Invalid Unary")]
    around = {int(index) for op in tables for index in (*ops[op].inputs, *ops[op].outputs)}
    assert all(around & {*map(int, ops[op].inputs), *map(int, ops[op].outputs)} for op in without)
    assert {types[op] for op in without} <= {"MUL", "QUANTIZE", "DEQUANTIZE"}


@pytest.mark.parametrize("make", [make_float_file, make_int8_file])
@pytest.mark.parametrize("name", ["hard_swish", "silu", "detector"])
def test_kernels_of_convolutions_fit_the_sizes_of_their_weights(name, make):
    """Names of kernels depend on sizes, which the assignment does not know."""
    program, [events], owners = record(make(name))
    ops = list(program.iterate_ops())
    checked = 0
    for event, owner in zip(events, owners, strict=True):
        if program.op_type(ops[owner]) in ("CONV_2D", "DEPTHWISE_CONV_2D"):
            _, height, width, _ = get_sizes(program.main.tensors[ops[owner].inputs[1]])
            assert event.name.startswith("Fully Connected") == (height == width == 1)
            assert ("DWConv" in event.name) == (program.op_type(ops[owner]) != "CONV_2D")
            checked += 1
    assert checked == sum(program.op_type(op).endswith("CONV_2D") for op in ops)


def test_a_silu_in_int8_is_one_kernel():
    program, [events], owners = record(make_int8_file("silu"))
    types = [program.op_type(op) for op in program.iterate_ops()]
    tables = [
        owner
        for event, owner in zip(events, owners, strict=True)
        if event.name.startswith("Invalid Unary")
    ]
    assert len(tables) == 4
    assert all(types[owner : owner + 2] == ["LOGISTIC", "MUL"] for owner in tables)
    assert not {owner + 1 for owner in tables} & set(owners)


@pytest.mark.parametrize("name", ["hard_swish", "silu", "attention"])
def test_names_of_kernels_tell_int8_from_float(name):
    for make, word in ((make_float_file, "F32"), (make_int8_file, "Q")):
        products = [
            event.name
            for event in record(make(name))[1][0]
            if event.name.startswith(("Convolution", "Fully Connected"))
        ]
        assert products
        assert all(f", {word}" in product for product in products)


def test_hard_swish_in_int8_is_left_to_the_own_kernels():
    _, [events], _ = record(make_int8_file("hard_swish"))
    own = {event.op_type for event in events if not event.is_delegated}
    assert "HARD_SWISH" in own
    assert not any(event.name.startswith("HardSwish") for event in events)


@pytest.mark.parametrize(("name", "make"), FILES)
def test_ops_without_a_delegate_are_those_that_ran_in_own_kernels(name, make):
    content = make(name)
    _, [events], _ = record(content)
    own = {event.position for event in events if not event.is_delegated}
    assert find_undelegated(content) == own


def test_files_with_a_free_batch_run_at_other_sizes():
    """Results of own kernels have no size before a run, and the library runs them once only."""
    for name in ("hard_swish", "silu", "attention", "unrolled", "detector"):
        program, events, owners = record(make_float_file(name, frees_batch=True), 3, runs=3)
        assert set(owners) == set(range(len(program.main.operators)))
        assert len({tuple(event.name for event in run) for run in events}) == 1


def test_files_of_one_sample_run_for_three():
    _, single, _ = record(make_float_file("silu"))
    _, triple, _ = record(make_float_file("silu"), 3)
    assert [event.name for event in triple[0]] == [event.name for event in single[0]]


def test_all_runs_have_times_whatever_the_number_of_threads():
    for threads in (1, 2):
        _, events, _ = record(make_float_file("silu"), 16, runs=4, threads=threads)
        assert len(events) == 4
        assert all(sum(event.seconds for event in run) > 0 for run in events)
        assert all(event.seconds >= 0 for run in events for event in run)


def test_loops_are_single_kernels_with_their_bodies():
    program, [events], owners = record(make_float_file("loops"))
    loops = [owner for event, owner in zip(events, owners, strict=True) if event.name == "WHILE"]
    types = [program.op_type(op) for op in program.iterate_ops()]
    assert [types[owner] for owner in loops] == ["WHILE", "WHILE"]
    assert len(events) < 10


def test_loops_that_overflow_the_profiler_are_refused():
    content = as_litert(fix_batch(recurrent_net(60)))
    with pytest.raises(ConversionError, match="profiles fewer than 2048 kernels"):
        record(content)


def test_kernels_of_unknown_names_belong_to_the_op_that_has_none_else():
    program, [events], owners = record(make_float_file("attention"))
    for position in range(1, len(events) - 1):
        if not events[position].name.startswith("Static Reshape"):
            renamed = list(events)
            renamed[position] = replace(events[position], name="Quantum Fold (ND)")
            found = assign_events(program, renamed)
            # Of equal neighbors, the first has the known kernel.
            assert abs(found[position] - owners[position]) <= 2, events[position]


def test_kernels_without_the_parts_of_the_graph_are_assigned_by_order():
    program, [events], owners = record(make_int8_file("hard_swish"))
    moved = [replace(event, position=event.position + 1000) for event in events]
    assert assign_events(program, moved) == owners
    assert len(assign_events(program, events[5:])) == len(events) - 5
    assert len(assign_events(program, [*events, *events])) == 2 * len(events)


def test_other_outputs_and_signatures_are_run_as_well():
    content = make_float_file("detector")
    for keep in (None, []):
        program = Program.parse(content)
        program.tree.signatureDefs = keep
        program.main.outputs = np.asarray(program.main.outputs, np.int32)[::-1]
        [events] = record_events(program.content, draw_feeds(program), 1, 1)
        assert set(assign_events(program, events)) == set(range(len(program.main.operators)))


def test_inputs_that_do_not_fit_are_refused():
    content = make_float_file("silu")
    with pytest.raises(ConversionError):
        record_events(content, [np.zeros((1, 32, 32, 4), np.float32)], 1, 1)
    with pytest.raises(ConversionError):
        record_events(content, [np.zeros((1, 32, 32, 3), np.int8)], 1, 1)


def test_a_library_of_another_version_is_not_read(monkeypatch):
    """Structures in memory differ between versions: reading those of another could crash."""
    assert is_available()
    profiled_run.load_library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: "9.0.0")
        assert not is_available()
        with pytest.raises(ConversionError, match=r"ai-edge-litert 2\.3"):
            record(make_float_file("silu"))
    profiled_run.load_library.cache_clear()
    assert is_available()
