"""What the roads that are the same for all ask of a framework; `Adaptor` has all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from neural_mp.adaptors.common.calibration import TensorSummary
from neural_mp.adaptors.common.cross_layer_scaling import Layer, LayerChange
from neural_mp.core.observations import Range
from neural_mp.space import ResolvedPlan

M = TypeVar("M")


class Framework(Protocol[M]):
    """The methods are those of `neural_mp.adaptors.contract.Adaptor`, which describes them."""

    def kinds(self) -> Mapping[str, Collection[str]]:
        """Kind of op → op types."""

    def layers(self, model: M) -> Mapping[str, Layer]:
        """Op → its constants."""

    def with_layers(self, model: M, changes: Mapping[str, LayerChange]) -> M:
        """The model with other constants."""

    def channel_keepers(self, model: M) -> Collection[str]:
        """The ops that leave every channel where it is."""

    def watch(
        self, model: M, batches: Iterable[Any], tensors: Collection[str]
    ) -> Iterator[tuple[str, TensorSummary]]:
        """What tensors hold while the model runs."""

    def write(self, model: M, plan: ResolvedPlan, ranges: Mapping[str, Range]) -> M:
        """A new model in the precisions of a plan."""

    def time_ops(self, model: M, inputs: object, runs: int) -> Mapping[str, Sequence[float]]:
        """Op → seconds of each of so many runs."""

    def hessian_traces(
        self, model: M, batches: Iterable[Any], ops: Collection[str]
    ) -> Mapping[str, float]:
        """Op → trace of the Hessian by its weight."""
