import warnings

import pytest

from neural_mp.config import (
    IgnoredSettingWarning,
    MetricSettings,
    load_settings,
    parse_settings,
    settings_to_yaml,
)
from neural_mp.core.precision import Precision
from neural_mp.space.capability import OpConstraint, QuantConstraint

INT8, BF16, FP32 = Precision.INT8, Precision.BF16, Precision.FP32

TENSORFLOW = """
version: 1.0

model:
  name: ssd_mobilenet
  framework: tensorflow_itex
  inputs: image_tensor
  outputs: num_detections,detection_boxes

device: cpu

quantization:
  approach: post_training_static_quant
  recipes:
    scale_propagation_max_pooling: True
    first_conv_or_matmul_quantization: True
  calibration:
    sampling_size: 50, 100
    dataloader:
      batch_size: 10
      filter:
        LabelBalance: {size: 1}
      dataset:
        TFRecordDataset:
          root: /data/records
      transform:
        ParseDecodeCoco:
        Resize: {size: 300}
  model_wise:
    weight:
      granularity: per_channel
      scheme: asym
      dtype: int8
      algorithm: minmax
      bit: [7.0]
    activation:
      granularity: per_tensor
      scheme: asym
      dtype: int8, fp32
      algorithm: minmax, kl
  op_wise: {
    'conv1': {
      'activation': {'dtype': ['uint8', 'fp32'], 'algorithm': ['minmax', 'kl'], 'scheme': ['sym']},
      'weight': {'dtype': ['int8', 'fp32'], 'algorithm': ['minmax']}
    },
    'conv2': {'activation': {'dtype': ['fp32']}, 'weight': {'dtype': ['fp32']}},
  }

evaluation:
  accuracy:
    metric:
      COCOmAP:
        anno_path: /data/label_map.yaml
    configs:
      cores_per_instance: 28
      num_of_instance: 1
    dataloader:
      batch_size: 16
      dataset:
        TFRecordDataset:
          root: /data/records
    postprocess:
      transform:
        LabelShift: 1
  performance:
    warmup: 10
    iteration: 100
    configs:
      cores_per_instance: 4
      num_of_instance: 7
      kmp_blocktime: 1
    dataloader:
      dataset:
        dummy:
          shape: [[128, 3, 224, 224], [128, 1, 1, 1]]

tuning:
  strategy:
    name: sigopt
    sigopt_api_token: token
  accuracy_criterion:
    relative:  0.01
  objective: performance
  exit_policy:
    timeout: 0
    max_trials: 100
    performance_only: False
  random_seed: 9527
  tensorboard: True
  workspace:
    path: ./saved
    resume: ./old/history.snapshot
"""

PYTORCH = """
model:
  name: resnet18
  framework: pytorch_fx

use_bf16: True

quantization:
  approach: post_training_dynamic_quant
  model_wise:
    activation: {algorithm: placeholder, compute_dtype: ['uint8']}
    weight: {scheme: [asym_float, sym]}
  optype_wise: {
    'Linear': {'activation': {'dtype': ['fp32']}, 'weight': {'dtype': ['fp32']}}
  }
  op_wise: {
    'default_qconfig': {'activation': {'dtype': ['fp32']}, 'weight': {'dtype': ['fp32']}}
  }

tuning:
  accuracy_criterion:
    absolute: 1%
    higher_is_better: True
  multi_objectives:
    objective: [performance, footprint]
    weight: [0.7, 0.3]
  diagnosis:
    diagnosis_after_tuning: True

evaluation:
  accuracy:
    multi_metrics:
      Accuracy: {}
      SquadF1:
      weight: 0.6 0.4
      higher_is_better: True, True
  performance:
    iteration: -1
"""

ONNX = """
version: 1.0
model: {name: bert, framework: onnxrt_qlinearops}
quantization:
  train:
    criterion: {CrossEntropyLoss: {reduction: mean}}
  advance: {bias_correction: weight_empirical}
  optimization_level: 1
optimization_level: 0
tuning: {objective: accuracy}
pruning:
  approach:
    weight_compression:
      pruners:
        - !Pruner
            start_epoch: 0
            names: ['layer1.0.conv1.weight']
            shape: !!python/tuple [1, 2]
distillation:
  train: {epoch: 3}
"""

GRAPH = """
model: {name: resnet50, framework: NA}
graph_optimization:
  precisions: ['bf16, fp32']
  op_wise:
    weight: {dtype: bf16}
    activation: {dtype: [bf16]}
evaluation: {accuracy: {metric: {topk: 1}}}
"""


