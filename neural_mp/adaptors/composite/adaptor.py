"""The adaptor of models of several graphs: every member is that of the parts, with their names.

Ops and tensors of a part are named `PART/…`. A batch is a dict of calls in their order, key →
inputs, with a key `NUMBER:PART` for each; outputs have the same keys.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from neural_mp.adaptors.common.calibration import BatchStats
from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.optional import Portability
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel, TransferredModel
from neural_mp.adaptors.registry import COMPOSITE, AnyAdaptor, adaptor_for
from neural_mp.amp import FourLists
from neural_mp.core.enums import Capture
from neural_mp.core.graph import Layer, Op, OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind
from neural_mp.core.observations import KeptOutputs, Observations, Range
from neural_mp.core.op_timings import OpTrace
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, ConversionError, DataError, ModelLoadError
from neural_mp.io.readers import read_json
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.util.pytree import tree_leaves
from neural_mp.util.validators import mapping_of, string

PARTS_FILE = "parts.json"
T = TypeVar("T")


def make_call_key(number: int, part: str) -> str:
    """Return the key of a call in a batch."""
    return f"{number}:{part}"


def _part_of_call(key: str) -> str:
    return key.partition(":")[2]


@dataclass(frozen=True, eq=False)
class Composite:
    """The parts of a model by name, in the order given."""

    parts: Mapping[str, AnyModel]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Notes to the user from loading the parts."""
        return tuple(f"{name}: {note}" for name, p in self.parts.items() for note in p.warnings)

    @property
    def counts(self) -> ConversionCounts:
        """The number of conversions of all parts."""
        counts = [part.conversions for part in self.parts.values()]
        names = [field.name for field in fields(ConversionCounts)]
        return ConversionCounts(**{n: sum(getattr(c, n) for c in counts) for n in names})

    @cached_property
    def callables(self) -> Mapping[str, TransferredModel]:
        """Part → an object called as the model in its framework, with arrays or tensors."""
        return {name: TransferredModel(part) for name, part in self.parts.items()}

    def get_part(self, key: str) -> AnyModel:
        """Return the part of a call.

        Raises:
            DataError: there is none.
        """
        name = _part_of_call(key)
        if name not in self.parts:
            raise DataError(
                f"a batch must have keys such as '0:{next(iter(self.parts))}', one for each call "
                f"of a part ({', '.join(self.parts)}), got {key!r}"
            )
        return self.parts[name]

    def with_parts(self, parts: Mapping[str, AnyModel]) -> Composite:
        """Return the composite of changed parts; itself if all are its own."""
        is_same = all(parts[name] is part for name, part in self.parts.items())
        return self if is_same else Composite(parts)


