"""Scripts for Intel Neural Compressor, in their two dialects, on models of three frameworks."""

import logging
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from onnx_nets import as_onnx

import neural_mp
from neural_mp.compat.inc import (
    Metric,
    PostTrainingQuantConfig,
    benchmark,
    conf,
    mix_precision,
    quantization,
)
from neural_mp.compat.inc.config import (
    AccuracyCriterion,
    BenchmarkConfig,
    MixedPrecisionConfig,
    TuningCriterion,
)
from neural_mp.compat.inc.data import Datasets
from neural_mp.compat.inc.experimental import Benchmark, MixedPrecision, Quantization, common
from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.core import hardware
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, DataError


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch, quick_runs):
    monkeypatch.chdir(tmp_path)
    yield
    conf.clear()


@pytest.fixture(scope="module")
def onnx_net(net):
    return as_onnx(net)


class Pairs:
    """A dataset: images and labels."""

    def __init__(self, split, count=256):
        self.images, self.labels = split.images[:count], split.labels[:count]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Hits:
    """A metric as their scripts write one."""

    def __init__(self, scale=1.0):
        self.scale = scale
        self.reset()

    def reset(self):
        self.right = self.all = 0

    def update(self, preds, labels):
        self.right += int((np.asarray(preds).argmax(1) == np.asarray(labels)).sum())
        self.all += len(labels)

    def result(self):
        return self.scale * self.right / self.all


@pytest.fixture
def loader(digits):
    return common.DataLoader(Pairs(digits[1]), batch_size=64)


def accuracy_of(model, split):
    with torch.no_grad():
        predicted = model(torch.from_numpy(split.images[:256])).argmax(1)
    return float((predicted.numpy() == split.labels[:256]).mean())


YAML = """
version: 1.0
model: {name: digits, framework: pytorch_fx}
quantization:
  approach: post_training_static_quant
  calibration: {sampling_size: 100}
evaluation:
  accuracy: {metric: {topk: 1}}
tuning:
  objective: modelsize
  accuracy_criterion: {relative: 0.01}
  exit_policy: {timeout: 0, max_trials: 5}
  random_seed: 9527
"""


def test_quantization_by_yaml(net, digits, loader, tmp_path):
    (tmp_path / "conf.yaml").write_text(YAML)
    quantizer = Quantization("conf.yaml")
    quantizer.model = common.Model(net)
    quantizer.calib_dataloader = loader
    quantizer.eval_dataloader = loader
    q_model = quantizer.fit()
    assert q_model.plan.counts()["int8"] > 0
    assert accuracy_of(q_model, digits[1]) > accuracy_of(net, digits[1]) - 0.02
    q_model.save("saved_results")
    again = neural_mp.compat.inc.utils.load("saved_results", net)
    assert accuracy_of(again, digits[1]) == accuracy_of(q_model.model, digits[1])


def test_mixed_precision_by_settings_in_python(net, digits, monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    conf.model.framework = "pytorch"
    conf.tuning.exit_policy.max_trials = 3
    converter = MixedPrecision(conf)
    assert str(converter) == "MixedPrecision"
    converter.precisions = "fp32, bf16"
    assert converter.precisions == ["bf16", "fp32"]
    converter.model = net
    models = []

    def evaluate(model):
        models.append(model)
        return accuracy_of(model, digits[1])

    converter.eval_func = evaluate
    output_model = converter()
    assert output_model.plan.counts().get("bf16", 0) > 0
    assert all(isinstance(model, torch.nn.Module) for model in models)


@pytest.mark.slow
def test_an_output_that_the_graph_lacks_is_named_and_left_out(monkeypatch, caplog):
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setenv("FORCE_BF16", "1")
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 3], name="input")
        kernel = tf.constant(np.full((3, 3, 3, 4), 0.1, np.float32))
        tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"), name="final")
    converter = MixedPrecision()
    converter.precisions = ["bf16", "fp32"]
    converter.output = "final, fianl"
    converter.model = graph.as_graph_def()
    converter.eval_func = lambda model: 0.5
    with caplog.at_level(logging.WARNING):
        output_model = converter.fit()
    assert any(node.op == "Cast" for node in output_model.graph_def.node)
    assert "output 'fianl' is ignored: the model has no such tensor" in caplog.text
    assert "did you mean 'final'?" in caplog.text
    assert converter.output == "final, fianl"


