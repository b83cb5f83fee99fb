"""Transfer of loaded models to other runtimes by files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neural_mp.adaptors.common.counterparts import KnownKinds, match_ops
from neural_mp.adaptors.common.optional import require_part
from neural_mp.adaptors.common.signatures.boundary import Boundary
from neural_mp.adaptors.common.signatures.signature import Array, Signature, TensorSpec
from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.adaptors.registry import AnyAdaptor, get_adaptor_named
from neural_mp.errors import ConversionError

#: Start of the name of a tensor that is known by its position in the file.
POSITION = "#"


def list_reading_runtimes(source: AnyModel) -> Iterator[str]:
    """Yield the other built-in runtimes that read the files of a model, installed or not."""
    offered = source.adaptor.transfer
    for name, entry in FRAMEWORKS.items():
        readable = offered is not None and offered.format in entry.reads
        if readable and name != source.adaptor.framework:
            yield name


@dataclass(frozen=True)
class TransferFile:
    """A model in a temporary file that other runtimes read; the file lives as long as the object.

    `boundary` are the calls of the model, `scratch` is the temporary folder.
    """

    path: Path
    boundary: Boundary
    scratch: tempfile.TemporaryDirectory[str]


def transfer_file(source: AnyModel) -> TransferFile:
    """Write a model for other runtimes.

    Raises:
        ConversionError: the model must stay in its framework.
    """
    offered = require_part(
        source.adaptor.transfer, source.adaptor.framework, "transfer to other runtimes"
    )
    boundary = offered.boundary(source.held)
    scratch = tempfile.TemporaryDirectory()
    return TransferFile(offered.write(source.held, Path(scratch.name)), boundary, scratch)


def transfer_model(
    source: AnyModel, runtime: str, file: TransferFile | None = None, batch_size: int | None = None
) -> AnyModel:
    """Return a model in another runtime, called as in its source framework.

    `file` is that of the model, if already written. The example in the runtime has `batch_size`
    samples; None for those of the source.

    Raises:
        ConversionError: the model must stay in its framework, or the runtime cannot read its file.
        MissingFrameworkError: the runtime is not installed.
        ModelLoadError: the runtime rejects the model.
    """
    if runtime not in list_reading_runtimes(source):
        raise ConversionError(f"{runtime} does not read models of {source.adaptor.framework}")
    return load_transferred(source, get_adaptor_named(runtime), file, batch_size)


def load_transferred(
    source: AnyModel,
    adaptor: AnyAdaptor,
    file: TransferFile | None = None,
    batch_size: int | None = None,
) -> AnyModel:
    """Return a model as an adaptor reads its file, called as in its source framework.

    Errors as for `transfer_model`.
    """
    file = file or transfer_file(source)
    boundary = file.boundary
    example = _make_example_inputs(boundary, source, batch_size)
    model = _named_as_source(adaptor, adaptor.load(file.path, example=example), source)
    inner: Signature = model.signature
    outside = boundary.signature
    inputs = _match_tensors(outside.inputs, inner.inputs, "inputs")
    outputs = _match_tensors(outside.outputs, inner.outputs, "outputs")
    chosen = inner.select_ports(tuple(p.name for p in inputs), tuple(p.name for p in outputs))
    signature = Signature(
        _rename_tensor_specs(outside.inputs, inputs),
        _rename_tensor_specs(outside.outputs, outputs),
        outside.returns,
    )
    return LoadedModel(
        adaptor,
        replace(model, signature=chosen),
        boundary=replace(boundary, signature=signature, held=file),
    )


@dataclass(frozen=True)
class TransferredLoader:
    """A picklable loader of a model in another runtime; see `transfer_model`."""

    load: Callable[[], AnyModel]
    runtime: str
    batch_size: int | None

    def __call__(self) -> AnyModel:
        """Return the model."""
        return transfer_model(self.load(), self.runtime, batch_size=self.batch_size)


def compile_calls(source: AnyModel) -> AnyModel:
    """Return a model in its own framework whose calls are compiled.

    Raises:
        ConversionError: the framework has no compiler, or none is installed.
    """
    offered = require_part(source.adaptor.compiler, source.adaptor.framework, "compiler")
    reason = offered.missing()
    if reason:
        raise ConversionError(reason)
    return replace(source, held=offered.compiling(source.held))


@dataclass(frozen=True)
class CompilingLoader:
    """A picklable loader of a model whose calls are compiled."""

    load: Callable[[], AnyModel]

    def __call__(self) -> AnyModel:
        """Return the model."""
        return compile_calls(self.load())


def _named_as_source(adaptor: AnyAdaptor, held: object, source: AnyModel) -> Any:
    """Return a model read from a file with the names that its ops have in the source."""
    if not adaptor.offers("with_op_names"):
        return held
    own = KnownKinds(source.adaptor.graph(source.held), source.adaptor.op_kinds)
    names = match_ops(own, KnownKinds(adaptor.graph(held), adaptor.op_kinds))
    return adaptor.with_op_names(held, names) if names else held


def _make_example_inputs(
    boundary: Boundary, source: AnyModel, batch_size: int | None
) -> dict[str, Array] | tuple[Array, ...]:
    """Return example inputs for the file: by name, or in its order."""
    bound = boundary.signature.bind_inputs(boundary.bind_arrays(source.example_inputs(batch_size)))
    if all(tensor.startswith(POSITION) for tensor in bound):
        return tuple(bound[f"{POSITION}{index}"] for index in range(len(bound)))
    return {port.name: bound[port.tensor] for port in boundary.signature.inputs}


def _match_tensors(
    outside: tuple[TensorSpec, ...], inside: tuple[TensorSpec, ...], kind: str
) -> tuple[TensorSpec, ...]:
    """Return the tensor of the file for each tensor of the source; raise if one is missing."""
    matches = []
    for port in outside:
        if port.tensor.startswith(POSITION):
            # Files without unused inputs would shift the positions.
            candidates = inside if len(inside) == len(outside) else ()
            match = candidates[int(port.tensor[1:])] if candidates else None
        else:
            match = next((spec for spec in inside if spec.answers_to(port.name)), None)
        if match is None:
            names = ", ".join(spec.name for spec in inside)
            raise ConversionError(
                f"the {kind} of the transferred model must include {port.name!r}, got {names}"
            )
        matches.append(match)
    return tuple(matches)


def _rename_tensor_specs(
    outside: tuple[TensorSpec, ...], inside: tuple[TensorSpec, ...]
) -> tuple[TensorSpec, ...]:
    return tuple(
        replace(spec, name=port.name, alias=port.alias, default=port.default)
        for port, spec in zip(outside, inside, strict=True)
    )
