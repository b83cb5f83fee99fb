"""Which ops run along with which layer, for made-up kernels over a made-up graph."""

import pytest

from neural_mp.adaptors.common.kernels.fusion import (
    BIAS,
    SUM,
    FusionGroup,
    FusionRules,
    Step,
    find_fusion_groups,
    map_fused_ops,
)


class Chain(FusionRules[str, str]):
    """Kernels that take a `bias…`, then a `sum…`, then a `relu…`; `reads` is op → what it reads."""

    def __init__(self, reads: dict[str, tuple[str, ...]]) -> None:
        self.reads = reads

    def _reader(self, group, start):
        readers = [op for op, inputs in self.reads.items() if group.tail in inputs]
        return readers[0] if len(readers) == 1 and readers[0].startswith(start) else None

    def match_bias(self, group):
        op = self._reader(group, "bias")
        return Step(BIAS, (op,), "constant") if op else None

    def match_residual_sum(self, group):
        op = self._reader(group, "sum")
        if op is None:
            return None
        (operand,) = {*self.reads[op]} - {group.tail}
        return Step(SUM, (op,), operand)

    def match_activation(self, group):
        op = self._reader(group, "relu")
        return Step("relu", (op,)) if op else None


#: Two layers that meet in a sum.
MEETING = {
    "one": ("x",),
    "bias1": ("one",),
    "two": ("x",),
    "bias2": ("two",),
    "sum": ("bias1", "bias2"),
    "relu": ("sum",),
}


@pytest.mark.parametrize(
    ("order", "first", "last"), [(("one", "two"), 1, 2), (("two", "one"), 2, 1)]
)
def test_the_later_of_two_layers_takes_the_sum(order, first, last):
    groups = find_fusion_groups(order, Chain(MEETING))
    assert tuple(groups) == order
    assert groups[order[0]].fused_ops == (f"bias{first}",)
    taking = groups[order[1]]
    assert taking.fused_ops == (f"bias{last}", "sum", "relu")
    assert taking.residual_sum is not None
    assert taking.residual_sum.operand == f"bias{first}"
    assert map_fused_ops(groups.values()) == {
        f"bias{first}": order[0],
        **dict.fromkeys((f"bias{last}", "sum", "relu"), order[1]),
    }


def test_a_layer_alone_has_an_empty_group():
    (group,) = find_fusion_groups(["one"], Chain({"one": ("x",)})).values()
    assert group == FusionGroup("one")
    assert (group.bias, group.residual_sum, group.activation) == (None, None, None)
    assert group.tail == "one"


def test_nothing_is_fused_behind_an_op_that_is_not_fused():
    (_, group) = find_fusion_groups(("one", "two"), Chain(MEETING)).values()
    assert group.fused_prefix(lambda op: op != "sum").fused_ops == ("bias2",)
    assert group.fused_prefix(lambda op: op != "bias2") == FusionGroup("two")
    assert group.fused_prefix(lambda op: True) == group
    assert group.fused_prefix(lambda op: op != "relu").tail == "sum"
