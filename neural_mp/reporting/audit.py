"""An audit, for people to read."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from neural_mp.core.grammar import counted
from neural_mp.profiling.audit import BROKEN, Audit, AuditedOp, Verdict

_YELLOW = (Verdict.EMULATED, Verdict.BEHIND, Verdict.PASSED_ON, Verdict.NOT_REACHED)
_STYLES = {**dict.fromkeys(_YELLOW, "yellow"), **dict.fromkeys(BROKEN, "red")}


def audit_table(ops: Iterable[AuditedOp]) -> Table:
    """Ops with what was planned, and what ran."""
    table = Table(title="What ran, beside the plan", title_justify="left")
    for heading in ("op", "type", "planned", "ran in", "verdict", "kernels"):
        table.add_column(heading, overflow="fold")
    for op in ops:
        along = f" ({op.planned.along})" if op.ran is None and op.planned.along else ""
        table.add_row(
            op.name,
            op.planned.type,
            op.planned.words,
            op.ran_in.value if op.ran_in is not None else "",
            Text(f"{op.verdict}{along}", _STYLES.get(op.verdict, "")),
            ", ".join(op.kernels),
        )
    return table


def audit_words(audit: Audit) -> str:
    """What an audit comes down to, in a line or two."""
    each = ", ".join(f"{count} {verdict}" for verdict, count in audit.counts().items())
    words = f"{audit.lowered} of {counted(len(audit.ops), 'op')} planned below fp32"
    words += f": {each}" if each else ""
    if not audit.complete:
        words += "\nan earlier version saved this model: only the ops that the plan names are known"
    broken = sum(op.verdict in BROKEN for op in audit.ops)
    if not broken:
        return f"{words}\nthe plan holds"
    return f"{words}\nthe plan does NOT hold: {counted(broken, 'op')} ran otherwise"
