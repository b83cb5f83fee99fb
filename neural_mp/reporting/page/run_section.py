"""The run itself: its phases, its settings; the machine and the versions."""

from __future__ import annotations

from neural_mp.core.precision import Precision
from neural_mp.reporting import formatting
from neural_mp.reporting.page.axes import NAMES, both, legend
from neural_mp.reporting.page.bars import Part, stacked
from neural_mp.reporting.page.page_model import View
from neural_mp.reporting.page.parts import card, facts, none, scrolling
from neural_mp.util.html import Element, element, table

_PHASES = {
    "load": "load and capture",
    "baseline": "evaluate FP32",
    "calibrate": "calibrate",
    "search": "search",
    "measure": "measure the result",
}
#: A part of the search, told beside it.
_PROBE = "probe"


def run_section(view: View) -> Element:
    """How long everything took, and what was asked for."""
    record = view.record
    pairs = [
        ("run", record.name or "not in a history"),
        ("started", record.setup.started),
        ("ended", view.ending.ended if view.ending else "no end was kept"),
        ("calibration", f"{record.observations.samples} samples"),
    ]
    rows = [[option, s.value, s.origin] for option, s in record.setup.settings.items()]
    settings = table(["setting", "what held", "set by"], rows, class_="left")
    return card(
        "The run",
        None,
        _phases(view),
        facts(pairs),
        scrolling(settings, "Settings", "middle after") if rows else None,
    )


def _phases(view: View) -> list[Element]:
    if view.report is None:
        tried = sum(trial.seconds for trial in view.trials)
        return [
            none(f"The phases are kept when a run ends; its trials took {formatting.seconds(tried)}.")
        ]
    seconds = view.report.seconds
    known = {**_PHASES, **{name: name for name in seconds if name not in (*_PHASES, _PROBE)}}
    spent = [(known[name], seconds[name]) for name in known if seconds.get(name)]
    if not spent:
        return []
    parts = [
        Part(taken, f"k{index % 6}", f"{name}: {formatting.seconds(taken)}", name)
        for index, (name, taken) in enumerate(spent)
    ]
    keys = [(part.kind, part.said) for part in parts]
    whole = f"{formatting.seconds(sum(taken for _, taken in spent))} in all"
    if seconds.get(_PROBE):
        whole += f"; of the search, {formatting.seconds(seconds[_PROBE])} measured ops beside trials"
    return [
        element("p", f"{whole}.", class_="lead"),
        *both(lambda narrow: stacked(parts, narrow)),
        legend(keys),
    ]


def machine_section(view: View) -> Element:
    """Where it ran, and with what."""
    machine, versions = view.record.setup.machine, view.record.setup.versions
    supports = [
        (NAMES[p], f"{how}: {why}")
        for p in Precision
        for how, why in [machine.supports.get(p.value, ("", ""))]
        if how
    ]
    cores = f"{machine.cores} core{'' if machine.cores == 1 else 's'}"
    return card(
        "Machine and versions",
        "Figures hold for this machine and these versions.",
        facts(
            [
                ("CPU", f"{machine.name}, {cores}"),
                ("flags that count", " ".join(machine.flags) or "none"),
                *supports,
                *([("system", machine.system)] if machine.system else []),
                *versions.items(),
            ]
        ),
    )
