"""Constructs of ONNX models that no single op shows: bodies, sequences, functions, odd graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser
from zoo.harness import Built, Case, flat
from zoo.onnx_ops import outputs_of

_DRAWN = np.random.default_rng(0)
_ROWS = _DRAWN.normal(size=(4, 8)).astype(np.float32)
_PICTURES = _DRAWN.normal(size=(2, 3, 8, 8)).astype(np.float32)
_FORM = '<ir_version: 10, opset_import: ["" : 21{domains}]>\n'
_RUNTIME = ', "com.microsoft" : 1'
_LEARNERS = ', "ai.onnx.ml" : 3'
Feeds = Mapping[str, Any]


def weight(*shape: int, seed: int = 1) -> np.ndarray:
    """Return a constant of a trained layer's size."""
    drawn = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[0])
    return drawn.astype(np.float32)


def built(
    text: str,
    constants: Feeds,
    batches: Sequence[Feeds],
    domains: str = "",
    change: Callable[[onnx.ModelProto], None] = lambda model: None,
) -> Built:
    """Return a model written in ONNX's own text form.

    Args:
        text: the graph, and local functions behind it.
        constants: name → constant of the graph.
        batches: its inputs.
        domains: further op sets.
        change: what the text form cannot say.
    """
    model = parser.parse_model(_FORM.format(domains=domains) + text)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    change(model)
    expected = [flat(outputs_of(model, batch)) for batch in batches]
    return Built(model, batches, expected)


def rows(text: str, domains: str = "", change: Any = lambda model: None, **more: Any) -> Built:
    """Return a model of rows of eight, with two square weights and a head."""
    constants = {"w": weight(8, 8), "v": weight(8, 8, seed=2), "head": weight(8, 5), **more}
    return built(text, constants, [{"x": _ROWS}, {"x": _ROWS * 0.7}], domains, change)


