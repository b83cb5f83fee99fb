"""Scripts of the forms that examples of Intel Neural Compressor have, after one changed import.

Four kinds: an image classifier of TensorFlow, of torch and of ONNX, and a detector. Models are
small, data made up in the form that the datasets have.
"""

import json
import re
import textwrap

import numpy as np
import onnx
import pytest
import torch
from inc_script import run, shown
from torch import nn
from torch.nn import functional as F

from neural_mp.compat.inc.experimental import common
from neural_mp.testing import digits as load_digits

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.slow

SIZE = 32


@pytest.fixture(scope="module")
def photos():
    """Digits as photos: uint8 [32, 32, 3], and their labels."""
    train, test = load_digits()
    images = np.concatenate([train.images[:700], test.images[:128]]).squeeze()
    large = np.kron(images, np.ones((4, 4)))[..., np.newaxis] * 255
    labels = np.concatenate([train.labels[:700], test.labels[:128]])
    return large.repeat(3, -1).astype(np.uint8), labels.astype(int)


@pytest.fixture(scope="module")
def classifier(photos):
    """A small torch net, trained on the first 700 photos in 0…1, channels first."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 4, 4),
        nn.ReLU(),
        nn.Conv2d(8, 32, 3, 1, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, 10),
    )
    images = torch.from_numpy(photos[0][:700]).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(photos[1][:700])
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
    return net.eval()


def save_class_folders(folder, photos, count=64):
    for number in range(count):
        directory = folder / f"{photos[1][700 + number]}"
        directory.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photos[0][700 + number]).save(directory / f"{number}.png")


def test_torchvision(tmp_path, photos, classifier, monkeypatch):
    """`ImageFolder` with the transforms of torchvision, in YAML; INT8, saved and loaded."""
    save_class_folders(tmp_path / "val", photos)
    for number in range(10):
        (tmp_path / "val" / str(number)).mkdir(exist_ok=True)
    loader = f"""
      dataloader:
        batch_size: 16
        dataset: {{ImageFolder: {{root: {tmp_path / "val"}}}}}
        transform:
          Resize: {{size: 36}}
          CenterCrop: {{size: 32}}
          ToTensor: {{}}
          Normalize: {{mean: [0.0, 0.0, 0.0], std: [1.0, 1.0, 1.0]}}
    """
    (tmp_path / "conf.yaml").write_text(
        f"""
version: 1.0
model: {{name: digits, framework: pytorch_fx}}
quantization:
  calibration:
    sampling_size: 32
{textwrap.indent(textwrap.dedent(loader), "    ")}
evaluation:
  accuracy:
    metric: {{topk: 1}}
{textwrap.indent(textwrap.dedent(loader), "    ")}
tuning:
  objective: modelsize
  accuracy_criterion: {{absolute: 0.05}}
  exit_policy: {{timeout: 0}}
  random_seed: 9527
"""
    )
    monkeypatch.setattr("builtins.model_of_the_test", classifier, raising=False)
    done = run(
        tmp_path,
        """
        import argparse

        parser = argparse.ArgumentParser()
        parser.add_argument("--config")
        parser.add_argument("--tuned_checkpoint", default="saved_results")
        args = parser.parse_args()
        model = model_of_the_test

        from neural_mp.compat.inc.experimental import Benchmark, Quantization, common

        quantizer = Quantization(args.config)
        quantizer.model = common.Model(model)
        q_model = quantizer.fit()
        q_model.save(args.tuned_checkpoint)

        from neural_mp.compat.inc.utils.pytorch import load

        new_model = load(args.tuned_checkpoint, model)
        evaluator = Benchmark(args.config)
        evaluator.model = new_model
        accuracy, _, _ = evaluator("accuracy")["accuracy"]
        """,
        "--config",
        str(tmp_path / "conf.yaml"),
    )
    assert done["q_model"].plan.counts()["int8"] > 0
    assert done["accuracy"] > 0.7


def test_onnx_vision(tmp_path, photos, classifier):
    """`ImagenetRaw` with a list of labels, in YAML; an `.onnx` file in, an `.onnx` file out."""
    listed = []
    (tmp_path / "val").mkdir()
    for number in range(64):
        Image.fromarray(photos[0][700 + number]).save(tmp_path / f"val/{number}.png")
        listed.append(f"{number}.png {photos[1][700 + number]}")
    (tmp_path / "val_map.txt").write_text("\n".join(listed))
    torch.onnx.export(
        classifier,
        (torch.rand(2, 3, SIZE, SIZE),),
        str(tmp_path / "net.onnx"),
        input_names=["data"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        opset_version=18,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    loader = f"""
        dataset:
          ImagenetRaw: {{data_path: {tmp_path / "val"}, image_list: {tmp_path / "val_map.txt"}}}
        transform:
          Rescale: {{}}
          Transpose: {{perm: [2, 0, 1]}}
          Cast: {{dtype: float32}}
    """
    (tmp_path / "conf.yaml").write_text(
        f"""
