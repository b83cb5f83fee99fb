"""The members of `Adaptor` that the shared pipelines require."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from neural_mp.adaptors.common.calibration import BatchStats
from neural_mp.adaptors.common.fusion_check import UnoptimizedRun
from neural_mp.adaptors.common.optional import (
    Corrections,
    Gradients,
    GroupedWeights,
    Hessian,
    LayerInputs,
)
from neural_mp.adaptors.common.output_keeping import OutputKeeping
from neural_mp.core.graph import OpGraph
from neural_mp.core.observations import Range
from neural_mp.space import ResolvedPlan

M = TypeVar("M")


class Framework(Protocol[M]):
    """The required members; `neural_mp.adaptors.contract.Adaptor` documents them."""

    framework: ClassVar[str]
    op_kinds: ClassVar[Mapping[str, Collection[str]]]
    corrections: Corrections[M] | None
    hessian: Hessian[M] | None
    gradients: Gradients[M] | None
    grouped_weights: GroupedWeights[M] | None
    layer_inputs: LayerInputs[M] | None
    output_keeping: OutputKeeping[M] | None
    unoptimized_run: UnoptimizedRun[M] | None

    def fingerprint(self, model: M) -> str:
        """Return a digest of ops and weights."""

    def predict(self, model: M, inputs: Any) -> Any:
        """Return the outputs for one batch."""

    def graph(self, model: M) -> OpGraph:
        """Return all ops with their types and data edges."""

    def observe_tensors(
        self, model: M, batches: Iterable[Any], tensors: Collection[str]
    ) -> Iterator[tuple[str, BatchStats]]:
        """Yield statistics of tensors while the model runs."""

    def convert_graph(self, model: M, plan: ResolvedPlan, ranges: Mapping[str, Range]) -> M:
        """Return a new model in the precisions of a plan."""