_TAKES, _GIVES = "g (float[n, 8] x) =>", "(float[n, k] y)"
#: Name → graph of rows.
ROWS: Mapping[str, str] = {
    "two products in an If": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  total = ReduceSum <keepdims: int = 0> (a)
        zero = Constant <value_float: float = 0.0> ()  large = Greater(total, zero)
        b = If (large) <
            then_branch = then () => (float[n, m] p) {{ p = MatMul(a, v) }},
            else_branch = otherwise () => (float[n, m] q) {{ r = MatMul(a, w)  q = Relu(r) }}>
        y = MatMul(b, head) }}""",
    "an If within an If": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  total = ReduceSum <keepdims: int = 0> (a)
        zero = Constant <value_float: float = 0.0> ()  large = Greater(total, zero)
        b = If (large) <
            then_branch = then () => (float[n, m] p) {{ p = MatMul(a, v) }},
            else_branch = otherwise () => (float[n, m] q) {{
                small = Less(total, zero)
                q = If (small) <
                    then_branch = then2 () => (float[n, m] p2) {{ p2 = MatMul(a, w) }},
                    else_branch = otherwise2 () => (float[n, m] q2) {{ q2 = Neg(a) }}> }}>
        y = MatMul(b, head) }}""",
    "an If of a constant": f"""{_TAKES} {_GIVES} {{
        yes = Constant <value_int: int = 1> ()  on = Cast <to: int = 9> (yes)
        b = If (on) <
            then_branch = then () => (float[n, m] p) {{ p = MatMul(x, v) }},
            else_branch = otherwise () => (float[n, m] q) {{ q = MatMul(x, w) }}>
        y = MatMul(b, head) }}""",
    "products in a Loop": f"""{_TAKES} {_GIVES} {{
        three = Constant <value_int: int = 3> ()
        a = MatMul(x, w)
        state, steps = Loop (three, , a) <body = body
            (int64 i, bool go, float[n, m] s) => (bool again, float[n, m] t, float[n, m] step) {{
            again = Identity(go)  p = MatMul(s, v)  t = Tanh(p)  step = Identity(t) }}>
        y = MatMul(state, head) }}""",
    "a Loop within an If": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  total = ReduceSum <keepdims: int = 0> (a)
        zero = Constant <value_float: float = 0.0> ()  large = Greater(total, zero)
        b = If (large) <
            then_branch = then () => (float[n, m] p) {{
                two = Constant <value_int: int = 2> ()
                p = Loop (two, , a) <body = body
                    (int64 i, bool go, float[n, m] s) => (bool again, float[n, m] t) {{
                    again = Identity(go)  u = MatMul(s, v)  t = Tanh(u) }}> }},
            else_branch = otherwise () => (float[n, m] q) {{ q = Identity(a) }}>
        y = MatMul(b, head) }}""",
    "cell in a Scan": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  first = Constant <value_floats: floats = [0,0,0,0,0,0,0,0]> ()
        last, steps = Scan (first, a) <num_scan_inputs: int = 1, body = body
            (float[8] s, float[8] row) => (float[8] t, float[8] step) {{
            mixed = MatMul(s, v)  sum = Add(mixed, row)  t = Tanh(sum)  step = Identity(t) }}>
        y = MatMul(steps, head) }}""",
    "products in a SequenceMap": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  parts = SplitToSequence <axis: int = 0> (a)
        mapped = SequenceMap (parts) <body = body (float[r, 8] s) => (float[r, 8] t) {{
            p = MatMul(s, v)  t = Relu(p) }}>
        b = ConcatFromSequence <axis: int = 0> (mapped)
        y = MatMul(b, head) }}""",
    "SequenceConstruct and its readers": f"""{_TAKES} (float[n, k] y, int64 length) {{
        a = MatMul(x, w)  b = Relu(a)  empty = SequenceEmpty ()
        some = SequenceInsert(empty, a)  zero = Constant <value_int: int = 0> ()
        rest = SequenceErase(some, zero)  length = SequenceLength(rest)
        parts = SequenceConstruct(a, b)  one = Constant <value_int: int = 1> ()
        last = SequenceAt(parts, one)  all = ConcatFromSequence <axis: int = 0> (parts)
        sum = ReduceSum (all)  c = Add(last, sum)  y = MatMul(c, head) }}""",
    "SequenceAt of products": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  b = MatMul(x, v)  parts = SequenceConstruct(a, b)
        one = Constant <value_int: int = 1> ()  c = SequenceAt(parts, one)
        y = MatMul(c, head) }}""",
    "SequenceEmpty that grows": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  none = SequenceEmpty ()  parts = SequenceInsert(none, a)
        b = ConcatFromSequence <axis: int = 0> (parts)  y = MatMul(b, head) }}""",
    "SequenceErase of a product": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  b = MatMul(x, v)  parts = SequenceConstruct(a, b)
        one = Constant <value_int: int = 1> ()  rest = SequenceErase(parts, one)
        c = ConcatFromSequence <axis: int = 0> (rest)  y = MatMul(c, head) }}""",
    "SequenceLength beside a product": f"""{_TAKES} (float[n, k] y, int64 length) {{
        a = MatMul(x, w)  parts = SplitToSequence <axis: int = 0> (a)
        length = SequenceLength(parts)  y = MatMul(a, head) }}""",
    "ConcatFromSequence of products": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  b = MatMul(x, v)  parts = SequenceConstruct(a, b)
        c = ConcatFromSequence <axis: int = 0> (parts)  y = MatMul(c, head) }}""",
    "Optional and its readers": f"""{_TAKES} (float[n, k] y, bool there) {{
        a = MatMul(x, w)  maybe = Optional(a)  there = OptionalHasElement(maybe)
        b = OptionalGetElement(maybe)  y = MatMul(b, head) }}""",
    "several outputs": f"""{_TAKES} (float[n, 8] a, float[n, k] y, int64[n] best) {{
        a = MatMul(x, w)  y = MatMul(a, head)  best = ArgMax <axis: int = 1, keepdims: int = 0> (y)
    }}""",
    "output that is also read": f"""{_TAKES} (float[n, 8] a, float[n, k] y) {{
        a = MatMul(x, w)  b = Relu(a)  y = MatMul(b, head) }}""",
    "output that is an input": f"""{_TAKES} (float[n, 8] same, float[n, k] y) {{
        same = Identity(x)  y = MatMul(x, head) }}""",
    "unused nodes and constants": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  unused = Relu(a)  y = MatMul(a, head) }}""",
    "one weight twice": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  b = Relu(a)  c = MatMul(b, w)  y = MatMul(c, head) }}""",
    "skipped optional inputs": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  six = Constant <value_float: float = 0.6> ()
        b = Clip(a, , six)  c = Clip(b, , )  y = MatMul(c, head) }}""",
    "second output alone": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  four = Constant <value_ints: ints = [4, 4]> ()
        unread, b = Split <axis: int = 1> (a, four)  c = Concat <axis: int = 1> (b, b)
        y = MatMul(c, head) }}""",
    "float16 inside": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  h = Cast <to: int = 10> (a)  t = Tanh(h)  f = Cast <to: int = 1> (t)
        y = MatMul(f, head) }}""",
    "double inside": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  h = Cast <to: int = 11> (a)  t = Tanh(h)  f = Cast <to: int = 1> (t)
        y = MatMul(f, head) }}""",
    "training with Dropout": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  none = Constant <value_float: float = 0.0> ()
        yes = Constant <value_int: int = 1> ()  on = Cast <to: int = 9> (yes)
        b, mask = Dropout <seed: int = 1> (a, none, on)  y = MatMul(b, head) }}""",
    "RandomNormal of next to no spread": f"""{_TAKES} {_GIVES} {{
        drawn = RandomNormal <scale: float = 1e-30, shape: ints = [8]> ()
        a = MatMul(x, w)  b = Add(a, drawn)  y = MatMul(b, head) }}""",
    "RandomNormalLike of next to no spread": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  drawn = RandomNormalLike <scale: float = 1e-30> (a)
        b = Add(a, drawn)  y = MatMul(b, head) }}""",
    "RandomUniform of no spread": f"""{_TAKES} {_GIVES} {{
        drawn = RandomUniform <high: float = 0.5, low: float = 0.5, shape: ints = [8]> ()
        a = MatMul(x, w)  b = Add(a, drawn)  y = MatMul(b, head) }}""",
    "RandomUniformLike of no spread": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  drawn = RandomUniformLike <high: float = 0.5, low: float = 0.5> (a)
        b = Add(a, drawn)  y = MatMul(b, head) }}""",
    "Bernoulli of sure draws": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  zero = Constant <value_float: float = 0.0> ()  nought = Mul(a, zero)
        one = Exp(nought)  drawn = Bernoulli(one)  b = Mul(a, drawn)  y = MatMul(b, head) }}""",
    "Mish of a product": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  b = Mish(a)  y = MatMul(b, head) }}""",
    "Multinomial of sure draws": f"""{_TAKES} (float[n, k] y, int32[n, 3] drawn) {{
        a = MatMul(x, w)  y = MatMul(a, head)  zero = Constant <value_float: float = 0.0> ()
        nought = Mul(y, zero)
        sure = Constant <value_floats: floats = [-1000, -1000, 1000, -1000, -1000]> ()
        logits = Add(nought, sure)  drawn = Multinomial <sample_size: int = 3> (logits) }}""",
    "Gelu of ONNX Runtime": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  b = com.microsoft.Gelu(a)  y = MatMul(b, head) }}""",
    "BiasGelu of ONNX Runtime": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  b = com.microsoft.BiasGelu(a, bias)  y = MatMul(b, head) }}""",
    "FastGelu of ONNX Runtime": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  b = com.microsoft.FastGelu(a)  y = MatMul(b, head) }}""",
    "QuickGelu of ONNX Runtime": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  b = com.microsoft.QuickGelu(a)  y = MatMul(b, head) }}""",
    "FusedMatMul of ONNX Runtime": f"""{_TAKES} {_GIVES} {{
        a = com.microsoft.FusedMatMul <alpha: float = 0.5> (x, w)  y = MatMul(a, head) }}""",
    "FusedGemm of ONNX Runtime": f"""{_TAKES} {_GIVES} {{
        a = com.microsoft.FusedGemm <activation: string = "Relu"> (x, w, bias)
        y = MatMul(a, head) }}""",
    "SkipLayerNormalization of ONNX Runtime": f"""{_TAKES} {_GIVES} {{
        a = MatMul(x, w)  b = MatMul(x, v)
        c = com.microsoft.SkipLayerNormalization(a, b, bias)  y = MatMul(c, head) }}""",
    "LinearRegressor behind a product": f"""{_TAKES} (float[n, 1] y) {{
        a = MatMul(x, w)
        y = ai.onnx.ml.LinearRegressor
            <coefficients: floats = [1, 2, 3, 4, 5, 6, 7, 8], intercepts: floats = [0.5]> (a) }}""",
    "Scaler before a product": f"""{_TAKES} {_GIVES} {{
        a = ai.onnx.ml.Scaler <offset: floats = [0.1], scale: floats = [2.0]> (x)
        y = MatMul(a, head) }}""",
    "Normalizer behind a product": f"""{_TAKES} (float[n, 8] y) {{
        a = MatMul(x, w)  y = ai.onnx.ml.Normalizer <norm: string = "L2"> (a) }}""",
    "Imputer before a product": f"""{_TAKES} {_GIVES} {{
        a = ai.onnx.ml.Imputer
            <imputed_value_floats: floats = [0.0], replaced_value_float: float = -1.0> (x)
        y = MatMul(a, head) }}""",
    "FeatureVectorizer before a product": f"""{_TAKES} {_GIVES} {{
        a = ai.onnx.ml.FeatureVectorizer <inputdimensions: ints = [8]> (x)
        y = MatMul(a, head) }}""",
    "LinearClassifier behind a product": f"""{_TAKES} (int64[n] best, float[n, 2] scores) {{
        a = MatMul(x, w)
        best, scores = ai.onnx.ml.LinearClassifier
            <classlabels_ints: ints = [0, 1], intercepts: floats = [0.0, 0.1],
             coefficients: floats = [1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4, -5, -6, -7, -8]> (a)
    }}""",
}
#: Of them, those whose further outputs an error of rounding may change without bound.
_SELECTING = {
    "several outputs": "selects by comparison",
    "LinearClassifier behind a product": "selects by comparison",
}
#: Of them, those that the runtime's own ops are in.
_DOMAINS = {"of ONNX Runtime": _RUNTIME, "a product": _LEARNERS}
_FUNCTION = """
<domain: "own", opset_import: ["" : 21]>
Block (a, matrix) => (c) { b = MatMul(a, matrix)  c = Relu(b) }"""
_NESTED = (
    _FUNCTION
    + """
<domain: "own", opset_import: ["" : 21, "own" : 1]>
Twice (a, matrix) => (c) { b = own.Block(a, matrix)  c = own.Block(b, matrix) }"""
)


