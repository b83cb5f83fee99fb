"""Files of Intel Neural Compressor are read as leniently as there, where that is harmless."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from neural_mp import MixedPrecision
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api import config_objects
from neural_mp.api.constraints import apply_constraints
from neural_mp.api.user_metrics import gather_metrics
from neural_mp.compat.inc.constraints import matching_op_types
from neural_mp.config import (
    IgnoredSettingWarning,
    Options,
    parse_settings,
    settings_to_yaml,
)
from neural_mp.config.inc_dialect import ONLY_THEIR_NAMES
from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.core.enums import Dialect
from neural_mp.core.precision import Precision
from neural_mp.data import DATASETS, TRANSFORMS
from neural_mp.errors import ConfigurationError, DataError, UnknownOperatorError
from neural_mp.metrics import METRICS


def theirs(text):
    """A file of theirs, and what was said to be ignored."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = parse_settings("version: 1.0\n" + text, origin="conf.yaml")
    assert settings.dialect is Dialect.INC
    assert {item.category for item in caught} <= {IgnoredSettingWarning}
    return settings, [str(item.message) for item in caught]


def test_a_negative_tolerance_asks_for_more_than_the_baseline():
    criterion = theirs("tuning: {accuracy_criterion: {relative: -0.01}}")[
        0
    ].options.accuracy_criterion
    assert criterion.target(0.9) == pytest.approx(0.909)
    assert not criterion.met(0.9, 0.9)
    assert criterion.met(0.9, 0.91)
    absolute = theirs("tuning: {accuracy_criterion: {absolute: -2%}}")[0].options.accuracy_criterion
    assert absolute.target(0.9) == pytest.approx(0.92)
    lower = theirs("tuning: {accuracy_criterion: {absolute: -1, higher_is_better: false}}")
    assert lower[0].options.accuracy_criterion.target(5.0) == 4.0


def test_a_negative_tolerance_is_a_mistake_elsewhere():
    with pytest.raises(ConfigurationError, match=r"line 1: tuning\.accuracy_criterion\.relative"):
        parse_settings("tuning: {accuracy_criterion: {relative: -0.01}}")
    with pytest.raises(ConfigurationError, match="cannot be negative"):
        AccuracyCriterion(-0.01)


def test_a_large_share_is_taken_at_its_word_in_a_file_of_theirs():
    text = "tuning: {accuracy_criterion: {relative: 0.99}}"
    assert theirs(text)[0].options.accuracy_criterion.target(1.0) == pytest.approx(0.01)
    with pytest.raises(ConfigurationError, match="did you mean 0.0099"):
        parse_settings(text)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("timeout: -1", ExitPolicy(timeout=0.0)),
        ("max_trials: 0", ExitPolicy(max_trials=1)),
        ("max_trials: -3", ExitPolicy(max_trials=1)),
        ("timeout: 7", ExitPolicy(timeout=7.0)),
    ],
)
def test_a_limit_below_what_has_a_meaning_is_what_it_comes_to_there(written, meant):
    assert theirs(f"tuning: {{exit_policy: {{{written}}}}}")[0].options.exit_policy == meant


def test_a_negative_seed_is_the_first_one():
    assert theirs("tuning: {random_seed: -1}")[0].options.random_seed == 0


@pytest.mark.parametrize("written", ["max_trials: many", "max_trials: 1.5", "timeout: soon"])
def test_what_is_no_number_is_a_mistake_in_their_files_too(written):
    with pytest.raises(ConfigurationError, match=r"conf\.yaml, line 2: tuning\.exit_policy\."):
        theirs(f"tuning: {{exit_policy: {{{written}}}}}")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("MSE", "mse"),
        ("automixedprecision", "auto_mixed_precision"),
        ("auto", "mincut"),
        ("hawq_v2", "hawq_v2"),
    ],
)
def test_a_strategy_by_its_name_there(written, meant):
    settings, ignored = theirs(f"tuning: {{strategy: {{name: {written}}}}}")
    assert (settings.options.strategy, ignored) == (meant, [])