model: {{name: digits, framework: onnxrt_qlinearops}}
quantization:
  approach: post_training_static_quant
  calibration:
    dataloader:
      batch_size: 8
{textwrap.indent(textwrap.dedent(loader), "      ")}
evaluation:
  accuracy:
    metric: {{topk: 1}}
    dataloader:
      batch_size: 16
{textwrap.indent(textwrap.dedent(loader), "      ")}
tuning:
  objective: modelsize
  accuracy_criterion: {{absolute: 0.05}}
  exit_policy: {{timeout: 0}}
"""
    )
    done = run(
        tmp_path,
        """
        import sys
        import onnx
        from neural_mp.compat.inc import options
        from neural_mp.compat.inc.experimental import Quantization, common

        options.onnxrt.graph_optimization.level = "ENABLE_BASIC"
        model = onnx.load(sys.argv[1])
        quantize = Quantization(sys.argv[2])
        quantize.model = common.Model(model)
        q_model = quantize()
        q_model.save(sys.argv[3])
        """,
        *(str(tmp_path / name) for name in ("net.onnx", "conf.yaml", "int8.onnx")),
    )
    kinds = {node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node}
    assert any("QLinear" in kind or "Integer" in kind for kind in kinds)
    assert done["q_model"].report.accuracy > 0.7


def test_tensorflow_image_recognition(tmp_path, photos):
    """`ImageRecord` with the transforms of ImageNet, in YAML, without eager execution."""
    import io

    import keras
    import tensorflow as tf
    from keras_nets import compile_briefly

    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3), name="input"),
            keras.layers.Conv2D(8, 4, 4, activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    compile_briefly(net, "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    net.fit(photos[0][:700] / 255.0, photos[1][:700], epochs=8, verbose=0)
    neural_mp_graph = common.Model(net).graph_def
    (tmp_path / "net.pb").write_bytes(neural_mp_graph.SerializeToString())
    (tmp_path / "records").mkdir()
    with tf.io.TFRecordWriter(str(tmp_path / "records/validation-00000-of-00001")) as writer:
        for number in range(64):
            stream = io.BytesIO()
            Image.fromarray(photos[0][700 + number]).save(stream, format="JPEG", quality=95)
            features = {
                "image/encoded": tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[stream.getvalue()])
                ),
                "image/class/label": tf.train.Feature(
                    int64_list=tf.train.Int64List(value=[int(photos[1][700 + number]) + 1])
                ),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    loader = f"""
        dataset: {{ImageRecord: {{root: {tmp_path / "records"}}}}}
        transform:
          Resize: {{size: 32}}
          Cast: {{dtype: float32}}
          LabelShift: 1
    """
    (tmp_path / "conf.yaml").write_text(
        f"""
version: 1.0
model: {{name: digits, framework: tensorflow}}
quantization:
  calibration:
    sampling_size: 32
    dataloader:
      batch_size: 16
{textwrap.indent(textwrap.dedent(loader), "      ")}
evaluation:
  accuracy:
    metric: {{topk: 1}}
    dataloader:
      batch_size: 16
{textwrap.indent(textwrap.dedent(loader), "      ")}
tuning:
  objective: modelsize
  accuracy_criterion: {{absolute: 0.05}}
  exit_policy: {{timeout: 0}}
