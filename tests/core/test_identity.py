"""Whether two objects of a user's are the same, told in another process."""

import copy
import enum
import functools
import subprocess
import sys

import numpy as np
import pytest

from neural_mp.util.fingerprint import code_fingerprint, object_fingerprint

SHARE = 0.5


def scaled(value):
    return value * SHARE


def top(k):
    return lambda scores: sorted(scores)[-k:]


class Top:
    def __init__(self, k, found=None):
        self.k = k
        self.found = found

    def result(self):
        return self.k + 1


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k


def made(body, name="metric", **names):
    exec(body, names)
    return names[name]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (top(1), top(5)),
        (Top(1), Top(5)),
        (Slotted(1), Slotted(5)),
        (functools.partial(scaled, 1), functools.partial(scaled, 2)),
        (Top(1).result, Top(5).result),
        (Top(1, np.arange(3)), Top(1, np.arange(4))),
        (Top(1, {"a": 1}), Top(1, {"a": 2})),
        (made("def metric(a): return a + 1"), made("def metric(a): return a + 2")),
        (made("def metric(a, b=1): return a"), made("def metric(a, b=2): return a")),
        (made("def metric(a): return a + N", N=1), made("def metric(a): return a + N", N=2)),
        (
            made("def inner(a): return a\ndef metric(a): return inner(a)"),
            made("def inner(a): return -a\ndef metric(a): return inner(a)"),
        ),
        (
            made("class metric:\n def result(self): return 1", __name__="m"),
            made("class metric:\n def result(self): return 2", __name__="m"),
        ),
        (np.mean, np.max),
        ({1, 2}, {1, 3}),
        (1, True),
        ("1", 1),
        ([1, [2]], [[1], 2]),
        (Top(enum.Enum("Kind", {"BEST": 1}).BEST), Top(enum.Enum("Kind", {"BEST": 2}).BEST)),
    ],
)
def test_what_does_something_else_is_another(one, other):
    assert object_fingerprint(one) is not None
    assert object_fingerprint(other) is not None
    assert object_fingerprint(one) != object_fingerprint(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: top(3),
        lambda: Top(3, np.arange(3)),
        lambda: functools.partial(scaled, 2),
        lambda: made("def metric(a):\n return a"),
        lambda: {"b": Slotted(1), "a": frozenset("xyz")},
        lambda: np.random.default_rng(0),
    ],
)
def test_what_is_made_in_the_same_way_is_the_same(make):
    assert object_fingerprint(make()) == object_fingerprint(make()) is not None


def test_where_a_function_stands_in_its_file_does_not_matter():
    assert object_fingerprint(made("def metric(a): return a")) == object_fingerprint(
        made("\n\n# a comment\ndef metric(a):\n    return a")
    )


def test_an_object_that_holds_itself_has_an_identity():
    ring = Top(1)
    ring.found = [ring]
    assert object_fingerprint(ring) is not None


def test_of_what_cannot_be_copied_nothing_is_told(tmp_path):
    with (tmp_path / "open").open("w") as file:
        assert object_fingerprint(Top(1, file)) is None
        assert object_fingerprint(lambda: file) is None


def test_of_what_is_nested_without_end_nothing_is_told():
    chain = None
    for _ in range(20_000):
        chain = Top(1, chain)
    assert object_fingerprint(chain) is None
    while chain is not None:  # or Python falls over it as it clears up
        chain = chain.found


PROGRAM = """
from neural_mp.util.fingerprint import object_fingerprint
from yaml import safe_dump

LABELS = {"cat", "dog", "bird", "fish"}

class Metric:
    def __init__(self):
        self.average = "macro"
    def result(self, x):
        return safe_dump([x, self.average, LABELS])

print(object_fingerprint((Metric(), lambda x: x + 1, frozenset(LABELS), safe_dump)))
"""


def test_another_process_tells_the_same(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    fingerprints = {
        subprocess.run(
            [sys.executable, "program.py"], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(fingerprints) == 1
    assert "None" not in fingerprints.pop()


@functools.lru_cache
def cached(value):
    return value


def test_the_function_in_a_wrapper_counts():
    def other(value):
        return -value

    other.__qualname__ = cached.__qualname__
    other.__module__ = cached.__module__
    wrapped = functools.lru_cache(other)
    assert None is not object_fingerprint(wrapped) != object_fingerprint(cached) is not None


def test_equal_tuples_count_by_their_values_alone():
    pair = tuple([1, 2])
    assert object_fingerprint((pair, pair)) == object_fingerprint((pair, tuple([1, 2])))


@pytest.mark.slow
@pytest.mark.parametrize("fingerprint", [object_fingerprint, code_fingerprint])
def test_nested_sharing_takes_bounded_work(fingerprint):
    nested = ("end",)
    for _ in range(200):
        nested = (nested, nested)
    assert fingerprint([nested]) is None


@pytest.mark.slow
@pytest.mark.parametrize("fingerprint", [object_fingerprint, code_fingerprint])
def test_sets_of_sets_take_bounded_work(fingerprint):
    nested = frozenset(("end",))
    for depth in range(200):
        nested = frozenset((nested, (depth, nested)))
    assert fingerprint([nested]) is None


def test_a_copy_leaves_the_fingerprint_of_its_class_alone():
    """Copying an object makes Python write the names of its slots into its class."""

    class Metric:
        def __init__(self):
            self.answers = []

    initial = object_fingerprint(Metric())
    copy.deepcopy(Metric())
    assert "__slotnames__" in vars(Metric)
    assert object_fingerprint(Metric()) == initial