def test_fp16_that_is_forced_leaves_an_onnx_model_alone_where_it_gains_nothing(
    monkeypatch, caplog, onnx_net, plain_machine
):
    machine = replace(plain_machine, forced=frozenset({Precision.FP16}))
    monkeypatch.setattr(hardware, "detect", lambda: machine)
    converter = MixedPrecision()
    converter.precisions = "fp16"
    converter.model = onnx_net
    with caplog.at_level(logging.WARNING):
        output_model = converter.fit()
    assert not any(node.op_type == "Cast" for node in output_model.nodes())
    assert "ONNX Runtime has no FP16 kernels" in caplog.text


@pytest.mark.slow
def test_a_metric_by_its_class_and_a_postprocess(net, loader):
    class Doubled:
        def __call__(self, sample):
            preds, labels = sample
            return 2 * preds, labels

    quantizer = Quantization(conf)
    quantizer.model = net
    quantizer.calib_dataloader = quantizer.eval_dataloader = loader
    quantizer.metric = common.Metric(Hits, name="hits", scale=100.0)
    quantizer.postprocess = common.Postprocess(Doubled)
    result = quantizer.fit()
    assert 90 < result.report.accuracy <= 100


@pytest.mark.slow
def test_a_target_that_is_missed_gives_the_model_back_and_says_so(net, loader, caplog):
    results = iter([0.9, *[0.1] * 50])
    quantizer = Quantization(conf)
    quantizer.model = net
    quantizer.calib_dataloader = loader
    quantizer.eval_func = lambda model: next(results)
    with caplog.at_level(logging.WARNING):
        result = quantizer.fit()
    assert "where Intel Neural Compressor returns None" in caplog.text
    assert result.model is net


def test_version_2_quantization(net, digits, loader):
    config = PostTrainingQuantConfig(
        approach="static",
        calibration_sampling_size=[64],
        accuracy_criterion=AccuracyCriterion(tolerable_loss=0.02),
        tuning_criterion=TuningCriterion(max_trials=4, strategy="basic", objective="modelsize"),
        op_name_dict={"head": {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}}},
    )
    q_model = quantization.fit(
        net,
        config,
        calib_dataloader=loader,
        eval_dataloader=loader,
        eval_metric=Metric(name="topk", k=1),
    )
    assert q_model.plan.counts()["int8"] > 0
    assert accuracy_of(q_model.model, digits[1]) > 0.9


FLOAT = {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}}


def test_names_of_ops_are_beginnings_and_one_that_is_missing_is_said(net, loader):
    names = list(quantization.fit(net, calib_dataloader=loader).plan)
    start = names[0][:3]
    config = PostTrainingQuantConfig(op_name_dict={start: FLOAT, "no_such_op": FLOAT})
    result = quantization.fit(net, config, calib_dataloader=loader)
    limited = [name for name in names if name.startswith(start)]
    assert {str(result.plan[name].precision) for name in limited} == {"fp32"}
    assert any("'no_such_op'; no op of the model" in line for line in result.report.warnings)


