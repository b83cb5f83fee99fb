"""Files that a model names beside itself."""

from __future__ import annotations

from pathlib import Path

from neural_mp.errors import ModelLoadError


def beside(model: Path, name: str, folder: str = "") -> Path:
    """The file that a model names, which lies in the model's folder or below.

    Where the model is a link, as in caches of downloaded models, it may lie beside what that leads
    to.

    Args:
        model: the model's file.
        name: as the model gives it.
        folder: the one beside the model that names begin in.

    Raises:
        ModelLoadError: it lies elsewhere, by its name or by a link.
    """
    file = model.parent / folder / name
    try:
        places = [model.parent.resolve(), model.resolve().parent]
        inside = any(file.resolve().is_relative_to(place) for place in places)
    except (OSError, RuntimeError, ValueError):  # such as links in a ring, or a zero in the name
        inside = False
    if not name or "\0" in name or not inside:
        raise ModelLoadError(
            f"{str(model)!r} names the file {name!r}, which lies outside of the model's folder; "
            f"a model may only name files that lie beside it"
        )
    return file
