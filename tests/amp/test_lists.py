"""Edits of the four lists, and where they come from."""

import pytest

from neural_mp.amp import (
    AmpList,
    AutoMixedPrecisionOptions,
    FourLists,
    ListEdit,
    check_known,
    merge_options,
)
from neural_mp.errors import ConfigurationError, UnknownOperatorError

LISTS = FourLists(
    frozenset({"MatMul", "Conv2D"}), frozenset({"Exp"}), frozenset({"Add"}), frozenset({"Reshape"})
)


def edited(**options):
    amp = AutoMixedPrecisionOptions(**options)
    return LISTS.edited(merge_options({"{option}": amp}, {}).edits)


def test_a_type_is_moved_by_taking_it_off_and_putting_it_on():
    changed = edited(inferlist_remove="Add", allowlist_add="Add,AvgPool")
    assert changed.of("Add") is AmpList.ALLOW
    assert changed.of("AvgPool") is AmpList.ALLOW
    assert LISTS.of("Add") is AmpList.INFER


def test_lists_and_words_with_commas_are_the_same():
    assert edited(allowlist_add=["AvgPool", "Softmax"]) == edited(
        allowlist_add=" AvgPool , Softmax"
    )


def test_a_type_that_stands_on_another_list_must_be_removed_first():
    with pytest.raises(
        ConfigurationError,
        match="denylist_add adds 'Conv2D' to the deny list, but 'Conv2D' is on the allow list; "
        "remove the type from that list with allowlist_remove",
    ):
        edited(denylist_add="Conv2D")


def test_adding_what_is_there_already_changes_nothing():
    assert edited(allowlist_add="Conv2D") == LISTS


def test_removing_what_is_not_there_says_where_it_is():
    with pytest.raises(ConfigurationError, match="'Exp' from the allow list.*is on the deny list"):
        edited(allowlist_remove="Exp")


def test_a_type_that_the_framework_does_not_know():
    op_types = {"Conv2D", "MatMul", "Exp"}
    edits = [ListEdit(True, AmpList.DENY, "Con2D", "amp.denylist_add")]
    with pytest.raises(
        UnknownOperatorError, match="denylist_add names 'Con2D'.*did you mean 'Conv2D'"
    ):
        check_known(edits, op_types)


def test_lists_in_other_words():
    """A word may stand for several there, or for nothing."""
    translated = LISTS.translated({"MatMul": ["linear", "bmm"], "Exp": ["exp"], "Add": []})
    assert translated == FourLists(frozenset({"linear", "bmm"}), frozenset({"exp"}))
