"""Cases of small OpenVINO models: layers, types, sizes and constructs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from zoo.harness import Case
from zoo.openvino_bodies import (
    attention,
    branched,
    broadcast_sum,
    by_constant,
    bytes_in,
    chosen_names,
    concatenated,
    divided,
    embedded,
    excited,
    gram,
    gru,
    half_throughout,
    in_type,
    iterated,
    largest,
    looped,
    lstm,
    lstm_of_any_size,
    lstm_two_way,
    lstms,
    mixed_types,
    normed,
    own_output,
    part_read_twice,
    pooled,
    products,
    read_twice,
    residual,
    rows_from_vector,
    selected,
    shared,
    summed_by_row,
    two_inputs,
    unpooled,
)
from zoo.openvino_models import (
    DRAWN,
    PICTURES,
    ROWS,
    SIGNALS,
    STEPS,
    TOKENS,
    VOLUMES,
    biased,
    built,
    convolved,
    grouped,
    halved,
    product,
    transposed,
    weight,
)

from neural_mp.adaptors.openvino.runtime import ops


def cases() -> Iterator[Case]:
    """Yield all cases."""
    two_layers = lambda x: convolved(ops.relu(biased(convolved(x))), 8, size=1)  # noqa: E731
    yield from (
        Case(name, partial(built, body, *inputs, **rest))
        for name, body, inputs, rest in [
            ("Convolution", two_layers, [PICTURES], {}),
            (
                "Convolution of signals",
                lambda x: convolved(biased(convolved(x, axes=1), axes=1), 8, axes=1),
                [SIGNALS],
                {},
            ),
            (
                "Convolution of volumes",
                lambda x: convolved(ops.relu(convolved(x, axes=3)), 8, axes=3, size=1),
                [VOLUMES],
                {},
            ),
            (
                "Convolution, dilated",
                lambda x: convolved(ops.relu(convolved(x, dilation=2)), 8, size=1),
                [PICTURES],
                {},
            ),
            ("Convolution of static shape", two_layers, [PICTURES], {"sizes": [[2, 16, 8, 8]]}),
            ("Convolution of any size", two_layers, [PICTURES], {"sizes": [[-1, 16, -1, -1]]}),
            ("Convolution, read twice", read_twice, [PICTURES], {}),
            (
                "GroupConvolution",
                lambda x: convolved(ops.relu(biased(grouped(x, 4))), 8, size=1),
                [PICTURES],
                {},
            ),
            (
                "GroupConvolution by channel",
                lambda x: convolved(ops.clamp(biased(grouped(x, 16)), 0.0, 6.0), 8, size=1),
                [PICTURES],
                {},
            ),
            (
                "GroupConvolution of signals",
                lambda x: convolved(ops.relu(grouped(x, 16, 1)), 8, axes=1, size=1),
                [SIGNALS],
                {},
            ),
            (
                "GroupConvolution of volumes",
                lambda x: convolved(ops.relu(grouped(x, 16, 3)), 8, axes=3, size=1),
                [VOLUMES],
                {},
            ),
            (
                "ConvolutionBackpropData",
                lambda x: convolved(transposed(convolved(x)), 8, size=1),
                [PICTURES],
                {},
            ),
            (
                "GroupConvolutionBackpropData",
                lambda x: convolved(transposed(convolved(x), 4), 8, size=1),
                [PICTURES],
                {},
            ),
            ("MatMul", lambda x: product(ops.relu(product(x))), [ROWS], {}),
            (
                "MatMul, not transposed",
                lambda x: product(ops.relu(product(x, across=False)), weight(32, 8), across=False),
                [ROWS],
                {},
            ),
            (
                "MatMul of sequences",
                lambda x: product(ops.relu(ops.add(product(x), weight(1, 1, 32)))),
                [STEPS],
                {},
            ),
            (
                "MatMul of sequences of any length",
                lambda x: product(ops.relu(product(x))),
                [STEPS],
                {"sizes": [[-1, -1, 32]]},
            ),
            (
                "MatMul with a batch of weights",
                lambda x: ops.matmul(x, weight(2, 32, 8), False, False),
                [STEPS],
                {"sizes": [[2, -1, 32]]},
            ),
            (
                "MatMul of a transposed input",
                lambda x: ops.matmul(x, weight(6, 8), True, False),
                [STEPS],
                {},
            ),
            (
                "MatMul of a fixed number of rows",
                lambda x: product(product(ops.gelu(ops.add(product(x), weight(1, 32)), "erf"))),
                [ROWS],
                {"sizes": [[4, 32]]},
            ),
            ("MatMul of a vector", rows_from_vector, [ROWS], {}),
            ("MatMul with float16 weights", halved, [ROWS], {}),
            ("MatMul with a shared weight", shared, [ROWS], {}),
            ("Add, residual", residual, [PICTURES], {}),
            ("Concat", concatenated, [PICTURES], {}),
            ("Split", divided, [PICTURES], {}),
            ("Split with a part as output", part_read_twice, [PICTURES], {}),
            ("AvgPool", pooled, [PICTURES], {}),
            ("Softmax, attention", attention, [STEPS], {}),
            ("MatMul of computed matrices", products, [STEPS], {}),
            ("Gather, embedding", embedded, [TOKENS], {}),
            ("MVN", normed, [STEPS], {}),
            ("Multiply, squeeze and excitation", excited, [PICTURES], {}),
            ("Select", selected, [ROWS], {}),
            ("Add of rows", summed_by_row, [STEPS], {}),
            ("Add of a constant", by_constant, [PICTURES], {}),
            ("Add of a pixel", broadcast_sum, [PICTURES], {}),
            ("Add, with its terms as outputs", own_output, [PICTURES], {}),
            ("MatMul of a tensor with itself", gram, [STEPS], {}),
            ("ReduceMean of the batch", unpooled, [ROWS], {}),
            ("If", branched, [ROWS], {}),
            ("TensorIterator", iterated, [STEPS], {"sizes": [[2, 6, 32]]}),
            (
                "GroupConvolution of volumes, in groups",
                lambda x: convolved(ops.relu(grouped(x, 4, 3)), 8, axes=3, size=1),
                [VOLUMES],
                {},
            ),
            ("Loop", looped, [ROWS], {}),
            ("LSTMSequence", lstm, [STEPS], {"sizes": [[2, 6, 32]]}),
            (
                "LSTMSequence of any size, reversed",
                lstm_of_any_size,
                [STEPS],
                {"sizes": [[-1, -1, 32]]},
            ),
            ("LSTMSequence, stacked", lstms, [STEPS], {"sizes": [[2, 6, 32]]}),
            ("LSTMSequence, two-way", lstm_two_way, [STEPS], {"sizes": [[2, 6, 32]]}),
            ("GRUSequence", gru, [STEPS], {"sizes": [[2, 6, 32]]}),
            (
                "GRUSequence, reset of the state",
                partial(gru, resets_product=False),
                [STEPS],
                {"sizes": [[2, 6, 32]]},
            ),
            ("TopK", largest, [ROWS], {}),
            ("Parameter, two", two_inputs, [ROWS, ROWS[::-1].copy()], {}),
            (
                "Parameter of bytes",
                bytes_in,
                [DRAWN.integers(0, 255, (2, 16, 8, 8)).astype(np.uint8)],
                {},
            ),
            ("Convert to bfloat16", partial(in_type, "bf16"), [ROWS], {}),
            ("Convert to float16", partial(in_type, "f16"), [ROWS], {}),
            ("Convert to bfloat16 beside float32", mixed_types, [ROWS], {}),
        ]
    )
    yield Case("Parameter, chosen", chosen_names)
    yield Case("Parameter of float16", half_throughout)
