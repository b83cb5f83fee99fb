"""What a user says of the lists: in Python, in YAML, in the environment."""

import pytest

from neural_mp import AutoMixedPrecisionOptions
from neural_mp.amp import LEVEL, PREFIXES, SWITCH, AmpDataType, AmpList, merge_options
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError

NEURAL, ITEX, TF = PREFIXES


def said(python=None, yaml=None, environment=None):
    sources = [None if o is None else AutoMixedPrecisionOptions(**o) for o in (python, yaml)]
    return merge_options(
        {"amp.{option}": sources[0], "mixed_precision.{option}": sources[1]}, environment or {}
    )


def test_the_names_of_the_variables():
    assert PREFIXES == (
        "NEURAL_MP_AUTO_MIXED_PRECISION_",
        "ITEX_AUTO_MIXED_PRECISION_",
        "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_",
    )


def test_nothing_said_is_nothing_wanted():
    assert said() == said({}, {}, {"ALLOWLIST_ADD": "Exp"})
    assert said().describe_options() == ()
    assert (said().data_type, said().force_all, said().edits, said().log_path) == (
        None,
        False,
        (),
        None,
    )


def test_python_goes_before_yaml_and_that_before_the_environment():
    environment = {f"{NEURAL}DENYLIST_ADD": "Softmax"}
    (edit,) = said(environment=environment).edits
    assert (edit.op_type, edit.origin) == ("Softmax", f"{NEURAL}DENYLIST_ADD")
    (edit,) = said(None, {"denylist_add": "Log"}, environment).edits
    assert (edit.op_type, edit.origin) == ("Log", "mixed_precision.denylist_add")
    (edit,) = said({"denylist_add": ["Tanh"]}, {"denylist_add": "Log"}, environment).edits
    assert (edit.op_type, edit.origin) == ("Tanh", "amp.denylist_add")
    assert (edit.adds, edit.list) == (True, AmpList.DENY)


def test_an_option_given_empty_hides_what_is_said_elsewhere():
    assert said({"denylist_add": ""}, None, {f"{NEURAL}DENYLIST_ADD": "Softmax"}).edits == ()


def test_options_do_not_hide_each_other():
    settled = said({"denylist_add": "A"}, {"allowlist_add": "B"}, {f"{TF}CLEARLIST_REMOVE": "C"})
    assert {edit.op_type for edit in settled.edits} == {"A", "B", "C"}


def test_of_the_names_of_a_variable_the_first_that_is_set_counts():
    environment = {f"{TF}CLEARLIST_ADD": "A", f"{ITEX}CLEARLIST_ADD": "B"}
    assert [edit.op_type for edit in said(environment=environment).edits] == ["B"]
    environment[f"{NEURAL}CLEARLIST_ADD"] = "C"
    assert [edit.op_type for edit in said(environment=environment).edits] == ["C"]


@pytest.mark.parametrize("value", ["FLOAT16", "float16", "fp16", AmpDataType.FLOAT16])
def test_the_data_type_in_all_its_words(value):
    assert said({"data_type": value}).data_type is Precision.FP16


def test_the_default_data_type_hides_what_the_environment_says():
    environment = {f"{ITEX}DATA_TYPE": "BFLOAT16"}
    assert said(environment=environment).data_type is Precision.BF16
    assert said({"data_type": "DEFAULT_DATA_TYPE"}, None, environment).data_type is None


@pytest.mark.parametrize(("value", "forced"), [("1", True), ("on", True), ("0", False)])
def test_forcing_by_a_variable(value, forced):
    assert said(environment={f"{ITEX}UNSAFE_FORCE_ALL": value}).force_all is forced


@pytest.mark.parametrize("word", ["UNSAFE_FORCE_ALL", "unsafe_force_all", " Unsafe_Force_All "])
def test_forcing_by_the_level_of_tensorflows_pass(word):
    settled = said(environment={LEVEL: word})
    assert settled.force_all
    assert settled.origins == {"unsafe_force_all": "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LEVEL"}
    assert not said({"unsafe_force_all": False}, environment={LEVEL: word}).force_all
    assert not said(environment={LEVEL: word, f"{NEURAL}UNSAFE_FORCE_ALL": "0"}).force_all


def test_the_other_level_of_tensorflows_pass():
    settled = said(environment={LEVEL: "TREAT_INFER_AS_DENY"})
    assert (settled.infer_as_deny, settled.force_all) == (True, False)
    assert settled.list_words() == ("treat_infer_as_deny: True",)
    assert not said(environment={LEVEL: ""}).infer_as_deny


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("FORCE_ALL", "did you mean 'UNSAFE_FORCE_ALL'"),
        ("1", "known are TREAT_INFER_AS_DENY, UNSAFE_FORCE_ALL"),
    ],
)
def test_a_level_that_tensorflow_would_leave_without_a_word_is_refused(word, hint):
    with pytest.raises(ConfigurationError, match=f"{LEVEL} cannot be '{word}'; {hint}"):
        said(environment={LEVEL: word})


@pytest.mark.parametrize(("word", "on"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_switch_of_tensorflows_extension(word, on):
    settled = said(environment={SWITCH: word})
    assert settled.switched_on is on
    assert settled.data_type is None  # what precisions and defaults say
    assert settled.list_words() == ()


def test_a_switch_that_is_neither_on_nor_off():
    with pytest.raises(ConfigurationError, match=f"{SWITCH} must be on or off, got 'perhaps'"):
        said(environment={SWITCH: "perhaps"})


def test_the_report_says_what_was_said_where():
    settled = said({"allowlist_add": ["AvgPool", "Softmax"]}, None, {f"{TF}LOG_PATH": "logs"})
    assert settled.describe_options() == (
        "allowlist_add: AvgPool, Softmax (from amp.allowlist_add)",
        f"log_path: logs (from {TF}LOG_PATH)",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"denylist_add": [1]}, "amp.denylist_add must be op types, separated by commas"),
        ({"denylist_add": 1}, "amp.denylist_add must be op types"),
        ({"data_type": "float8"}, "amp.data_type must be one of DEFAULT_DATA_TYPE, FLOAT16"),
        ({"unsafe_force_all": "perhaps"}, "amp.unsafe_force_all must be on or off"),
    ],
)
def test_what_cannot_be_understood(options, message):
    with pytest.raises(ConfigurationError, match=message):
        said(options)


def test_an_option_that_does_not_exist():
    options = AutoMixedPrecisionOptions()
    with pytest.raises(ConfigurationError, match="'denylist_ad'; did you mean 'denylist_add'"):
        options.denylist_ad = "Exp"


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        (f"{ITEX}DENY_ADD", f"'{ITEX}DENYLIST_ADD'"),
        (f"{TF}CLEARLIST_REMOVED", f"'{TF}CLEARLIST_REMOVE'"),
    ],
)
def test_a_variable_without_effect_names_the_nearest(caplog, variable, nearest):
    for _ in range(2):
        assert said(environment={variable: "Softmax"}).describe_options() == ()
    (line,) = caplog.messages
    assert line.startswith(f"the environment variable {variable} has no effect; did you mean ")
    assert nearest in line


def test_variables_with_an_effect_are_not_warned_of(caplog):
    said(environment={f"{ITEX}DATA_TYPE": "BFLOAT16", LEVEL: "UNSAFE_FORCE_ALL", SWITCH: "1"})
    assert caplog.messages == []
