"""Names of Keras layers, and the log of the process."""

import subprocess
import sys

import keras
import pytest
from keras import layers
from litert_nets import as_litert

from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.errors import ModelLoadError

ADAPTOR = LiteRtAdaptor()


@pytest.fixture(scope="module")
def names():
    """Op type → the names of its layers, for a net whose converter folds and renames ops."""
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, name="conv_2")(image)
    inner = keras.Input((4,))
    block = keras.Model(inner, layers.Dense(4, "tanh", name="wide")(inner), name="block")
    pooled = layers.GlobalAveragePooling2D(name="pool")(layers.ReLU(name="act")(x))
    net = keras.Model(image, layers.Dense(3, name="head")(block(pooled)))
    model = ADAPTOR.load(as_litert(net))
    ops = ADAPTOR.graph(model)
    return [(op.type, {layer.name for layer in op.layers}) for op in ops]


def test_an_op_has_the_names_of_the_keras_layers_that_are_folded_into_it(names):
    assert ("CONV_2D", {"conv_2", "act"}) in names


def test_an_op_of_a_nested_model_has_the_name_of_the_model_too(names):
    assert ("FULLY_CONNECTED", {"block", "wide"}) in names
    assert ("TANH", {"block", "wide"}) in names


def test_the_last_layer_has_its_name_although_its_result_has_none_of_it(names):
    assert names[-1] == ("FULLY_CONNECTED", {"head"})


def test_a_conversion_leaves_the_root_logger_of_the_process_alone(net, tmp_path):
    path = tmp_path / "net.tflite"
    path.write_bytes(net)
    code = (
        "import logging, sys\n"
        "from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor\n"
        "from neural_mp.core import hardware\n"
        "adaptor = LiteRtAdaptor()\n"
        "adaptor.kernels(adaptor.load(sys.argv[1]), hardware.detect({}))\n"
        "assert not logging.root.handlers, logging.root.handlers\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_inputs_have_the_order_of_a_keras_model():
    second, first = keras.Input((2,), name="zeros"), keras.Input((3,), name="ones")
    scaled = layers.Dense(2, name="wide")(first)
    net = keras.Model([second, first], layers.Add()([scaled, second]))
    model = ADAPTOR.load(net)
    assert [port.name for port in model.signature.inputs] == ["zeros", "ones"]


def test_a_model_that_tensorflow_cannot_convert_raises_an_error_of_this_package():
    sequence = keras.Input((6, 4))
    net = keras.Model(sequence, layers.LSTM(4)(sequence))
    with pytest.raises(ModelLoadError, match="cannot convert the model"):
        ADAPTOR.load(net)
