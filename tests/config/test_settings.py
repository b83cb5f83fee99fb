import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from neural_mp.config import (
    EvaluationSettings,
    MetricSettings,
    Options,
    PerformanceSettings,
    Settings,
    load_settings,
    parse_settings,
    settings_to_yaml,
)
from neural_mp.config.inc_dialect import IGNORED
from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError
from neural_mp.space.capability import Constraints, OpConstraint, QuantConstraint

FULL = """
model:
  name: digits
  framework: pytorch
  inputs: image, mask
  outputs: [scores]
device: gpu
mixed_precision:
  precisions: fp16, int8, bf16
  op_wise:
    stem: {precisions: fp32}
quantization:
  calibration:
    sampling_size: 64
    dataloader:
      batch_size: 8
      shuffle: true
      seed: 3
      last_batch: discard
      dataset: {numpy: {inputs: x.npy, labels: y.npy}}
      transform: {Rescale: , Normalize: {mean: [0.5], std: [0.25]}}
  model_wise:
    activation: {scheme: asymmetric, granularity: per_tensor, algorithm: [minmax, kl]}
  optype_wise:
    linear: {weight: {dtype: int8, scheme: symmetric, granularity: per_channel}}
  op_wise:
    layer1.0.conv: {weight: {dtype: fp32}, activation: {dtype: fp32}}
    head: {precisions: any, activation: {dtype: uint8}}
    0:
tuning:
  strategy: basic
  accuracy_criterion: {absolute: 1e-2, higher_is_better: false}
  objective: {footprint: 0.3, performance: 0.7}
  early_stopping: false
  min_speedup: 1.1
  workers: 2
  exit_policy: {timeout: 60, max_trials: 7, performance_only: true}
  random_seed: 5
  workspace: {path: ./run, resume: true}
  storage: sqlite:///runs.db
evaluation:
  accuracy:
    multi_metrics: {topk: 5, F1: , "my.metrics:Mine": {alpha: 2}, weight: [0.5, 0.3, 0.2]}
    dataloader: {batch_size: 4, dataset: "my.data:Dataset"}
    postprocess: {transform: {Cast: {dtype: int64}}}
    max_batches: 7
  performance:
    warmup: 0
    iteration: 10
    cores_per_instance: 4
    streams: 2
    instances: 3
    dataloader: {dataset: {dummy: {shape: [8, 3, 32, 32]}}}
"""

FLOAT32 = OpConstraint(precisions=(Precision.FP32,))

EXPECTED = Settings(
    Options(
        model="digits",
        framework="pytorch",
        inputs=("image", "mask"),
        outputs=("scores",),
        precisions=(Precision.INT8, Precision.BF16, Precision.FP16),
        sampling_size=64,
        strategy="basic",
        accuracy_criterion=AccuracyCriterion(0.01, relative=False, higher_is_better=False),
        objective={"footprint": 0.3, "performance": 0.7},
        early_stopping=False,
        min_speedup=1.1,
        workers=2,
        exit_policy=ExitPolicy(60.0, 7, performance_only=True),
        random_seed=5,
        workspace="./run",
        resume=True,
        storage="sqlite:///runs.db",
        max_batches=7,
    ),
    device="gpu",
    constraints=Constraints(
        model_wise=OpConstraint(
            activation=QuantConstraint(
                scheme=("asymmetric",), granularity=("per_tensor",), algorithm=("minmax", "kl")
            )
        ),
        optype_wise={
            "linear": OpConstraint(
                precisions=(Precision.INT8,),
                weight=QuantConstraint(("int8",), ("symmetric",), ("per_channel",)),
            )
        },
        op_wise={
            "layer1.0.conv": FLOAT32,
            "head": OpConstraint(activation=QuantConstraint(dtype=("uint8",))),
            "stem": FLOAT32,
        },
    ),
    calibration_dataloader={
        "batch_size": 8,
        "shuffle": True,
        "seed": 3,
        "last_batch": "discard",
        "dataset": {"numpy": {"inputs": "x.npy", "labels": "y.npy"}},
        "transform": {"Rescale": {}, "Normalize": {"mean": [0.5], "std": [0.25]}},
    },
    evaluation=EvaluationSettings(
        metrics=(
            MetricSettings("topk", {"k": 5}, 0.5),
            MetricSettings("f1", {}, 0.3),
            MetricSettings("my.metrics:Mine", {"alpha": 2}, 0.2),
        ),
        dataloader={"batch_size": 4, "dataset": {"my.data:Dataset": {}}},
        postprocess={"Cast": {"dtype": "int64"}},
        performance=PerformanceSettings(
            0, 10, 4, {"dataset": {"dummy": {"shape": [8, 3, 32, 32]}}}, 2, 3
        ),
    ),
)


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def metrics(text):
    return parse_settings(f"evaluation: {{accuracy: {{{text}}}}}").evaluation.metrics


