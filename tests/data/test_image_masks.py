"""Images with masks from folders: paired by name, checked when listed, resized together."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from neural_mp import MixedPrecision
from neural_mp.data import build_dataloader, build_dataset
from neural_mp.errors import ConfigurationError, DataError, MissingFrameworkError

Image = pytest.importorskip("PIL.Image")


def save_image(path, pixels, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(path)


@pytest.fixture
def scenes(tmp_path):
    """Six images of 12 × 10 pixels with masks of classes 0 to 2, two of these in a folder."""
    random = np.random.default_rng(0)
    arrays = {}
    for number in range(6):
        stem = f"day/{number}" if number < 2 else f"{number}"
        image = random.integers(0, 256, (12, 10, 3), dtype=np.uint8)
        mask = random.integers(0, 3, (12, 10), dtype=np.uint8)
        save_image(tmp_path / "images" / f"{stem}.png", image)
        save_image(tmp_path / "masks" / f"{stem}.png", mask)
        arrays[stem] = image, mask
    return tmp_path, arrays


def options_of(folder, **options):
    return {"images": str(folder / "images"), "masks": str(folder / "masks"), **options}


def build(folder, **options):
    return build_dataset({"image_mask_folder": options_of(folder, **options)})


def test_a_sample_is_the_image_and_the_class_of_each_pixel_in_the_order_of_names(scenes):
    folder, arrays = scenes
    dataset = build(folder)
    assert len(dataset) == 6
    for stem, (pixels, classes) in zip(sorted(arrays), dataset, strict=True):
        image, mask = arrays[stem]
        np.testing.assert_array_equal(pixels, image)
        np.testing.assert_array_equal(classes, mask)
        assert (pixels.dtype, classes.dtype) == (np.uint8, np.int64)


def test_image_and_mask_may_differ_in_the_ending_and_images_be_grey(scenes):
    folder, arrays = scenes
    for stem in arrays:
        png = folder / "images" / f"{stem}.png"
        Image.open(png).save(png.with_suffix(".JPG"), "JPEG")
        png.unlink()
    (folder / "masks" / "._2.png").write_bytes(b"left by a file manager")
    dataset = build(folder, mode="L")
    assert dataset.files[0][0].name == "2.JPG"
    pixels, classes = dataset[0]
    assert pixels.shape == (12, 10, 1)
    np.testing.assert_array_equal(classes, arrays["2"][1])


@pytest.mark.parametrize("mode", ["P", "1", "I;16"])
def test_masks_with_a_palette_of_two_values_or_of_16_bits_hold_classes(tmp_path, mode):
    """Pixels of a palette are the index, not the color; VOC's masks are such files."""
    pattern = np.indices((4, 6)).sum(axis=0) % 2
    if mode == "P":
        mask = Image.fromarray((pattern * 20).astype(np.uint8))
        mask.putpalette([7] * 768)
        expected = pattern * 20
    elif mode == "1":
        mask, expected = Image.fromarray(pattern.astype(bool)), pattern
    else:
        mask, expected = Image.fromarray((pattern * 1000).astype(np.uint16)), pattern * 1000
    assert mask.mode == mode
    save_image(tmp_path / "images" / "a.png", np.zeros((4, 6, 3), np.uint8))
    (tmp_path / "masks").mkdir()
    mask.save(tmp_path / "masks" / "a.png")
    np.testing.assert_array_equal(build(tmp_path)[0][1], expected)


def test_values_of_pixels_become_the_classes_of_their_positions(tmp_path):
    mask = np.array([[0, 255, 128], [255, 0, 0]], np.uint8)
    save_image(tmp_path / "images" / "a.png", np.zeros((2, 3, 3), np.uint8))
    save_image(tmp_path / "masks" / "a.png", mask)
    classes = build(tmp_path, values=[255, 0, 128])[0][1]
    assert classes.tolist() == [[1, 0, 2], [0, 1, 1]]
    with pytest.raises(
        DataError, match=r"\[0, 255\] do not hold 128, the value of 1 pixel .*a\.png"
    ):
        build(tmp_path, values=[0, 255])[0]


def test_size_resizes_images_bilinearly_and_masks_to_the_nearest_pixel(scenes):
    folder, arrays = scenes
    for size in ([6, 5], [24, 7], [1, 1]):
        pixels, classes = build(folder, size=size)[2]
        image, mask = arrays["4"]
        width_and_height = (size[1], size[0])
        bilinear = Image.fromarray(image).resize(width_and_height, Image.Resampling.BILINEAR)
        nearest = Image.fromarray(mask).resize(width_and_height, Image.Resampling.NEAREST)
        np.testing.assert_array_equal(pixels, np.array(bilinear))
        np.testing.assert_array_equal(classes, np.array(nearest))