def inputs_too(model: onnx.ModelProto) -> None:
    """Declare the constants as inputs, as files of the first versions have them."""
    model.graph.input.extend(
        onnx.helper.make_tensor_value_info(item.name, item.data_type, item.dims)
        for item in model.graph.initializer
    )


def of_old(model: onnx.ModelProto) -> None:
    """Write a model in the third version of the file format."""
    inputs_too(model)
    model.ir_version, model.opset_import[0].version = 3, 7


def unnamed(model: onnx.ModelProto) -> None:
    """Take the names of all nodes away."""
    for node in model.graph.node:
        node.name = ""


def sparse(model: onnx.ModelProto) -> None:
    """Store the first weight by its non-zero numbers."""
    dense = next(item for item in model.graph.initializer if item.name == "w")
    array = numpy_helper.to_array(dense)
    (positions,) = np.nonzero(array.ravel())
    values = numpy_helper.from_array(array.ravel()[positions], "w")
    indices = numpy_helper.from_array(positions.astype(np.int64), "w_places")
    model.graph.initializer.remove(dense)
    stored = onnx.helper.make_sparse_tensor(values, indices, array.shape)
    model.graph.sparse_initializer.append(stored)


_PLAIN = f"{_TAKES} {_GIVES} {{ a = MatMul(x, w)  b = Relu(a)  y = MatMul(b, head) }}"
_CALLS = f"{_TAKES} {_GIVES} {{ b = own.Block(x, w)  y = MatMul(b, head) }}"
_CALLS_TWICE = f"{_TAKES} {_GIVES} {{ b = own.Twice(x, w)  y = MatMul(b, head) }}"
_OWN = ', "own" : 1'
_SPARSE = weight(8, 8) * (np.random.default_rng(5).random((8, 8)) > 0.5)