def test_every_key_is_read(tmp_path):
    path = tmp_path / "conf.yaml"
    path.write_text(FULL, encoding="utf-8")
    assert load_settings(path) == EXPECTED
    assert load_settings(str(path)) == EXPECTED


def test_transforms_stay_in_order():
    dataloader = load(transform="{Resize: {size: 8}, ToArray: , LabelShift: 1, Cast: {}}")
    assert list(dataloader["transform"]) == ["Resize", "ToArray", "LabelShift", "Cast"]


def load(**keys):
    written = ", ".join(f"{key}: {value}" for key, value in {"dataset": "a", **keys}.items())
    text = f"quantization: {{calibration: {{dataloader: {{{written}}}}}}}"
    return parse_settings(text).calibration_dataloader


def test_without_anything_else_defaults_hold():
    assert parse_settings("device: cpu") == Settings()
    assert parse_settings("{tuning: , evaluation: {accuracy: }}") == Settings()


def test_a_quantization_section_means_int8():
    assert parse_settings("quantization:").options.precisions == (Precision.INT8,)
    assert parse_settings("{quantization: {}, mixed_precision: {}}").options.precisions == (
        Precision.INT8,
    )
    text = "{quantization: {}, mixed_precision: {precisions: bf16}}"
    assert parse_settings(text).options.precisions == (Precision.BF16,)
    assert parse_settings("{quantization: {}, mixed_precision: {precisions: any}}") == Settings()


@pytest.mark.parametrize(
    ("written", "size"), [("50", 50), ("'100, 200'", 200), ("[300, 20]", 300), ("100, 50", 100)]
)
def test_the_largest_sampling_size_is_taken(written, size):
    settings = parse_settings(f"quantization:\n  calibration:\n    sampling_size: {written}\n")
    assert settings.options.sampling_size == size


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{relative: 0.02}", AccuracyCriterion(0.02)),
        ("{relative: 2%}", AccuracyCriterion(0.02)),
        ("{absolute: 3}", AccuracyCriterion(3.0, relative=False)),
        ("{absolute: 1e-3}", AccuracyCriterion(0.001, relative=False)),
        ("{higher_is_better: false}", AccuracyCriterion(higher_is_better=False)),
    ],
)
def test_criterion(written, expected):
    settings = parse_settings(f"tuning: {{accuracy_criterion: {written}}}")
    assert settings.options.accuracy_criterion == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("metric: accuracy", MetricSettings("accuracy")),
        ("metric: {Accuracy: }", MetricSettings("accuracy")),
        ("metric: {topk: 1}", MetricSettings("topk", {"k": 1})),
        ("metric: {topk: {k: 3}}", MetricSettings("topk", {"k": 3})),
        ("metric: 'Pkg.metrics:Mine'", MetricSettings("Pkg.metrics:Mine")),
    ],
)
def test_metric(written, expected):
    assert metrics(written) == (expected,)


def test_metrics_without_weights_count_alike():
    assert [metric.weight for metric in metrics("multi_metrics: {MSE: , MAE: }")] == [0.5, 0.5]


