"""What the names of transforms mean in files for PyTorch: what they mean in torchvision."""

import numpy as np
import pytest
from close_arrays import assert_close

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.data import build_transforms
from neural_mp.errors import ConfigurationError, DataError

PIL = pytest.importorskip("PIL.Image")
PHOTO = np.random.default_rng(0).integers(0, 256, (40, 61, 3)).astype(np.uint8)
GREY = PHOTO[..., 0]
FLOATS = np.moveaxis(PHOTO / 255, -1, 0).astype(np.float32)


def applied(image, **spec):
    return build_transforms(spec, load_vocabulary("pytorch"))((image, 0))[0]


def test_the_way_of_an_imagenet_model():
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    output = applied(
        PHOTO[:, :60],
        Resize={"size": 32},
        CenterCrop={"size": 24},
        ToTensor={},
        Normalize={"mean": mean, "std": std},
    )
    scaled = PIL.fromarray(PHOTO[:, :60]).resize((48, 32), PIL.Resampling.BILINEAR)
    pixels = np.array(scaled)[4:28, 12:36] / 255  # (32 - 24) / 2, (48 - 24) / 2
    expected = ((pixels - mean) / std).transpose(2, 0, 1)
    assert output.dtype == np.float32
    assert_close(output, expected, abs=1e-5)


def test_one_size_is_the_shorter_edge_and_two_are_both_edges():
    assert applied(PHOTO, Resize=20).shape == (20, 30, 3)  # 61 × 20 / 40 = 30.5, cut off
    assert applied(PHOTO, Resize={"size": [20]}).shape == (20, 30, 3)
    assert applied(PHOTO, Resize={"size": [20, 25]}).shape == (20, 25, 3)
    assert applied(GREY, Resize=20).shape == (20, 30)
    assert applied(FLOATS, Resize=20).shape == (3, 20, 30)


def test_floats_are_scaled_as_pytorch_does_it():
    torch = pytest.importorskip("torch")
    for method in ("bilinear", "bicubic"):
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(FLOATS)[None], (23, 31), mode=method, antialias=True
        )[0].numpy()
        output = applied(FLOATS, Resize={"size": [23, 31], "interpolation": method})
        assert_close(output, expected, abs=1e-4)
    nearest = torch.nn.functional.interpolate(torch.from_numpy(FLOATS)[None], (23, 31))[0].numpy()
    output = applied(FLOATS, Resize={"size": [23, 31], "interpolation": "nearest"})
    assert (output == nearest).all()


def test_an_image_of_pillow_is_taken_too():
    assert (applied(PIL.fromarray(PHOTO), ToArray={}) == PHOTO).all()
    assert applied(PIL.fromarray(GREY), ToTensor={}).shape == (1, 40, 61)


def test_to_tensor_scales_bytes_only():
    assert_close(applied(PHOTO, ToTensor={}), FLOATS, abs=1e-6)
    floats = PHOTO.astype(np.float32)
    assert (applied(floats, ToTensor={}) == floats.transpose(2, 0, 1)).all()


def test_to_pil_image_is_the_way_back():
    assert (applied(PHOTO, ToTensor={}, ToPILImage={}) == PHOTO).all()
    assert (applied(PHOTO, ToPILImage={}) == PHOTO).all()


def test_a_crop_larger_than_the_image_is_filled_with_zeros():
    output = applied(PHOTO, CenterCrop=[44, 60])
    assert output.shape == (44, 60, 3)
    assert not output[:2].any()
    assert not output[-2:].any()
    assert (output[2:42] == PHOTO[:, :60]).all()  # (61 - 60) / 2 = 0.5 is rounded to 0


def test_a_part_beyond_the_image_is_filled_with_zeros():
    box = {"offset_height": -1, "offset_width": 0, "target_height": 3, "target_width": 4}
    output = applied(PHOTO, CropToBoundingBox=box)
    assert not output[0].any()
    assert (output[1:] == PHOTO[:2, :4]).all()
    options = {"x": 2, "y": 3, "width": 30, "height": 20, "size": 10}
    output = applied(PHOTO, CropResize=options)
    assert (output == applied(PHOTO[3:23, 2:32], Resize=10)).all()
    assert output.shape == (10, 15, 3)


def test_pad_takes_one_two_or_four_margins():
    assert applied(PHOTO, Pad=2).shape == (44, 65, 3)
    assert applied(PHOTO, Pad={"padding": [1, 2]}).shape == (44, 63, 3)
    output = applied(PHOTO, Pad={"padding": [1, 2, 3, 4], "fill": [7, 8, 9]})
    assert output.shape == (46, 65, 3)
    assert output[0, 0].tolist() == [7, 8, 9]
    assert (output[2:42, 1:62] == PHOTO).all()
    edge = applied(FLOATS, Pad={"padding": 1, "padding_mode": "edge"})
    assert (edge[:, 0, 1:-1] == FLOATS[:, 0]).all()
    with pytest.raises(ConfigurationError, match="1, 2 or 4"):
        applied(PHOTO, Pad={"padding": [1, 2, 3]})


def test_flips_turn_over_a_share_of_the_images():
    assert (applied(PHOTO, RandomHorizontalFlip={"p": 1.0}) == PHOTO[:, ::-1]).all()
    assert (applied(FLOATS, RandomVerticalFlip={"p": 1.0}) == FLOATS[:, ::-1]).all()
    assert (applied(PHOTO, RandomHorizontalFlip={"p": 0.0}) == PHOTO).all()
    with pytest.raises(ConfigurationError, match="from 0 to 1"):
        applied(PHOTO, RandomHorizontalFlip={"p": 2.0})


def test_random_crops_pad_only_if_asked():
    with pytest.raises(DataError, match="pad_if_needed"):
        applied(PHOTO, RandomCrop=50)
    output = applied(PHOTO, RandomCrop={"size": 50, "pad_if_needed": True, "fill": 3})
    assert output.shape == (50, 50, 3)
    assert applied(PHOTO, RandomCrop={"size": 40, "padding": 4}).shape == (40, 40, 3)


def test_a_random_part_of_the_whole_size_is_the_whole_image():
    output = applied(
        PHOTO[:, :40], RandomResizedCrop={"size": 40, "scale": [1, 1], "ratio": [1, 1]}
    )
    assert (output == PHOTO[:, :40]).all()
    assert applied(PHOTO, RandomResizedCrop={"size": [20, 30]}).shape == (20, 30, 3)


def test_colours_change_by_known_factors():
    grey_levels = np.full((2, 2, 3), 100, dtype=np.uint8)
    assert (applied(grey_levels, ColorJitter={"brightness": [0.5, 0.5]}) == 50).all()
    assert (applied(grey_levels, ColorJitter={"contrast": [0.2, 0.2]}) == 100).all()
    red = np.zeros((2, 2, 3), dtype=np.uint8)
    red[..., 0] = 200
    without = applied(red, ColorJitter={"saturation": [0, 0]})
    assert (without == without[..., :1]).all()
    shifted = applied(red, ColorJitter={"hue": [1 / 3, 1 / 3]})
    assert shifted[0, 0, 1] == 200
    assert shifted[0, 0, 0] < 5
    assert (applied(PHOTO, ColorJitter={}) == PHOTO).all()
    with pytest.raises(ConfigurationError, match="hue"):
        applied(red, ColorJitter={"hue": 0.7})


def test_colours_need_a_picture():
    with pytest.raises(DataError, match="move ToTensor after"):
        applied(FLOATS, ColorJitter={"brightness": 0.5})
