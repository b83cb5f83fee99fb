"""Tuning files of version 1.14 over frameworks and tasks, each with data and a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from inc_data import images, records

from inc_examples import data, detection, models, others, text
from inc_examples.case import ACCURACY, PERFORMANCE, Case, Step

_PROGRAM = Path(__file__).with_name("tune_file.py")
_Maker = Callable[[Path], object]


def _file(
    path: str,
    model: str,
    make: _Maker,
    paths: Mapping[str, str],
    has_accuracy: bool = True,
) -> Case:
    """Return the run of a file below `examples/`."""
    folder, _, name = path.rpartition("/")
    result = "int8" if model in ("net.pt", "net.saved") else model.replace("net", "int8")

    def prepare(target: Path) -> None:
        shutil.copy(_PROGRAM, target)
        make(target)

    lines = (*ACCURACY, *PERFORMANCE) if has_accuracy else PERFORMANCE
    return Case(
        f"examples/{folder}",
        prepare,
        {"all": Step((name, model, result), lines)},
        script=_PROGRAM.name,
        paths=paths,
        result=result,
    )


def _torch(path: str) -> Case:
    def make(folder: Path) -> None:
        data.class_folders(folder / "classes")
        models.torch_net(folder / "net.pt")

    return _file(f"pytorch/image_recognition/{path}", "net.pt", make, {"root": "classes"})


def _onnx_images(path: str, is_channels_last: bool = False) -> Case:
    def make(folder: Path) -> None:
        data.image_list(folder)
        models.onnx_net(folder / "net.onnx", is_channels_last=is_channels_last)

    listed = {"data_path": "images", "image_list": "val_map.txt"}
    return _file(f"onnxrt/image_recognition/{path}", "net.onnx", make, listed)


def _digits(folder: Path) -> None:
    data.idx_files(folder / "digits/MNIST/raw")
    models.onnx_net(folder / "net.onnx", size=28, channels=1)


def _onnx_boxes(path: str) -> Case:
    def make(folder: Path) -> None:
        (folder / "coco").mkdir()
        images.with_boxes(folder / "coco")
        detection.onnx_detector(folder / "net.onnx", detection.NUMBERED)

    return _file(f"onnxrt/object_detection/{path}", "net.onnx", make, {"root": "coco"})


def _glue(path: str) -> Case:
    kind = path.partition("/")[0]
    make = partial(text.sentence_classifier, kind=kind)
    paths = {"data_dir": "glue", "model_name_or_path": f"glue/{kind}"}
    return _file(f"onnxrt/language_translation/{path}", "net.onnx", make, paths)


def _tensorflow_images(path: str, form: str = "pb", **shape: object) -> Case:
    def make(folder: Path) -> None:
        data.image_records(folder)
        write = models.frozen_graph if form == "pb" else models.saved_model
        write(folder / f"net.{form}", **shape)  # type: ignore[arg-type]

    return _file(f"tensorflow/image_recognition/{path}", f"net.{form}", make, {"root": "records"})


def _clothes(folder: Path) -> None:
    data.idx_files(folder / "clothes")
    models.saved_model(folder / "net.saved", size=28, channels=1)


def _tensorflow_boxes(path: str) -> Case:
    def make(folder: Path) -> None:
        records.of_boxes(folder)
        detection.frozen_detector(folder / "net.pb")

    example = f"tensorflow/object_detection/tensorflow_models/quantization/ptq/{path}"
    return _file(example, "net.pb", make, {"root": "coco_val.record"})


def _segments(folder: Path) -> None:
    (folder / "voc").mkdir()
    records.of_segments(folder / "voc")
    others.segmenter(folder / "net.pb")


def _styles(folder: Path) -> None:
    images.contents_and_styles(folder)
    others.stylizer(folder / "net.pb")


_PTQ = "quantization/ptq"
FILES: tuple[Case, ...] = (
    _torch(f"efficientnet/{_PTQ}/eager/conf_efficientnet_b0.yaml"),
    _torch(f"efficientnet/{_PTQ}/eager/conf_mobilenetv3_rw.yaml"),
    _torch(f"resnest/{_PTQ}/eager/conf.yaml"),
    _torch(f"peleenet/{_PTQ}/eager/conf.yaml"),
    _torch(f"se_resnext/{_PTQ}/eager/conf.yaml"),
    _torch(f"torchvision_models/{_PTQ}/cpu/fx/conf.yaml"),
    _torch(f"torchvision_models/{_PTQ}/cpu/eager/conf.yaml"),
    _torch(f"torchvision_models/{_PTQ}/cpu/ipex/conf_ipex.yaml"),
    _onnx_images(f"resnet50/{_PTQ}/resnet50_v1_5_mlperf.yaml"),
    _onnx_images(f"mobilenet_v3/{_PTQ}/mobilenet_v3_qdq.yaml", is_channels_last=True),
    _onnx_images(f"vgg16/{_PTQ}/vgg16_qdq.yaml"),
    _onnx_images(f"onnx_model_zoo/shufflenet/{_PTQ}/shufflenetv2_qdq.yaml"),
    _file(
        f"onnxrt/image_recognition/onnx_model_zoo/mnist/{_PTQ}/mnist.yaml",
        "net.onnx",
        _digits,
        {"root": "digits"},
    ),
    _onnx_boxes(f"ssd_mobilenet_v1/{_PTQ}/ssd_mobilenet_v1_qdq.yaml"),
    _onnx_boxes(f"ssd_mobilenet_v2/{_PTQ}/ssd_mobilenet_v2.yaml"),
    _glue(f"bert/{_PTQ}/bert_static.yaml"),
    _glue(f"distilbert/{_PTQ}/distilbert_qdq.yaml"),
    _glue(f"roberta/{_PTQ}/roberta.yaml"),
    _tensorflow_images(f"tensorflow_models/{_PTQ}/resnet_v2_50.yaml", has_background=True),
    _tensorflow_images(f"tensorflow_models/{_PTQ}/inception_v2.yaml", has_background=True),
    _tensorflow_images(f"tensorflow_models/{_PTQ}/vgg19.yaml"),
    _tensorflow_images(f"SavedModel/{_PTQ}/mobilenet_v2.yaml", "saved", has_background=True),
    _file(
        f"tensorflow/image_recognition/keras_models/resnet50_fashion/{_PTQ}/resnet50_fashion.yaml",
        "net.saved",
        _clothes,
        {"root": "clothes"},
    ),
    _tensorflow_boxes("ssd_resnet50_v1.yaml"),
    _tensorflow_boxes("faster_rcnn_resnet50.yaml"),
    _file(
        f"tensorflow/semantic_image_segmentation/deeplab/{_PTQ}/deeplab.yaml",
        "net.pb",
        _segments,
        {"root": "voc"},
    ),
    _file(
        f"tensorflow/nlp/bert_large_squad_model_zoo/{_PTQ}/bert.yaml",
        "net.pb",
        text.question_records,
        text.QUESTION_PATHS,
    ),
    _file(
        f"tensorflow/style_transfer/arbitrary_style_transfer/{_PTQ}/conf.yaml",
        "net.pb",
        _styles,
        {"content_folder": "content/", "style_folder": "style/"},
        has_accuracy=False,
    ),
)
