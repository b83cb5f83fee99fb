"""The transforms that `inc_values.py` compares."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inc_names.comparison import Comparison, Repository
from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.compat.inc.components.transforms.image_transform import as_tensor_image

SEED = 7
_draw = np.random.RandomState(SEED)
PHOTO = _draw.randint(0, 256, (97, 131, 3)).astype(np.uint8)
TALL = _draw.randint(0, 256, (140, 75, 3)).astype(np.uint8)
LARGE = _draw.randint(0, 256, (375, 500, 3)).astype(np.uint8)
GREY = _draw.randint(0, 256, (64, 80)).astype(np.uint8)
FLOATS = (_draw.rand(97, 131, 3) * 255).astype(np.float32)
CHANNELS_FIRST = _draw.rand(3, 50, 61).astype(np.float32)
LOGITS = _draw.randn(4, 10).astype(np.float32)


def _ours(framework: str, name: str, options: Any, image: Any, label: Any = None) -> Any:
    transform = load_vocabulary(framework).transforms.build(name, options)
    return transform((image, label))


def _whole(image: np.ndarray) -> list[int]:
    """Height and width of a picture, or of floats with channels first."""
    return list(image.shape[:2] if image.dtype == np.uint8 else image.shape[1:])


def _plain(value: Any) -> Any:
    """Pictures, tensors of PyTorch and of TensorFlow as arrays; pictures with channels."""
    if isinstance(value, tuple | list | dict | str | bytes | type(None)):
        return value
    return np.asarray(value)


def _case(kind: str, options: dict[str, Any], image: np.ndarray) -> str:
    shape = " × ".join(map(str, image.shape))
    shown = "".join(f"; {key} {value}" for key, value in options.items())
    return f"({kind} {image.dtype} {shape}{shown})"


def on_arrays(
    framework: str, name: str, options: dict[str, Any], image: np.ndarray, **kwargs: Any
) -> Comparison:
    """One image as an array; numpy's generator is set to the seed of ours."""
    seed = {"seed": SEED} if name.startswith("Random") or options.get("random_crop") else {}
    process = kwargs.pop("process", "preprocess")

    def theirs(repository: Repository) -> Any:
        np.random.seed(SEED)
        transform = repository.transform(framework, name, process)(**options)
        return _plain(transform((image.copy(), None))[0])

    return Comparison(
        name,
        framework,
        lambda: _ours(framework, name, {**options, **seed}, image)[0],
        theirs,
        case=_case("array", options, image),
        **kwargs,
    )


def on_tensors(name: str, options: dict[str, Any], image: np.ndarray, **kwargs: Any) -> Comparison:
    """One image as an eager tensor of TensorFlow, as in a record."""
    process = kwargs.pop("process", "preprocess")

    def theirs(repository: Repository) -> Any:
        import tensorflow as tf

        transform = repository.transform("tensorflow", name, process)(**options)
        return _plain(transform((tf.constant(image), None))[0])

    return Comparison(
        name,
        "tensorflow",
        lambda: _ours("tensorflow", name, options, as_tensor_image(image))[0],
        theirs,
        case=_case("tensor", options, image),
        **kwargs,
    )


def on_pictures(name: str, options: dict[str, Any], image: np.ndarray) -> Comparison:
    """One picture of Pillow, or floats as a tensor of PyTorch."""

    def theirs(repository: Repository) -> Any:
        import torch
        from PIL import Image

        picture = image.dtype == np.uint8
        inputs = Image.fromarray(image) if picture else torch.from_numpy(image.copy())
        process = "general" if name == "Cast" else "preprocess"
        transform = repository.transform("pytorch", name, process)(**options)
        return _plain(transform((inputs, None))[0])

    def ours() -> Any:
        array = _ours("pytorch", name, options, image)[0]
        one_channel = array.ndim == 3 and array.dtype == np.uint8 and array.shape[2] == 1
        return array[:, :, 0] if one_channel else array

    what = "picture" if image.dtype == np.uint8 else "tensor"
    return Comparison(name, "pytorch", ours, theirs, case=_case(what, options, image))


def labels_of(framework: str, labels: Any, shift: int) -> Comparison:
    """Labels of one kind, shifted."""
    return Comparison(
        "LabelShift",
        framework,
        lambda: _ours(framework, "LabelShift", shift, LOGITS, labels)[1],
        lambda repository: repository.transform(framework, "LabelShift", "postprocess")(shift)(
            (LOGITS, labels)
        )[1],
        case=type(labels).__name__,
    )


