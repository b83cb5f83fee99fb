"""Lines that scripts of Intel Neural Compressor print when they measure a model."""

import re
import subprocess
import sys

import numpy as np
import pytest
from onnx_nets import as_onnx

from neural_mp.compat.inc import Benchmark, Quantization, benchmark
from neural_mp.compat.inc.config import BenchmarkConfig
from neural_mp.compat.inc.experimental import common

CONF = """
version: 1.0
model: {name: digits, framework: onnxrt_qlinearops}
quantization: {calibration: {sampling_size: 64}}
evaluation:
  accuracy: {metric: {topk: 1}}
  performance: {warmup: 1, iteration: 3, configs: {cores_per_instance: 4, num_of_instance: 7}}
tuning:
  objective: modelsize
  accuracy_criterion: {relative: 0.05}
"""
SCRIPT = """
import sys
import numpy as np
from neural_compressor.experimental import Benchmark, common

held = np.load("digits.npz")
evaluator = Benchmark("conf.yaml")
evaluator.model = common.Model("net.onnx")
evaluator.b_dataloader = common.DataLoader(
    list(zip(held["images"], held["labels"])), batch_size=64
)
evaluator(sys.argv[1])
"""


@pytest.fixture
def loader(digits):
    images, labels = digits[1].images[:256], digits[1].labels[:256]
    return common.DataLoader(list(zip(images, labels, strict=True)), batch_size=64)


@pytest.fixture
def files(tmp_path, monkeypatch, net, digits, quick_runs):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf.yaml").write_text(CONF)
    (tmp_path / "net.onnx").write_bytes(as_onnx(net).SerializeToString())
    np.savez("digits.npz", images=digits[1].images[:256], labels=digits[1].labels[:256])
    return tmp_path


@pytest.mark.slow
def test_a_script_shows_the_results_of_both_modes(files):
    (files / "main.py").write_text(SCRIPT)

    def shown(mode):
        command = [sys.executable, "-m", "neural_mp.compat.inc", "main.py", mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    accuracy, speed = shown("accuracy"), shown("performance")
    assert re.search(r"\[INFO\] Accuracy is (0\.9\d{3}|1\.0000)$", accuracy, re.MULTILINE)
    assert re.search(r"\[INFO\] Batch size = 64$", accuracy, re.MULTILINE)
    assert re.search(r"\[INFO\] Batch size = 64$", speed, re.MULTILINE)
    latency = float(re.search(r"Latency: ([\d.]+) ms$", speed, re.MULTILINE)[1])
    throughput = float(re.search(r"Throughput: ([\d.]+) images/sec$", speed, re.MULTILINE)[1])
    assert latency * throughput == pytest.approx(1000, rel=0.2)
    assert re.search(r"num_of_instance is 7 with 4 cores each, which exceeds the \d", speed)


@pytest.mark.slow
def test_lines_go_to_the_log_of_a_program_that_has_its_own(files, loader, caplog, capsys):
    benchmark.fit("net.onnx", BenchmarkConfig(warmup=1, iteration=2), b_dataloader=loader)
    assert [line.split(" ")[0] for line in caplog.messages] == [
        "benchmark",
        "Batch",
        "Latency:",
        "Throughput:",
    ]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_classes_of_the_top_level_are_called_with_the_model(files, loader, caplog):
    quantized = Quantization("conf.yaml")("net.onnx", loader, eval_dataloader=loader)
    types = {node.op_type for node in quantized.graph.node}
    assert any("Quant" in name or "Integer" in name or "QLinear" in name for name in types)
    (performance,) = Benchmark("conf.yaml")(quantized, loader).items()
    mode, (accuracy, batch_size, seconds) = performance
    assert (mode, accuracy, batch_size, len(seconds)) == ("performance", 0.0, 64, 3)
    (files / "conf.yaml").write_text(re.sub(r"  performance:.*\n", "", CONF))
    evaluated = Benchmark("conf.yaml")
    evaluated.metric("hits", Hits)
    accuracy, batch_size, seconds = evaluated(quantized, loader)["accuracy"]
    assert (accuracy > 0.9, batch_size, len(seconds)) == (True, 64, 4)
    assert f"Accuracy is {accuracy:.4f}" in caplog.messages


class Hits:
    """The share of correct predictions."""

    def reset(self):
        self.right, self.count = 0, 0

    def update(self, predictions, labels):
        self.right += int((np.asarray(predictions).argmax(1) == np.asarray(labels)).sum())
        self.count += len(labels)

    def result(self):
        return self.right / self.count


@pytest.mark.slow
def test_names_of_ports_that_a_saved_model_lacks_are_ignored(files, digits, caplog):
    """Tuning files name tensors of graphs that older converters wrote."""
    keras = pytest.importorskip("keras")
    net = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    net.export("exported", verbose=False)
    loader = common.DataLoader([(np.zeros((8, 8, 1), np.float32), 1)] * 8, batch_size=4)
    (files / "conf.yaml").write_text(
        "version: 1.0\nmodel: {framework: tensorflow, inputs: image, outputs: scores}\n"
        "quantization: {calibration: {sampling_size: 8}}\n"
    )
    graph = Quantization("conf.yaml")("exported", loader)
    assert graph.get_operations()
    assert [line.split(":")[0] for line in caplog.messages if "no such tensor" in line] == [
        "input 'image' is ignored",
        "output 'scores' is ignored",
    ]