def test_sigopt_is_said_to_be_replaced():
    settings, ignored = theirs("tuning:\n  strategy:\n    name: sigopt")
    assert settings.options.strategy == "bayesian"
    assert "conf.yaml, line 4: tuning.strategy.name.sigopt is ignored" in ignored[0]


def test_precisions_compare_with_what_they_were_set_to():
    converter = MixedPrecision()
    converter.precisions = ["bf16", "fp32"]
    assert converter.precisions == ["bf16", "fp32"]
    assert theirs("mixed_precision: {precisions: [bf16, fp32]}")[0].options.precisions == [
        "bf16",
        "fp32",
    ]


@pytest.mark.parametrize("section", ["model_conversion", "automixedprecision"])
def test_a_section_for_something_else_is_passed_over(section):
    settings, ignored = theirs(f"{section}:\n  source: QAT\n  destination: default")
    assert [line.startswith(f"conf.yaml, line 2: {section} is ignored") for line in ignored] == [
        True
    ]
    assert settings == theirs("device: cpu")[0]


def test_of_a_key_given_twice_the_last_counts():
    text = "tuning:\n  random_seed: 1\n  strategy: {name: basic}\n  random_seed: 2"
    settings, ignored = theirs(text)
    assert settings.options.random_seed == 2
    assert settings.options.strategy == "basic"
    assert ignored == ["conf.yaml, line 3: tuning.random_seed is ignored: repeated on line 5"]
    with pytest.raises(
        ConfigurationError, match=r"line 4: tuning\.random_seed: must not be given twice"
    ):
        parse_settings(text)


def test_a_section_given_twice_is_the_last_one_as_a_whole():
    settings, ignored = theirs("tuning: {random_seed: 5}\ntuning: {early_stopping: false}")
    assert (settings.options.random_seed, settings.options.early_stopping) == (0, False)
    assert len(ignored) == 1


def test_normalize_without_std_passes_into_the_settings():
    settings, _ = theirs(
        "evaluation: {accuracy: {dataloader: {dataset: {ImageRecord: {root: x}}, "
        "transform: {Normalize: {mean: [1.0, 2.0, 3.0]}}}}}"
    )
    assert settings.evaluation.dataloader["transform"] == {"Normalize": {"mean": [1.0, 2.0, 3.0]}}


def test_pruners_are_passed_over():
    _, ignored = theirs(
        "pruning:\n  approach:\n    weight_compression:\n      pruners:\n"
        "        - !Pruner {start_epoch: 0, names: [a]}\n        - !Pruner\n            names: [b]"
    )
    assert len(ignored) == 1
    assert "conf.yaml, line 2: pruning is ignored" in ignored[0]


@pytest.mark.parametrize(
    "text",
    [
        "version: 1.0",
        "model: {framework: pytorch_fx}",
        "quantization: {approach: post_training_static_quant}",
        "quantization: {recipes: {scale_propagation_concat: true}}",
        "evaluation: {accuracy: {dataloader: {dataset: {ImageRecord: {root: x}}}}}",
        "evaluation: {accuracy: {dataloader: {dataset: a, transform: {ToTensor: }}}}",
        "evaluation: {accuracy: {metric: {COCOmAP: {anno_path: x}}}}",
        "evaluation: {accuracy: {metric: SquadF1}}",
    ],
)
def test_what_only_they_have_makes_a_file_theirs(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredSettingWarning)
        settings = parse_settings(text)
        assert settings.dialect is Dialect.INC
        assert parse_settings(settings_to_yaml(settings)) == settings


@pytest.mark.parametrize(
    "text",
    [
        "model: {framework: pytorch, name: net}",
        "quantization: {approach: static}",
        "evaluation: {accuracy: {metric: {topk: 1}, dataloader: {dataset: {ImageFolder: {root: a}},"
        " transform: {Resize: {size: 8}, Normalize: {mean: 0, std: 1}}}}}",
    ],
)
def test_what_both_have_leaves_a_file_ours(text):
    assert parse_settings(text).dialect is Dialect.OWN


def test_names_that_make_a_file_theirs_are_none_of_ours():
    for name in ONLY_THEIR_NAMES:
        assert not [kind for kind in (DATASETS, TRANSFORMS, METRICS) if name in kind]


