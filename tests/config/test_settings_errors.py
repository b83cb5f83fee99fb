import re
from dataclasses import dataclass

import pytest

from neural_mp.config import load_settings, parse_settings
from neural_mp.errors import ConfigurationError, UnknownPrecisionError


@dataclass(frozen=True)
class Bad:
    text: str
    line: int
    path: str
    says: tuple[str, ...] = ()


BAD = [
    Bad("tuning:\n  exit_policy:\n    max_trails: 5", 3, "tuning.exit_policy.max_trails",
        ("did you mean 'max_trials'?",)),
    Bad("model: {}\ntunning: {}", 2, "tunning", ("did you mean 'tuning'?",)),
    Bad("tuning:\n  exit_policy:\n    max_trials: many", 3, "tuning.exit_policy.max_trials",
        ("a whole number from 1", "'many'")),
    Bad("tuning: {exit_policy: {max_trials: 0}}", 1, "tuning.exit_policy.max_trials", ("found 0",)),
    Bad("tuning: {exit_policy: {max_trials: true}}", 1, "tuning.exit_policy.max_trials", ("True",)),
    Bad("tuning:\n  exit_policy:\n    timeout: -1", 3, "tuning.exit_policy.timeout", ("-1",)),
    Bad("tuning: {exit_policy: {timeout: .inf}}", 1, "tuning.exit_policy.timeout", ("inf",)),
    Bad("tuning: {exit_policy: {performance_only: 1}}", 1, "tuning.exit_policy.performance_only",
        ("true or false", "found 1")),
    Bad("\n\ntuning: [basic]", 3, "tuning", ("a mapping", "['basic']")),
    Bad("tuning: {strategy: 5}", 1, "tuning.strategy", ("a word", "found 5")),
    Bad("tuning: {objective: {speed: 1}}", 1, "tuning.objective", ("footprint",)),
    Bad("tuning: {workers: 0}", 1, "tuning.workers", ("from 1", "0")),
    Bad("tuning: {workers: 2.5}", 1, "tuning.workers", ("from 1", "2.5")),
    Bad("tuning:\n  workers: rai:10.0.0.1:6379", 2, "tuning.workers", ("'rai'", "ray")),
    Bad("tuning: {workers: {engine: rai}}", 1, "tuning.workers.engine", ("'rai'", "ray")),
    Bad("tuning: {workers: {cuont: 2}}", 1, "tuning.workers.cuont", ("did you mean", "count")),
    Bad("tuning: {objective: speed}", 1, "tuning.objective", ("footprint", "'speed'")),
    Bad("tuning: {random_seed: 1.5}", 1, "tuning.random_seed", ("1.5",)),
    Bad("tuning:\n  workspace:\n    resume: 3", 3, "tuning.workspace.resume", ("a path", "3")),
    Bad("tuning:\n  accuracy_criterion:\n    relative: 0.01\n    absolute: 0.02", 2,
        "tuning.accuracy_criterion", ("relative", "absolute")),
    Bad("tuning: {accuracy_criterion: {relative: -0.1}}", 1, "tuning.accuracy_criterion.relative",
        ("-0.1",)),
    Bad("tuning:\n  accuracy_criterion: {relative: 1}", 2, "tuning.accuracy_criterion",
        ("must be below 0.5, got 1 (100 % of the baseline)", "did you mean 0.01 (1 %)?")),
    Bad("tuning: {accuracy_criterion: {absolute: .nan}}", 1, "tuning.accuracy_criterion.absolute",
        ("nan",)),
    Bad("tuning:\n  accuracy_criterion:\n    absolute: 2%", 3, "tuning.accuracy_criterion.absolute",
        ("the unit of the metric", "'2%'; write relative: 2%")),
    Bad("device: npu", 1, "device", ("cpu, gpu", "'npu'")),
    Bad("model:\n  framework: pytorh", 2, "model.framework", ("did you mean 'pytorch'",)),
    Bad("model: {inputs: {a: 1}}", 1, "model.inputs", ("a list of names",)),
    Bad("mixed_precision:\n  precisions: [int8, bf61]", 2, "mixed_precision.precisions",
        ("bf61", "did you mean 'bf16'?")),
    Bad("mixed_precision: {precisions: []}", 1, "mixed_precision.precisions", ("got none",)),
    Bad("mixed_precision: {precisions: 1.5}", 1, "mixed_precision.precisions", ("1.5",)),
    Bad("mixed_precision: {precisions: bf16}\ngraph_optimization: {precisions: fp16}", 2,
        "graph_optimization.precisions", ("mixed_precision.precisions",)),
    Bad("quantization:\n  calibration:\n    sampling_size: 0", 3,
        "quantization.calibration.sampling_size", ("found 0",)),
    Bad("quantization: {calibration: {sampling_size: '10, x'}}", 1,
        "quantization.calibration.sampling_size", ("10, x",)),
    Bad("quantization: {calibration: {dataloader: {batch_size: 4}}}", 1,
        "quantization.calibration.dataloader", ("the key 'dataset'",)),
    Bad("evaluation:\n  accuracy:\n    dataloader:\n      batch_size: 0\n      dataset: a", 4,
        "evaluation.accuracy.dataloader.batch_size", ("found 0",)),
    Bad("evaluation: {accuracy: {dataloader: {dataset: {a: {}, b: {}}}}}", 1,
        "evaluation.accuracy.dataloader.dataset", ("one dataset name",)),
    Bad("evaluation: {accuracy: {dataloader: {dataset: a, last_batch: keep}}}", 1,
        "evaluation.accuracy.dataloader.last_batch", ("rollover", "'keep'")),
    Bad("evaluation: {accuracy: {dataloader: {dataset: a, transform: [Resize]}}}", 1,
        "evaluation.accuracy.dataloader.transform", ("a mapping of transform names",)),
    Bad("evaluation: {accuracy: {dataloader: {dataset: a, bacth_size: 3}}}", 1,
        "evaluation.accuracy.dataloader.bacth_size", ("did you mean 'batch_size'?",)),
    Bad("evaluation: {accuracy: {metric: [accuracy]}}", 1, "evaluation.accuracy.metric",
        ("a metric name",)),
    Bad("evaluation: {accuracy: {metric: {f1: , mse: }}}", 1, "evaluation.accuracy.metric",
        ("f1, mse", "multi_metrics")),
    Bad("evaluation: {accuracy: {metric: {topk: 0}}}", 1, "evaluation.accuracy.metric.topk",
        ("found 0",)),
    Bad("evaluation: {accuracy: {metric: {f1: 3}}}", 1, "evaluation.accuracy.metric.f1",
        ("a mapping of its options",)),
    Bad("evaluation:\n  accuracy:\n    metric: f1\n    multi_metrics: {f1: }", 2,
        "evaluation.accuracy", ("metric", "multi_metrics")),
    Bad("evaluation: {accuracy: {multi_metrics: {f1: , mse: , weight: [1]}}}", 1,
        "evaluation.accuracy.multi_metrics.weight", ("2 weights", "f1, mse", "found 1")),
    Bad("evaluation: {accuracy: {multi_metrics: {f1: , weight: [-1]}}}", 1,
        "evaluation.accuracy.multi_metrics.weight", ("[-1]",)),
    Bad("evaluation: {accuracy: {multi_metrics: {f1: , weight: {a: 1}}}}", 1,
        "evaluation.accuracy.multi_metrics.weight", ("'a': 1",)),
    Bad("evaluation: {accuracy: {multi_metrics: {f1: , F1: }}}", 1,
        "evaluation.accuracy.multi_metrics", ("each metric once", "f1")),
    Bad("evaluation: {accuracy: {multi_metrics: {weight: [1]}}}", 1,
        "evaluation.accuracy.multi_metrics", ("at least one metric",)),
    Bad("evaluation:\n  performance:\n    warmup: -1", 3, "evaluation.performance.warmup", ("-1",)),
    Bad("evaluation:\n  performance:\n    cores_per_instance: 2\n    configs:\n"
        "      cores_per_instance: 4", 3, "evaluation.performance.cores_per_instance", ("2", "4")),
    Bad("quantization:\n  model_wise:\n    weight: {granularity: per_chanel}", 3,
        "quantization.model_wise.weight.granularity", ("per_channel", "per_chanel")),
    Bad("quantization:\n  op_wise:\n    a.b:\n      weight:\n        dtype: int5", 5,
        "quantization.op_wise.a.b.weight.dtype", ("int8, uint8, int4, uint4, int3, uint3", "int5")),
    Bad("quantization: {op_wise: {a: {weight: {dtype: int8}, activation: {dtype: fp32}}}}", 1,
        "quantization.op_wise.a", ("must have a common precision", "int8", "fp32")),
    Bad("quantization: {op_wise: {a: {weights: {}}}}", 1, "quantization.op_wise.a.weights",
        ("did you mean 'weight'?",)),
    Bad("quantization: {op_wise: [a]}", 1, "quantization.op_wise", ("a mapping of names",)),
    Bad("quantization:\n  op_wise: {a: {precisions: fp32}}\n"
        "mixed_precision:\n  op_wise:\n    a: {precisions: bf16}", 5,
        "mixed_precision.op_wise.a", ("quantization.op_wise",)),
    Bad("quantization: {optype_wise: {conv: {precisions: int5}}}", 1,
        "quantization.optype_wise.conv.precisions", ("int5",)),
    Bad("device: cpu\ntuning: {}\ndevice: gpu", 3, "device", ("twice", "line 1")),
    Bad("tuning:\n  random_seed: 1\n  random_seed: 2", 3, "tuning.random_seed", ("twice",)),
    Bad("tuning:\n  ? [a, b]\n  : 1", 2, "tuning", ("a key must be a string",)),
    Bad("tuning:\n  storage: !!python/object:os.system x", 2, "tuning.storage", ("os.system",)),
    Bad("tuning: &x\n  strategy: *x", 2, "tuning.strategy", ("has no anchor before it",)),
    Bad("tuning: {<<: [1], random_seed: 1}", 1, "tuning", ("'<<' must be a mapping",)),
    Bad("tuning: {random_seed: !!int one}", 1, "tuning.random_seed", ("one",)),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.text.replace("\n", "|"))
