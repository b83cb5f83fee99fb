"""The folder that a model is saved in: what may be there already, and what is replaced."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from neural_mp.errors import ModelLoadError, NeuralMPError
from neural_mp.io.readers import read_json
from neural_mp.util.argument_checks import check_path, path_of
from neural_mp.util.validators import UnfitError, fields, mapping_of, shown, text

logger = logging.getLogger(__name__)

MANIFEST = "neural_mp.json"
PLAN_FILE = "plan.yaml"
RECORD_FILE = "run.json.gz"
PAGE_FILE = "report.html"
#: Names in a folder that a model is saved under, whatever its framework.
RESERVED = (
    *(MANIFEST, PLAN_FILE, RECORD_FILE, PAGE_FILE, "details.json", "neural_mp_onnx.json"),
    *("model.pt2", "saved_model.pb", "saved_model.pbtxt", "variables"),
    *("model.onnx", "model.onnx.data"),
)


def is_saved_model(path: object) -> bool:
    """Whether a path is a folder that `OptimizedModel.save` wrote."""
    try:
        return isinstance(path, str | Path) and (Path(path) / MANIFEST).is_file()
    except OSError:  # such as a name that is too long, or a folder that may not be looked into
        return False


def check_destination(path: str | Path) -> Path:
    """A folder that a model can be saved in; what it lies in is made.

    It may be there already, with an earlier result, which is replaced, and with files of others,
    which stay, unless they have the names of a model's files.

    Raises:
        NeuralMPError: a file is there, or a model that is not ours, or it cannot be written.
    """
    if not isinstance(path, str | Path):
        raise NeuralMPError(f"a model is saved in a folder; got {path!r} for its path")
    target = path_of("the folder to save a model in", path)
    if target.exists() and not target.is_dir():
        raise NeuralMPError(f"{str(target)!r} is a file; choose a folder to save the model in")
    if not is_saved_model(target):
        for name in RESERVED:
            if os.path.lexists(target / name):
                raise _taken(target, name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NeuralMPError(f"{str(target)!r} cannot be written: {error}") from error
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise NeuralMPError(f"{str(target)!r} cannot be written: no permission")
    return target


def put_in_place(complete: Path, target: Path) -> None:
    """Move a saved model to its folder, in place of an earlier one; files of others stay.

    Args:
        complete: the folder of the saved model.
        target: where it is to be.

    Raises:
        NeuralMPError: a file of somebody else's has the name of one of its files.
        OSError: it cannot be written.
    """
    if not target.exists():
        complete.rename(target)
        return
    earlier = _files_of(target)
    new = [path.relative_to(complete) for path in sorted(complete.rglob("*"))]
    for path in new:
        there = target / path
        both_folders = there.is_dir() and (complete / path).is_dir()
        if os.path.lexists(there) and path not in earlier and not both_folders:
            raise _taken(target, str(path))
    # What tells that a model is there goes first and comes last, so that there is never a part.
    for path in earlier:
        (target / path).unlink(missing_ok=True)
    for path in sorted(new, key=lambda path: path == Path(MANIFEST)):
        if (complete / path).is_dir():
            (target / path).mkdir(exist_ok=True)
        else:
            shutil.move(complete / path, target / path)


def _taken(folder: Path, name: str) -> NeuralMPError:
    return NeuralMPError(
        f"{str(folder)!r} exists and holds {name!r}, which is of no model saved there before and "
        f"is not overwritten; choose another folder"
    )


def _files_of(folder: Path) -> list[Path]:
    """The files of the saved model in a folder, the one that lists them first; none without it."""
    if not is_saved_model(folder):
        return []
    try:
        files = read_json(folder / MANIFEST, _FILES, ModelLoadError)["files"]
    except ModelLoadError as error:
        logger.debug("%s", error)
        files = {}
    # A file that was tampered with must not lead out of the folder.
    return [Path(MANIFEST), *(Path(name) for name in files if _is_within(name))]


def digests_of_files(value: object) -> dict[str, str]:
    """The names of a saved model's files, none of which leads out of its folder, and their digests.

    Raises:
        NeuralMPError: they are something else.
    """
    found = mapping_of(text)(value)
    for name in found:
        check_path("the name of a file", name)
        if not _is_within(name):
            raise UnfitError(f"expected names of files in the folder, found {shown(name)}")
    return found


def _is_within(name: str) -> bool:
    """Whether a name is that of a file in the folder."""
    try:
        check_path("the name of a file", name)
    except NeuralMPError:
        return False
    path = Path(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


_FILES = fields({"files": mapping_of(text)})
