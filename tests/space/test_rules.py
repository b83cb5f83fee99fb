"""Rules that name one configuration for each op."""

from __future__ import annotations

import pytest

from neural_mp.core.graph import Layer, Op, OpGraph
from neural_mp.core.precision import Precision
from neural_mp.space import ConversionRules, OpConstraint

INT4, INT8, BF16 = (
    OpConstraint((precision,)) for precision in (Precision.INT4, Precision.INT8, Precision.BF16)
)


def _op(name: str, kind: str, *layers: str) -> Op:
    return Op(name, kind, layers=tuple(Layer(layer, "Linear") for layer in layers))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (ConversionRules(), Precision.FP32),
        (ConversionRules(((frozenset(), INT8),)), Precision.INT8),
        (ConversionRules(((frozenset({"conv2d"}), INT8),)), Precision.FP32),
        (ConversionRules(((frozenset({"Linear"}), INT8),)), Precision.INT8),
        (ConversionRules(((frozenset(), INT8), (frozenset({"Linear"}), INT4))), Precision.INT4),
        (ConversionRules(((frozenset(), INT8),), kept=("block",)), Precision.FP32),
        (ConversionRules(((frozenset(), INT8),), by_type={"linear": INT4}), Precision.INT4),
        (
            ConversionRules(((frozenset(), INT8),), by_type={"linear": INT4}, by_name={"bl": BF16}),
            Precision.BF16,
        ),
        (ConversionRules(by_name={"bl": BF16, "block.fc": INT4}), Precision.INT4),
        (ConversionRules(by_name={"fc": BF16}), Precision.FP32),
        (ConversionRules(by_name={".*fc": BF16}), Precision.BF16),
        (ConversionRules(by_name={"Linear": INT8}, kept=("block",)), Precision.INT8),
    ],
)
def test_the_most_specific_rule_decides_on_an_op(rules, expected):
    assert rules.constraint_for(_op("block.fc", "linear", "block.fc")).precisions == (expected,)


def test_names_and_types_without_an_op_are_listed():
    graph = OpGraph([_op("fc", "linear", "fc")])
    rules = ConversionRules(by_type={"Linear": INT8, "GRU": INT8}, by_name={"f": INT4, "gc": INT4})
    assert rules.find_unmatched(graph) == ("gc", "GRU")