class CompositeAdaptor(Adaptor[Composite]):
    """The adaptor of models of several graphs.

    Args:
        members: the adaptors of the parts.
    """

    framework = COMPOSITE

    def __init__(self, members: Sequence[AnyAdaptor] = ()) -> None:
        self._members = list(members)
        self.portability = Portability(_list_full_range_kernels, _reduce_ranges)

    @property
    def packages(self) -> tuple[str, ...]:  # type: ignore[override]
        """The packages of all members."""
        return tuple(dict.fromkeys(name for member in self._members for name in member.packages))

    def load(
        self,
        source: object,
        *,
        inputs: object = None,
        outputs: object = None,
        example: object = None,
        capture: Capture = Capture.WHOLE,
    ) -> Composite:
        """Load each part from its path or object, with its first call in `example`."""
        if inputs is not None or outputs is not None:
            raise ConfigurationError(
                "inputs and outputs must be unset for a model of several parts, whose calls by "
                "eval_func name both"
            )
        calls = example if isinstance(example, Mapping) else {}
        parts: dict[str, AnyModel] = {}
        for name, part in require_parts(source).items():
            adaptor = adaptor_for(part)
            first = next((v for key, v in calls.items() if _part_of_call(key) == name), None)
            parts[name] = LoadedModel(adaptor, adaptor.load(part, example=first, capture=capture))
        return Composite(parts)

    def graph(self, model: Composite) -> OpGraph:
        """Return the ops of all parts."""
        ops, inputs, outputs = [], [], []
        for name, part in model.parts.items():
            graph = part.adaptor.graph(part.held)
            ops += [_rename_op(op, name) for op in graph]
            inputs += [f"{name}/{tensor}" for tensor in graph.inputs]
            outputs += [f"{name}/{tensor}" for tensor in graph.outputs]
        return OpGraph(ops, inputs, outputs)

    def kernels(self, model: Composite, hardware: Hardware) -> Mapping[str, OpKernels]:
        """Return the kernels of all ops."""
        return _join(model, lambda part: part.adaptor.kernels(part.held, hardware))

    def amp_lists(self, precision: Precision) -> FourLists:
        """Return the lists of all members; of a type on several lists, the first counts."""
        lists = FourLists()
        for member in self._members:
            own = member.amp_lists(precision)
            rest = {
                name: frozenset(kind for kind in getattr(own, name) if lists.of(kind) is None)
                for name in ("allow", "deny", "infer", "clear")
            }
            lists = FourLists(**{name: getattr(lists, name) | rest[name] for name in rest})
        return lists

    def op_types(self) -> Collection[str]:
        """Return the op types of all members."""
        return frozenset().union(*(member.op_types() for member in self._members))

    def int8_accumulation(self, hardware: Hardware) -> Mapping[KernelKind, Int8Accumulation]:
        """Return the accumulation of all members: exact where that of each is."""
        modes = [member.int8_accumulation(hardware) for member in self._members]
        modes = modes or [super().int8_accumulation(hardware)]
        saturating = Int8Accumulation.SATURATING
        return {
            kind: saturating if saturating in (mode[kind] for mode in modes) else modes[0][kind]
            for kind in KernelKind
        }

    def predict(self, model: Composite, inputs: Any) -> Any:
        """Run the calls of a batch."""
        if not isinstance(inputs, Mapping):
            raise DataError(
                f"the inputs of a model of several parts must be a dict of calls, got "
                f"{type(inputs).__name__}; call a part: result.model[NAME](inputs)"
            )
        return {key: model.get_part(key)(call) for key, call in inputs.items()}

    def example_inputs(self, model: Composite, batch_size: int | None = None) -> Any:
        """Return one call of each part."""
        examples = (part.example_inputs(batch_size) for part in model.parts.values())
        numbered = enumerate(zip(model.parts, examples, strict=True))
        return {make_call_key(number, name): inputs for number, (name, inputs) in numbered}

    def native(self, model: Composite) -> Mapping[str, TransferredModel]:
        """Return part → an object called as the model in its framework."""
        return model.callables

    def weight_bytes(self, model: Composite) -> int:
        """Return the size of the weights of all parts in bytes."""
        return sum(part.size for part in model.parts.values())

    def fingerprint(self, model: Composite) -> str:
        """Return a digest of the names and digests of the parts."""
        text = json.dumps({name: part.fingerprint for name, part in model.parts.items()})
        return hashlib.sha256(text.encode()).hexdigest()

    def observe_tensors(
        self, model: Composite, batches: Iterable[Any], tensors: Collection[str]
    ) -> Iterator[tuple[str, BatchStats]]:
        """Run the calls of batches and yield the statistics of tensors."""
        for batch in batches:
            for key, call in batch.items():
                name, part = _part_of_call(key), model.get_part(key)
                own = _select(tensors, name)
                for tensor, stats in part.adaptor.observe_tensors(part.held, [call], own):
                    yield f"{name}/{tensor}", stats

    def observe(
        self,
        model: Composite,
        batches: Iterable[Any],
        space: TuningSpace,
        collected: KeptOutputs | None = None,
    ) -> Observations:
        """Calibrate each part on its calls."""
        calls: dict[str, list[Any]] = defaultdict(list)
        for batch in batches:
            for key, call in batch.items():
                calls[_part_of_call(key)].append(call)
        observed = {
            name: part.adaptor.observe(part.held, calls[name], _part_space(model, name, space))
            for name, part in model.parts.items()
        }
        mappings = [field.name for field in fields(Observations) if field.name != "samples"]
        joined = {
            field: {
                f"{name}/{key}": value
                for name, own in observed.items()
                for key, value in getattr(own, field).items()
            }
            for field in mappings
        }
        return Observations(samples=max(own.samples for own in observed.values()), **joined)

    def convert(
        self,
        model: Composite,
        plan: ResolvedPlan,
        observations: Observations,
        space: TuningSpace,
        corrected: CorrectedWeights[Composite] | None = None,
    ) -> Composite:
        """Return the model with each part converted by its share of the plan."""
        parts = {}
        for name, part in model.parts.items():
            own_space = _part_space(model, name, space)
            resolved = own_space.resolve(PrecisionPlan(_strip(plan.plan, name)))
            converted = part.adaptor.convert(
                part.held, resolved, _part_observations(observations, name), own_space
            )
            is_same = converted is part.held
            parts[name] = part if is_same else LoadedModel(part.adaptor, converted)
        return model.with_parts(parts)

    def convert_graph(
        self, model: Composite, plan: ResolvedPlan, ranges: Mapping[str, Range]
    ) -> Composite:
        """Raise: parts are converted by `convert`, each by its own adaptor."""
        raise ConversionError("a model of several parts must be converted part by part")

    def save(self, model: Composite, folder: Path) -> None:
        """Write each part into a folder of its name."""
        for name, part in model.parts.items():
            (folder / name).mkdir()
            part.adaptor.save(part.held, folder / name)
        frameworks = {name: part.adaptor.framework for name, part in model.parts.items()}
        (folder / PARTS_FILE).write_text(json.dumps(frameworks), encoding="utf-8")

    def restore(self, folder: Path) -> Composite:
        """Read back the parts."""
        frameworks = read_json(folder / PARTS_FILE, mapping_of(string), ModelLoadError)
        parts: dict[str, AnyModel] = {}
        for name, framework in require_parts(frameworks, ModelLoadError).items():
            if framework == self.framework:
                raise ModelLoadError(f"the part {name!r} in {PARTS_FILE} must be one graph")
            adaptor = adaptor_for(folder / name, framework)
            parts[name] = LoadedModel(adaptor, adaptor.restore(folder / name))
        self._members = [part.adaptor for part in parts.values()]
        return Composite(parts)

    def prepare(self, model: Composite) -> None:
        """Prepare all parts for their first run."""
        for part in model.parts.values():
            part.prepare()

    def threads(self, count: int | None) -> AbstractContextManager[None]:
        """Let all members use `count` threads within this context."""
        return self._limit_threads(count)

    @contextmanager
    def _limit_threads(self, count: int | None) -> Iterator[None]:
        with ExitStack() as stack:
            for member in {member.framework: member for member in self._members}.values():
                stack.enter_context(member.threads(count))
            yield

    def time_ops(self, model: Composite, inputs: Any, runs: int) -> Mapping[str, Sequence[float]]:
        """Return op → seconds in a batch: those in the call of median size, times the calls."""
        times: dict[str, Sequence[float]] = {}
        for name, part in model.parts.items():
            calls = [call for key, call in inputs.items() if _part_of_call(key) == name]
            if not calls:
                continue
            call = sorted(calls, key=_count_elements)[(len(calls) - 1) // 2]
            for op, seconds in part.adaptor.time_ops(part.held, call, runs).items():
                times[f"{name}/{op}"] = [len(calls) * value for value in seconds]
        return times

    def trace_kernels(self, model: Composite, inputs: Any) -> Mapping[str, OpTrace]:
        """Return op → its kernels in the first call of its part."""
        traces: dict[str, OpTrace] = {}
        for key, call in inputs.items():
            name, part = _part_of_call(key), model.get_part(key)
            for op, trace in part.adaptor.trace_kernels(part.held, call).items():
                traces.setdefault(f"{name}/{op}", trace)
        return traces


def require_parts(
    source: object, kind: type[ConfigurationError] | type[ModelLoadError] = ConfigurationError
) -> Mapping[str, Any]:
    """Return the parts of a model after a check of their names.

    Raises:
        ConfigurationError, ModelLoadError: there are no parts, or a name is none of a folder.
    """
    if not isinstance(source, Mapping) or not source:
        raise kind("a model of several parts must be a dict, name → model, with at least one part")
    for name in source:
        if not isinstance(name, str) or not name.isidentifier():
            raise kind(
                f"the name of a part must be one word of letters, digits and _, got {name!r}"
            )
    return source


def _rename_op(op: Op, part: str) -> Op:
    def rename(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{part}/{name}" for name in names)

    return replace(
        op,
        name=f"{part}/{op.name}",
        inputs=rename(op.inputs),
        fusion_group=None if op.fusion_group is None else f"{part}/{op.fusion_group}",
        quantized_inputs=rename(op.quantized_inputs),
        constants=rename(op.constants),
        # The part is a layer, whose name selects all of its ops in constraints.
        layers=(
            Layer(part, "Part"),
            *(Layer(f"{part}/{layer.name}", layer.type) for layer in op.layers),
        ),
    )


def _join(model: Composite, values: Any) -> dict[str, Any]:
    """Return `PART/KEY` → value of a function from a part to a mapping."""
    return {
        f"{name}/{key}": value
        for name, part in model.parts.items()
        for key, value in values(part).items()
    }


def _select(names: Iterable[str], part: str) -> list[str]:
    """Return the names in a part, without its name."""
    prefix = f"{part}/"
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _strip(values: Mapping[str, T], part: str) -> dict[str, T]:
    """Return the entries of a part, without its name."""
    return {key: values[f"{part}/{key}"] for key in _select(values, part)}


def _part_space(model: Composite, name: str, space: TuningSpace) -> TuningSpace:
    part, prefix = model.parts[name], f"{name}/"
    requests = frozenset(
        (op.removeprefix(prefix), p) for op, p in space.asked if op.startswith(prefix)
    )
    return TuningSpace(
        part.adaptor.graph(part.held), _strip(space.capabilities, name), space.lists, requests
    )


def _part_observations(observations: Observations, name: str) -> Observations:
    mappings = [field.name for field in fields(Observations) if field.name != "samples"]
    own = {field: _strip(getattr(observations, field), name) for field in mappings}
    return Observations(samples=observations.samples, **own)


def _count_elements(call: object) -> int:
    return sum(math.prod(getattr(leaf, "shape", ())) for leaf in tree_leaves(call))


def _list_full_range_kernels(model: Composite) -> frozenset[KernelKind]:
    return frozenset().union(*(part.full_range_kernels for part in model.parts.values()))


def _reduce_ranges(model: Composite) -> Composite:
    parts = {}
    for name, part in model.parts.items():
        offered = part.adaptor.portability
        is_exact = not part.full_range_kernels
        parts[name] = part
        if offered is not None and not is_exact:
            parts[name] = LoadedModel(part.adaptor, offered.with_reduced_range(part.held))
    return model.with_parts(parts)
