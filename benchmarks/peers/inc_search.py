"""Run by an environment with `neural-compressor`: one of its strategies on one of our nets.

PEER -m benchmarks.peers.inc_search pytorch|onnx model folder strategy max_trials

The folder holds `data.npz` and `weights.npz` or `model.onnx`. Ends with a line of JSON.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

BATCH = 100
#: What its INT8 nodes in ONNX are called; those of the layers that have weights.
INTEGER_NODES = ("QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "MatMulInteger")


class Batches:
    """What it takes for a data loader."""

    def __init__(self, images, convert):
        self.batch_size = 20
        self._images, self._convert = images, convert

    def __iter__(self):
        for start in range(0, len(self._images), self.batch_size):
            batch = self._images[start : start + self.batch_size]
            yield self._convert(batch), np.zeros(len(batch), np.int64)


class PyTorch:
    """Its FX path: the net is built here, from the same file, as it traces code."""

    def __init__(self, name, folder):
        import torch

        from benchmarks.nets.search_nets import untrained_net, with_weights

        self._torch = torch
        self.convert = torch.from_numpy
        self.model = with_weights(untrained_net(name), folder / "weights.npz")
        self.able = self._count(self.model, ("Conv2d", "Linear"))

    def runner(self, model):
        def run(images):
            with self._torch.no_grad():
                return model(self._torch.from_numpy(images)).numpy()

        return run

    def kept(self, model):
        return self._count(model, ("Conv2d", "Linear", "ConvReLU2d", "LinearReLU"), "quantized")

    @staticmethod
    def _count(model, names, module=""):
        classes = [type(item) for item in model.modules()]
        return sum(c.__name__ in names and module in c.__module__ for c in classes)


class Onnx:
    """Its path for files."""

    convert = staticmethod(np.asarray)

    def __init__(self, name, folder):
        import onnx

        self.model = str(folder / "model.onnx")
        graph = onnx.load(self.model).graph
        constants = {item.name for item in graph.initializer}
        self.able = sum(
            node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in constants
            for node in graph.node
        )

    def runner(self, model):
        import onnxruntime

        source = model if isinstance(model, str) else model.SerializeToString()
        session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda images: session.run(None, {name: images})[0]

    def kept(self, model):
        return sum(node.op_type in INTEGER_NODES for node in model.graph.node)


def tuned(side, data, strategy, max_trials):
    """Its result or None, the accuracies it saw, and seconds."""
    from neural_compressor import PostTrainingQuantConfig, quantization
    from neural_compressor.config import AccuracyCriterion, TuningCriterion

    accuracies = []

    def accuracy(model):
        run = side.runner(model)
        accuracies.append(float((run(data["images"]).argmax(1) == data["labels"]).mean()))
        return accuracies[-1]

    config = PostTrainingQuantConfig(
        quant_level=1,  # `auto` tries plans of its own before it asks the strategy
        tuning_criterion=TuningCriterion(
            strategy=strategy, max_trials=max_trials, strategy_kwargs=_arguments(strategy)
        ),
        accuracy_criterion=AccuracyCriterion(tolerable_loss=0.01, criterion="relative"),
        calibration_sampling_size=[len(data["calibration"])],
    )
    started = time.perf_counter()
    result = quantization.fit(
        side.model,
        config,
        calib_dataloader=Batches(data["calibration"], side.convert),
        eval_func=accuracy,
    )
    return result, accuracies, time.perf_counter() - started


def _arguments(strategy):
    if strategy != "hawq_v2":
        return None
    import torch

    return {"hawq_v2_loss": torch.nn.CrossEntropyLoss()}


def speedup(side, result, images):
    """Over FP32, runs taken in turn."""
    runs = [side.runner(side.model), side.runner(result.model)]
    seconds = [[], []]
    for turn in range(34):
        for run, durations in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run(images)
            if turn >= 3:
                durations.append(time.perf_counter() - start)
    baseline, candidate = map(np.median, seconds)
    return float(baseline / candidate)


def main():
    framework, name, folder, strategy, max_trials = sys.argv[1:]
    side = {"pytorch": PyTorch, "onnx": Onnx}[framework](name, Path(folder))
    data = np.load(Path(folder) / "data.npz")
    result, accuracies, seconds = tuned(side, data, strategy, int(max_trials))
    figures = {"evaluations": len(accuracies), "trials": len(accuracies) - 1, "seconds": seconds}
    figures |= {"baseline": accuracies[0], "met": result is not None, "able": side.able}
    figures |= {"kept": 0, "speedup": 1.0}
    if len(accuracies) == 1:
        figures["error"] = "it failed before its first trial"
    if result is not None:
        predicted = side.runner(result.model)(data["images"]).argmax(1)
        figures["accuracy"] = float((predicted == data["labels"]).mean())
        figures["kept"] = side.kept(result.model)
        figures["speedup"] = speedup(side, result, data["images"][:BATCH])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
