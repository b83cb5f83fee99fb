"""Mistakes on the command line and in files: one line that names the thing and the fix, code 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import dense_runs
import numpy as np
import pytest
from command_here import run_main

_TUNE = ("tune", "net.onnx", "--metric", "accuracy", "--data")
_TEST = (*_TUNE, "test.npz")


@dataclass(frozen=True)
class Mistake:
    """A command, the error, and the words that its line must contain."""

    command: tuple[str, ...]
    error: str
    words: tuple[str, ...]


def _of(command: str, error: str, *fragments: str) -> Mistake:
    return Mistake(tuple(command.split()), error, fragments)


def _tune(options: str, error: str, *fragments: str) -> Mistake:
    return Mistake((*_TEST, *options.split()), error, fragments)


def _data(file: str, error: str, *fragments: str, options: str = "") -> Mistake:
    return Mistake((*_TUNE, file, *options.split()), error, fragments)


#: Name of a tuning file → what is replaced in the right one, and by what.
FILES = {
    "no_model.yaml": ("name: net.onnx, ", ""),
    "no_file.yaml": ("test.npz", "tset.npz"),
    "no_array.yaml": ("{path: test.npz}", "{path: test.npz, inputs_key: images}"),
    "metric_option.yaml": ("metric: accuracy", "metric: {topk: {n: 5}}"),
    "metric_name.yaml": ("metric: accuracy", "metric: acuracy"),
    "percent.yaml": ("relative: 0.05", "relative: 5"),
    "op.yaml": ("evaluation:", "quantization: {op_wise: {frist: {precisions: fp32}}}\nevaluation:"),
    "dtype.yaml": ("precisions: int8", "precisions: float16"),
    "dataset.yaml": ("{numpy: {path: test.npz}}", "{num_py_: {pth: test.npz}}"),
    "not_mine.yaml": ("metric: accuracy", 'metric: {"sklearn.metrics:accuracy_score": {}}'),
    "no_module.yaml": ("metric: accuracy", 'metric: {"my_code:Mine": {}}'),
    "image.yaml": ("test.npz}}}", "test.npz}}, transform: {CenterCrop: {size: 224}}}"),
    "strategy.yaml": ("tuning:", "tuning:\n  strategy: bayes"),
    "target.yaml": ("mixed_precision:", "target: arm\nmixed_precision:"),
    "storage.yaml": ("tuning:", "tuning:\n  storage: team.db"),
    "driver.yaml": ("tuning:", "tuning:\n  storage: nosql://me:secret@host/runs"),
}

MISTAKES = [
    # the command itself
    _of("tun conf.yaml", "UsageError", "'tun'", "'tune'", "see neural-mp --help"),
    _of("tune", "UsageError", "source", "see neural-mp tune --help"),
    _of("tune conf.yaml --max-trails 3", "UsageError", "--max-trails", "--max-trials"),
    _of("compare net.onnx", "UsageError", "Missing argument", "'b'"),
    _tune("--timeout 10m", "UsageError", "--timeout", "number"),
    _tune("--batch-size 0", "UsageError", "--batch-size", "greater than or equal to 1"),
    # tuning files
    _of("tune gone.yaml", "ConfigurationError", "gone.yaml", "cannot be read"),
    _of("tune no_model.yaml", "ConfigurationError", "model must be set", "model.name in YAML"),
    _of("tune no_file.yaml", "DataError", "line 10", "tset.npz does not exist"),
    _of("tune no_array.yaml", "DataError", "'images'", "inputs, labels"),
    _of("tune metric_option.yaml", "ConfigurationError", "topk", "no option 'n'", "k"),
    _of("tune metric_name.yaml", "ConfigurationError", "'acuracy'", "'accuracy'"),
    _of("tune percent.yaml", "ConfigurationError", "got 5 (500 %", "0.05 (5 %)"),
    _of("tune op.yaml", "UnknownOperatorError", "line 7", "'frist'", "'first'"),
    _of("tune dtype.yaml", "UnknownPrecisionError", "'float16'", "did you mean 'fp16'?"),
    _of("tune dataset.yaml", "ConfigurationError", "option 'pth'", "'path'"),
    _of("tune not_mine.yaml", "ConfigurationError", "not your own code", "--trust"),
    _of("tune no_module.yaml", "ConfigurationError", "no module 'my_code'"),
    _of("tune image.yaml", "DataError", "CenterCrop", "[H, W]", "[16]"),
    _of("tune strategy.yaml", "ConfigurationError", "'bayes'", "'bayesian'"),
    _of("tune target.yaml", "ConfigurationError", "'arm'", "'arm-dotprod'"),
    _of("tune storage.yaml", "HistoryError", "'team.db'", "'sqlite:///team.db'"),
    _of("tune driver.yaml", "HistoryError", "nosql://me:***@host/runs", "cannot be opened"),
    _of("tune conf.yaml --model other.onnx", "ModelLoadError", "'other.onnx' does not exist"),
    # options of a search
    _tune("--precisions int9", "UnknownPrecisionError", "'int9'", "'int8'"),
    _tune("--precisions int8;bf16", "UnknownPrecisionError", "commas", "'int8,bf16'"),
    _tune("--tolerance 1", "ConfigurationError", "100 % of the baseline", "0.01 (1 %)"),
    _tune("--tolerance one", "ConfigurationError", "--tolerance", "'one'", "1%"),
    _tune("--tolerance -1%", "ConfigurationError", "'-1%'", "from 0"),
    _tune("--tolerance absolute:0.7", "ConfigurationError", "half the baseline", "target of 0.3"),
    _tune("--timeout -5", "ConfigurationError", "timeout", "from 0", "-5"),
    _tune("--runtime tensorrt", "ConfigurationError", "'tensorrt'", "onnxrt", "openvino"),
    _tune("--objective speed", "ConfigurationError", "'speed'", "latency", "modelsize"),
    _tune("--workers many", "ConfigurationError", "'many'", "local, ray"),
    _tune("-o conf.yaml", "NeuralMPError", "'conf.yaml' is a file", "folder"),
    _tune("-o out.keras", "ConversionError", ".keras", "'out'"),
    # data
    _tune("--label lables", "DataError", "'lables'", "'labels'"),
    _data("three.npz", "DataError", "a, b, c", "--label"),
    _data("short.npz", "DataError", "200 inputs", "199 labels"),
    _data("wide.npz", "DataError", "[1, 17]", "x: float32[?, 16]"),
    _data("ones.npz", "MetricError", "from 0 to 3", "got 1 to 4", "subtract 1",
          options="--batch-size 200"),
    _data("empty.npz", "DataError", "empty.npz has no samples"),
    _data("words.npz", "MetricError", "labels must be numbers", "number the classes from 0"),
    _data("nan.npz", "MetricError", "all NaN", "preprocessing"),
    _data("pickled.npz", "DataError", "pickled.npz", "pickled objects"),
    _data("inputs.npy", "DataError", "inputs.npy", "tuning file"),
    _data("text.csv", "DataError", "line 2", "column 'a'", "'x' is not a finite number"),
    _data("empty.csv", "DataError", "empty.csv has no rows"),
    _data("ragged.csv", "DataError", "line 3", "2 cells where 3 are expected"),
    _data("semicolon.csv", "DataError", "no column left", "delimiter"),
    _data("test.npz", "MetricError", "(1, 4)", "(1,)", options="--metric rmse"),
    _data("test.npz", "ConfigurationError", "no module 'mine'", options="--metric mine:Metric"),
    # models
    _of("tune folder --data test.npz", "ConfigurationError", "'folder'", "neither a tuning file"),
    _of("tune net.mlmodel --data test.npz", "ConfigurationError", "'net.mlmodel'", "onnxrt"),
    _of("tune weights.pth --data test.npz --metric acc", "ModelLoadError", "pickle", "model.pt2"),
    _of("tune w.safetensors --data test.npz --metric acc", "ModelLoadError", "nn.Module"),
    _of("tune no_code:net --data test.npz --metric acc", "ConfigurationError", "no module 'no_code'"),
    _of("inspect conf.yaml", "UnknownFrameworkError", "'conf.yaml'", "tuning file"),
    _of("inspect net.onnx --framework onnx", "UnknownFrameworkError", "'onnx'", "'onnxrt'"),
    _of("inspect net.onnx --framework pytorch", "ModelLoadError", "not a file of PyTorch", ".pt2"),
    # other commands
    _of("inspect net.onnx --type conv9d", "UnknownOperatorError", "'conv9d'", "MatMul, Relu"),
    _of("inspect net.onnx --match (", "ConfigurationError", "regular expression", "write .*"),
    _of("inspect net.onnx --input-shape 2x16", "ConfigurationError", "'2x16'", "commas"),
    _of("inspect net.onnx --input-shape 2,17", "DataError", "[2, 17]", "float32[?, 16]"),
    _of("explain net.onnx frist", "UnknownOperatorError", "'frist'", "'first'"),
    _of("explain net.onnx first --plan gone.yaml", "PlanError", "'gone.yaml'", "cannot be read"),
    _of("convert net.onnx --plan bare.yaml -o x", "PlanError", "bare.yaml", "write the plan again"),
    _of("convert net.onnx --plan conf.yaml -o x", "PlanError", "expected a plan", "'ops'"),
    _of("benchmark net.onnx gone", "UnknownFrameworkError", "'gone' does not exist"),
    _of("compare net.onnx net.onnx --data wide.npz", "DataError", "[20, 17]", "[?, 16]"),
    _of("compare net.onnx net.onnx --data gone.npy", "DataError", "no file 'gone.npy'"),
    _of("sensitivity net.onnx --data text.csv", "DataError", "text.csv, line 2", "column 'a'"),
    _of("sensitivity net.onnx --data text.txt", "DataError", ".npz", ".csv", "'text.txt'"),
    _of("sensitivity net.onnx --precision fp32", "UnknownPrecisionError", "below fp32", "int8"),
    _of("audit net.onnx", "ConfigurationError", "nothing to audit", "--plan"),
    _of("report folder", "HistoryError", "contains no runs", "workspace"),
    _of("advise conf.yaml", "ConfigurationError", "Keras", "'net.onnx'"),
    _of("kernels gone.log", "KernelLogError", "'gone.log'", "ONEDNN_VERBOSE=1"),
    _of("kernels -- no_such_program", "KernelLogError", "cannot be run", "python train.py"),
    _of("init net.onnx -o conf.yaml", "ConfigurationError", "exists already", "--output"),
    _of("init net.onnx -o new.yaml --metric acuracy", "ConfigurationError", "'accuracy'"),
    _of("init net.onnx -o new.yaml --data gone.npz", "DataError", "no file 'gone.npz'"),
    _of("tune-many gone*.yaml", "ConfigurationError", "'gone*.yaml'", "folder of YAML files"),
    _of("tune-many conf.yaml --workers 0", "ConfigurationError", "workers", "from 1", "got 0"),
]  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a right model, right data, and the files that the mistakes name."""
    folder = dense_runs.write_workplace(tmp_path_factory.mktemp("workplace"))
    right = dict(np.load(folder / "test.npz"))
    inputs, labels = right["inputs"], right["labels"]
    arrays = {
        "three": {"a": inputs, "b": labels, "c": labels},
        "short": {"inputs": inputs, "labels": labels[:-1]},
        "wide": {"inputs": np.ones((20, 17), np.float32), "labels": np.zeros(20, int)},
        "ones": {"inputs": inputs, "labels": labels + 1},
        "empty": {"inputs": inputs[:0], "labels": labels[:0]},
        "words": {"inputs": inputs, "labels": np.array(["cat", "dog"] * 100)},
        "nan": {"inputs": inputs * np.nan, "labels": labels},
        "pickled": {"inputs": inputs, "labels": np.array([{}] * 200, object)},
    }
    for name, content in arrays.items():
        np.savez(folder / f"{name}.npz", **content)
    np.save(folder / "inputs.npy", inputs)
    texts = {
        "text.csv": "a,b,class\nx,y,z\n",
        "empty.csv": "",
        "ragged.csv": "a,b,c\n1,2,3\n1,2\n",
        "semicolon.csv": "a;b;c\n1;2;3\n",
        "bare.yaml": "ops: {first: int8}\n",
        "net.mlmodel": "other",
        "weights.pth": "PK",
        "w.safetensors": "weights",
    }
    for name, (original, replacement) in FILES.items():
        assert original in dense_runs.CONF, name
        texts[name] = dense_runs.CONF.replace(original, replacement)
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "folder").mkdir()
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: " ".join(mistake.command))
@pytest.mark.usefixtures("quick_runs")
def test_a_mistake_is_one_line_with_the_thing_and_the_fix(workplace, monkeypatch, mistake):
    monkeypatch.chdir(workplace)
    files = sorted(workplace.iterdir())
    code, out, err = run_main(*mistake.command)
    assert code == 2, err
    assert not out
    *earlier, line = [line for line in err.splitlines() if line.strip()]
    assert all(text.startswith("warning: ") or ": FP32 " in text for text in earlier), err
    assert line.startswith(f"{mistake.error}: "), line
    for fragment in mistake.words:
        assert fragment in line
    assert set(Path.iterdir(workplace)) - set(files) <= {workplace / "neural_mp_workspace"}
