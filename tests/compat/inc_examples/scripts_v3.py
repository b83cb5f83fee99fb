"""Example scripts of version 3.9, with the data and the models of the earlier versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from inc_data import images, records

from inc_examples import data, detection, models, others
from inc_examples.case import ACCURACY_V2, PERFORMANCE, V3, Case, Step, steps

_TENSORFLOW = "examples/tensorflow"


def _graph_classifier(model: str, write: Callable[[Path], object]) -> Case:
    """A classifier of images whose frozen graph `write` makes."""

    def make(folder: Path) -> None:
        data.image_records(folder)
        write(folder / "net.pb")

    common = ("--input-graph", "net.pb", "--dataset_location", "records", "--batch_size", "4")
    return Case(
        f"{_TENSORFLOW}/image_recognition/{model}/quantization/ptq",
        make,
        steps(common, ("--output-graph", "int8.pb"), ACCURACY_V2),
        result="int8.pb",
        tag=V3,
    )


def _classifier(model: str, **shape: object) -> Case:
    return _graph_classifier(model, lambda path: models.frozen_graph(path, **shape))  # type: ignore[arg-type]


def _keras(model: str, size: int) -> Case:
    def make(folder: Path) -> None:
        data.image_records(folder)
        models.keras_net(size).save(folder / "net.keras")

    common = ("--input_model", "net.keras", "--eval_data", "records", "--batch_size", "4")
    return Case(
        f"{_TENSORFLOW}/keras/image_recognition/{model}/quantization/ptq",
        make,
        steps(common, ("--output_model", "int8", "--calib_data", "records"), ACCURACY_V2),
        result="int8",
        tag=V3,
    )


def _transformer(path: Path) -> None:
    """Write a SavedModel of one frozen graph: images with channels first, two dense layers."""
    import tensorflow as tf
    from tensorflow.core.protobuf import saved_model_pb2

    rng = np.random.default_rng(0)
    first, second = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((48, 64), (64, 10)))
    with tf.Graph().as_default() as graph:
        image = tf.compat.v1.placeholder(tf.float32, (None, 3, 224, 224), "input")
        x = tf.nn.avg_pool2d(tf.transpose(image, (0, 2, 3, 1)), 56, 56, "VALID")
        name = "StatefulPartitionedCall/vit/encoder/layer_._9/output/dense/Tensordot/MatMul"
        x = tf.matmul(tf.reshape(x, (-1, 48)), first, name=name)
        tf.matmul(tf.nn.relu(x), second, name="scores")
    model = saved_model_pb2.SavedModel()
    model.meta_graphs.add().graph_def.CopyFrom(graph.as_graph_def())
    path.write_bytes(model.SerializeToString())


def _translator(folder: Path) -> None:
    """Write a frozen graph that repeats the words of a text, and texts with their vocabulary."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    parts = ["<pad>", "<EOS>", *(f"{letter}_" for letter in letters), *letters, *"_\\u;0123456789"]
    (folder / "vocab.txt").write_text("".join(f"'{part}'\n" for part in parts), encoding="utf-8")
    lines = (" ".join(rng.choice(list(letters), 8)) for _ in range(80))
    text = "\n".join(lines) + "\n"
    for name in ("inputs.txt", "reference.txt"):
        (folder / name).write_text(text, encoding="utf-8")
    table = rng.uniform(-1, 1, (len(parts), 64)).astype(np.float32)
    with tf.Graph().as_default() as graph:
        ids = tf.compat.v1.placeholder(tf.int32, (None, None), "input_tensor")
        rows = tf.reshape(tf.gather(table, ids), (-1, 64))
        mixed = tf.matmul(rows, np.eye(64, dtype=np.float32))
        predictions = tf.argmax(tf.matmul(mixed, table.T), -1, output_type=tf.int32)
        tf.reshape(predictions, tf.shape(ids), name="model/Transformer/strided_slice_19")
    (folder / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())


def _translation() -> Case:
    texts = ("--inputs_file=inputs.txt", "--reference_file=reference.txt", "--vocab_file=vocab.txt")
    common = ("--input_graph=net.pb", *texts, "--batch_size=4")
    speed = ("--benchmark", "--mode=performance", "--iters=15")
    accuracy = ("--benchmark", "--mode=accuracy")
    return Case(
        f"{_TENSORFLOW}/nlp/transformer_lt/quantization/ptq",
        _translator,
        {
            "tune": Step((*common, "--tune", "--output_model=int8.pb")),
            "accuracy": Step((*common, *accuracy), (r"Accuracy is [\d.]+",)),
            "performance": Step((*common, *speed), PERFORMANCE),
        },
        result="int8.pb",
        tag=V3,
    )


def _detector(model: str) -> Case:
    def make(folder: Path) -> None:
        # Scripts of this version read either names or numbers.
        records.of_boxes(folder, numbered=False)
        detection.frozen_detector(folder / "net.pb")

    common = ("--input-graph", "net.pb", "--dataset_location", "coco_val.record", "--batch_size=1")
    return Case(
        f"{_TENSORFLOW}/object_detection/{model}/quantization/ptq",
        make,
        steps(common, ("--output_model", "int8.pb"), ACCURACY_V2),
        result="int8.pb",
        tag=V3,
    )


def _style() -> Case:
    def make(folder: Path) -> None:
        images.contents_and_styles(folder)
        others.stylizer(folder / "net.pb")

    pictures = ("--style_images_paths=style/", "--content_images_paths=content/")
    common = ("--input_model=net.pb", *pictures)
    return Case(
        f"{_TENSORFLOW}/style_transfer/arbitrary_style_transfer/quantization/ptq",
        make,
        {
            "tune": Step((*common, "--tune", "--output_model=int8.pb"), PERFORMANCE),
            "performance": Step(common, PERFORMANCE),
        },
        result="int8.pb",
        tag=V3,
    )


def _recommendation() -> Case:
    common = ("--evaluation_data_location", "eval.tfrecords", "--batch_size", "20")
    tuned = ("--calibration_data_location", "eval.tfrecords", "--tune", "--output_graph", "int8.pb")
    # The script's performance mode ends in an error of its own, after its lines.
    graph = ("--input_graph", "net.pb")
    return Case(
        f"{_TENSORFLOW}/recommendation/wide_deep_large_ds/quantization/ptq",
        others.recommendation_files,
        {
            "tune": Step((*common, *graph, *tuned)),
            "accuracy": Step((*common, *graph, "--accuracy"), (r"Accuracy: [\d.]+",)),
        },
        result="int8.pb",
        tag=V3,
    )


CASES: tuple[Case, ...] = (
    _classifier("inception_v3", has_background=True, size=299),
    _classifier("mobilenet_v2", has_background=True),
    _classifier("resnet_v2_50", has_background=True),
    _classifier("vgg16"),
    _graph_classifier("vision_transformer", _transformer),
    _translation(),
    *(_keras(model, size) for model, size in (("inception_v3", 299), ("resnet_v2_50", 224))),
    *map(_detector, ("faster_rcnn_resnet50", "mask_rcnn_inception_v2", "ssd_mobilenet_v1")),
    _style(),
    _recommendation(),
)
