"""Lines and pages of printed text, drawn here."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

#: Words to print: those that Python itself brings.
WORDS = sorted({*keyword.kwlist, *(name for name in sys.stdlib_module_names if "_" not in name)})


def phrases(count: int, seed: int) -> Iterator[str]:
    """Two or three words and a number."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        tokens = list(draw.choice(WORDS, draw.integers(1, 3)))
        if draw.random() < 0.5:
            tokens[0] = tokens[0].capitalize()
        yield " ".join([*tokens, str(draw.integers(0, 1000))])


def line(text: str, seed: int, height: int, width: int) -> np.ndarray:
    """One line, dark on light or light on dark, with noise: uint8 [height, at most width, 3]."""
    draw = np.random.default_rng(seed)
    font = ImageFont.load_default(int(draw.integers(26, 42)))
    left, top, right, bottom = font.getbbox(text)
    margin = int(draw.integers(3, 9))
    size = (int(right - left) + 2 * margin, int(bottom - top) + 2 * margin)
    dark, light = int(draw.integers(0, 90)), int(draw.integers(170, 255))
    ink, paper = (dark, light) if draw.random() < 0.7 else (light, dark)
    page = Image.new("L", size, paper)
    ImageDraw.Draw(page).text((margin - left, margin - top), text, font=font, fill=ink)
    page = page.rotate(float(draw.uniform(-1.5, 1.5)), fillcolor=paper, resample=Image.BILINEAR)
    shown = page.resize((min(width, max(1, size[0] * height // size[1])), height), Image.BILINEAR)
    noise = draw.normal(0, draw.uniform(2, 22), (height, shown.width))
    result = np.clip(np.asarray(shown) + noise, 0, 255)
    return np.repeat(result.astype(np.uint8)[..., None], 3, axis=2)


def normalized(lines: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Lines as RapidOCR gives them to its models: float32 [lines, 3, height, width].

    Colours lie between -1 and 1; what a line leaves of the width is 0.
    """
    result = np.zeros((len(lines), 3, len(lines[0]), width), np.float32)
    for room, shown in zip(result, lines, strict=True):
        room[..., : shown.shape[1]] = shown.transpose(2, 0, 1) / np.float32(127.5) - 1
    return result


def page(seed: int, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """A page of several lines: uint8 [height, width, 3], and their boxes [lines, 4].

    A box is left, top, right, bottom.
    """
    draw = np.random.default_rng(seed)
    paper = int(draw.integers(170, 255))
    image = Image.new("L", (width, height), paper)
    pen, boxes, y = ImageDraw.Draw(image), [], int(draw.integers(8, 30))
    for text in phrases(20, seed):
        font = ImageFont.load_default(int(draw.integers(16, 34)))
        left, top, right, bottom = font.getbbox(text)
        x = int(draw.integers(10, max(11, width - int(right - left) - 20)))
        if y + bottom - top + 10 > height:
            break
        pen.text((x - left, y - top), text, font=font, fill=int(draw.integers(0, 90)))
        boxes.append((x, y, x + right - left, y + bottom - top))
        y += int(bottom - top) + int(draw.integers(14, 40))
    noisy = np.asarray(image, np.float32) + draw.normal(0, draw.uniform(2, 15), (height, width))
    shown = np.repeat(np.clip(noisy, 0, 255).astype(np.uint8)[..., None], 3, axis=2)
    return shown, np.asarray(boxes, np.float32)
