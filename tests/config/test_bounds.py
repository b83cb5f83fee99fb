"""Numbers that nothing below can hold, and paths with NUL, are named by their key at once."""

from pathlib import Path

import numpy as np
import pytest

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.api.input_data import make_random_inputs
from neural_mp.api.loading import load_source
from neural_mp.api.saved_model import check_destination
from neural_mp.common import DataLoader
from neural_mp.config import load_settings, parse_settings, settings_from
from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.core.enums import Dialect
from neural_mp.core.plan import PrecisionPlan
from neural_mp.data.datasets import DummyDataset
from neural_mp.data.option_checks import (
    check_existing_path,
    check_finite_number,
    check_whole_number,
)
from neural_mp.errors import ConfigurationError, DataError, NeuralMPError
from neural_mp.jobs import tune_many
from neural_mp.profiling.kernel_log import read_kernel_log
from neural_mp.reporting.page import write_page
from neural_mp.runs.history import get_storage_url

DATASET = "dataset: {dummy: {shape: [3], size: 4}}"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("tuning.random_seed", "tuning: {random_seed: -1}"),
        ("tuning.random_seed", "tuning: {random_seed: 4294967296}"),
        ("tuning.random_seed", f"tuning: {{random_seed: {10**30}}}"),
        ("tuning.exit_policy.timeout", "tuning: {exit_policy: {timeout: -1}}"),
        ("tuning.exit_policy.timeout", "tuning: {exit_policy: {timeout: .inf}}"),
        ("tuning.exit_policy.timeout", "tuning: {exit_policy: {timeout: .nan}}"),
        ("tuning.exit_policy.timeout", "tuning: {exit_policy: {timeout: 1e400}}"),
        ("tuning.exit_policy.timeout", f"tuning: {{exit_policy: {{timeout: {10**350}}}}}"),
        ("tuning.exit_policy.max_trials", f"tuning: {{exit_policy: {{max_trials: {10**30}}}}}"),
        (
            "tuning.accuracy_criterion.absolute",
            f"tuning: {{accuracy_criterion: {{absolute: {10**350}}}}}",
        ),
        (
            "evaluation.accuracy.dataloader.batch_size",
            f"evaluation: {{accuracy: {{dataloader: {{batch_size: {10**18}, {DATASET}}}}}}}",
        ),
        (
            "evaluation.accuracy.dataloader.batch_size",
            f"evaluation: {{accuracy: {{dataloader: {{batch_size: 0, {DATASET}}}}}}}",
        ),
        ("evaluation.performance.iteration", "evaluation: {performance: {iteration: 99999999999}}"),
        ("tuning.workspace.path", 'tuning: {workspace: {path: "a\\0b"}}'),
        ("tuning.storage", 'tuning: {storage: "sqlite:///a\\0b"}'),
        ("model.name", 'model: {name: "net\\0.onnx"}'),
        ("mixed_precision.log_path", 'mixed_precision: {log_path: "log\\0"}'),
        ("model", '"model\\0": {}'),
        (
            "evaluation.accuracy.dataloader.dataset.numpy.inputs",
            'evaluation: {accuracy: {dataloader: {dataset: {numpy: {inputs: "x\\0.npy"}}}}}',
        ),
    ],
)
def test_a_file_is_told_the_key_of_what_is_out_of_bounds(key, text):
    with pytest.raises(ConfigurationError) as caught:
        parse_settings(text, "conf.yaml")
    first = str(caught.value)
    assert "conf.yaml, line 1: " in first
    assert key in first or key == "model"
    assert len(first) < 400


def test_files_of_intel_neural_compressor_keep_a_seed_below_zero():
    settings = parse_settings("tuning: {random_seed: -1}", dialect=Dialect.INC)
    assert settings.options.random_seed == 0
    with pytest.raises(ConfigurationError, match=r"tuning\.random_seed"):
        parse_settings(f"tuning: {{random_seed: {2**32}}}", dialect=Dialect.INC)


def test_a_number_in_base_60_is_none():
    """As one, these digits take minutes to read."""
    with pytest.raises(ConfigurationError, match=r"random_seed: expected a whole number"):
        parse_settings(f"tuning: {{random_seed: 1{':59' * 300_000}}}")


