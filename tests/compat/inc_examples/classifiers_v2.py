"""Image classifiers of version 2.2: the data are arguments, and scripts evaluate by themselves."""

from __future__ import annotations

from pathlib import Path

from inc_examples import data, models
from inc_examples.case import ACCURACY_V2, V2, Case, steps


def _onnx(model: str, is_channels_last: bool = False) -> Case:
    def make(folder: Path) -> None:
        data.image_list(folder)
        models.onnx_net(folder / "net.onnx", is_channels_last=is_channels_last)

    common = ("--model_path", "net.onnx")
    listed = ("--dataset_location", "images", "--label_path", "val_map.txt")
    return Case(
        f"examples/onnxrt/image_recognition/{model}/quantization/ptq_static",
        make,
        steps((*common, *listed), ("--output_model", "int8.onnx"), ACCURACY_V2),
        result="int8.onnx",
        tag=V2,
    )


def _tensorflow(model: str, form: str = "pb", **shape: object) -> Case:
    def make(folder: Path) -> None:
        data.image_records(folder)
        write = models.frozen_graph if form == "pb" else models.saved_model
        write(folder / f"net.{form}", **shape)  # type: ignore[arg-type]

    # Some scripts skip the first batches of those that they time.
    common = ("--input-graph", f"net.{form}", "--dataset_location", "records", "--batch_size", "4")
    return Case(
        f"examples/tensorflow/image_recognition/{model}/quantization/ptq",
        make,
        steps(common, ("--output-graph", f"int8.{form}"), ACCURACY_V2),
        result=f"int8.{form}",
        tag=V2,
    )


def _keras(model: str, size: int = 224) -> Case:
    def make(folder: Path) -> None:
        data.image_records(folder)
        models.keras_net(size).save(folder / "net.keras")

    common = ("--input_model", "net.keras", "--eval_data", "records", "--batch_size", "4")
    return Case(
        f"examples/keras/image_recognition/{model}/quantization/ptq",
        make,
        steps(common, ("--output_model", "int8", "--calib_data", "records"), ACCURACY_V2),
        result="int8",
        tag=V2,
    )


CASES: tuple[Case, ...] = (
    *(
        _onnx(model, is_channels_last=model in ("mobilenet_v3", "onnx_model_zoo/efficientnet"))
        for model in (
            "mobilenet_v2",
            "mobilenet_v3",
            "resnet50_mlperf",
            "resnet50_torchvision",
            "vgg16",
            "onnx_model_zoo/efficientnet",
            "onnx_model_zoo/googlenet",
            "onnx_model_zoo/squeezenet",
        )
    ),
    _tensorflow("tensorflow_models/resnet50_v1", has_background=True),
    _tensorflow("tensorflow_models/resnet50_v1_5", has_background=True, output="softmax_tensor"),
    _tensorflow("tensorflow_models/inception_v3", has_background=True, size=299),
    _tensorflow("tensorflow_models/mobilenet_v2", has_background=True),
    _tensorflow("tensorflow_models/mobilenet_v3", has_background=True),
    _tensorflow("tensorflow_models/vgg19"),
    _tensorflow("SavedModel/mobilenet_v1", "saved", has_background=True),
    *(_keras(model) for model in ("resnet50", "mobilenet_v2")),
    _keras("xception", 299),
)
