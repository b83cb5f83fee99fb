"""See `AccumulationContract`."""

from onnx_nets import product_graph

from neural_mp.testing.products_contract import AccumulationContract


class TestOnnxProducts(AccumulationContract):
    framework = "onnxrt"
    approaches = ("static", "dynamic")

    def source(self, case, weight):
        return product_graph(case, weight)