def test_what_is_megabytes_long_is_said_in_a_line():
    for text in (
        f"tuning: {{strategy: {{name: [{'x' * 1_000_000}]}}}}",
        f"mixed_precision: {{precisions: {'x' * 1_000_000}}}",
        f"? {'x' * 1_000_000}\n: 1",
    ):
        with pytest.raises(NeuralMPError) as caught:
            parse_settings(text)
        assert len(str(caught.value)) < 3000


def test_a_mapping_in_python_is_read_as_a_file_is():
    with pytest.raises(
        ConfigurationError, match=r"model\.name: must not contain the character NUL"
    ):
        settings_from({"model": {"name": Path("net\0.onnx")}})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("random_seed", -1),
        ("random_seed", 2**32),
        ("sampling_size", 0),
        ("sampling_size", 10**30),
        ("workspace", "a\0b"),
        ("storage", "sqlite:///a\0b"),
        ("model", "net\0.onnx"),
        ("model", Path("net\0.onnx")),
    ],
)
def test_options_in_python_are_named(option, value, net):
    with pytest.raises(ConfigurationError, match=option):
        MixedPrecision(**{"model": net, option: value}).fit()


@pytest.mark.parametrize(
    "call",
    [
        lambda: neural_mp.load("a\0b"),
        lambda: MixedPrecision("conf\0.yaml"),
        lambda: load_source("a\0b", None, None),
        lambda: tune_many("a\0b"),
        lambda: tune_many("conf.yaml", output="a\0b"),
        lambda: check_destination("a\0b"),
        lambda: PrecisionPlan().save("a\0b"),
        lambda: write_page("a\0b", ""),
        lambda: read_kernel_log("a\0b"),
        lambda: get_storage_url("a\0b"),
        lambda: check_existing_path("root", "a\0b"),
    ],
)
def test_a_path_with_nul_is_no_path_anywhere(call):
    with pytest.raises(ConfigurationError, match="NUL"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: ExitPolicy(timeout=float("inf")),
        lambda: ExitPolicy(timeout=float("nan")),
        lambda: ExitPolicy(timeout=10**400),
        lambda: ExitPolicy(timeout=-(10**400)),
        lambda: ExitPolicy(max_trials=10**30),
        lambda: AccuracyCriterion(10**400),
        lambda: AccuracyCriterion(float("inf")),
        lambda: DummyDataset(shape=[10**6, 10**6], size=1),
        lambda: DummyDataset(shape=[10**30], size=1),
        lambda: DummyDataset(shape=[3], size=10**30),
        lambda: DummyDataset(shape=[3], size=3, high=10**400),
        lambda: check_whole_number("seed", 10**5000),
        lambda: check_finite_number("scale", 10**5000),
        lambda: make_random_inputs(["100000,100000,100000"]),
    ],
)
def test_numbers_that_nothing_can_hold_are_refused(call):
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("given", [{"batch_size": 10**18}, {"batch_size": 0}, {"seed": -1}])
def test_a_loader_names_what_it_cannot_do(given):
    with pytest.raises(DataError, match=next(iter(given))):
        DataLoader(np.zeros((4, 2)), **given)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, -1, 10**18, 2**31 - 1])
def test_a_batch_that_fills_the_memory_is_not_made(size, net):
    model = load_source(net, None, np.zeros((2, 1, 8, 8), np.float32))
    assert len(model.example_inputs(3)[0]) == 3
    with pytest.raises(ConfigurationError, match="batch_size"):
        model.example_inputs(size)


@pytest.mark.slow
def test_a_tuning_file_of_many_values_ends_before_they_fill_the_memory():
    with pytest.raises(ConfigurationError, match=r"line 2: .* aliases expanded, exceeds 1000000"):
        parse_settings(f"model: {{}}\na: [{'1,' * 1_100_000}]")


@pytest.mark.slow
def test_a_tuning_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "conf.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigurationError, match=r"conf\.yaml.* exceeds the limit of 256 MiB"):
        load_settings(tmp_path / "conf.yaml")
