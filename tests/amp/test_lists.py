"""Edits of the four lists, and where they come from."""

import pytest

from neural_mp.amp import AmpList, FourLists, check_known, edits_of
from neural_mp.errors import ConfigurationError, UnknownOperatorError

LISTS = FourLists(
    frozenset({"MatMul", "Conv2D"}), frozenset({"Exp"}), frozenset({"Add"}), frozenset({"Reshape"})
)
NEURAL, ITEX, TF = (
    "NEURAL_MP_AUTO_MIXED_PRECISION_",
    "ITEX_AUTO_MIXED_PRECISION_",
    "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_",
)


def edited(environment=None, **options):
    return LISTS.edited(edits_of(options, environment or {}))


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
        match="denylist_add adds 'Conv2D' to the deny list, but it is on the allow list; "
        "remove it from there first, with allowlist_remove",
    ):
        edited(denylist_add="Conv2D")


def test_adding_what_is_there_already_changes_nothing():
    assert edited(allowlist_add="Conv2D") == LISTS


def test_removing_what_is_not_there_says_where_it_is():
    with pytest.raises(ConfigurationError, match="'Exp' from the allow list.*is on the deny list"):
        edited(allowlist_remove="Exp")


def test_an_option_goes_before_the_environment_and_that_before_the_default():
    environment = {f"{NEURAL}DENYLIST_ADD": "Softmax"}
    (edit,) = edits_of({}, environment)
    assert (edit.op_type, edit.origin) == ("Softmax", f"{NEURAL}DENYLIST_ADD")
    (edit,) = edits_of({"denylist_add": "Log"}, environment)
    assert (edit.op_type, edit.origin) == ("Log", "denylist_add")
    assert edits_of({"denylist_add": ""}, environment) == ()


def test_of_the_names_of_a_variable_the_first_that_is_set_counts():
    environment = {f"{TF}CLEARLIST_ADD": "A", f"{ITEX}CLEARLIST_ADD": "B"}
    assert [edit.op_type for edit in edits_of({}, environment)] == ["B"]
    environment[f"{NEURAL}CLEARLIST_ADD"] = "C"
    assert [edit.op_type for edit in edits_of({}, environment)] == ["C"]


def test_an_option_that_does_not_exist():
    with pytest.raises(ConfigurationError, match="did you mean 'denylist_add'"):
        edits_of({"denylist_ad": "Exp"}, {})
    with pytest.raises(ConfigurationError, match="separated by commas or as a list"):
        edits_of({"denylist_add": [1]}, {})


def test_a_type_that_the_framework_does_not_know():
    known = {"Conv2D", "MatMul", "Exp"}
    with pytest.raises(
        UnknownOperatorError, match="denylist_add names 'Con2D'.*did you mean 'Conv2D'"
    ):
        check_known(edits_of({"denylist_add": "Con2D"}, {}), known)
