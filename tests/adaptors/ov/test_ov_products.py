"""See `AccumulationContract`."""

import ov_nets
from onnx_nets import graph, op

from neural_mp.testing.products_contract import SIDE, AccumulationContract


class TestOpenVinoProducts(AccumulationContract):
    framework = "openvino"
    approaches = ("static",)

    def source(self, case, weight):
        rest = [name for name in ("Add", "Relu") if getattr(case, _FIELDS[name])]
        names = [f"t{index}" for index in range(len(rest))] + ["y"]
        if case.dense:
            nodes = [op("MatMul", "x w", names[0])]
            shape, weight = ["n", case.inputs], weight.T.copy()
        else:
            nodes = [op("Conv", "x w", names[0], group=case.groups, pads=[1] * 4)]
            shape = ["n", case.inputs, SIDE, SIDE]
        for index, kind in enumerate(rest):
            read = f"{names[index]} x" if kind == "Add" else names[index]
            nodes.append(op(kind, read, names[index + 1]))
        return ov_nets.read(graph(nodes, {"x": shape}, ["y"], {"w": weight}))


_FIELDS = {"Add": "residual", "Relu": "relu"}
