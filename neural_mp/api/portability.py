"""CPU portability of converted models: target of a conversion, and checks on loading."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from neural_mp.adaptors.common.optional import require_part
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core.hardware import FORCE_VARIABLES, HOST_TARGET, PORTABLE, Hardware, detect
from neural_mp.core.int8_accumulation import EXACT_EVERYWHERE, Int8Accumulation
from neural_mp.core.precision import Precision
from neural_mp.errors import (
    ConfigurationError,
    ConversionError,
    ModelLoadError,
    UnsupportedPrecisionError,
)
from neural_mp.space import TuningSpace
from neural_mp.space.plan_effects import count_ineligible_reasons

logger = logging.getLogger(__name__)

#: Text for a model that is exact on all CPUs.
EVERYWHERE = "every CPU"
_EXACT = "CPUs with exact INT8 accumulation (VNNI, AMX, ARM)"
_MEND = f"convert it with target {PORTABLE!r}, which is exact on every CPU"


def find_target_hardware(
    target: str, here: Hardware, adaptor: Adaptor[Any]
) -> tuple[Hardware, tuple[str, ...]]:
    """Return the hardware of a target in `hardware.TARGETS`, and warnings if it is not `here`.

    Raises:
        ConfigurationError: the target is unknown, or its results cannot be reproduced here.
    """
    hardware = here.for_target(target)
    if target == HOST_TARGET:
        return hardware, ()
    wrong_here = adaptor.int8_accumulation(here)
    for kernel, products in adaptor.int8_accumulation(hardware).items():
        if products is Int8Accumulation.EXACT and wrong_here[kernel] is Int8Accumulation.SATURATING:
            raise ConfigurationError(
                f"target {target!r} requires a machine with exact INT8 accumulation to check the "
                f"results; here the {kernel} kernels of {adaptor.framework} saturate; convert on "
                f"such a machine, or {_MEND}"
            )
    if target == PORTABLE:
        return hardware, ()
    message = f"the model is converted for target {target!r}; speeds were measured on this machine"
    return hardware, (message,)


def describe_exact_targets(model: AnyModel) -> str:
    """Return the CPUs on which INT8 accumulation of a model is exact, as text."""
    minding = model.full_range_kernels - EXACT_EVERYWHERE
    return f"{_EXACT} only; {_MEND}" if minding else EVERYWHERE


def ensure_exact(model: AnyModel, name: str) -> tuple[AnyModel, tuple[str, ...]]:
    """Return a loaded model with exact INT8 accumulation on this machine, and the changes made.

    Raises:
        ModelLoadError: results would be wrong here and cannot be corrected.
    """
    wide = model.full_range_kernels
    if not wide:
        return model, ()
    products = model.adaptor.int8_accumulation(detect())
    saturating = sorted(k.value for k in wide if products[k] is Int8Accumulation.SATURATING)
    if not saturating:
        return model, ()
    reason = (
        f"{name} was converted for {_EXACT}; on this CPU the {' and '.join(saturating)} kernels "
        f"saturate"
    )
    try:
        offered = require_part(
            model.adaptor.portability, model.adaptor.framework, "portable weights"
        )
        right = replace(model, held=offered.with_reduced_range(model.held))
    except ConversionError as error:
        raise ModelLoadError(
            f"{reason}, and the weights cannot be corrected: {error}; {_MEND}"
        ) from error
    done = f"{reason}; its INT8 weights were quantized again after the accuracy was measured"
    logger.warning(done)
    return right, (done,)


def without_kernels(space: TuningSpace, hardware: Hardware) -> tuple[Precision, ...]:
    """Return the precisions that the hardware has but the framework emulates.

    Kernels of quantize-agnostic or fused ops do not count, since they gain nothing alone.
    """
    emulated = []
    for precision in space.usable_precisions:
        begin = [space.capabilities[op] for op in space.tunable_ops if space.choice(op, precision)]
        if hardware.support(precision).native and all(precision in c.emulated for c in begin):
            emulated.append(precision)
    return tuple(emulated)


def warn_idle_precisions(
    space: TuningSpace, hardware: Hardware, precisions: Sequence[Precision]
) -> list[str]:
    """Return a warning for every precision that no op of a model can run in.

    Raises:
        UnsupportedPrecisionError: one of them is forced, and no other lower precision is usable.
    """
    usable = (*space.usable_precisions, Precision.FP32)
    idle = [precision for precision in precisions if precision not in usable]
    is_all_fp32 = set(usable) == {Precision.FP32}
    for precision in idle:
        if precision in hardware.forced and is_all_fp32:
            reasons = count_ineligible_reasons(space, space.graph, [precision])
            message = reasons[0].reason if reasons else "the model has no op with such a kernel"
            raise UnsupportedPrecisionError(
                f"{FORCE_VARIABLES[precision]}=1 is set, but no op of this model can run in "
                f"{precision}: {message}; unset {FORCE_VARIABLES[precision]} for a run in FP32"
            )
    warnings = [f"no op of this model can run in {name}; continuing without it" for name in idle]
    for message in warnings:
        logger.warning("%s", message)
    return warnings
