"""Segmentation, recommendation, style transfer in TensorFlow, and a text classifier in PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from inc_data import images, records, text

from inc_examples.case import ACCURACY, ACCURACY_V2, PERFORMANCE, Case, Step, steps

_TENSORFLOW = "examples/tensorflow"
CHANNELS = 64


def _kernels(channels: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return kernels `[5, 5, channels, C]` and `[3, 3, C, outputs]`."""
    rng = np.random.default_rng(0)
    first = rng.uniform(-1, 1, (5, 5, channels, CHANNELS)) / (25 * channels)
    second = rng.uniform(-1, 1, (3, 3, CHANNELS, outputs)) / (9 * CHANNELS)
    return first.astype(np.float32), second.astype(np.float32)


def segmenter(path: Path) -> None:
    """Write a frozen graph that names a class, 0 to 2, for each pixel."""
    import tensorflow as tf

    first, second = _kernels(3, 3)
    with tf.Graph().as_default() as graph:
        image = tf.compat.v1.placeholder(tf.uint8, (None, None, None, 3), "ImageTensor")
        x = tf.nn.relu(tf.nn.conv2d(tf.cast(image, tf.float32) / 255.0, first, 1, "SAME"))
        scores = tf.nn.conv2d(x, second, 1, "SAME")
        tf.argmax(scores, -1, name="SemanticPredictions")
    path.write_bytes(graph.as_graph_def().SerializeToString())


def _segmentation() -> Case:
    def make(folder: Path) -> None:
        (folder / "voc").mkdir()
        records.of_segments(folder / "voc")
        segmenter(folder / "net.pb")

    common = ("--input-graph", "net.pb", "--config", "deeplab.yaml")
    return Case(
        f"{_TENSORFLOW}/semantic_image_segmentation/deeplab/quantization/ptq",
        make,
        steps(common, ("--output-graph", "int8.pb"), ACCURACY),
        paths={"root": "voc"},
        result="int8.pb",
    )