def read(text):
    """The settings, and which keys were said to be ignored."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = parse_settings(text, origin="conf.yaml")
    assert {item.category for item in caught} <= {IgnoredSettingWarning}
    messages = [str(item.message).split(" is ignored: ") for item in caught]
    assert all(len(parts) == 2 and parts[1] for parts in messages)
    return settings, sorted(parts[0].split(": ")[1] for parts in messages)


def test_a_tensorflow_file():
    settings, ignored = read(TENSORFLOW)
    assert ignored == [
        "evaluation.accuracy.configs",
        "evaluation.performance.configs.kmp_blocktime",
        "quantization.calibration.dataloader.filter",
        "quantization.model_wise.weight.bit",
        "quantization.recipes",
        "tuning.strategy.name.sigopt",
        "tuning.strategy.sigopt_api_token",
        "tuning.tensorboard",
        "tuning.workspace.path",
    ]
    assert settings.options.framework == "tensorflow"
    assert settings.options.inputs == ("image_tensor",)
    assert settings.options.outputs == ("num_detections", "detection_boxes")
    assert settings.options.precisions == (INT8,)
    assert settings.options.sampling_size == 100
    assert settings.calibration_dataloader["transform"] == {
        "ParseDecodeCoco": {},
        "Resize": {"size": 300},
    }
    assert settings.options.strategy == "bayesian"
    assert (settings.options.workspace, settings.options.resume) == ("./old/history.snapshot", True)
    metric = MetricSettings("cocomap", {"anno_path": "/data/label_map.yaml"})
    assert settings.evaluation.metrics == (metric,)
    assert settings.evaluation.postprocess == {"LabelShift": 1}
    performance = settings.evaluation.performance
    assert (performance.cores_per_instance, performance.instances) == (4, 7)


def test_limits_of_a_tensorflow_file():
    constraints = read(TENSORFLOW)[0].constraints
    weight = QuantConstraint(("int8",), ("asymmetric",), ("per_channel",), ("minmax",))
    activation = QuantConstraint(("int8",), ("asymmetric",), ("per_tensor",), ("minmax", "kl"))
    assert constraints.model_wise == OpConstraint((INT8,), weight, activation)
    assert constraints.op_wise == {
        "conv1": OpConstraint(
            (INT8, FP32),
            QuantConstraint(("int8",), algorithm=("minmax",)),
            QuantConstraint(("uint8",), ("symmetric",), algorithm=("minmax", "kl")),
        ),
        "conv2": OpConstraint((FP32,)),
    }


def test_a_pytorch_file():
    settings, ignored = read(PYTORCH)
    assert ignored == [
        "evaluation.accuracy.multi_metrics.higher_is_better",
        "evaluation.performance.iteration",
        "quantization.model_wise.activation.compute_dtype",
        "quantization.model_wise.weight.scheme.asym_float",
        "quantization.op_wise.default_qconfig",
        "tuning.diagnosis",
        "tuning.multi_objectives",
    ]
    assert settings.options.framework == "pytorch"
    assert settings.options.precisions == (INT8, BF16)
    weight = QuantConstraint(scheme=("symmetric",))
    activation = QuantConstraint(algorithm=("dynamic",))
    model_wise = OpConstraint(weight=weight, activation=activation)
    assert settings.constraints.model_wise == model_wise
    assert settings.options.approach == "dynamic"
    assert settings.constraints.optype_wise == {"Linear": OpConstraint((FP32,))}
    assert not settings.constraints.op_wise
    assert settings.options.accuracy_criterion.tolerance == 0.01
    assert not settings.options.accuracy_criterion.relative
    assert [(m.name, m.weight) for m in settings.evaluation.metrics] == [
        ("accuracy", 0.6),
        ("squadf1", 0.4),
    ]
    assert settings.evaluation.performance.iteration == 30


def test_an_onnx_file():
    settings, ignored = read(ONNX)
    assert ignored == [
        "distillation",
        "optimization_level",
        "pruning",
        "quantization.advance",
        "quantization.optimization_level",
        "quantization.train",
        "tuning.objective.accuracy",
    ]
    assert settings.options.framework == "onnxrt"
    assert settings.options.precisions == (INT8,)
    assert not settings.options.is_set("objective")


def test_a_graph_optimization_file():
    settings, ignored = read(GRAPH)
    assert ignored == []
    assert settings.options.framework is None
    assert settings.options.precisions == (BF16, FP32)
    assert settings.constraints.op_wise == {".*": OpConstraint((BF16,))}


@pytest.mark.parametrize("text", [TENSORFLOW, PYTORCH, ONNX, GRAPH])
def test_written_in_our_words_nothing_is_ignored(text):
    settings, _ = read(text)
    assert read(settings_to_yaml(settings)) == (settings, [])


def test_bf16_is_asked_for_where_it_has_an_effect():
    assert read("quantization: {use_bf16: true}")[0].options.precisions == (INT8, BF16)
    assert read("quantization: {use_bf16: false}")[0].options.precisions == (INT8,)
    assert read("use_bf16: true")[1] == ["use_bf16"]
    text = "{use_bf16: true, quantization: {}, mixed_precision: {precisions: fp16}}"
    settings, ignored = read(text)
    assert (settings.options.precisions, ignored) == ((Precision.FP16,), ["use_bf16"])


@pytest.mark.parametrize(
    ("written", "framework"),
    [
        ("pytorch_ipex", "pytorch"),
        ("keras", "tensorflow"),
        ("onnxrt_integerops", "onnxrt"),
        ("onnxrt_qdq", "onnxrt"),
        ("onnxruntime", "onnxrt"),
        ("TensorFlow", "tensorflow"),
    ],
)
def test_their_frameworks(written, framework):
    assert read(f"model: {{framework: {written}}}")[0].options.framework == framework


def test_a_warning_names_file_and_line(tmp_path):
    path = tmp_path / "conf.yaml"
    path.write_text("device: cpu\noptimization_level: 1\n")
    with pytest.warns(
        IgnoredSettingWarning, match=r"conf\.yaml, line 2: optimization_level is ignored: "
    ):
        load_settings(path)


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("version: 1.0\n", "inc"),
        ("model: {name: a, framework: onnxrt_qdq}\n", "inc"),
        ("model: {name: a, framework: pytorch_fx}\n", "inc"),
        ("model: {name: a, framework: pytorch}\n", "own"),
        ("device: cpu\n", "own"),
    ],
)
def test_whose_words_a_file_is_written_in(text, dialect):
    settings = parse_settings(text)
    assert settings.dialect == dialect
    assert parse_settings(settings_to_yaml(settings)).dialect == dialect
