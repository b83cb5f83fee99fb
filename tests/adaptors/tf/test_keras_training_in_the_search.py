"""A search without a plan that meets the target trains the most promising plan of a Keras model."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import compile_briefly
from trained_searches import CountingEpochs, check_trained

from neural_mp import MixedPrecision, compare
from neural_mp.testing import digits

TRAIN, TEST = digits()
IMAGES, TEST_IMAGES = TRAIN.images.transpose(0, 2, 3, 1), TEST.images.transpose(0, 2, 3, 1)
BATCHES = [(IMAGES[i : i + 50], TRAIN.labels[i : i + 50]) for i in range(0, 1200, 50)]
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@cache
def trained_net():
    """A net that all-INT8 plans damage: the channels of its first result differ 10000 times."""
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1), name="image")
    first = layers.Conv2D(16, 3, padding="same", activation="relu", name="first")
    second = layers.DepthwiseConv2D(3, padding="same", activation="relu", name="second")
    last = layers.Conv2D(32, 1, strides=2, activation="relu", name="last")
    x = layers.Flatten(name="flat")(last(second(first(image))))
    # Named throughout: a run is resumed by a process in which other layers were made before.
    net = keras.Model(image, layers.Dense(10, name="head")(x), name="net")
    steps = 12 * len(BATCHES)
    rate = keras.optimizers.schedules.CosineDecay(5e-3, steps)
    compile_briefly(net, keras.optimizers.Adam(rate), LOSS)
    net.fit(IMAGES[:1200], TRAIN.labels[:1200], 50, 12, verbose=0, shuffle=False)
    factors = np.logspace(0, 4, 16)
    kernel, bias = first.get_weights()
    first.set_weights([kernel * factors, bias * factors])
    kernel, bias = second.get_weights()
    second.set_weights([kernel / factors[:, None], bias])
    return net


def accuracy(model):
    outputs = np.asarray(model(TEST_IMAGES))
    return float((outputs.argmax(1) == TEST.labels).mean())


def search(folder, **options):
    """Return a search whose only plan, all layers in INT8 without corrections, misses."""
    defaults = {
        "precisions": "int8",
        "strategy": "basic",
        "calib_dataloader": [images for images, _ in BATCHES[:4]],
        "eval_func": accuracy,
        "accuracy_criterion": {"absolute": 0.025},
        "objective": "modelsize",
        "exit_policy": {"max_trials": 1, "train_seconds": 600},
        "train_dataloader": BATCHES,
        "loss": LOSS,
        "workspace": folder,
    }
    conf = options.pop("conf", None)
    return MixedPrecision(conf, model=trained_net(), **{**defaults, **options})


def check(result):
    """Assert that training saved the plan of the only other trial."""
    check_trained(result)
    missed, trained = result.trials
    assert missed.accuracy < result.report.baseline_accuracy - 0.05
    assert result.plan.counts()["int8"] == 4
    assert accuracy(result.model) == pytest.approx(trained.accuracy, abs=1e-6)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A workspace and the result of the search in it."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, search(folder).fit()


@pytest.mark.slow
def test_the_most_promising_plan_is_trained_and_a_resumed_run_continues(searched):
    folder, result = searched
    check(result)
    batches = CountingEpochs(BATCHES)
    again = search(folder, train_dataloader=batches, resume=True).fit()
    assert batches.epochs == 0
    check(again)
    assert again.report.accuracy == result.report.accuracy


#: Where the killed process finds this file and what it imports.
FOLDERS = [str(Path(__file__).parents[n]) for n in (0, 2)]
KILLED = """
import sys
sys.path[:0] = {folders!r}
from test_keras_training_in_the_search import BATCHES, CountingEpochs, search
search({folder!r}, train_dataloader=CountingEpochs(BATCHES, killed=4)).fit()
"""


@pytest.mark.slow
def test_a_run_killed_in_training_repeats_no_trial_and_no_epoch(searched, tmp_path):
    code = KILLED.format(folders=FOLDERS, folder=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    batches = CountingEpochs(BATCHES)
    result = search(tmp_path, train_dataloader=batches, resume=True).fit()
    assert batches.epochs == 7
    check(result)
    _, whole = searched
    assert result.report.accuracy == pytest.approx(whole.report.accuracy, abs=0.01)


@pytest.mark.slow
def test_the_users_own_function_trains_with_fit_of_keras(tmp_path):
    def train(model):
        rate = keras.optimizers.schedules.CosineDecay(1e-3, 10 * len(BATCHES))
        compile_briefly(model, keras.optimizers.Adam(rate), LOSS)
        model.fit(IMAGES[:1200], TRAIN.labels[:1200], 50, 10, verbose=0)

    options = {"train_dataloader": None, "loss": None, "train_func": train}
    check(search(tmp_path, **options).fit())


@pytest.mark.slow
def test_without_labels_the_plan_is_trained_on_the_calibration_batches(tmp_path):
    options = {"train_dataloader": None, "loss": None, "epochs": 60}
    options |= {"accuracy_criterion": {"absolute": 0.05}}
    batches = [images for images, _ in BATCHES]
    result = search(tmp_path, **options, calib_dataloader=batches).fit()
    check(result)
    outputs = result.report.stage_noise.outputs
    assert outputs["trained"] < 0.5 * outputs["nearest"]
    compared = compare(trained_net(), result, batches[:2]).outputs[0].noise
    assert outputs["trained"] == pytest.approx(compared, rel=1e-3)


def section(folder, loss, optimizer):
    """Return the options of a search with a file of INC 1.x, and no training in Python."""
    np.savez(folder / "train.npz", images=IMAGES[:1200], labels=TRAIN.labels[:1200])
    data = {"path": str(folder / "train.npz"), "inputs_key": "images", "labels_key": "labels"}
    train = {
        "end_epoch": 10,
        "dataloader": {"batch_size": 50, "dataset": {"numpy": data}},
        "criterion": loss,
        "optimizer": optimizer,
    }
    quantization = {"approach": "quant_aware_training", "train": train}
    conf = {"version": 1.0, "model": {"framework": "tensorflow"}, "quantization": quantization}
    defaults = {"train_dataloader": None, "loss": None, "exit_policy": {"max_trials": 1}}
    return {"conf": conf, **defaults}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CrossEntropyLoss", "SparseCategoricalCrossentropy"])
def test_a_file_of_inc_trains_with_its_section(tmp_path, name):
    loss = {name: {"reduction": "sum_over_batch_size", "from_logits": True}}
    optimizer = {"Adam": {"learning_rate": 5e-4, "epsilon": 1e-7}}
    result = search(tmp_path, **section(tmp_path, loss, optimizer)).fit()
    check(result)
