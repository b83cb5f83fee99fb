"""Colours derived by hand from the rules, on small graphs; every rule, and every way around it.

A graph is written as `name=LIST reads…`, ops separated by semicolons: A(llow), D(eny), I(nfer),
C(lear), and N for a type that is on no list.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neural_mp.amp import Colour, FourLists, graph_of, paint
from neural_mp.core.enums import RuleSet
from neural_mp.core.graph import OpGraph
from neural_mp.errors import ConfigurationError

LISTS = FourLists(*(frozenset({word}) for word in "ADIC"))


def graph(text: str) -> OpGraph:
    triples = []
    for part in text.split(";"):
        name, rest = part.strip().split("=")
        kind, *reads = rest.split()
        triples.append((name, kind, reads))
    return graph_of(triples)


def sets(text: str, rules: str = "advanced", **settings) -> tuple[str, str]:
    """The names of the allowed and of the denied ops, sorted."""
    painting = paint(graph(text), LISTS, rules, **settings)
    return "".join(sorted(painting.allowed)), "".join(sorted(painting.denied))


#: What it shows → graph, allowed, denied, by the advanced rules.
ADVANCED = {
    "nothing on any list": ("a=N x; b=N a", "", ""),
    "a safe op alone": ("a=A x", "a", ""),
    "a dangerous op alone": ("a=D x", "", "a"),
    "an INFER op alone is drawn nowhere": ("a=I x", "", ""),
    "a CLEAR op alone is drawn nowhere": ("a=C x", "", ""),
    "INFER behind ALLOW": ("a=A x; b=I a", "ab", ""),
    "INFER before ALLOW stays": ("a=I x; b=A a", "b", ""),
    "INFER behind INFER behind ALLOW": ("a=A x; b=I a; c=I b", "abc", ""),
    "INFER behind DENY": ("a=D x; b=I a", "", "ab"),
    "INFER before DENY is not in danger": ("a=I x; b=D a", "", "b"),
    "INFER behind DENY through CLEAR": ("a=D x; b=C a; c=I b", "", "abc"),
    "INFER behind DENY through two CLEAR": ("a=D x; b=C a; c=C b; d=I c", "", "abcd"),
    "INFER behind INFER behind DENY": ("a=D x; b=I a; c=I b", "", "abc"),
    "CLEAR behind ALLOW": ("a=A x; b=C a", "ab", ""),
    "CLEAR before ALLOW": ("a=C x; b=A a", "ab", ""),
    "CLEAR before CLEAR before ALLOW": ("a=C x; b=C a; c=A b", "abc", ""),
    "CLEAR behind DENY alone is not denied": ("a=D x; b=C a", "", "a"),
    "CLEAR between DENY and DENY": ("a=D x; b=C a; c=D b", "", "abc"),
    "CLEAR between DENY and ALLOW": ("a=D x; b=C a; c=A b", "bc", "a"),
    "CLEAR between ALLOW and DENY": ("a=A x; b=C a; c=D b", "ab", "c"),
    "ALLOW behind DENY": ("a=D x; b=A a", "b", "a"),
    "an ALLOW op ends the danger": ("a=D x; b=A a; c=I b", "bc", "a"),
    "a type on no list ends the danger": ("a=D x; b=N a; c=I b", "", "a"),
    "a type on no list ends 16 bits": ("a=A x; b=N a; c=I b", "a", ""),
    "INFER behind both": ("a=A x; b=D x; c=I a b", "a", "bc"),
    "INFER behind both, the danger through CLEAR": ("a=A x; b=D x; c=C b; d=I a c", "a", "bcd"),
    "one branch in danger, one not": ("a=A x; b=I a; c=D a; d=I c", "ab", "cd"),
    "several consumers of one CLEAR": ("a=D x; b=C a; c=I b; d=A b", "d", "abc"),
    "16 bits reach INFER through CLEAR": ("a=A x; b=C a; c=I b", "abc", ""),
    "CLEAR drawn from below draws INFER beside it": ("a=C x; b=A a; c=I a", "abc", ""),
    "branches meet": ("a=A x; b=I a; c=C a; d=I b c", "abcd", ""),
    "a loop of INFER behind ALLOW": ("a=A x; b=I a c; c=I b", "abc", ""),
    "a loop of INFER behind DENY": ("a=D x; b=I a c; c=I b", "", "abc"),
    "a loop of CLEAR with DENY in it": ("a=D c; b=C a; c=C b", "", "abc"),
    "a loop of CLEAR beside ALLOW": ("a=C b; b=C a; c=A b", "abc", ""),
    "an op that reads itself": ("a=I a; b=A x", "b", ""),
    "a recurrent edge carries the danger back": ("a=I x c; b=I a; c=D b", "", "abc"),
    "no inputs at all": ("a=A; b=I a", "ab", ""),
}


@pytest.mark.parametrize("case", ADVANCED)
def test_advanced_rules(case):
    text, allowed, denied = ADVANCED[case]
    assert sets(text) == (allowed, denied)


def test_the_worked_case():
    """A chain of eleven, from DENY to DENY."""
    chain = ["a=D x", "b=I a", "c=C b", "d=I c", "e=C d", "f=A e", "g=I f", "h=C g", "i=A h"]
    text = "; ".join([*chain, "j=I i", "k=D j"])
    assert sets(text) == ("efghij", "abcdk")
    assert paint(graph(text), LISTS).casts == 2  # d → e and j → k


#: The same by the rules of TensorFlow's own pass.
STOCK = {
    "INFER behind ALLOW": ("a=A x; b=I a", "ab", ""),
    "INFER before ALLOW stays": ("a=I x; b=A a", "b", ""),
    "INFER behind INFER behind ALLOW": ("a=A x; b=I a; c=I b", "abc", ""),
    "INFER behind ALLOW and another": ("a=A x; b=N x; c=I a b", "ac", ""),
    "INFER behind CLEAR stays: CLEAR joins last": (
        "a=A x; b=C a; c=I b",
        "ab",
        "",
    ),
    "INFER between ALLOW and ALLOW": ("a=A x; b=I a; c=A b", "abc", ""),
    "a chain between ALLOW and ALLOW": ("a=A x; b=I a; c=C b; d=I c; e=A d", "abcde", ""),
    "DENY between ends it": ("a=A x; b=D a; c=I b; d=A c", "ad", "bc"),
    "INFER behind both is in danger": ("a=D x; b=A x; c=I a b", "b", "ac"),
    "CLEAR beside ALLOW joins": ("a=C x; b=A a; c=C b", "abc", ""),
    "CLEAR beside CLEAR beside ALLOW joins": ("a=C x; b=C a; c=A b", "abc", ""),
    "INFER beside that CLEAR stays": ("a=C x; b=A a; c=I a", "ab", ""),
    "a loop between": ("a=A x; b=I a c; c=I b; d=A c", "abcd", ""),
    "CLEAR in danger stays": ("a=D x; b=C a; c=I b; d=A b", "d", "abc"),
}


@pytest.mark.parametrize("case", STOCK)
def test_stock_rules(case):
    text, allowed, denied = STOCK[case]
    assert sets(text, "stock") == (allowed, denied)


def test_nothing_spreads_through_a_boundary():
    """As ops that run in INT8 are: neutral boundaries."""
    text = "a=A x; b=I a; c=I b; d=D x; e=C d; f=I e"
    boundaries = {"b": "runs in int8", "e": "runs in int8"}
    painting = paint(graph(text), LISTS, boundaries=boundaries)
    assert (painting.allowed, painting.denied) == ({"a"}, {"d"})
    assert painting.paints["b"].reason == "INFER, not in 16 bits: runs in int8"
    assert painting.paints["c"].colour is Colour.PLAIN


UNABLE = {  # what cannot run in 16 bits, and the sets
    "16 bits do not spread through it": ("a=A x; b=I a; c=I b", "b", "a", ""),
    "danger does": ("a=D x; b=I a; c=I b; d=A c", "b", "d", "abc"),
    "and begins in it": ("a=D x; b=I a; c=A b", "a", "c", "ab"),
    "ALLOW stays out, too": ("a=A x; b=A a; c=I b", "b", "a", ""),
    "CLEAR between two that join": ("a=A x; b=C a; c=C b; d=A c", "b", "acd", ""),
    "danger through CLEAR": ("a=D x; b=C a; c=I b", "b", "", "abc"),
}


@pytest.mark.parametrize("rules", tuple(RuleSet))
@pytest.mark.parametrize("case", UNABLE)
def test_what_is_unable_stays_out_and_passes_danger_on(case, rules):
    text, unable, allowed, denied = UNABLE[case]
    painting = paint(graph(text), LISTS, rules, unable=dict.fromkeys(unable, "no kernel"))
    assert (painting.allowed, painting.denied) == (set(allowed), set(denied))


CHOSEN = {
    "INFER begins a set": ("a=N x; b=I a; c=I b", "b", "bc", ""),
    "without danger any more": ("a=D x; b=I a; c=I b", "a", "abc", ""),
    "in the way of danger": ("a=D x; b=C a; c=I b", "b", "bc", "a"),
    "on no list": ("a=N x; b=N a; c=I b", "b", "bc", ""),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_what_is_chosen_is_in_16_bits_whatever_its_list(case):
    text, chosen, allowed, denied = CHOSEN[case]
    painting = paint(graph(text), LISTS, chosen=dict.fromkeys(chosen, "set by the plan"))
    assert (painting.allowed, painting.denied) == (set(allowed), set(denied))
    assert painting.paints[chosen].reason.endswith("allowed: set by the plan")


def test_every_op_can_be_forced():
    forced = LISTS.allowing("DNI")
    painting = paint(graph("a=D x; b=N a; c=I b; d=C c"), forced, boundaries={"c": "int8"})
    assert painting.allowed == {"a", "b"}


REASONS = {
    "a": "DENY, denied",
    "b": "CLEAR, denied: downstream of D 'a'",
    "c": "INFER, denied: downstream of D 'a' through CLEAR 'b'",
    "d": "ALLOW, allowed",
    "e": "INFER, allowed: downstream of A 'd'",
    "f": "CLEAR, allowed: upstream of A 'd'",
    "g": "N is on no list",
    "h": "INFER, not in 16 bits: no neighbour to follow",
}


@pytest.mark.parametrize("op", REASONS)
def test_reasons_name_where_it_comes_from(op):
    text = "a=D x; b=C a; c=I b; f=C x; d=A f; e=I d; g=N x; h=I g"
    assert paint(graph(text), LISTS).paints[op].reason == REASONS[op]


def test_a_long_path_is_abbreviated():
    chain = "a=D x; " + "; ".join(f"{b}=I {a}" for a, b in zip("abcdefg", "bcdefgh", strict=True))
    reason = paint(graph(chain), LISTS).paints["h"].reason
    assert reason == "INFER, denied: downstream of D 'a' through INFER 'g', INFER 'f', INFER 'e', …"


@pytest.mark.parametrize(
    ("text", "casts"),
    [
        ("a=A x", 2),  # in and out
        ("a=A x; b=N a; c=N a", 2),  # one for all that read a tensor in FP32
        ("a=N x; b=A a; c=A a; d=N b c", 3),  # one in for both, one out of each
        ("a=A x; b=A x", 3),  # an input is cast once
        ("a=N x; b=I a", 0),
    ],
)
def test_casts_are_one_a_tensor_and_direction(text, casts):
    assert paint(graph(text), LISTS).casts == casts


def test_rules_that_do_not_exist():
    with pytest.raises(ConfigurationError, match="did you mean 'advanced'"):
        paint(graph("a=A x"), LISTS, "advance")


@given(st.data())
def test_what_holds_of_every_graph(data):
    """Cycles included: no op in both sets; ALLOW in, DENY out; every member has its reason."""
    count = data.draw(st.integers(1, 12))
    names = [f"o{i}" for i in range(count)]
    triples = [
        (
            name,
            data.draw(st.sampled_from("ADICN")),
            data.draw(st.lists(st.sampled_from([*names, "x"]), max_size=3, unique=True)),
        )
        for name in names
    ]
    op_graph = graph_of(triples)
    kinds = {name: kind for name, kind, _ in triples}
    reads = {name: inputs for name, _, inputs in triples}
    advanced, stock = (paint(op_graph, LISTS, rules) for rules in ("advanced", "stock"))
    for painting in (advanced, stock):
        assert not painting.allowed & painting.denied
        for name, kind in kinds.items():
            paint_of = painting.paints[name]
            assert (name in painting.allowed) or kind != "A"
            assert (name in painting.denied) or kind != "D"
            assert paint_of.colour is Colour.PLAIN or kind != "N"
            assert paint_of.reason
    assert stock.denied == advanced.denied
    assert stock.allowed <= advanced.allowed
    for name in advanced.allowed:
        if kinds[name] == "I":
            assert any(source in advanced.allowed for source in reads[name])
