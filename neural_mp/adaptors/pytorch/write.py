"""Write a plan into a model: casts, quantize/dequantize pairs, then the kernels that are run."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule

from neural_mp.adaptors.pytorch.casts import insert_casts
from neural_mp.adaptors.pytorch.lowering import rewritten
from neural_mp.adaptors.pytorch.model import TorchModel
from neural_mp.adaptors.pytorch.write_int8 import insert_quantization
from neural_mp.core.observations import Range
from neural_mp.space import ResolvedPlan


def write(model: TorchModel, plan: ResolvedPlan, ranges: Mapping[str, Range]) -> TorchModel:
    """A model with a plan in it: see `Adaptor.write`."""

    def write_into(module: GraphModule) -> None:
        insert_casts(module, plan.flow, model.convention.dtype)
        insert_quantization(module, plan, ranges)

    return rewritten(model, write_into)