def wide_and_deep(path: Path) -> None:
    """Write a frozen graph with the names of the example; class 1 if the first number is large."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    spread = rng.uniform(0, 0.02, (13 + 16, 256)).astype(np.float32)
    spread[0] = rng.uniform(0.9, 1.1, 256)
    table = rng.uniform(0, 0.1, (100, 8)).astype(np.float32)
    mixed = rng.uniform(0, 2 / 256, (256, 256)).astype(np.float32)
    last = np.stack([np.zeros(256), np.full(256, 1 / 256)], 1).astype(np.float32)
    with tf.Graph().as_default() as graph:
        numbers = tf.compat.v1.placeholder(tf.float32, (None, 13), "new_numeric_placeholder")
        categories = tf.compat.v1.placeholder(tf.int64, (None, 2), "new_categorical_placeholder")
        looked_up = tf.reshape(tf.gather(table, categories), (-1, 16))
        x = tf.concat([numbers, looked_up], 1)
        x = tf.nn.relu(tf.matmul(x, spread, name="import/dnn/hiddenlayer_0/MatMul"))
        x = tf.nn.relu(tf.matmul(x, mixed, name="import/dnn/hiddenlayer_1/MatMul"))
        logits = tf.matmul(x, last) + np.array([0.5, 0], np.float32)
        tf.nn.softmax(logits, name="import/head/predictions/probabilities")
    path.write_bytes(graph.as_graph_def().SerializeToString())


def recommendation_files(folder: Path) -> None:
    """Write records and a net of recommendations."""
    rng = np.random.default_rng(0)
    samples = []
    for label in np.arange(400) % 2:
        numbers = rng.uniform(0, 0.1, 13)
        numbers[0] = label
        numeric = [float(number) for number in numbers]
        categories = [int(category) for category in rng.integers(0, 100, 2)]
        samples.append({"numeric_1": numeric, "string_1": categories, "label": [int(label)]})
    records.write(folder / "eval.tfrecords", samples)
    wide_and_deep(folder / "net.pb")


def _recommendation() -> Case:
    data = ("--evaluation_data_location", "eval.tfrecords", "--batch_size", "20")
    common = ("--input_graph", "net.pb", *data, "--config", "wide_deep_large_ds.yaml")
    calibration = ("--calibration_data_location", "eval.tfrecords", "--accuracy_only")
    speed = (r"Batch size = \d+", r"Latency: [\d.]+ ms", r"Throughput: [\d.]+ \w+/sec")
    return Case(
        f"{_TENSORFLOW}/recommendation/wide_deep_large_ds/quantization/ptq",
        recommendation_files,
        {
            "tune": Step((*common, "--tune", *calibration, "--output_graph", "int8.pb")),
            "accuracy": Step((*common, "--benchmark", "--accuracy_only"), ACCURACY_V2),
            "performance": Step((*common, "--benchmark", "--warmup-steps", "5"), speed),
        },
        script="inference.py",
        result="int8.pb",
    )


def stylizer(path: Path) -> None:
    """Write a frozen graph of two images with the names of the example."""
    import tensorflow as tf

    first, second = _kernels(6, 3)
    with tf.Graph().as_default() as graph:
        style, content = (
            tf.compat.v1.placeholder(tf.float32, (None, 256, 256, 3), name)
            for name in ("style_input", "content_input")
        )
        x = tf.nn.relu(tf.nn.conv2d(tf.concat([style, content], -1), first, 2, "SAME"))
        x = tf.nn.conv2d(x, second, 1, "SAME")
        tf.sigmoid(x, name="transformer/expand/conv3/conv/Sigmoid")
    path.write_bytes(graph.as_graph_def().SerializeToString())


def _style() -> Case:
    def make(folder: Path) -> None:
        images.contents_and_styles(folder)
        stylizer(folder / "net.pb")

    data = ("--style_images_paths=style/", "--content_images_paths=content/")
    common = ("--input_model=net.pb", "--config=conf.yaml", *data)
    return Case(
        f"{_TENSORFLOW}/style_transfer/arbitrary_style_transfer/quantization/ptq",
        make,
        {
            "tune": Step((*common, "--tune", "--output_model=int8.pb"), PERFORMANCE),
            "performance": Step(common, PERFORMANCE),
        },
        script="style_tune.py",
        paths={"content_folder": "content/", "style_folder": "style/"},
        result="int8.pb",
    )


#: Program that writes the files of the classifier of texts: BERT's embeddings and the weights.
_BLEND = """
import json, tensorflow as tf, torch, models
config = models.Config(**json.load(open("config/bert_base.json")))
names = {
    "word_embeddings": (config.vocab_size, config.dim),
    "position_embeddings": (config.max_len, config.dim),
    "token_type_embeddings": (config.n_segments, config.dim),
    "LayerNorm/gamma": (config.dim,),
    "LayerNorm/beta": (config.dim,),
}
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    for name, shape in names.items():
        value = tf.random.stateless_normal(shape, (0, len(name)))
        tf.compat.v1.get_variable("bert/embeddings/" + name, initializer=value)
    session.run(tf.compat.v1.global_variables_initializer())
    saver = tf.compat.v1.train.Saver()
    saver.save(session, "models/uncased_L-12_H-768_A-12/bert_model.ckpt")
torch.manual_seed(0)
torch.save(models.BlendCNN(config, 2).state_dict(), "net.pt")
"""


def _blend() -> Case:
    def make(folder: Path) -> None:
        (folder / "glue").mkdir()
        text.sentences(folder / "glue")
        target = folder / "models/uncased_L-12_H-768_A-12"
        target.mkdir(parents=True)
        (target / "vocab.txt").write_text((folder / "glue/bert/vocab.txt").read_text())
        # The folder `models` hides the module of this name, unless it is no package.
        subprocess.run([sys.executable, "-c", _BLEND], cwd=folder, check=True, capture_output=True)

    common = ("--dataset_location", "glue/dev.tsv", "--input_model", "net.pt", "--batch_size=1")
    common = (*common, "--warmup=2")
    speed = (r"Latency: [\d.]+ ms", r"Throughput: [\d.]+ \w+/sec")
    return Case(
        "examples/pytorch/nlp/blendcnn/quantization/ptq/eager",
        make,
        {
            "tune": Step((*common, "--tune")),
            "accuracy": Step((*common, "--accuracy_only"), (r"Accuracy: [\d.]+",)),
            "performance": Step((*common, "--benchmark"), speed),
            "performance of the result": Step((*common, "--benchmark", "--int8"), speed),
        },
        script="classify.py",
        result="saved_results",
    )


CASES: tuple[Case, ...] = (_segmentation(), _recommendation(), _style(), _blend())
