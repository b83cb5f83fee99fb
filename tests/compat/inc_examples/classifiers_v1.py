"""Image classifiers and first steps of version 1.14."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from inc_examples import data, models
from inc_examples.case import ACCURACY, PERFORMANCE, Case, Step, steps

_IMAGENET = "examples/onnxrt/image_recognition"
_TENSORFLOW = "examples/tensorflow/image_recognition"
_HELLO = "examples/helloworld"


def _onnx(model: str, config: str, *more: str, **shape: object) -> Case:
    """Return a classifier of ONNX Runtime; `more`: arguments of every call."""

    def make(folder: Path) -> None:
        data.image_list(folder)
        models.onnx_net(folder / "net.onnx", **shape)  # type: ignore[arg-type]

    common = ("--model_path", "net.onnx", "--config", config, *more)
    return Case(
        f"{_IMAGENET}/{model}/quantization/ptq",
        make,
        steps(common, ("--output_model", "int8.onnx")),
        result="int8.onnx",
    )


_LISTED = ("--data_path", "images", "--label_path", "val_map.txt")


def _mnist() -> Case:
    case = _onnx("onnx_model_zoo/mnist", "mnist.yaml")

    def make(folder: Path) -> None:
        data.idx_files(folder / "digits/MNIST/raw")
        models.onnx_net(folder / "net.onnx", size=28, channels=1)

    return Case(case.folder, make, case.steps, paths={"root": "digits"}, result=case.result)


def _tensorflow(folder: str, config: str, output: str, form: str = "pb", **shape: object) -> Case:
    """Return a classifier of TensorFlow; `output`: the option for the result."""

    def make(target: Path) -> None:
        data.image_records(target)
        write = models.frozen_graph if form == "pb" else models.saved_model
        write(target / f"net.{form}", **shape)  # type: ignore[arg-type]

    common = ("--input-graph", f"net.{form}", "--config", config)
    return Case(
        f"{_TENSORFLOW}/{folder}/quantization/ptq",
        make,
        steps(common, (output, f"int8.{form}")),
        result=f"int8.{form}",
    )


def _hello(number: int, steps: Mapping[str, Step], result: str | None = None) -> Case:
    def make(folder: Path) -> None:
        data.image_records(folder)
        models.frozen_graph(folder / "mobilenet_v1_1.0_224_frozen.pb", has_background=True)

    return Case(f"{_HELLO}/tf_example{number}", make, steps, "test.py", result=result)


def _fashion(folder: Path) -> None:
    """Write Keras' files of Fashion-MNIST, and the model beside the script's folder."""
    data.idx_files(folder / ".keras/datasets/fashion-mnist")
    (folder.parent / "models").mkdir()
    models.saved_model(folder.parent / "models/saved_model", size=28, channels=0)
    models.frozen_graph(folder.parent / "models/frozen_graph.pb", size=28, channels=0)


_TUNE, _BENCHMARK = ("--tune",), ("--benchmark",)
_PRINTED = (r"Accuracy is [\d.]+", r"Latency: [\d.]+ ms")

CASES: tuple[Case, ...] = (
    *(
        _onnx(f"onnx_model_zoo/{model}", config)
        for model, config in (
            ("resnet50", "resnet50_v1_5.yaml"),
            ("resnet50", "resnet50_v1_5_qdq.yaml"),
            ("shufflenet", "shufflenetv2.yaml"),
        )
    ),
    _onnx("onnx_model_zoo/efficientnet", "efficientnet.yaml", is_channels_last=True),
    *(
        _onnx(f"onnx_model_zoo/{model}", config, *_LISTED)
        for model, config in (
            ("googlenet", "googlenet.yaml"),
            ("alexnet", "alexnet.yaml"),
        )
    ),
    *(
        _onnx(model, config)
        for model, config in (
            ("resnet50", "resnet50_v1_5.yaml"),
            ("mobilenet_v2", "mobilenet_v2.yaml"),
        )
    ),
    _onnx("mobilenet_v3", "mobilenet_v3.yaml", is_channels_last=True),
    _mnist(),
    *(
        _tensorflow("tensorflow_models", f"{config}.yaml", "--output-graph", **shape)
        for config, shape in (
            ("mobilenet_v1", {"has_background": True}),
            ("resnet101", {}),
        )
    ),
    _tensorflow("SavedModel", "mobilenet_v1.yaml", "--output_model", "saved"),
    _tensorflow("keras_models/vgg16", "vgg16.yaml", "--output-graph", "saved"),
    _hello(1, {"tune": Step(())}),
    Case(f"{_HELLO}/tf_example2", _fashion, {"tune": Step((), ("Inference is done",))}, "test.py"),
    _hello(
        5,
        {"tune": Step(_TUNE), "accuracy": Step(_BENCHMARK, ACCURACY)},
        "int8.pb",
    ),
    _hello(6, {"tune": Step(_TUNE), "accuracy": Step(_BENCHMARK, _PRINTED)}, "int8.pb"),
    Case(
        f"{_HELLO}/tf_example7",
        _fashion,
        {"tune": Step(_TUNE), "performance": Step(_BENCHMARK, PERFORMANCE)},
        "test.py",
    ),
    _hello(8, {"tune": Step(())}),
)