def strings() -> Built:
    """Return a model of strings and rows: strings are looked up, split and joined beside them."""
    tokens = np.array(["a b", "b c d", "a", "c"], object)
    text = """g (float[n, 8] x, string[n] s) => (float[n, k] y, string[n] t, string[n, m] p) {
        a = MatMul(x, w)  found = ai.onnx.ml.LabelEncoder
            <keys_strings: strings = ["a", "c"], values_floats: floats = [1, 2]> (s)
        axes = Constant <value_ints: ints = [1]> ()  column = Unsqueeze(found, axes)
        b = Add(a, column)  y = MatMul(b, head)
        t = StringConcat(s, s)  p, count = StringSplit (s) }"""
    constants = {"w": weight(8, 8), "head": weight(8, 5)}
    return built(text, constants, [{"x": _ROWS, "s": tokens}], _LEARNERS)


def symbolic_sizes() -> Built:
    """Return a model of pictures of any size and number."""
    text = """g (float[n, 3, h, w] x) => (float[n, 8, a, b] y) {
        p = Conv <pads: ints = [1, 1, 1, 1]> (x, kernel)  r = Relu(p)
        m = MaxPool <kernel_shape: ints = [2, 2], strides: ints = [2, 2]> (r)
        y = Conv (m, second) }"""
    constants = {"kernel": weight(8, 3, 3, 3), "second": weight(8, 8, 1, 1)}
    cut = _PICTURES[:1, :, :6, :4]
    return built(text, constants, [{"x": _PICTURES}, {"x": cut}])


