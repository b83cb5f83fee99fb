"""`neural-mp advise`: a Keras file and data in YAML in, a table and a plan out."""

import keras
import numpy as np
import pytest
from keras import layers
from keras_dangers import digits_net
from keras_nets import channels_last
from typer.testing import CliRunner

from neural_mp.cli.app import app
from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import ConfigurationError, NeuralMPError
from neural_mp.training import apply_plan

CONF = """
model:
  name: net.keras
quantization:
  calibration:
    dataloader:
      batch_size: 64
      dataset:
        numpy: {inputs: "train.npz:inputs", labels: "train.npz:labels"}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    split = channels_last()[0]
    np.savez("train.npz", inputs=split.images, labels=split.labels)
    model = digits_net(dangerous=False)
    model.compile("adam", "sparse_categorical_crossentropy")
    model.save("net.keras")
    (tmp_path / "conf.yaml").write_text(CONF)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["advise", *arguments])


@pytest.mark.slow
def test_a_table_and_a_plan(folder):
    result = run("conf.yaml", "--precision", "bf16", "--steps", "3", "--output", "plan.yaml")
    assert result.exit_code == 0, result.output
    assert "bf16: keep softmax of 8 in float32" in result.output
    assert "saved to plan.yaml" in result.output
    plan = PrecisionPlan.load("plan.yaml")
    assert plan.counts() == {"bf16": 7, "fp32": 1}
    model = apply_plan(keras.saving.load_model("net.keras"), "plan.yaml")
    assert model.get_layer("conv1").compute_dtype == "bfloat16"


@pytest.mark.slow
def test_a_loss_may_be_named(folder):
    inputs = keras.Input((8, 8, 1))
    model = keras.Model(inputs, layers.Dense(10, "softmax", name="out")(layers.Flatten()(inputs)))
    model.save("plain.keras")
    arguments = ("conf.yaml", "--model", "plain.keras", "--steps", "1")
    result = run(*arguments)
    assert isinstance(result.exception, ConfigurationError)
    assert "is not compiled; pass e.g. loss=" in str(result.exception)
    result = run(*arguments, "--loss", "sparse_categorical_crossentropy")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("conf", "arguments", "said"),
    [
        (
            "model: {name: net.keras}",
            (),
            "must have calibration or evaluation data, got none; add quantization",
        ),
        (CONF, ("--model", "missing.keras"), "missing.keras"),
        (CONF, ("--model", "net.onnx"), "must be a Keras file"),
        (CONF, ("--precision", "fp17"), "did you mean 'fp16'"),
        (CONF.replace("  name: net.keras", "  framework: tensorflow"), (), "must name a model"),
    ],
)
def test_a_mistake_is_one_error(folder, conf, arguments, said):
    (folder / "conf.yaml").write_text(conf)
    result = run("conf.yaml", *arguments)
    assert isinstance(result.exception, NeuralMPError)
    assert said in str(result.exception)
