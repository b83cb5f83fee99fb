"""Safe reader of `.pt2` archives: every member is read, checked and rewritten here.

`torch.export.load` opens libraries in an archive, unpickles, imports by name and evaluates text.
Therefore PyTorch does not get the file: each member is read here by a reader for its type, and
PyTorch gets a rewritten program text and tensors that were created here.
"""

from __future__ import annotations

import io
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._export.serde.serialize import (
    GraphModuleDeserializer,
    SerializedArtifact,
    deserialize,
)
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.graph import tracing
from neural_mp.adaptors.pytorch.graph.tracing import TRACING
from neural_mp.adaptors.pytorch.pt2.op_allowlist import ForbiddenOpError
from neural_mp.adaptors.pytorch.pt2.program_checks import check_arguments
from neural_mp.adaptors.pytorch.pt2.program_json import check_payload_list, check_program_text
from neural_mp.adaptors.pytorch.pt2.safe_unpickler import (
    move_to_device,
    parse_tensor_view,
    read_plain,
    read_values,
    strided_view,
)
from neural_mp.errors import ModelLoadError
from neural_mp.io.archives import open_checked_archive
from neural_mp.util.system.watched_thread import TimeLimitError
from neural_mp.util.validators import InvalidValueError, format_located_error

#: Method of torch that parses sizes, and the lock of its replacement.
_PARSE = "_parse_sym_expr"
#: Key of an op in the text of a program.
_OP_KEY = b'"target"'
#: Default program name of `torch.export.save`.
_MODEL = "model"
#: Members of an archive of torch ≥ 2.8, below its only folder.
_KNOWN = re.compile(
    r"archive_format|archive_version|version|byteorder|\.data/version|\.data/serialization_id"
    r"|models/\w+\.json|data/sample_inputs/\w+\.pt"
    r"|data/weights/(weight_\d+|\w+_weights_config\.json|\w+\.pt)"
    r"|data/constants/(tensor_\d+|\w+_constants_config\.json|\w+\.pt)"
    r"|extra/.+",
    re.ASCII,
)
#: Members of an archive of torch ≤ 2.7.
_KNOWN_BEFORE = re.compile(
    r"version|serialized_exported_program\.json"
    r"|serialized_(state_dict|constants|example_inputs)\.pt|extra_files/.+"
)
_CODE = re.compile(
    r"(^|/)data/(aotinductor|executorch|mtia)(/|$)|(custom|opaque)_obj_\d*$|_tensorrt|"
    r"\.(so|dll|dylib|exe|o|a|ptx|cubin|py|pyc|sh|pkl|pickle)(\.[\d.]+)?$",
    re.IGNORECASE,
)
#: Magic numbers of compiled code on Linux, Windows and macOS.
_COMPILED = (
    b"\x7fELF",
    b"MZ\x90\x00",
    b"\xcf\xfa\xed\xfe",
    b"\xfe\xed\xfa\xcf",
    b"\xca\xfe\xba\xbe",
)
_SHORT = 1024


def read_program(path: Path) -> ExportedProgram:
    """Return the program in a file of `torch.export.save`, without running code from the file.

    Raises:
        ModelLoadError: if the archive is damaged or has unexpected content.
        Exception: of any class, if PyTorch rejects the program.
    """
    with open_checked_archive(path) as archive:
        try:
            artifact = SerializedArtifact(*_read_parts(archive))
        except ForbiddenOpError as error:
            raise ModelLoadError(f"{str(path)!r} is refused: {error}") from error
        except (ValueError, InvalidValueError) as error:
            raise ModelLoadError(
                f"{str(path)!r} is not a program of torch.export.save, or is damaged: "
                f"{format_located_error(error)}"
            ) from error
    try:
        seconds = tracing.limit_symbolic_time(artifact.exported_program.count(_OP_KEY))
        with _parse_sizes_once(), seconds:
            program = deserialize(artifact)
            check_arguments(program, _check_archive_tensors(program))
    except ValueError as error:
        raise ModelLoadError(f"{str(path)!r} is refused: {error}") from error
    except TimeLimitError as error:
        raise ModelLoadError(
            f"{str(path)!r} must have sizes that are read within {error.seconds:.0f} CPU seconds; "
            f"export the program with fewer dynamic axes"
        ) from None
    return program


@contextmanager
def _parse_sizes_once() -> Iterator[None]:
    """Let torch parse each size of a program once, with all sizes within that size.

    Of padded convolutions in a row, the sizes of each hold those of all before; torch simplifies
    them for every tensor, and each part of a size as often as another size holds that part.
    """
    parsed: dict[int, tuple[object, dict[tuple[object, object], Any]]] = {}

    def parse_once(reader: GraphModuleDeserializer, size: object, hint: object = None) -> Any:
        symbols = reader.symbol_name_to_symbol  # a graph within the graph has symbols of its own
        _, sizes = parsed.setdefault(id(symbols), (symbols, {}))
        if (size, hint) not in sizes:
            sizes[size, hint] = parse(reader, size, hint)
        return sizes[size, hint]

    with TRACING:
        parse = getattr(GraphModuleDeserializer, _PARSE)
        setattr(GraphModuleDeserializer, _PARSE, parse_once)
        try:
            yield
        finally:
            setattr(GraphModuleDeserializer, _PARSE, parse)