"""
    )
    lines = shown(
        tmp_path,
        """
        import tensorflow as tf
        from argparse import ArgumentParser

        tf.compat.v1.disable_eager_execution()

        parser = ArgumentParser()
        parser.add_argument("--input-graph", dest="input_graph")
        parser.add_argument("--output-graph", dest="output_graph")
        parser.add_argument("--config")
        args = parser.parse_args()

        from neural_mp.compat.inc.experimental import Benchmark, Quantization, common

        quantizer = Quantization(args.config)
        quantizer.model = common.Model(args.input_graph)
        q_model = quantizer.fit()
        q_model.save(args.output_graph)
        evaluator = Benchmark(args.config)
        evaluator.model = common.Model(args.output_graph)
        evaluator("accuracy")
        evaluator("performance")
        print(f"Tuned: {q_model.report.accuracy:.4f}")
        """,
        "--input-graph",
        str(tmp_path / "net.pb"),
        "--config",
        str(tmp_path / "conf.yaml"),
        "--output-graph",
        str(tmp_path / "int8.pb"),
    )
    accuracy = re.search(r"Accuracy is ([\d.]+)", lines)[1]
    assert float(accuracy) > 0.7
    assert float(re.search(r"Throughput: ([\d.]+) images/sec", lines)[1]) > 0
    assert f"Tuned: {accuracy}\n" in lines


class Detector(nn.Module):
    """Finds one box, always at the same place, by way of a convolution."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
        nn.init.zeros_(self.head.weight)
        self.head.bias = nn.Parameter(torch.tensor([0.25, 0.25, 0.75, 0.75]))

    def forward(self, image):
        pooled = self.features(image.permute(0, 3, 1, 2)).relu().mean((2, 3))
        boxes = self.head(pooled).unsqueeze(1)
        return boxes, 0 * boxes[..., 0] + 0.9, (0 * boxes[..., 0] + 18).to(torch.float32)


def test_object_detection(tmp_path):
    """`COCORaw` and `COCOmAPv2`, in YAML, with a map of the model's outputs."""
    pytest.importorskip("pycocotools", reason="needs the extra coco")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val2017").mkdir()
    images, annotations = [], []
    for number in range(1, 9):
        name = f"{number:012}.png"
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "val2017" / name)
        images.append({"id": number, "file_name": name, "height": 32, "width": 32})
        annotations.append(
            {"id": number, "image_id": number, "category_id": 18, "bbox": [8, 8, 16, 16]}
        )
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 18, "name": "dog"}],
    }
    (tmp_path / "annotations/instances_val2017.json").write_text(json.dumps(content))
    torch.manual_seed(0)
    torch.onnx.export(
        Detector().eval(),
        (torch.rand(2, 32, 32, 3),),
        str(tmp_path / "detector.onnx"),
        input_names=["image"],
        output_names=["boxes", "scores", "classes"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        opset_version=18,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    (tmp_path / "conf.yaml").write_text(
        f"""
version: 1.0
model: {{name: detector, framework: onnxrt_qlinearops}}
quantization:
  approach: post_training_static_quant
  calibration:
    sampling_size: 4
    dataloader: &loader
      batch_size: 1
      dataset: {{COCORaw: {{root: {tmp_path}}}}}
      transform:
        Rescale: {{}}
        Cast: {{dtype: float32}}
evaluation:
  accuracy:
    metric:
      COCOmAPv2:
        output_index_mapping: {{boxes: 0, scores: 1, classes: 2}}
    dataloader: *loader
tuning:
  accuracy_criterion: {{relative: 0.01}}
  exit_policy: {{timeout: 0}}
"""
    )
    done = run(
        tmp_path,
        """
        import sys
        from neural_mp.compat.inc.experimental import Quantization, common

        quantizer = Quantization(sys.argv[2])
        quantizer.model = common.Model(sys.argv[1])
        q_model = quantizer.fit()
        """,
        *(str(tmp_path / name) for name in ("detector.onnx", "conf.yaml")),
    )
    assert done["q_model"].report.accuracy == pytest.approx(1.0)
