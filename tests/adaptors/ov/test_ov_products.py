"""See `AccumulationContract`."""

import ov_nets
from onnx_nets import product_graph

from neural_mp.testing.products_contract import AccumulationContract


class TestOpenVinoProducts(AccumulationContract):
    framework = "openvino"
    approaches = ("static",)

    def source(self, case, weight):
        return ov_nets.read(product_graph(case, weight))