@pytest.mark.parametrize("weight", ["'0.7 0.3'", "'0.7, 0.3'", "[0.7, 0.3]"])
def test_weights_are_a_list_or_words(weight):
    parsed = metrics(f"multi_metrics: {{MSE: , MAE: , weight: {weight}}}")
    assert [metric.weight for metric in parsed] == [0.7, 0.3]


def test_metrics_that_each_have_to_meet_the_target_have_no_weight():
    parsed = metrics("multi_metrics: {MSE: , F1: , weight: each, higher_is_better: [false, true]}")
    assert [metric.weight for metric in parsed] == [None, None]
    assert [metric.higher_is_better for metric in parsed] == [False, True]


@pytest.mark.parametrize(
    ("written", "workspace", "resume"),
    [
        ("./run", "./run", False),
        ("{path: ./run}", "./run", False),
        ("{resume: true}", Options().workspace, True),
        ("{resume: ./old}", "./old", True),
        ("{path: ./old, resume: ./old}", "./old", True),
    ],
)
def test_workspace(written, workspace, resume):
    options = parse_settings(f"tuning: {{workspace: {written}}}").options
    assert (options.workspace, options.resume) == (workspace, resume)


def test_anchors_and_merged_mappings_are_read():
    text = """
quantization:
  calibration:
    dataloader: &data {batch_size: 4, dataset: {dummy: {shape: [8, 4]}}}
evaluation:
  accuracy:
    dataloader: {<<: *data, batch_size: 16}
"""
    settings = parse_settings(text)
    assert settings.calibration_dataloader["batch_size"] == 4
    assert settings.evaluation.dataloader == {
        "batch_size": 16,
        "dataset": {"dummy": {"shape": [8, 4]}},
    }


def test_the_full_example_survives_a_round_trip():
    assert parse_settings(settings_to_yaml(EXPECTED)) == EXPECTED


def test_workers_of_an_engine_are_written_and_read_back():
    workers = {"engine": "ray", "address": "10.0.0.1:6379", "count": 8}
    settings = parse_settings(f"tuning: {{workers: {workers}}}")
    assert settings.options.workers == workers
    assert parse_settings(settings_to_yaml(settings)) == settings


@pytest.mark.parametrize(
    "metrics",
    [
        (MetricSettings("mse"), MetricSettings("mse")),
        (MetricSettings("weight", weight=0.5), MetricSettings("mse")),
        (MetricSettings("mse", {"function": object()}),),
    ],
)
def test_what_yaml_cannot_hold_is_an_error(metrics):
    with pytest.raises(ConfigurationError, match="cannot be|unique names"):
        settings_to_yaml(Settings(evaluation=EvaluationSettings(metrics)))


def test_importing_it_stays_light():
    heavy = "{'torch', 'tensorflow', 'optuna', 'sklearn', 'scipy', 'rich', 'typer'}"
    code = f"import sys, neural_mp.config; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_reference_names_every_key_that_is_ignored():
    reference = (Path(__file__).parents[2] / "docs" / "yaml.md").read_text(encoding="utf-8")
    for path in IGNORED:
        last = path.rsplit(".", 1)[1] if "." in path else path
        assert re.search(rf"`[^`]*\b{last}`", reference), path


def test_the_example_in_the_reference_reads():
    reference = (Path(__file__).parents[2] / "docs" / "yaml.md").read_text(encoding="utf-8")
    example = re.search(r"```yaml\n(.*?)```", reference, re.DOTALL)[1]
    settings = parse_settings(example)
    assert settings.options.precisions == (Precision.INT8, Precision.BF16)
    assert parse_settings(settings_to_yaml(settings)) == settings


@pytest.mark.parametrize("approach", ["static", "dynamic", "weight_only"])
def test_the_way_of_int8_is_read_and_written(approach):
    settings = parse_settings(f"quantization:\n  approach: {approach}\n")
    assert settings.options.approach == approach
    assert parse_settings(settings_to_yaml(settings)) == settings


def test_a_model_taken_apart_into_modules_is_read_and_written():
    settings = parse_settings("model:\n  capture: modules\n")
    assert settings.options.capture == "modules"
    assert parse_settings(settings_to_yaml(settings)) == settings
