"""See `CorrectionContract`."""

import numpy as np
import pytest
from keras_contract_nets import outliers, residual, seeded, two_outputs
from keras_nets import ChannelsLast
from litert_nets import as_litert

from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerRescale
from neural_mp.adaptors.litert import layer_params
from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.testing import CorrectionContract, signal_to_noise

ADAPTOR = LiteRtAdaptor()


@pytest.mark.slow
class TestCorrections(ChannelsLast, CorrectionContract):
    # The converter spreads the scale of a norm over several ops, which stay as they are.
    readers = (1, 1)
    learned_gain_db = 0
    test_a_corrected_bias_takes_the_mean_error_away = None
    # Results are those of a ReLU within the layer: see below.
    test_the_rows_of_a_layer_times_its_weight_are_its_results = None

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls):
        return as_litert(seeded(lambda: outliers(norm_factor=1)))

    @pytest.fixture(scope="class")
    @classmethod
    def residual(cls):
        return as_litert(seeded(residual))

    @pytest.fixture(scope="class")
    @classmethod
    def two_outputs(cls):
        return as_litert(seeded(two_outputs))

    def test_rows_times_weight_and_bias_are_the_results_behind_the_relu(self, case):
        structure, layers = case.model.structure, case.layers
        convolutions = [op for op in layers if structure.get_type(op) != "FULLY_CONNECTED"]
        assert len(convolutions) == 3
        sources = {op: case.space.graph[op].inputs[0] for op in convolutions}
        values = dict(case.values({*sources.values(), *convolutions}))
        for op in convolutions:
            layer = layers[op]
            matrix, rows = layer.as_matrix(), layer.extract_rows(values[sources[op]], 1 << 30, 0)
            weight = matrix.reshape(*matrix.shape[:2], -1)
            product = np.einsum("gri,goi->rgo", rows, weight).reshape(len(rows[0]), -1)
            bias = structure.program.get_constant(structure.find_bias(op))
            result = values[op].reshape(product.shape)
            assert signal_to_noise(result, np.maximum(product + bias, 0)) > 100, op


def test_a_file_does_not_keep_the_weights_that_a_correction_replaced(net):
    model = ADAPTOR.load(net)
    layers = layer_params.collect_layer_params(model)
    changes = {
        op: LayerRescale(outputs=np.full(len(layer.weight()), 2, np.float32))
        for op, layer in layers.items()
    }
    corrected = layer_params.with_layer_params(model, changes)
    assert len(ADAPTOR.native(corrected)) < 1.05 * len(ADAPTOR.native(model))