PYTORCH = ("add", "batch_norm", "conv2d", "layer_norm", "linear", "relu")
TENSORFLOW = ("BatchMatMulV2", "Conv2D", "DepthwiseConv2dNative", "MatMul", "MaxPool", "Relu")
ONNX = ("Add", "Conv", "Gemm", "MatMul")


@pytest.mark.parametrize(
    ("word", "types", "meant"),
    [
        ("Conv2d", PYTORCH, {"conv2d"}),
        ("ConvReLU2d", PYTORCH, {"conv2d"}),
        ("Linear", PYTORCH, {"linear"}),
        ("LayerNorm", PYTORCH, {"layer_norm"}),
        ("BatchNorm2d", PYTORCH, {"batch_norm"}),
        ("Embedding", PYTORCH, set()),
        ("Conv2D", TENSORFLOW, {"Conv2D", "DepthwiseConv2dNative"}),
        ("conv2d", TENSORFLOW, {"Conv2D", "DepthwiseConv2dNative"}),
        ("DepthwiseConv2dNative", TENSORFLOW, {"DepthwiseConv2dNative"}),
        ("matmul", TENSORFLOW, {"MatMul", "BatchMatMulV2"}),
        ("pooling", TENSORFLOW, {"MaxPool"}),
        ("MATMUL", ONNX, {"MatMul"}),
        ("conv", ONNX, {"Conv"}),
        ("EmbedLayerNormalization", ONNX, set()),
    ],
)
def test_their_op_types_mean_those_of_the_model(word, types, meant):
    assert set(matching_op_types(types, word)) == meant


def test_a_word_that_is_no_op_type_of_anybody_means_nothing():
    assert matching_op_types(PYTORCH, "Convolve") is None


def test_a_plugged_in_framework_has_the_names_that_all_have():
    settings = replace(theirs("model: {name: net}")[0], options=Options(framework="theirs"))
    names = config_objects.choose_name_vocabulary(settings)
    assert names == config_objects.choose_name_vocabulary(theirs("model: {framework: NA}")[0])


FP32 = "{weight: {dtype: fp32}, activation: {dtype: fp32}}"


@pytest.fixture
def converter(net, digits):
    def made(text, **options):
        settings, _ = theirs(text)
        tuner = MixedPrecision(settings)
        tuner.model, tuner.eval_dataloader = net, digits[1].loader()
        tuner.precisions, tuner.strategy = "int8", "basic"
        tuner.metric, tuner.objective = Accuracy(), "modelsize"
        for name, value in options.items():
            setattr(tuner, name, value)
        return tuner

    return made


class Accuracy:
    higher_is_better = True

    def reset(self):
        self.right, self.all = 0, 0

    def update(self, preds, labels):
        self.right += int((preds.argmax(1) == np.asarray(labels)).sum())
        self.all += len(labels)

    def result(self):
        return self.right / self.all


def test_a_limit_on_their_op_types_holds(net, digits, all_machine):
    adaptor = adaptor_for(net)
    model = adaptor.load(net, example=digits[1].images[:2])
    space = adaptor.space(model, all_machine)
    text = f"quantization: {{optype_wise: {{Conv2d: {FP32}, LSTM: {FP32}}}}}"
    limited, notes = apply_constraints(space, theirs(text)[0])
    convolutions = {op.name for op in space.graph if op.type == "conv2d"}
    assert convolutions
    for op in space.tunable_ops:
        held_back = limited.capabilities[op].precisions == (Precision.FP32,)
        assert held_back == (op in convolutions)
    assert notes == ("optype_wise limits LSTM; the model has no such op",)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_a_target_that_cannot_be_met_makes_all_trials(converter):
    result = converter(
        "tuning: {accuracy_criterion: {relative: -0.5}, exit_policy: {max_trials: 4}}"
    )()
    assert not result.met
    assert len(result.trials) == 4


def test_a_type_that_nobody_knows_is_said_with_its_line(converter):
    where = r"conf\.yaml, line 4: quantization\.optype_wise\.Convolve: "
    with pytest.raises(UnknownOperatorError, match=where):
        converter(f"quantization:\n  optype_wise:\n    Convolve: {FP32}")()