def _check_archive_tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return placeholder → weight, constant or example input.

    Raises:
        ValueError: a weight or constant differs from its description in the graph, from which the
            shapes of other tensors are derived.
    """
    signature = program.graph_signature
    stored = {**program.state_dict, **program.constants}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    described = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    tensors: dict[str, torch.Tensor] = {}
    for placeholder, name in names.items():
        tensor, value = stored.get(name), described.get(placeholder)
        if not isinstance(tensor, torch.Tensor) or not isinstance(value, torch.Tensor):
            raise ValueError(f"the tensor {name!r} of the program must be in the archive")
        if (tensor.dtype, tuple(tensor.shape)) != (value.dtype, tuple(value.shape)):
            raise ValueError(
                f"the tensor {name!r} must have the shape {tuple(value.shape)} and type "
                f"{value.dtype} of the graph, got {tuple(tensor.shape)} and {tensor.dtype}"
            )
        tensors[placeholder] = tensor
    examples = pytree.tree_leaves(program.example_inputs)
    inputs = signature.user_inputs
    if len(inputs) == len(examples):
        pairs = zip(inputs, examples, strict=True)
        tensors |= {str(n): x for n, x in pairs if isinstance(x, torch.Tensor)}
    return tensors


def _read_parts(archive: zipfile.ZipFile) -> tuple[bytes, Any, Any, Any]:
    """Return the program text, state, constants and example inputs."""
    names = archive.namelist()
    for name in names:
        _refuse_code(archive, name)
    roots = {name.partition("/")[0] for name in names}
    if len(roots) == 1 and f"{min(roots)}/archive_format" in names:
        return _read_new_parts(archive, f"{min(roots)}/")
    return _read_old_parts(archive)


def _refuse_code(archive: zipfile.ZipFile, name: str) -> None:
    with archive.open(name) as member:
        begins = member.read(4)
    extra = name.startswith("extra_files/") or "/extra/" in name
    if _CODE.search(name) or (extra and begins.startswith(_COMPILED)):
        raise ValueError(f"the archive contains code ({name[:100]!r}), which is never loaded")


def _read_new_parts(archive: zipfile.ZipFile, root: str) -> tuple[bytes, Any, Any, Any]:
    unknown = [n for n in archive.namelist() if not _KNOWN.fullmatch(n.removeprefix(root))]
    if unknown:
        raise ValueError(f"the archive contains an unknown member {unknown[0][:100]!r}")
    if _read_short_text(archive, f"{root}archive_format") != "pt2":
        raise ValueError("the format of the archive must be pt2")
    _same_byte_order(archive, f"{root}byteorder")
    program = _read_member(archive, f"{root}models/{_MODEL}.json")
    state = _read_tensors(archive, f"{root}data/weights/", "weights")
    constants = _read_tensors(archive, f"{root}data/constants/", "constants")
    inputs = _read_example_inputs(_read_member(archive, f"{root}data/sample_inputs/{_MODEL}.pt"))
    return check_program_text(program), state, constants, inputs


def _read_old_parts(archive: zipfile.ZipFile) -> tuple[bytes, Any, Any, Any]:
    unknown = [name for name in archive.namelist() if not _KNOWN_BEFORE.fullmatch(name)]
    if unknown:
        raise ValueError(f"the archive contains an unknown member {unknown[0][:100]!r}")
    program = check_program_text(_read_member(archive, "serialized_exported_program.json"))
    state = _read_pickled_state(_read_member(archive, "serialized_state_dict.pt"))
    constants = _read_pickled_state(_read_member(archive, "serialized_constants.pt"))
    inputs = _read_example_inputs(_read_member(archive, "serialized_example_inputs.pt"))
    return program, state, constants, inputs


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    if name not in archive.namelist():
        raise ValueError(f"the archive must contain {name!r}")
    return archive.read(name)


def _read_short_text(archive: zipfile.ZipFile, name: str) -> str:
    with archive.open(name) as member:
        return member.read(_SHORT).decode("ascii", "replace").strip()


def _same_byte_order(archive: zipfile.ZipFile, name: str) -> None:
    if name in archive.namelist() and _read_short_text(archive, name) != sys.byteorder:
        raise ValueError(
            f"the byte order must be {sys.byteorder}, got {_read_short_text(archive, name)}"
        )


def _read_tensors(archive: zipfile.ZipFile, folder: str, kind: str) -> dict[str, torch.Tensor]:
    """Return name → tensor; tensors in one member share its values."""
    together = f"{folder}{_MODEL}.pt"
    if together in archive.namelist():  # torch 2.8 layout
        return _read_pickled_state(archive.read(together))
    listed = check_payload_list(_read_member(archive, f"{folder}{_MODEL}_{kind}_config.json"))
    values: dict[tuple[str, str], torch.Tensor] = {}
    tensors = {}
    for name, where in listed.items():
        meta, member = where["tensor_meta"], f"{folder}{where['path_name']}"
        if member not in archive.namelist():
            raise ValueError(f"the archive must contain {member!r}")
        index = meta["device"].get("index")
        device = meta["device"]["type"] + (f":{index}" if index is not None else "")
        if (member, device) not in values:
            values[member, device] = move_to_device(read_values(archive, member), device)
        tensor = strided_view(values[member, device], parse_tensor_view(meta))
        if where["is_param"]:
            tensor = nn.Parameter(tensor, meta["requires_grad"])
        tensors[name] = tensor
    return tensors


def _unpickle_safely(content: bytes) -> Any:
    try:
        return read_plain(io.BytesIO(content))
    except ModelLoadError as error:
        raise ValueError(
            f"a member is not a file of torch.save, so reading could run code: {error}"
        ) from error


def _read_pickled_state(content: bytes) -> dict[str, torch.Tensor]:
    state = _unpickle_safely(content) if content else {}
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise ValueError("the weights must be tensors with names")
    return dict(state)


def _read_example_inputs(content: bytes) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    match _unpickle_safely(content) if content else None:
        case None:
            return None
        case (tuple() | list() as args, dict() as named) if all(type(n) is str for n in named):
            return tuple(args), named
    raise ValueError("the example inputs must be the arguments of a call")