def sizes_read_from_shapes() -> Built:
    """Return a model that computes the sizes it reshapes to."""
    text = """g (float[n, 3, h, w] x) => (float[n, c, d] y) {
        p = Conv <pads: ints = [1, 1, 1, 1]> (x, kernel)  s = Shape <end: int = 2> (p)
        rest = Constant <value_ints: ints = [-1]> ()  sizes = Concat <axis: int = 0> (s, rest)
        y = Reshape(p, sizes) }"""
    return built(text, {"kernel": weight(8, 3, 3, 3)}, [{"x": _PICTURES}])


def sequence_given() -> Built:
    """Return a model that takes and gives sequences."""
    text = """g (seq(float[m, 8]) x) => (seq(float[m, 8]) y, float[n, 5] z) {
        all = ConcatFromSequence <axis: int = 0> (x)
        a = MatMul(all, w)  z = MatMul(a, head)  y = SequenceInsert(x, a) }"""
    constants = {"w": weight(8, 8), "head": weight(8, 5)}
    return built(text, constants, [{"x": [_ROWS, _ROWS[:2]]}])


def no_inputs() -> Built:
    """Return a model that takes nothing."""
    text = "g () => (float[4, 8] y) { y = MatMul(rows, w) }"
    return built(text, {"rows": _ROWS, "w": weight(8, 8)}, [{}])


def scalars() -> Built:
    """Return a model one of whose inputs is a single number."""
    text = """g (float[n, 8] x, float f) => (float[n, 5] y) {
        a = MatMul(x, w)  b = Mul(a, f)  y = MatMul(b, head) }"""
    constants = {"w": weight(8, 8), "head": weight(8, 5)}
    return built(text, constants, [{"x": _ROWS, "f": np.array(1.5, np.float32)}])


def empty_batch() -> Built:
    """Return a model that is also given a batch of no rows."""
    constants = {"w": weight(8, 8), "head": weight(8, 5)}
    return built(_PLAIN, constants, [{"x": _ROWS}, {"x": _ROWS[:0]}])


def boxes() -> Built:
    """Return the pooling of regions of a convolved picture."""
    text = """g (float[n, 3, h, w] x, float[r, 5] boxes) => (float[r, 8, 2, 2] y) {
        p = Conv <pads: ints = [1, 1, 1, 1]> (x, kernel)
        y = MaxRoiPool <pooled_shape: ints = [2, 2]> (p, boxes) }"""
    regions = np.array([[0, 0, 0, 5, 5], [1, 2, 2, 7, 7]], np.float32)
    return built(text, {"kernel": weight(8, 3, 3, 3)}, [{"x": _PICTURES, "boxes": regions}])


def pooled_by_norm() -> Built:
    """Return a convolution pooled by its Euclidean norm."""
    text = """g (float[n, 3, h, w] x) => (float[n, 8, 1, 1] y) {
        p = Conv <pads: ints = [1, 1, 1, 1]> (x, kernel)  y = GlobalLpPool (p) }"""
    return built(text, {"kernel": weight(8, 3, 3, 3)}, [{"x": _PICTURES}])


def cases() -> Iterator[Case]:
    """Yield one case for every construct."""
    for name, text in ROWS.items():
        domains = next((more for term, more in _DOMAINS.items() if term in name), "")
        build = partial(rows, text, domains, bias=weight(8, seed=3))
        yield Case(name, build, discontinuous=_SELECTING.get(name, ""))
    yield Case("constants that are inputs", partial(rows, _PLAIN, change=inputs_too))
    yield Case("file format of 2017", partial(rows, _PLAIN, change=of_old))
    yield Case("nodes without names", partial(rows, _PLAIN, change=unnamed))
    yield Case("function", partial(rows, _CALLS + _FUNCTION, _OWN))
    yield Case("function within a function", partial(rows, _CALLS_TWICE + _NESTED, _OWN))
    yield Case("sparse weight", partial(rows, _PLAIN, change=sparse, w=_SPARSE))
    yield Case("strings beside rows", strings)
    yield Case("sizes that are open", symbolic_sizes)
    yield Case("sizes read from shapes", sizes_read_from_shapes)
    yield Case("sequences given and returned", sequence_given)
    yield Case("no inputs", no_inputs)
    yield Case("scalar input", scalars)
    yield Case("batch of no rows", empty_batch)
    yield Case("MaxRoiPool of a convolution", boxes)
    yield Case("GlobalLpPool of a convolution", pooled_by_norm)