def test_an_unknown_strategy_is_said_with_its_line(converter):
    tuner = converter("tuning:\n  strategy:\n    name: basics", strategy="basics")
    with pytest.raises(ConfigurationError, match=r"line 4: tuning\.strategy\.name: .*'basic'"):
        tuner()


LOADER = """\
evaluation:
  accuracy:
    dataloader:
      batch_size: 2
      dataset:
        ImageFolder:
          root: nowhere
      transform:
        Rescale:
        Cast:
          dtype: int64
    metric:
      topk: 1
"""


@pytest.mark.parametrize("version", ["", "version: 1.0\n"])
@pytest.mark.parametrize(
    ("before", "after", "line", "path", "kind"),
    [
        ("ImageFolder:", "ImageFoldr:", 6, "dataset.ImageFoldr", ConfigurationError),
        ("root: nowhere", "rot: nowhere", 7, "dataset.ImageFolder.rot", ConfigurationError),
        ("root: nowhere", "", 6, "dataset.ImageFolder", ConfigurationError),
        ("root: nowhere", "root: [1]", 7, "dataset.ImageFolder.root", ConfigurationError),
        ("root: nowhere", "root: nowhere", 7, "dataset.ImageFolder.root", DataError),
        ("Rescale:", "Rescael:", 9, "transform.Rescael", ConfigurationError),
        ("dtype: int64", "dtype: int63", 11, "transform.Cast.dtype", ConfigurationError),
        ("dtype: int64", "type: int64", 11, "transform.Cast.type", ConfigurationError),
    ],
)
def test_a_mistake_in_the_data_is_said_with_its_own_line(version, before, after, line, path, kind):
    assert before in LOADER
    text = version + LOADER.replace(before, after)
    settings = parse_settings(text, origin="conf.yaml")
    line += bool(version)
    where = rf"^conf\.yaml, line {line}: evaluation\.accuracy\.dataloader\.{path}: "
    with pytest.raises(kind, match=where):
        config_objects.build_loader(settings, config_objects.ACCURACY)


@pytest.mark.parametrize(
    ("metric", "where"),
    [
        ("metric:\n      Acuracy:", r"line 4: evaluation\.accuracy\.metric\.Acuracy: unknown"),
        (
            "metric:\n      F1:\n        averge: 1",
            r"line 5: evaluation\.accuracy\.metric\.F1\.averge",
        ),
        (
            "multi_metrics:\n      MSE:\n      Topk: {k: -1}",
            r"line 5: evaluation\.accuracy\.multi_metrics\.Topk\.k: ",
        ),
    ],
)
def test_a_mistake_in_a_metric_is_said_with_its_own_line(metric, where):
    settings = parse_settings(f"evaluation:\n  accuracy:\n    {metric}\n", origin="conf.yaml")
    with pytest.raises(ConfigurationError, match=r"^conf\.yaml, " + where):
        config_objects.build_metrics(settings)


def test_metrics_without_weights_each_have_to_meet_the_target_as_there():
    """Theirs are of two directions, and `higher_is_better` says which."""
    text = (
        "version: 1.0\nmodel: {name: net, framework: pytorch}\nevaluation:\n  accuracy:\n"
        "    multi_metrics:\n      topk: 1\n      MSE: {compare_label: false}\n"
        "      higher_is_better: [true, false]\n"
    )
    settings = parse_settings(text, origin="conf.yaml")
    metrics = gather_metrics(None, settings, None, eval_func=lambda model: 1.0)
    assert metrics.every
    assert (metrics.names, metrics.said) == (("topk", "mse"), (True, False))


def test_a_mistake_in_postprocessing_is_said_with_its_own_line():
    text = "evaluation:\n  accuracy:\n    postprocess:\n      transform:\n        Cast: {dtype: x}"
    settings = parse_settings(text, origin="conf.yaml")
    where = r"line 5: evaluation\.accuracy\.postprocess\.transform\.Cast\.dtype: "
    with pytest.raises(ConfigurationError, match=where):
        config_objects.build_postprocess(settings)
