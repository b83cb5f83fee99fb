"""Corrected weights of a model, made from calibration data, block by block."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.optional import Blocks, GroupedWeights, require_part
from neural_mp.adaptors.common.quant_params import STEPS, QuantParams
from neural_mp.adaptors.common.weights.autoround import LearnOptions
from neural_mp.adaptors.common.weights.corrections import find_factor_groups
from neural_mp.adaptors.common.weights.cross_layer_scaling import ScalingGroup, round_int8_weight
from neural_mp.adaptors.common.weights.grouped_weight import (
    Floats,
    GroupedWeight,
    GroupParameters,
    InputMoments,
    Quantizer,
)
from neural_mp.adaptors.common.weights.weight_corrections import (
    factorize_for_gptq,
    round_with_corrections,
    search_awq_factors,
)
from neural_mp.adaptors.common.weights.weight_store import GroupHolder, WeightStore
from neural_mp.core.enums import Scheme, WeightCorrection
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError
from neural_mp.util.fingerprint import DataDigest
from neural_mp.util.pytree import Array
from neural_mp.util.system.memory import FREED

M = TypeVar("M")
logger = logging.getLogger(__name__)

#: Maximum bytes of moments at a time outside of blocks; more layers are observed in further passes.
_MOMENT_BYTES = 1 << 30

#: End of the context of weights whose learning ended at a time limit.
_ENDED = "\nended at a time limit"

_Specs = dict[str, QuantSpec]
_Made = dict[str, GroupedWeight]


@dataclass(frozen=True)
class CorrectionOptions:
    """Options of corrections of weights.

    Attributes:
        learning: options of learned rounding.
        folder: where finished blocks are kept for a resumed run; None to keep none.
        resumes: whether weights whose learning ended at a time limit are taken from the folder, as
            trials of the resumed run have them.
    """

    learning: LearnOptions = field(default_factory=LearnOptions)
    folder: Path | None = None
    resumes: bool = False


@dataclass(frozen=True)
class LayerErrors:
    """Squared errors of a layer's results relative to their squares, on calibration samples.

    With the weight rounded to nearest, and with the weight learned in some seconds.
    """

    nearest: float
    learned: float
    seconds: float


@dataclass(frozen=True, eq=False)
class CorrectedWeights(Generic[M]):
    """The corrected weights of one model; each is made once.

    Weights corrected by themselves are made from the float model, whatever the precisions of the
    layers before. Learned ones depend on the roundings of the blocks before and of their own.
    Without inputs, every rounding is as good as to nearest: that is the weight of a layer that
    calibration does not reach, e.g. of an expert that no token is routed to.

    Attributes:
        batches: → calibration inputs; None without data.
        layer_errors: op → errors of its results, for the layers reconstructed so far.
    """

    adaptor: Framework[M]
    model: M
    batches: Callable[[], Iterable[Any]] | None = None
    options: CorrectionOptions = CorrectionOptions()
    layer_errors: dict[str, LayerErrors] = field(default_factory=dict, repr=False)
    _made: dict[tuple[str, QuantSpec], GroupedWeight] = field(default_factory=dict, repr=False)
    #: Layers with one input, and the quantization → their common factors.
    _factors: dict[tuple[tuple[str, ...], QuantSpec], Floats | None] = field(
        default_factory=dict, repr=False
    )
    _learned: dict[frozenset[tuple[str, QuantSpec]], _Made] = field(
        default_factory=dict, repr=False
    )
    #: Context → the weights of layers reconstructed together.
    _reconstructed: dict[str, _Made] = field(default_factory=dict, repr=False)

    def of_plan(self, plan: PrecisionPlan) -> dict[str, GroupedWeight]:
        """Return op → its corrected weight, for the ops of a plan that have corrections.

        Raises:
            PlanError: the corrections require data, and there is none.
            ConversionError: the framework offers no corrected weights.
        """
        specs = {
            op: config.weight
            for op, config in plan.items()
            if config.weight is not None and config.weight.corrections
        }
        learned = {op: spec for op, spec in specs.items() if spec.is_learned}
        unlearned = {op: [spec] for op, spec in specs.items() if not spec.is_learned}
        weights = self.correct_weights(unlearned)
        return {op: weights[op, spec] for op, (spec,) in unlearned.items()} | self._learn_weights(
            learned
        )

    def correct_weights(
        self, requested: Mapping[str, Collection[QuantSpec]]
    ) -> Mapping[tuple[str, QuantSpec], GroupedWeight]:
        """Return (op, quantization) → corrected weight; errors as for `of_plan`.

        The first learned quantizations of all ops are learned together, likewise the second ones.
        """
        missing = {
            op: [spec for spec in specs if (op, spec) not in self._made]
            for op, specs in requested.items()
        }
        missing = {op: specs for op, specs in missing.items() if specs}
        unlearned = {op: [s for s in specs if not s.is_learned] for op, specs in missing.items()}
        self._make_weights({op: specs for op, specs in unlearned.items() if specs})
        for together in _specs_by_level(
            {op: [s for s in specs if s.is_learned] for op, specs in missing.items()}
        ):
            for op, weight in self._learn_weights(together).items():
                self._made[op, together[op]] = weight
        return self._made

    def make_quantizer(self, spec: QuantSpec) -> Quantizer:
        """Return the quantizer of a weight in groups, for the kernels of the framework."""
        offered = self.adaptor.grouped_weights
        return Quantizer(spec, GroupParameters.BFLOAT16 if offered is None else offered.parameters)

    def get_grouped_weight(self, op: str, weight: Array, spec: QuantSpec) -> GroupedWeight:
        """Return a weight in groups: the corrected one if made, or rounded to nearest."""
        return self._made.get((op, spec)) or self.make_quantizer(spec).round_to_nearest(weight)

    def restore_weight(self, op: str, weight: Array, spec: QuantSpec) -> NDArray[np.float32]:
        """Return a weight [outputs, inputs] as its stored form (in groups or INT8) restores it."""
        if spec.dtype.is_float:
            return weight.astype(np.float32)
        if spec.group_size is not None:
            return self.get_grouped_weight(op, weight, spec).to_floats()
        if spec.scheme is Scheme.ASYMMETRIC:
            params = QuantParams.of((float(weight.min()), float(weight.max())))
            steps = np.clip(np.rint(weight / params.scale) + params.zero_point, 0, STEPS)
            return ((steps - params.zero_point) * params.scale).astype(np.float32)
        return round_int8_weight(weight, weight_qmax(spec), (1,)).astype(np.float32)

    def _learn_weights(self, specs: _Specs) -> _Made:
        """Return op → its weight, learned together."""
        key = frozenset(specs.items())
        if specs and key not in self._learned:
            self._check_data({op: [spec] for op, spec in specs.items()})
            learned: _Made = {}
            if self._grouped_weights_part.blocks is not None:
                learned = self._learn_block_weights(self._grouped_weights_part.blocks, specs)
            self._make_weights({op: [spec] for op, spec in specs.items() if op not in learned})
            remaining = {op: self._made.pop((op, specs[op])) for op in specs if op not in learned}
            self._learned[key] = learned | remaining
        return self._learned.get(key, {})

    def _learn_block_weights(self, blocks: Blocks[M], specs: _Specs) -> _Made:
        assert self.batches is not None
        learned: _Made = {}
        previous: list[str] = []

        def load_earlier_weights(ops: Collection[str]) -> _Made | None:
            previous.extend(f"{op} {specs[op]}" for op in ops)
            part = {op: specs[op] for op in ops}
            return self._kept_or_ended(part, "\n".join(previous))

        for weights in blocks.learned(
            self.model,
            self.batches,
            {op: self.make_quantizer(spec) for op, spec in specs.items()},
            self.options.learning,
            load_earlier_weights,
            lambda op, moments: self._correct_weight(op, specs[op].unlearned, moments),
        ):
            context = self._current_context("\n".join(previous))
            self._store_weights(weights, {op: specs[op] for op in weights}, context)
            learned |= self._hold_weights(weights)
        return learned

    @property
    def _grouped_weights_part(self) -> GroupedWeights[M]:
        offered = self.adaptor.grouped_weights
        return require_part(offered, self.adaptor.framework, "corrections of weights")

    @cached_property
    def _float_weights(self) -> Mapping[str, Array]:
        return self._grouped_weights_part.weights(self.model)

    def _check_data(self, requested: Mapping[str, Collection[QuantSpec]]) -> None:
        for op, specs in requested.items():
            spec = next((spec for spec in specs if spec.needs_data), None)
            if spec is not None and self.batches is None:
                raise PlanError(
                    f"correction '{spec.corrections[0]}' of op {op!r} requires calibration data; "
                    f"give calibration data, or set the weight to {str(spec.uncorrected)!r}"
                )

    def _make_weights(self, missing: Mapping[str, Collection[QuantSpec]]) -> None:
        """Make weights that are corrected by themselves."""
        self._check_data(missing)
        observed = {
            op: specs for op, specs in missing.items() if any(spec.needs_data for spec in specs)
        }
        for op in missing.keys() - observed.keys():
            self._correct_weights(op, missing[op], None)
        for moments in self._observe_moments(observed):
            remaining = dict(moments)
            del moments  # so that those of each layer end with its last weight
            ops = list(remaining)
            for op in ops:
                # Without a name, or else those of the last layer stay beside the next block's.
                self._correct_weights(op, observed[op], remaining.pop(op))
            FREED.return_memory()
            for spec_of in _specs_by_level({op: observed[op] for op in ops}):
                self._store_weights(
                    {op: self._made[op, spec] for op, spec in spec_of.items()}, spec_of
                )

    def _correct_weights(
        self, op: str, specs: Collection[QuantSpec], moments: InputMoments | None
    ) -> None:
        for spec in specs:
            self._made[op, spec] = self._group_holder.hold_weight(
                self._correct_weight(op, spec, moments)
            )

    def _correct_weight(
        self, op: str, spec: QuantSpec, moments: InputMoments | None
    ) -> GroupedWeight:
        quantizer = self.make_quantizer(spec)
        factors = self._find_common_factors(op, quantizer, moments)
        learning = self.options.learning
        return round_with_corrections(
            self._float_weights[op], quantizer, moments, factors, learning
        )

    @cached_property
    def scaling_groups(self) -> tuple[ScalingGroup, ...]:
        """The groups of layers whose factors of inputs may be folded into the op before."""
        return find_factor_groups(self.adaptor, self.model)

    def _find_common_factors(
        self, op: str, quantizer: Quantizer, moments: InputMoments | None
    ) -> Floats | None:
        """Return the factors that a layer shares with the other readers of its input, if any."""
        if WeightCorrection.AWQ not in quantizer.spec.corrections or moments is None:
            return None
        group = next(
            (candidate for candidate in self.scaling_groups if op in candidate.consumers), None
        )
        if group is None or any(reader not in self._float_weights for reader in group.consumers):
            return None
        key = group.consumers, quantizer.spec
        if key not in self._factors:
            readers = [self._float_weights[reader] for reader in group.consumers]
            factor = factorize_for_gptq(quantizer, moments)
            self._factors[key] = search_awq_factors(readers, quantizer, moments, factor)
        return self._factors[key]

    def _observe_moments(
        self, observed: Mapping[str, Collection[QuantSpec]]
    ) -> Iterator[Mapping[str, InputMoments | None]]:
        """Yield the moments of ops that are not kept, of one block or portion at a time."""
        remaining = list(observed)
        if remaining and self._grouped_weights_part.blocks is not None:
            assert self.batches is not None

            def is_kept(ops: Collection[str]) -> bool:
                return self._recall_weights({op: observed[op] for op in ops})

            yield from self._grouped_weights_part.blocks.moments(
                self.model, self.batches, remaining, is_kept
            )
            remaining = [
                op for op in remaining if any((op, spec) not in self._made for spec in observed[op])
            ]
        sizes = {op: 4 * self._float_weights[op].shape[1] ** 2 for op in remaining}
        for part in split_portions(sizes, _MOMENT_BYTES):
            if self._recall_weights({op: observed[op] for op in part}):
                continue
            assert self.batches is not None
            moments = self._grouped_weights_part.input_moments(self.model, self.batches(), part)
            unread = [op for op in part if op not in moments]
            if unread:
                logger.warning(
                    "calibration did not reach %s; their weights are rounded to nearest, give "
                    "data that reaches them",
                    ", ".join(map(repr, unread)),
                )
            yield {op: moments.pop(op, None) for op in part}

    def _recall_weights(self, observed: Mapping[str, Collection[QuantSpec]]) -> bool:
        """Take the weights of some ops from the kept ones; return whether all are kept."""
        weights: dict[tuple[str, QuantSpec], GroupedWeight] = {}
        for specs in _specs_by_level(observed):
            stored = self._load_stored_weights(specs)
            if stored is None:
                return False
            weights |= {
                (op, specs[op]): weight for op, weight in self._hold_weights(stored).items()
            }
        self._made.update(weights)
        return True

    def _load_stored_weights(self, specs: _Specs, context: str = "") -> _Made | None:
        if self._weight_store is None:
            return None
        weights = {op: self._float_weights[op] for op in specs}
        return self._weight_store.load_weights(weights, specs, context)

    def _kept_or_ended(self, specs: _Specs, context: str) -> _Made | None:
        """Return kept weights of a context; see `CorrectionOptions.resumes`."""
        candidates = (
            self._load_stored_weights(specs, variant)
            for variant in reversed(self._list_accepted_contexts(context))
        )
        return next((weights for weights in candidates if weights is not None), None)

    def _hold_weights(self, weights: Mapping[str, GroupedWeight]) -> _Made:
        return {op: self._group_holder.hold_weight(weight) for op, weight in weights.items()}

    @cached_property
    def _group_holder(self) -> GroupHolder:
        return GroupHolder(self.options.folder)

    def _store_weights(
        self, weights: Mapping[str, GroupedWeight], specs: _Specs, context: str = ""
    ) -> None:
        if self._weight_store is not None:
            self._weight_store.store_weights(weights, specs, context)

    def load_reconstructed(
        self, weights: Mapping[str, Array], specs: Mapping[str, QuantSpec], context: str
    ) -> Mapping[str, GroupedWeight] | None:
        """Return op → the weight that was kept for a context, as codes; None if none was."""
        if context not in self._reconstructed and self._weight_store is not None:
            for variant in self._list_accepted_contexts(context):
                stored = self._weight_store.load_weights(weights, specs, variant)
                if stored is not None:
                    self._reconstructed[context] = stored
        return self._reconstructed.get(context)

    def keep_reconstructed(
        self, weights: Mapping[str, GroupedWeight], specs: Mapping[str, QuantSpec], context: str
    ) -> None:
        """Keep the weights of a context for later conversions and resumed runs."""
        self._reconstructed[context] = dict(weights)
        self._store_weights(weights, dict(specs), self._current_context(context))

    def _current_context(self, context: str) -> str:
        """Return the context of weights that were learned just now."""
        return context + _ENDED if self.options.learning.limit.is_reached() else context

    def _list_accepted_contexts(self, context: str) -> list[str]:
        """Return the contexts that weights are taken from, the last first."""
        return [context + _ENDED, context] if self.options.resumes else [context]

    @cached_property
    def _weight_store(self) -> WeightStore | None:
        """The kept weights of this model and data; None if none are kept."""
        if self.options.folder is None or self.batches is None:
            return None
        digest = DataDigest()
        for batch in self.batches():
            digest.hash_values(batch)
        if not digest.complete:
            return None
        model = self.adaptor.fingerprint(self.model)
        key = f"{model} {digest.hexdigest()} {self.options.learning}"
        return WeightStore(self.options.folder, hashlib.sha256(key.encode()).hexdigest())


def _specs_by_level(requested: Mapping[str, Collection[QuantSpec]]) -> Iterator[_Specs]:
    """Yield op → its first quantization, its second one, and so on."""
    for level in zip_longest(*requested.values()):
        yield {op: spec for op, spec in zip(requested, level, strict=True) if spec is not None}


def split_portions(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield ops that take at most `most` bytes together, in order, without ops of no bytes.

    A larger op is alone.
    """
    part: list[str] = []
    total = 0
    for op, size in sizes.items():
        if part and total + size > most:
            yield part
            part, total = [], 0
        if size:
            part.append(op)
            total += size
    if part:
        yield part
