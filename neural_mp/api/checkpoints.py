"""Checkpoints of other tools with `quantization_config`, run on the kernels here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neural_mp.adaptors.common.optional import needed
from neural_mp.adaptors.common.weights.checkpoint_formats import IntegerLayer
from neural_mp.adaptors.common.weights.grouped_weight import (
    CodedGroups,
    GroupedWeight,
    group_spec,
    middle_code,
    to_bfloat16,
)
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.adaptors.registry import adaptor_named
from neural_mp.core import hardware as machine
from neural_mp.core.enums import Approach, Capture, Scheme
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import INTEGERS, OpConfig, weight_only
from neural_mp.runs.report import Report, count_ops
from neural_mp.space import Capability, EffectiveOp, planned_ops
from neural_mp.util.text import counted

_CONFIG = "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the kernels here.

    Attributes:
        model: the model.
        plan: op → configuration.
        report: sizes, and warnings.
        planned: op → effective configuration.
    """

    model: AnyModel
    plan: PrecisionPlan
    report: Report
    planned: Mapping[str, EffectiveOp]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a model of `transformers` with a `quantization_config`."""
    file = folder / _CONFIG
    return file.is_file() and '"quantization_config"' in file.read_text("utf-8", errors="replace")


def load_checkpoint(folder: Path) -> Checkpoint:
    """Load a checkpoint of compressed-tensors (`pack-quantized`), GPTQ or AWQ.

    The codes are those of the file; scales are rounded to bfloat16, in which kernels read them. A
    layer without a kernel computes with floats of the same values: groups of no kernel's size,
    groups of inputs in another order, or 8 bits in groups or with zero points.

    Raises:
        ModelLoadError: a file is missing or damaged, or the format is not supported.
    """
    started = time.perf_counter()
    adaptor = adaptor_named("pytorch")
    offered = needed(adaptor.checkpoints, adaptor.framework, "checkpoints of other tools")
    module, layers = offered.read(folder)
    original = adaptor.load(module, capture=Capture.LAYERS)
    space = adaptor.space(original, machine.detect())
    configs, grouped, rest = {}, {}, []
    for name, layer in layers.items():
        config = _config(layer, space.capabilities.get(name, Capability()))
        if config is None:
            rest.append(name)
            continue
        configs[name] = config
        if layer.bits < 8:
            grouped[name] = _grouped(layer)
    resolved = space.resolve(PrecisionPlan(configs))
    groups = needed(adaptor.grouped_weights, adaptor.framework, "weights in groups")
    converted = original
    if configs:
        converted = adaptor.convert_graph(groups.with_weights(original, grouped), resolved, {})
    model = LoadedModel(adaptor, converted)
    notes = [f"{counted(len(rest), 'layer')} without a kernel: floats, {rest[0]}"] if rest else []
    report = Report(
        baseline_size=adaptor.weight_bytes(original),
        size=model.size,
        seconds={"convert": time.perf_counter() - started},
        op_counts=count_ops(space.graph, resolved.effective),
        conversions=model.conversions,
        warnings=tuple(notes),
    )
    return Checkpoint(model, resolved.plan, report, planned_ops(space, resolved))


def _config(layer: IntegerLayer, capability: Capability) -> OpConfig | None:
    """Return the configuration of a layer; None if no kernel reads its weight."""
    if layer.groups is not None:
        return None
    if layer.bits == 8:
        if layer.group_size is not None or not layer.is_symmetric:
            return None  # One scale per output would round the weight again.
        integers = (c for c in capability.configs if c.approach is Approach.WEIGHT_ONLY)
        return next((c for c in integers if c.precision is INTEGERS[8]), None)
    # A symmetric weight is also an asymmetric one, whose zero points are the middle code.
    schemes = [Scheme.SYMMETRIC] if layer.is_symmetric else []
    for scheme in (*schemes, Scheme.ASYMMETRIC):
        config = weight_only(group_spec(layer.bits, _group_size(layer), scheme=scheme))
        if capability.takes(config):
            return config
    return None


def _group_size(layer: IntegerLayer) -> int:
    return int(layer.codes.shape[1] // layer.scales.shape[1])


def _grouped(layer: IntegerLayer) -> GroupedWeight:
    scales = to_bfloat16(layer.scales)
    steps = middle_code(layer.bits) - layer.zero_points.astype("float32")
    offsets = to_bfloat16(steps * scales)
    return GroupedWeight(CodedGroups(layer.codes, scales, offsets), _group_size(layer), layer.bits)
