"""Names of Keras layers, and the log of the process."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers
from litert_nets import as_litert

from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.adaptors.litert.files import loading
from neural_mp.adaptors.litert.graph.program import Program
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


def test_a_model_that_tensorflow_cannot_convert_raises_an_error_with_the_way_out():
    sequence = keras.Input((6, 4))
    net = keras.Model(sequence, layers.LSTM(4)(sequence))
    with pytest.raises(ModelLoadError, match="must have a fixed batch size, .* cannot convert"):
        ADAPTOR.load(net)


def test_a_keras_model_with_a_dict_of_inputs_has_the_names_of_the_dict():
    ports = {name: keras.Input((size,), name=name) for name, size in (("wide", 4), ("small", 3))}
    x = layers.Dropout(0.5)(layers.Concatenate()(list(ports.values())))
    net = keras.Model(ports, {"scores": layers.Dense(2)(x)})
    model = ADAPTOR.load(net)
    draw = np.random.default_rng(0)
    batch = {
        name: draw.normal(size=(5, port.shape[1])).astype(np.float32)
        for name, port in ports.items()
    }
    expected = net.predict(batch, verbose=0)["scores"]
    np.testing.assert_allclose(ADAPTOR.predict(model, batch), expected, atol=1e-6)


def test_a_keras_model_made_by_subclassing_is_converted():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.scores = layers.Dense(3)

        def call(self, values):
            return self.scores(values)

    net, values = Net(), np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    expected = net.predict(values, verbose=0)
    np.testing.assert_allclose(ADAPTOR.predict(ADAPTOR.load(net), values), expected, atol=1e-6)


def test_a_keras_model_is_read_once(monkeypatch):
    parsed = []
    parse = Program.parse.__func__
    monkeypatch.setattr(
        loading.Program, "parse", classmethod(lambda c, b: parsed.append(len(b)) or parse(c, b))
    )
    freed = []
    free = loading.free_batch
    monkeypatch.setattr(loading, "free_batch", lambda program: freed.append(1) or free(program))
    image = keras.Input((8, 8, 1))
    ADAPTOR.load(keras.Model(image, layers.Conv2D(4, 3)(image)))
    assert len(freed) == 1
    # The conversion, and a copy whose batch size is freed.
    assert len(parsed) == 2
