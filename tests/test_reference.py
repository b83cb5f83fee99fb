"""The pages and the JSON Schema that the declarations of the options determine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from neural_mp import MixedPrecision
from neural_mp.config import Options, Settings, parse_settings, settings_to_yaml
from neural_mp.config.options import OPTIONS
from neural_mp.errors import ConfigurationError

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)


def test_pages_and_schema_are_those_of_the_declarations():
    for file, text in reference.pages().items():
        assert file.read_text(encoding="utf-8") == text, f"run python docs/reference.py: {file}"


def test_the_table_of_tested_versions_has_the_form_that_the_script_writes():
    spec = importlib.util.spec_from_file_location("tested", ROOT / "docs" / "tested_versions.py")
    tested = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tested)
    page = tested.PAGE.read_text(encoding="utf-8")
    rows = tested.read_page_rows(page)
    assert rows
    assert {len(row) for row in rows} == {len(tested.COLUMNS)}
    assert tested.write_table(page) == page, "run python docs/tested_versions.py"
    again = (*rows[0][:-1], "2000-01-01")
    changed = tested.read_page_rows(tested.write_table(page, [again]))
    assert changed == [again, *rows[1:]]
    with pytest.raises(ValueError, match="must have the columns"):
        tested.read_results("onnxrt\tpassed\n")


def _validator():
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft202012Validator(reference.tuning_file_schema())


@pytest.mark.parametrize("file", sorted((ROOT / "conf").glob("*.yaml")), ids=lambda file: file.name)
def test_working_files_match_the_json_schema(file):
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert [error.message for error in _validator().iter_errors(content)] == []


def test_the_example_of_the_reference_matches_the_json_schema():
    page = (ROOT / "docs" / "yaml.md").read_text(encoding="utf-8")
    example = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]
    assert [error.message for error in _validator().iter_errors(yaml.safe_load(example))] == []


@pytest.mark.parametrize(
    "text",
    [
        "tuning: {rounding_step: 3}",
        "tuning: {rounding_steps: 0}",
        "tuning: {random_seed: -1}",
        "tuning: {cache: 3}",
        "target: avx3",
        "quantization: {calibration: {seed: first}}",
        "tuning: {exit_policy: {max_trials: none}}",
    ],
)
def test_what_the_reader_refuses_the_json_schema_refuses(text):
    with pytest.raises(ConfigurationError):
        parse_settings(text)
    assert list(_validator().iter_errors(yaml.safe_load(text)))


@pytest.mark.parametrize(
    "text",
    [
        "quantization:",
        "tuning: {exit_policy: }",
        "tuning: {random_seed: null}",
        "evaluation: {performance: {warmup: }}",
        "mixed_precision: {op_wise: {conv: }}",
    ],
)
def test_a_key_without_a_value_counts_as_missing_in_the_json_schema_too(text):
    parse_settings(text)
    assert [error.message for error in _validator().iter_errors(yaml.safe_load(text))] == []


def test_empty_words_of_a_file_are_the_defaults():
    options = parse_settings("tuning: {workspace: '', strategy: ''}").options
    assert (options.workspace, options.strategy) == (Options().workspace, Options().strategy)


def test_constraints_set_in_python_stay_with_their_object():
    settings = parse_settings("tuning: {random_seed: 1}")
    assert settings_to_yaml(settings)  # reads every option
    first = MixedPrecision(settings)
    first.op_wise["fc"] = "fp32"
    assert MixedPrecision(settings).op_wise == {}


def test_the_help_of_python_names_every_option():
    text = MixedPrecision.__doc__
    assert [name for name in OPTIONS if f"\n        {name}: " not in text] == []


def test_options_at_their_default_are_not_written():
    assert "rounding_steps" not in settings_to_yaml(Settings())
    written = settings_to_yaml(Settings(Options(rounding_steps=7, objective="performance")))
    assert yaml.safe_load(written)["tuning"] == {"objective": "performance", "rounding_steps": 7}


def test_a_value_of_an_option_with_a_mapping_belongs_to_one_object():
    first, second = MixedPrecision(), MixedPrecision()
    first.op_wise["fc"] = "fp32"
    assert (first.op_wise, second.op_wise) == ({"fc": "fp32"}, {})