def test_images_of_several_sizes_form_batches_with_size(scenes):
    folder, _ = scenes
    save_image(folder / "images" / "9.png", np.zeros((30, 20, 3), np.uint8))
    save_image(folder / "masks" / "9.png", np.ones((30, 20), np.uint8))
    spec = {
        "batch_size": 7,
        "dataset": {"ImageMaskFolder": options_of(folder, size=8)},
        "transform": {"Rescale": {}, "ToCHW": {}},
    }
    ((inputs, labels),) = build_dataloader(spec)
    assert (inputs.shape, labels.shape) == ((7, 3, 8, 8), (7, 8, 8))
    assert 0 <= inputs.min() < inputs.max() <= 1


def test_an_image_without_a_mask_and_a_mask_without_an_image_are_named(scenes):
    folder, _ = scenes
    (folder / "masks" / "day" / "1.png").unlink()
    with pytest.raises(
        DataError, match=r"1 of 6 images without a mask in .*masks: 1\.png; .*day/1"
    ):
        build(folder)
    (folder / "images" / "day" / "1.png").unlink()
    for number in range(2, 6):
        (folder / "images" / f"{number}.png").unlink()
    with pytest.raises(DataError, match=r"4 of 5 masks without an image"):
        build(folder)


def test_files_of_unequal_size_are_named_before_any_is_read(scenes):
    folder, _ = scenes
    save_image(folder / "masks" / "5.png", np.zeros((10, 12), np.uint8))
    message = r"images/5\.png has 12 x 10 pixels, its mask .*masks/5\.png 10 x 12"
    with pytest.raises(DataError, match=message):
        build(folder)


def test_two_files_of_one_name_are_refused(scenes):
    folder, _ = scenes
    save_image(folder / "images" / "3.bmp", np.zeros((12, 10, 3), np.uint8))
    with pytest.raises(DataError, match=r"images: .*3\.bmp and 3\.png differ in the ending only"):
        build(folder)


def test_masks_of_colors_are_refused_by_name(scenes):
    folder, _ = scenes
    save_image(folder / "masks" / "2.png", np.zeros((12, 10, 3), np.uint8))
    with pytest.raises(DataError, match=r"masks/2\.png must hold one whole number per pixel"):
        build(folder)[0]


def test_broken_files_and_empty_folders_are_named(scenes, tmp_path):
    folder, _ = scenes
    (folder / "masks" / "4.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"masks/4\.png cannot be read as an image"):
        build(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"masks: .*empty holds no images, which end in \.png"):
        build(folder, masks=str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"images: nowhere does not exist"):
        build(folder, images="nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "BGR"}, "mode must be 'RGB' or 'L', got 'BGR'"),
        ({"size": 0}, "size must be a whole number from 1"),
        ({"values": [0]}, r"values must be two or more different numbers, .*got \[0\]"),
        ({"values": [0, 0]}, "values must be two or more different numbers"),
        ({"values": "0"}, "values must be a list of whole numbers"),
        ({"mask": "masks"}, "no option 'mask'; did you mean 'masks'"),
    ],
)
def test_wrong_options_are_refused(scenes, options, message):
    with pytest.raises(ConfigurationError, match=message):
        build(scenes[0], **options)


def test_without_pillow_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingFrameworkError, match=r"ImageMaskFolder.*pip install .*\[images\]"):
        build(tmp_path)


CONF = """
mixed_precision: {precisions: int8}
quantization:
  calibration:
    dataloader: &data
      batch_size: 8
      dataset:
        image_mask_folder: {images: images, masks: masks, mode: L, values: [0, 255]}
      transform: {Rescale: {}, ToCHW: {}}
evaluation:
  accuracy:
    metric: {mIoU: {num_classes: 2}}
    dataloader: *data
"""


@pytest.mark.slow
def test_a_net_is_tuned_by_the_miou_of_a_folder_from_yaml(tmp_path, monkeypatch):
    """The net copies brightness; its mIoU is that of the same threshold on the arrays."""
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    unions = np.zeros((2, 2))
    for number in range(16):
        mask = random.random((8, 8)) > 0.5
        image = (mask * 120 + random.integers(0, 136, (8, 8))).astype(np.uint8)
        save_image(tmp_path / "images" / f"{number}.png", image)
        save_image(tmp_path / "masks" / f"{number}.png", (mask * 255).astype(np.uint8))
        bright = image / np.float32(255) > 0.5
        unions += [
            [(same & (bright == value)).sum(), (same | (bright == value)).sum()]
            for value, same in ((False, ~mask), (True, mask))
        ]
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1)).eval()
    with torch.no_grad():
        net[0].weight[:] = torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1)
        net[0].bias[:] = torch.tensor([1.0, 0.0])
    (tmp_path / "conf.yaml").write_text(CONF)
    monkeypatch.chdir(tmp_path)
    converter = MixedPrecision("conf.yaml")
    converter.model = net
    result = converter()
    expected = (unions[:, 0] / unions[:, 1]).mean()
    assert result.report.baseline_accuracy == pytest.approx(expected, abs=1e-6)
    assert 0.5 < expected < 1
