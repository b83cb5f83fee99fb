"""See `AccumulationContract`."""

import tensorflow as tf

from neural_mp.testing.products_contract import CASES, SIDE, AccumulationContract


class TestTensorFlowProducts(AccumulationContract):
    framework = "tensorflow"
    cases = tuple(name for name in CASES if name != "grouped")

    def source(self, case, weight):
        shape = (None, case.inputs) if case.dense else (None, case.inputs, SIDE, SIDE)

        @tf.function(input_signature=[tf.TensorSpec(shape, tf.float32, name="x")])
        def run(x):
            y = _layer(case, x, weight)
            y = y + _last(x) if case.residual else y
            y = tf.nn.relu(y) if case.relu else y
            return y if case.dense else tf.transpose(y, (0, 3, 1, 2))

        return run.get_concrete_function()


def _last(x):
    """Channels last, as the kernels want them."""
    return tf.transpose(x, (0, 2, 3, 1))


def _layer(case, x, weight):
    if case.dense:
        return tf.matmul(x, weight.T.copy())
    if case.groups == 1:
        return tf.nn.conv2d(_last(x), weight.transpose(2, 3, 1, 0).copy(), 1, "SAME")
    # [height, width, inputs, multiplier]: the outputs of a channel lie side by side.
    kernel = weight.reshape(case.inputs, -1, 3, 3).transpose(2, 3, 0, 1).copy()
    return tf.nn.depthwise_conv2d(_last(x), kernel, [1, 1, 1, 1], "SAME")