def with_boxes(framework: str, options: dict[str, Any], image: np.ndarray) -> Comparison:
    """An image with boxes."""
    boxes = np.array([[0.1, 0.2, 0.5, 0.9], [0.0, 0.0, 1.0, 1.0]])
    label = (boxes, np.array([b"cat", b"dog"]), np.array([1, 2]), np.array(b"7.jpg"))
    return Comparison(
        "ResizeWithRatio",
        framework,
        lambda: _ours(framework, "ResizeWithRatio", options, image, label),
        lambda repository: repository.transform(framework, "ResizeWithRatio")(**options)(
            (image.copy(), label)
        ),
        case=_case("array", options, image),
    )


_TEXTS = (
    "The Amazon rainforest (Portuguese: Floresta Amazônica) covers 5,500,000 square kilometres. "
    "It spans nine nations; Brazil's share is 60%, Peru's 13%.",
    "Ångström's unit equals 10⁻¹⁰ m — named in 1868.\u202fIt isn't an SI unit, "
    "“though widely used” by chemists & crystallographers 中文 text.",
)
_QUESTIONS = ("How large is the forest?", "Who has 60%?", "What is it named after, and when?")


def _squad_files(folder: Path) -> dict[str, str]:
    paragraphs = [
        {
            "context": text,
            "qas": [
                {"id": f"{t}-{q}", "question": question} for q, question in enumerate(questions)
            ],
        }
        for t, (text, questions) in enumerate(
            zip(_TEXTS, (_QUESTIONS[:2], _QUESTIONS[2:]), strict=True)
        )
    ]
    (folder / "dev.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    letters = sorted({letter.lower() for text in _TEXTS for letter in text if letter.strip()})
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "the",
        "forest",
        "##est",
        "rain",
        "nation",
        "unit",
    ]
    vocabulary_lines = [*pieces, *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary_lines)) + "\n")
    return {"label_file": str(folder / "dev.json"), "vocab_file": str(folder / "vocab.txt")}


def answers(batches: Sequence[int], zoo: bool, **options: int) -> Comparison:
    """Answers from random scores, which come batch by batch or all at once."""
    folder = Path(tempfile.mkdtemp())
    length = options["max_seq_length"]
    count = sum(batches)
    start, end = np.random.RandomState(SEED).randn(2, count, length).astype(np.float32)
    name = "SquadV1ModelZoo" if zoo else "SquadV1"

    def run(transform: Any) -> Any:
        if not zoo:
            numbers = [1_000_000_000 + number for number in range(count)]
            return transform(([numbers, list(start), list(end)], None))[0]
        answer, position = None, 0
        for size in batches:
            chosen = slice(position, position + size)
            answer, position = transform(((start[chosen], end[chosen]), "label")), position + size
        return answer[0]

    def ours() -> Any:
        return run(
            load_vocabulary("tensorflow").transforms.build(
                name, {**_squad_files(folder), **options}
            )
        )

    def theirs(repository: Repository) -> Any:
        maker = repository.transform("tensorflow", name, "postprocess")
        return run(maker(**_squad_files(folder), **options))

    case = f"{count} windows; {options}"
    return Comparison(name, "tensorflow", ours, theirs, case=case)


_MEAN, _STD = [123.68, 116.78, 103.94], [58.4, 57.1, 57.4]
_ARRAYS = ("tensorflow", "onnxrt")

#: Two sizes that are no square, in the order of the file.
_SIZES = [61, 83]

