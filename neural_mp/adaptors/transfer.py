"""Transfer of loaded models to other runtimes by files, and the names of ops in both."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from neural_mp.adaptors.common.optional import require_part
from neural_mp.adaptors.common.signatures.boundary import Boundary
from neural_mp.adaptors.common.signatures.signature import Array, Signature, TensorSpec
from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.adaptors.registry import AnyAdaptor, get_adaptor_named
from neural_mp.core.graph import Op, OpGraph
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


#: Kinds of op that only move values, which runtimes add and remove.
_MOVERS = ("identity", "reshape", "transpose")
#: Kinds of op that runtimes fold into the one before, e.g. those of a batch norm.
_FOLDED = ("add", "batch_norm", "div", "mul", "sub")


@dataclass(frozen=True)
class KnownKinds:
    """Graph with the kind of each op.

    Attributes:
        kinds: kind of op (see `neural_mp.amp.KINDS`) → op types of the framework.
    """

    graph: OpGraph
    kinds: Mapping[str, Collection[str]]

    @cached_property
    def _kind_of_type(self) -> dict[str, str]:
        return {op_type: kind for kind, types in self.kinds.items() for op_type in types}

    def kind_of(self, op: Op) -> str:
        """Return the kind of an op, or else its type."""
        return self._kind_of_type.get(op.type, op.type)

    def producer_of(self, tensor: str) -> Op | None:
        """Return the op that writes a tensor; None for an input of the model."""
        name = tensor if tensor in self.graph else tensor.rpartition(":")[0]
        if name not in self.graph:
            return None
        return self.graph[name]

    def first_op_before(self, op: Op | None, kinds: Collection[str]) -> Op | None:
        """Return the first op at or before an op that is not of these kinds with one input."""
        while op is not None and self.kind_of(op) in kinds and len(op.inputs) == 1:
            op = self.producer_of(op.inputs[0])
        return op


@dataclass
class _Pairing:
    """Ops of the target paired with ops of the source, from later to earlier ops."""

    source: KnownKinds
    target: KnownKinds
    found: dict[str, str] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)

    def pair_ops(self, inner: Op | None, outer: Op | None) -> None:
        """Pair two ops, or the next ones before them of one kind, and all that these read."""
        waiting = [(inner, outer)]
        while waiting:
            inner, outer = self._of_one_kind(*waiting.pop())
            if inner is None or outer is None or self.found.get(inner.name) == outer.name:
                continue
            if inner.name in self.source.graph and inner.name != outer.name:
                continue
            if inner.name in self.found:
                self.conflicts.add(inner.name)
                continue
            self.found[inner.name] = outer.name
            if len(inner.inputs) == len(outer.inputs):
                pairs = zip(inner.inputs, outer.inputs, strict=True)
                waiting += [
                    (self.target.producer_of(i), self.source.producer_of(o)) for i, o in pairs
                ]

    def _of_one_kind(self, inner: Op | None, outer: Op | None) -> tuple[Op | None, Op | None]:
        inner, outer = (
            self.target.first_op_before(inner, _MOVERS),
            self.source.first_op_before(outer, _MOVERS),
        )
        while inner is not None and outer is not None:
            kind = self.source.kind_of(outer)
            if kind == self.target.kind_of(inner):
                return inner, outer
            if kind not in _FOLDED or len(outer.inputs) != 1:
                break
            outer = self.source.first_op_before(self.source.producer_of(outer.inputs[0]), _MOVERS)
        return None, None


def match_ops(source: KnownKinds, target: KnownKinds) -> dict[str, str]:
    """Return op of the target → op of the source, for ops whose name the source does not have.

    From outputs and ops with equal names, both graphs are read backwards: ops of one kind whose
    results are read alike are paired. An op with two pairs has none.
    """
    if all(op.name in source.graph for op in target.graph):
        return {}
    pairing = _Pairing(source, target)
    for op in target.graph:
        if op.name in source.graph:
            pairing.pair_ops(op, source.graph[op.name])
    if len(target.graph.outputs) == len(source.graph.outputs):
        for inner, outer in zip(target.graph.outputs, source.graph.outputs, strict=True):
            pairing.pair_ops(target.producer_of(inner), source.producer_of(outer))
    pairs = {
        op: name
        for op, name in pairing.found.items()
        if op not in source.graph and name not in target.graph and op not in pairing.conflicts
    }
    uses = Counter(pairs.values())
    return {op: name for op, name in pairs.items() if uses[name] == 1}
