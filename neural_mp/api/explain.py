"""What was decided of every op, in files that people and Netron can read."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.amp import Painting
from neural_mp.api.amp_settings import edited_lists, forced, gather_amp
from neural_mp.core import hardware
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.core.precision import Precision
from neural_mp.errors import NeuralMPError, UnsupportedPrecisionError
from neural_mp.space import ResolvedPlan, TuningSpace


def write_log(
    folder: Path, before: AnyTunableModel, after: AnyModel, plan: PrecisionPlan
) -> tuple[str, ...]:
    """Write the graph before and after, and a table of ops for every 16-bit precision.

    Args:
        folder: where to.
        before: the model as it was.
        after: the model as it is now.
        plan: what it runs in now.

    Returns:
        A warning for whatever could not be written; nothing is lost by that.
    """
    warnings = []
    for name, model in (("before", before), ("after", after)):
        try:
            model.draw(folder / name)
        except (OSError, NeuralMPError) as error:
            warnings.append(f"the graph {name} was not written to {str(folder)!r}: {error}")
    space, resolved = before.space, before.space.resolve(plan)
    for precision in (p for p in space.usable_precisions if p.is_16_bit):
        try:
            _write_table(folder / f"paint_{precision}.tsv", space, resolved, precision)
        except OSError as error:
            warnings.append(f"the reasons were not written to {str(folder)!r}: {error}")
    return tuple(warnings)


def _write_table(path: Path, space: TuningSpace, plan: ResolvedPlan, precision: Precision) -> None:
    paints = space.painting(plan, precision).paints
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["op", "type", "list", "colour", "runs in", "reason"])
        for op in space.graph:
            paint = paints[op.name]
            stands_on = paint.list.value if paint.list else ""
            writer.writerow(
                [
                    op.name,
                    op.type,
                    stands_on,
                    paint.colour.value,
                    plan.effective[op.name],
                    paint.reason,
                ]
            )


def explained(
    model: AnyModel,
    op: str,
    precisions: tuple[Precision, ...],
    plan: PrecisionPlan | str | Path | None = None,
) -> tuple[TuningSpace, Mapping[Precision, Painting]]:
    """Why an op would run in 16 bits, or would not, on a machine that has them.

    Args:
        model: the model.
        op: the op's name.
        precisions: BF16 or FP16, or both.
        plan: under this plan; by default, with all products in 16 bits.

    Returns:
        The model's space, and what is decided of all ops.

    Raises:
        UnknownOperatorError: the model has no such op, or an edit names an unknown op type.
        UnsupportedPrecisionError: one of the precisions has no 16 bits.
    """
    for precision in precisions:
        if not precision.is_16_bit:
            raise UnsupportedPrecisionError(
                f"the four lists decide on 16-bit precisions, bf16 and fp16, not on {precision}"
            )
    amp = gather_amp(None, None)
    machine = replace(hardware.detect(), forced=frozenset(precisions))
    lists, _ = edited_lists(model.adaptor, amp, precisions)
    space = forced(model.adaptor.space(model.held, machine, lists), amp)
    assert space.graph[op]  # says what the model has instead
    given = load_plan_file(plan)[0] if isinstance(plan, str | Path) else plan
    paintings = {}
    for precision in precisions:
        narrowed = space.restricted_to([precision]) if given is None else space
        resolved = narrowed.resolve(given or narrowed.fastest_plan())
        paintings[precision] = narrowed.painting(resolved, precision)
    return space, paintings