TRANSFORMS = (
    *(
        on_arrays(framework, "Resize", {"size": size, "interpolation": method}, image, bound=bound)
        for framework in _ARRAYS
        for image in (LARGE, FLOATS, TALL)
        for size in (_SIZES, 224)
        for method, bound in (("nearest", None), ("bilinear", None), ("bicubic", 1.0))
    ),
    *(on_arrays(framework, "Resize", {"size": 32}, GREY) for framework in _ARRAYS),
    *(
        on_tensors("Resize", {"size": size, "interpolation": method}, image)
        for image in (LARGE, FLOATS)
        for size in (_SIZES, 224)
        for method in ("nearest", "bilinear", "bicubic")
    ),
    *(
        on_arrays(framework, name, options, image)
        for framework in _ARRAYS
        for name, options, image in (
            ("CenterCrop", {"size": [50, 61]}, PHOTO),
            ("CenterCrop", {"size": 64}, FLOATS),
            ("CropToBoundingBox",
             {"offset_height": 3, "offset_width": 5, "target_height": 40, "target_width": 50},
             PHOTO),
            ("CropResize",
             {"x": 3, "y": 5, "width": 60, "height": 50, "size": [32, 40]}, PHOTO),
            ("RandomCrop", {"size": [50, 61]}, PHOTO),
            ("RandomHorizontalFlip", {}, PHOTO),
            ("RandomVerticalFlip", {}, PHOTO),
            ("RandomResizedCrop", {"size": [40, 50]}, PHOTO),
            ("RandomResizedCrop", {"size": 64, "scale": [0.9, 0.95]}, TALL),
            ("Normalize", {"mean": _MEAN, "std": _STD}, PHOTO),
            ("Normalize", {"mean": _MEAN, "std": _STD}, FLOATS),
            ("Rescale", {}, PHOTO),
            ("Rescale", {}, FLOATS),
            ("Transpose", {"perm": [2, 0, 1]}, PHOTO),
            ("AlignImageChannel", {"dim": 3}, GREY),
            ("AlignImageChannel", {"dim": 1}, PHOTO),
            ("AlignImageChannel", {"dim": 1}, FLOATS),
            ("AlignImageChannel", {"dim": 3}, np.dstack([PHOTO, PHOTO[..., :1]])),
        )
    ),
    *(
        on_arrays(framework, "Cast", {"dtype": dtype}, image, process="general")
        for framework in _ARRAYS
        for dtype, image in (("float32", PHOTO), ("float16", PHOTO), ("int32", FLOATS))
    ),
    *(
        on_tensors("Cast", {"dtype": dtype}, image, process="general")
        for dtype, image in (
            ("float32", PHOTO), ("float16", PHOTO), ("uint8", FLOATS / 256), ("int32", PHOTO),
            ("float32", FLOATS), ("uint8", PHOTO.astype(np.int32) << 20),
        )
    ),
    *(
        on_tensors(name, options, image)
        for name, options, image in (
            ("CenterCrop", {"size": [50, 61]}, PHOTO),
            ("RandomCrop", {"size": [50, 61]}, PHOTO),
            ("CropToBoundingBox",
             {"offset_height": 3, "offset_width": 5, "target_height": 40, "target_width": 50},
             PHOTO),
            ("CropResize",
             {"x": 3, "y": 5, "width": 60, "height": 50, "size": [32, 40]}, PHOTO),
            ("Normalize", {"mean": _MEAN, "std": _STD}, FLOATS),
            ("Normalize", {"mean": _MEAN, "std": _STD, "rescale": [127.5, 1.0]}, FLOATS),
            ("KerasRescale", {"rescale": [127.5, 1.0]}, FLOATS),
            ("KerasRescale", {}, FLOATS),
            ("Rescale", {}, PHOTO),
            ("Transpose", {"perm": [2, 0, 1]}, PHOTO),
            ("PaddedCenterCrop", {"size": 224, "crop_padding": 32}, PHOTO),
            ("PaddedCenterCrop", {"size": [224, 224]}, TALL),
            ("QuantizedInput", {"dtype": "uint8", "scale": 0.4}, FLOATS - 128),
            ("QuantizedInput", {"dtype": "int8", "scale": 0.4}, FLOATS - 128),
            ("QuantizedInput", {"dtype": "int8"}, FLOATS),
            ("BilinearImagenet", {"height": 64, "width": 72}, PHOTO),
            ("BilinearImagenet", {"height": 224, "width": 224, "central_fraction": 0.9}, LARGE),
            ("BilinearImagenet",
             {"height": 64, "width": 72, "mean_value": [0.1, 0.2, 0.3], "scale": 2.0},
             FLOATS / 255),
            ("ResizeCropImagenet", {"height": 224, "width": 224}, LARGE),
            ("ResizeCropImagenet",
             {"height": 224, "width": 200, "mean_value": _MEAN, "scale": 0.017}, TALL),
            ("ResizeCropImagenet",
             {"height": 60, "width": 50, "resize_side": 64, "subpixels": "BGR"}, PHOTO),
            ("ResizeCropImagenet",
             {"height": 60, "width": 50, "resize_side": 64, "subpixels": "BGR",
              "data_format": "channels_first"}, PHOTO.transpose(2, 0, 1)),
            *(
                ("ResizeCropImagenet",
                 {"height": 60, "width": 50, "resize_side": 64, "resize_method": method}, FLOATS)
                for method in ("nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian",
                               "mitchellcubic")
            ),
        )
    ),
    *(
        on_arrays("onnxrt", name, options, image, bound=bound)
        for name, options, image, bound in (
            ("BilinearImagenet", {"height": 64, "width": 72}, PHOTO, None),
            ("BilinearImagenet", {"height": 224, "width": 224}, LARGE, None),
            ("ResizeCropImagenet", {"height": 224, "width": 224}, LARGE, None),
            ("ResizeCropImagenet", {"height": 224, "width": 224}, TALL, None),
            ("ResizeCropImagenet", {"height": 60, "width": 60, "resize_side": 70}, GREY, None),
            ("ResizeCropImagenet",
             {"height": 60, "width": 50, "resize_side": 64, "random_crop": True}, PHOTO, None),
            ("ResizeWithAspectRatio", {"height": 224, "width": 224}, LARGE, 1.0),
            ("ResizeWithAspectRatio", {"height": 224, "width": 224}, PHOTO, 1.0),
            ("ResizeWithAspectRatio", {"height": 56, "width": 56}, FLOATS, None),
        )
    ),
    *(
        with_boxes(framework, options, image)
        for framework in ("onnxrt", "tensorflow", "pytorch")
        for options, image in (
            ({}, LARGE),
            ({"min_dim": 120, "max_dim": 160, "padding": True}, PHOTO),
            ({"min_dim": 50, "max_dim": 90, "padding": True}, TALL),
        )
    ),
    *(
        on_pictures(name, options, image)
        for image in (PHOTO, TALL, GREY, CHANNELS_FIRST)
        for name, options in (
            ("Resize", {"size": 40}),
            ("Resize", {"size": [40]}),
            ("Resize", {"size": [40, 44]}),
            ("Resize", {"size": 90, "interpolation": "bicubic"}),
            ("Resize", {"size": 33, "interpolation": "nearest"}),
            ("CenterCrop", {"size": 45}),
            ("CenterCrop", {"size": [44, 200]}),
            ("CropToBoundingBox",
             {"offset_height": -3, "offset_width": 5, "target_height": 40, "target_width": 50}),
            ("Pad", {"padding": 3}),
            ("Pad", {"padding": [3, 5], "padding_mode": "reflect"}),
            ("Pad", {"padding": [1, 2, 3, 4], "fill": 9}),
            ("RandomHorizontalFlip", {"p": 1.0}),
            ("RandomVerticalFlip", {"p": 1.0}),
            ("RandomCrop", {"size": _whole(image)}),
            ("RandomResizedCrop", {"size": 40, "scale": [4.0, 4.0]}),
        )
    ),
    *(
        on_pictures(name, options, image)
        for name, options, image in (
            ("ToTensor", {}, PHOTO),
            ("ToTensor", {}, GREY),
            ("ToPILImage", {}, CHANNELS_FIRST),
            ("ToArray", {}, PHOTO),
            ("Normalize", {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
             CHANNELS_FIRST),
            ("Transpose", {"perm": [1, 2, 0]}, CHANNELS_FIRST),
            ("Cast", {"dtype": "int32"}, CHANNELS_FIRST * 100),
            ("CropResize", {"x": 3, "y": 5, "width": 60, "height": 50, "size": 32}, PHOTO),
            ("AlignImageChannel", {"dim": 3}, GREY),
            ("AlignImageChannel", {"dim": 1}, PHOTO),
            ("ColorJitter", {"brightness": [0.7, 0.7]}, PHOTO),
            ("ColorJitter", {"contrast": [1.3, 1.3]}, PHOTO),
            ("ColorJitter", {"saturation": [0.4, 0.4]}, PHOTO),
            ("ColorJitter", {"hue": [0.2, 0.2]}, PHOTO),
            ("ColorJitter", {"hue": [-0.3, -0.3]}, PHOTO),
        )
    ),
    *(
        labels_of(framework, labels, 1)
        for framework in ("pytorch", "tensorflow", "onnxrt")
        for labels in (np.arange(4), [1, 2, 3], [(1, 2), (3, 4)], [np.arange(3)], 1001)
    ),
    *(
        answers(batches, zoo, max_seq_length=length, doc_stride=stride, n_best_size=best)
        for batches, length, stride, best, zoo in (
            ([2, 1], 384, 128, 20, True),
            ([5, 9, 3], 64, 16, 20, True),
            ([5, 9, 3], 64, 16, 3, False),
            ([9], 64, 16, 20, False),  # not all windows: some questions are skipped
        )
    ),
)  # fmt: skip
