"""Image folders and image transforms, based on Pillow, which is imported only when needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from neural_mp.data.datasets import DATASETS
from neural_mp.data.option_checks import (
    check_existing_folder,
    check_one_of,
    height_and_width,
    import_package,
)
from neural_mp.data.transforms import TRANSFORMS, InputTransform
from neural_mp.errors import DataError
from neural_mp.io.files import require_regular_file

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
#: Allowed formats of these files: some other formats of Pillow start other programs.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


def import_pillow(needed_by: str) -> ModuleType:
    """Return Pillow's module `PIL.Image`.

    Raises:
        MissingFrameworkError: Pillow is not installed.
    """
    module: ModuleType = import_package("PIL.Image", needed_by, "images", "Pillow")
    return module


def read_pixels(path: Path, mode: str | None, needed_by: str) -> np.ndarray:
    """Read the pixels of an image file.

    Args:
        path: the file.
        mode: Pillow's color mode, e.g. `RGB`; None for the mode of the file.
        needed_by: name of the caller, for messages.

    Returns:
        `[height, width, channels]`, or `[height, width]` for one channel; uint8 for `RGB` and `L`.

    Raises:
        DataError: the file is missing or broken.
        MissingFrameworkError: Pillow is not installed.
    """
    with _open_image(path, needed_by) as image:
        return np.array(image if mode is None else image.convert(mode))


def read_size(path: Path, needed_by: str) -> tuple[int, int]:
    """Return height and width in pixels, as the header of an image file names them.

    Raises:
        DataError: the file is missing or broken.
        MissingFrameworkError: Pillow is not installed.
    """
    with _open_image(path, needed_by) as image:
        return image.height, image.width


@contextmanager
def _open_image(path: Path, needed_by: str) -> Iterator[Any]:
    image_of = import_pillow(needed_by)
    try:
        image_of.init()
        require_regular_file(path)
        formats = [name for name in _FORMATS if name in image_of.OPEN]
        with image_of.open(path, formats=formats) as image:
            most, pixels = image_of.MAX_IMAGE_PIXELS, image.width * image.height
            if most is not None and pixels > most:
                raise ValueError(
                    f"{image.width} x {image.height} pixels exceed the limit of {most} pixels; "
                    f"raise PIL.Image.MAX_IMAGE_PIXELS"
                )
            yield image
    except Exception as error:
        # Pillow's decoders raise any type, e.g. SyntaxError for a broken PNG.
        raise DataError(f"{path} cannot be read as an image: {error}") from error


@DATASETS.register("ImageFolder")
@dataclass(frozen=True)
class ImageFolder:
    """Images in one folder per class: `root/cat/1.png`, `root/dog/a/2.jpg`.

    A sample is a uint8 array `[height, width, channels]` and the index of its class in the
    sorted names of the class folders.

    Attributes:
        root: the folder of class folders.
        mode: `RGB` for three channels, `L` for one grayscale channel.
        classes: names of the class folders, in the order of the labels.
        files: the images with their labels, in the order of the samples.

    Raises:
        ConfigurationError: an option is wrong.
        DataError: `root` is missing or holds no images, or (when read) an image is broken.
        MissingFrameworkError: Pillow is not installed.
    """

    root: Any
    mode: str = "RGB"
    classes: tuple[str, ...] = field(init=False)
    files: tuple[tuple[Path, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        import_pillow("dataset 'ImageFolder'")
        check_one_of("ImageFolder: mode", self.mode, ("RGB", "L"))
        root = check_existing_folder("ImageFolder: root", self.root)
        folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        files = tuple(
            (path, label)
            for label, folder in enumerate(folders)
            for path in sorted(folder.rglob("*"))
            if path.suffix.lower() in IMAGE_SUFFIXES
        )
        if not files:
            raise DataError(
                f"ImageFolder found no images in the folders under {root}; they are expected as "
                f"{root}/CLASS/image, ending in {', '.join(IMAGE_SUFFIXES)}"
            )
        object.__setattr__(self, "classes", tuple(folder.name for folder in folders))
        object.__setattr__(self, "files", files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, label = self.files[index]
        pixels = read_pixels(path, self.mode, "dataset 'ImageFolder'")
        return (pixels if pixels.ndim == 3 else pixels[:, :, np.newaxis]), label


@TRANSFORMS.register("Resize")
@dataclass(frozen=True)
class Resize(InputTransform):
    """Resize an image `[H, W]` or `[H, W, C]`, uint8 or float32.

    Attributes:
        size: `[height, width]` in pixels, or one number for both.
        interpolation: `nearest`, `bilinear` or `bicubic`.

    Raises:
        ConfigurationError: an option is wrong.
        MissingFrameworkError: Pillow is not installed.
    """

    size: Any
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        import_pillow("transform 'Resize'")
        object.__setattr__(self, "size", height_and_width("Resize: size", self.size))
        check_one_of(
            "Resize: interpolation", self.interpolation, ("nearest", "bilinear", "bicubic")
        )

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Resize each channel separately, as Pillow does internally."""
        if inputs.dtype not in (np.uint8, np.float32):
            raise ValueError(
                f"the dtype must be uint8 or float32, got {inputs.dtype}; add Cast before Resize"
            )
        if inputs.ndim not in (2, 3):
            raise ValueError(f"the shape must be [H, W] or [H, W, C], got {list(inputs.shape)}")
        if inputs.ndim == 2:
            return self._resize_channel(inputs)
        channels = np.moveaxis(inputs, -1, 0)
        return np.stack([self._resize_channel(channel) for channel in channels], axis=-1)

    def _resize_channel(self, channel: np.ndarray) -> np.ndarray:
        image = import_pillow("transform 'Resize'")
        method = image.Resampling[self.interpolation.upper()]
        height, width = self.size
        source = image.fromarray(np.ascontiguousarray(channel))
        return np.array(source.resize((width, height), method))


@TRANSFORMS.register("CenterCrop")
@dataclass(frozen=True)
class CenterCrop(InputTransform):
    """Crop the center of an image `[H, W]` or `[H, W, C]`.

    Attributes:
        size: `[height, width]` in pixels, or one number for both.

    Raises:
        ConfigurationError: the size is wrong.
    """

    size: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", height_and_width("CenterCrop: size", self.size))

    def apply(self, inputs: np.ndarray) -> np.ndarray:
        """Crop; odd margins leave the larger part below and to the right."""
        height, width = self.size
        if inputs.ndim not in (2, 3):
            raise ValueError(f"the shape must be [H, W] or [H, W, C], got {list(inputs.shape)}")
        if inputs.shape[0] < height or inputs.shape[1] < width:
            raise ValueError("the image is smaller; resize it first, and crop before ToCHW")
        top, left = (inputs.shape[0] - height) // 2, (inputs.shape[1] - width) // 2
        return inputs[top : top + height, left : left + width]
