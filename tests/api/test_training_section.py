"""Section `quantization.train` of tuning files: words of INC 1.x and ours, and their mistakes."""

import warnings

import pytest

from neural_mp.config import (
    IgnoredSettingWarning,
    TrainSettings,
    parse_settings,
    settings_to_yaml,
)
from neural_mp.errors import ConfigurationError

THEIRS = """
version: 1.0
model: {name: net, framework: pytorch}
quantization:
  approach: quant_aware_training
  train:
    start_epoch: 1
    end_epoch: 9
    iteration: 30
    dataloader:
      batch_size: 256
      shuffle: True
      dataset: {ImageFolder: {root: /data/train}}
    optimizer: {SGD: {learning_rate: 0.0001, momentum: 0.9, nesterov: True, weight_decay: 0.01}}
    criterion: {CrossEntropyLoss: {reduction: mean}}
"""
OURS = """
quantization:
  train:
    epochs: 8
    max_batches: 30
    dataloader: {dataset: {numpy: {inputs: images.npy, labels: labels.npy}}}
    loss: CrossEntropyLoss
    optimizer: {AdamW: {learning_rate: 1e-3, beta_1: 0.8}}
"""


def read(text):
    """The settings; a warning of an ignored key is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", IgnoredSettingWarning)
        return parse_settings(text)


def test_their_section_means_the_same_in_our_words():
    settings = read(THEIRS)
    loader = {
        "batch_size": 256,
        "shuffle": True,
        "dataset": {"ImageFolder": {"root": "/data/train"}},
    }
    options = {"learning_rate": 1e-4, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    assert settings.train == TrainSettings(
        loader, {"CrossEntropyLoss": {"reduction": "mean"}}, {"SGD": options}, 30
    )
    assert settings.options.epochs == 8
    assert settings.options.approach is None
    assert read(settings_to_yaml(settings)) == settings


def test_our_section_is_read_and_written():
    settings = read(OURS)
    loader = {"dataset": {"numpy": {"inputs": "images.npy", "labels": "labels.npy"}}}
    optimizer = {"AdamW": {"learning_rate": 1e-3, "beta_1": 0.8}}
    assert settings.train == TrainSettings(loader, {"CrossEntropyLoss": {}}, optimizer, 30)
    assert settings.options.epochs == 8
    assert read(settings_to_yaml(settings)) == settings


def test_defaults_are_those_of_their_files():
    train = read(
        THEIRS.replace("    end_epoch: 9\n", "").replace("SGD: {", "Adam: {beta_2: 0.9}}\n    #")
    )
    assert train.options.epochs == 1
    assert train.train.optimizer == {"Adam": {"learning_rate": 1e-3, "beta_2": 0.9}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            THEIRS.replace("quant_aware_training", "post_training_static_quant"),
            "quantization.train is ignored: only the approach quant_aware_training trains",
        ),
        (
            "version: 1.0\nquantization: {approach: quant_aware_training}",
            "approach.quant_aware_training is ignored: there is no section quantization.train",
        ),
        (
            THEIRS.replace("iteration: 30", "frequency: 2"),
            "quantization.train.frequency is ignored: the learning rate decays",
        ),
        (
            THEIRS.replace("iteration: 30", "hostconfig: {}"),
            "quantization.train.hostconfig is ignored: training runs in one process",
        ),
    ],
)
def test_what_has_no_effect_is_named(text, said):
    with pytest.warns(IgnoredSettingWarning, match=said):
        settings = parse_settings(text)
    assert (settings.train is None) == ("frequency" not in text and "hostconfig" not in text)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("SGD", "Sgd", "quantization.train.optimizer: there is no optimizer 'Sgd' here"),
        (
            "SGD",
            "RMSprop",
            "there is no optimizer 'RMSprop' here; known are Adam, AdamW, SGD; train",
        ),
        ("nesterov", "nestrov", "optimizer.SGD.nestrov: there is no such key; did you mean"),
        ("momentum: 0.9", "momentum: high", "optimizer.SGD.momentum: expected a finite number"),
        ("learning_rate: 0.0001", "learning_rate: 0", "learning_rate: expected a finite number"),
        ("CrossEntropyLoss", "KnowledgeDistillationLoss", "quantization.train.criterion: there is"),
        (
            "reduction: mean",
            "reduction: none",
            "criterion.CrossEntropyLoss.reduction: expected one",
        ),
        ("end_epoch: 9", "end_epoch: 1", "end_epoch: must be greater than start_epoch .1., got 1"),
        ("iteration: 30", "iterations: 30", "quantization.train.iterations: there is no such key"),
        ("iteration: 30", "postprocess: {transform: {}}", "train.postprocess: must not be given"),
        ("iteration: 30", "loss: CrossEntropyLoss", "criterion means loss; remove one of the two"),
    ],
)
def test_a_mistake_is_one_error_that_names_the_key(before, after, said):
    with pytest.raises(ConfigurationError, match=said):
        parse_settings(THEIRS.replace(before, after, 1))