def test_the_message_names_file_line_path_and_culprit(bad):
    with pytest.raises(ConfigurationError) as caught:
        parse_settings(bad.text, origin="conf.yaml")
    message = str(caught.value)
    where = f"conf.yaml, line {bad.line}: {bad.path}: "
    assert message.startswith(where)
    for expected in bad.says:
        assert expected in message[len(where) :]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "empty"),
        ("# only a comment\n", 1, "empty"),
        ("- model\n", 1, "must be a mapping"),
        ("\njust words\n", 2, "must be a mapping"),
        ("device: cpu\ntuning: [", 2, "not readable YAML"),
        ("device: cpu\n\tmodel: {}\n", 2, "not readable YAML"),
        ("device: cpu\n  model: {}\n", 2, "not readable YAML"),
        ("device: cpu\nmodel: \x00\n", 2, "not readable YAML"),
        ("device: cpu\n---\ndevice: gpu\n", 2, "not readable YAML"),
        ("device: *missing\n", 1, "not readable YAML"),
        ("device: " + "[" * 5000, 1, "nesting exceeds"),
    ],
)
def test_text_that_is_no_tuning_file(text, line, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        parse_settings(text, origin="conf.yaml")
    assert str(caught.value).startswith(f"conf.yaml, line {line}: ")


def test_a_precision_that_does_not_exist_keeps_its_class():
    with pytest.raises(UnknownPrecisionError, match=re.escape("<text>, line 1: mixed_precision")):
        parse_settings("mixed_precision: {precisions: int9}")


def test_aliases_that_multiply_are_stopped():
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 9):
        many = ", ".join([f"*a{level - 1}"] * 10)
        levels.append(f"a{level}: &a{level} [{many}]")
    with pytest.raises(ConfigurationError, match="line 6: a5.*aliases expanded, exceeds 1000000"):
        parse_settings("\n".join(levels))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml.*cannot be read"):
        load_settings(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_settings(tmp_path)


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "conf.yaml"
    path.write_bytes(b"device: cpu\nmodel: {name: \xff\xfe}\n")
    with pytest.raises(ConfigurationError, match=r"conf\.yaml, line 2: .*not UTF-8"):
        load_settings(path)