@pytest.mark.slow
def test_version_2_mixed_precision(net, digits, monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    result = mix_precision.fit(
        net, MixedPrecisionConfig(), eval_func=lambda model: accuracy_of(model, digits[1])
    )
    assert set(result.plan.counts()) <= {"bf16", "fp32"}


def test_options_without_meaning_are_named(caplog):
    config = PostTrainingQuantConfig(backend="ipex", recipes={"smooth_quant": True})
    with caplog.at_level(logging.WARNING):
        config.settings()
    assert "backend='ipex' has no effect" in caplog.text
    assert "recipes={'smooth_quant': True} has no effect" in caplog.text


def test_a_criterion_is_relative_or_absolute():
    criterion = AccuracyCriterion(criterion="absolute", tolerable_loss=0.5)
    assert (criterion.relative, criterion.absolute) == (None, 0.5)
    criterion.relative = 0.01
    assert (criterion.relative, criterion.absolute) == (0.01, None)
    with pytest.raises(ConfigurationError, match="did you mean 'relative'"):
        AccuracyCriterion(criterion="relativ")


def test_speed_in_one_process(net, loader):
    speed = benchmark.fit(net, BenchmarkConfig(warmup=1, iteration=4), b_dataloader=loader)
    assert (len(speed.seconds), len(speed.seconds[0]), speed.batch_size) == (1, 4, 64)
    assert speed.throughput == pytest.approx(64 * 4 / sum(speed.seconds[0]))


@pytest.mark.slow
def test_instances_run_on_cores_of_their_own(onnx_net, loader):
    import os

    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core is no two")
    config = BenchmarkConfig(warmup=1, iteration=3, cores_per_instance=1, num_of_instance=2)
    speed = benchmark.fit(onnx_net, config, b_dataloader=loader)
    assert len(set(speed.cores)) == 2
    assert all(len(cores) == 1 for cores in speed.cores)
    assert speed.throughput == pytest.approx(sum(64 * 3 / sum(times) for times in speed.seconds))
    assert speed.log_lines()[-3] == "Summary of 2 instances of 1 cores"
    assert speed.log_lines()[-1] == f"Throughput sum [samples/second]: {speed.throughput:.3f}"


def test_more_cores_than_there_are_run_as_one_instance_with_a_warning(net, loader, caplog):
    config = BenchmarkConfig(iteration=3, cores_per_instance=1000, num_of_instance=2)
    with caplog.at_level(logging.WARNING):
        speed = benchmark.fit(net, config, b_dataloader=loader)
    assert (len(speed.seconds), len(speed.seconds[0])) == (1, 3)
    assert "num_of_instance is 2 with 1000 cores each" in caplog.text


def test_a_function_in_place_of_the_measurement_gets_the_object_of_a_file(onnx_net):
    assert benchmark.fit(onnx_net, b_func=lambda model: model.graph.node[0].op_type) == "Conv"


def test_batches_are_required(net):
    with pytest.raises(DataError, match="b_dataloader must be set"):
        benchmark.fit(net, BenchmarkConfig())


@pytest.mark.slow
def test_benchmark_of_version_1(net, loader, tmp_path):
    (tmp_path / "conf.yaml").write_text(YAML)
    evaluator = Benchmark("conf.yaml")
    evaluator.model = net
    evaluator.b_dataloader = loader
    accuracy, batch_size, seconds = evaluator("accuracy")["accuracy"]
    assert (accuracy > 0.9, batch_size, len(seconds)) == (True, 64, 4)
    assert evaluator("performance")["performance"].throughput > 0
    with pytest.raises(ConfigurationError, match="mode must be performance or accuracy"):
        evaluator("speed")


def test_benchmark_gives_each_of_several_metrics_without_weights(net, loader, tmp_path):
    written = YAML.replace("metric: {topk: 1}", "multi_metrics: {topk: 1, Accuracy: {}}")
    assert written != YAML
    (tmp_path / "conf.yaml").write_text(written)
    evaluator = Benchmark("conf.yaml")
    evaluator.model = net
    evaluator.b_dataloader = loader
    accuracies, _, _ = evaluator("accuracy")["accuracy"]
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1] > 0.9


def test_a_dataset_by_name_takes_a_transform():
    def doubled(sample):
        return 2 * sample[0], sample[1]

    make = Datasets("tensorflow")["dummy"]
    plain, twice = make(shape=(4, 3)), make(shape=(4, 3), transform=doubled)
    np.testing.assert_array_equal(twice[1][0], 2 * plain[1][0])
    with pytest.raises(ConfigurationError, match="did you mean 'dummy'"):
        Datasets("tensorflow")["dumy"]


def test_what_is_not_here_says_so_when_it_is_used():
    from neural_mp.compat.inc.config import TensorflowQATModel
    from neural_mp.compat.inc.experimental import Pruning

    with pytest.raises(NotHereError, match="Pruning .* is not supported: .*nothing is pruned"):
        Pruning("conf.yaml")
    with pytest.raises(NotHereError, match="training.quantization_aware"):
        TensorflowQATModel()
    with pytest.raises(ImportError, match="Quantisation"):
        from neural_mp.compat.inc.experimental import Quantisation  # noqa: F401


@pytest.mark.slow
def test_a_script_runs_untouched(tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 3\n")
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from helper import VALUE\n"
        "from neural_compressor.experimental import Quantization, common\n"
        "from neural_compressor.conf.config import QuantConf\n"
        "from neural_compressor.utils import logger\n"
        "from neural_compressor import conf, options, quantization\n"
        "conf.model.framework = 'pytorch'\n"
        "print(Quantization(conf), VALUE, sys.argv[1:])\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "neural_mp.compat.inc", "script.py", "--tune"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stdout == "Quantization 3 ['--tune']\n"
    run = subprocess.run(
        [sys.executable, "-m", "neural_mp.compat.inc", "nix.py"], capture_output=True, text=True
    )
    assert (run.returncode, "the first argument must be a script" in run.stderr) == (2, True)
