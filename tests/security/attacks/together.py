"""Two runs at once in one workspace: each has a run of its own, or is told who has it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attacks.own_time import OwnClock, ends_within
from attacks.short_runs import Setting, as_text, kept, outcome, run_count, started, write_nets
from attacks.verdicts import Family, Finding, Verdict

NAME = "together"
_HANG = 120.0
_SETTINGS = (Setting("basic", pause=0.2), Setting("tpe", pause=0.2), Setting("exhaustive", 2))
Process = multiprocessing.Process


class Pair:
    """Runs in one folder.

    Args:
        nets: where the nets are.
        home: the folder of the runs.
        setting: of the runs.
        dice: says how long to wait between them.
    """

    def __init__(self, nets: Path, home: Path, setting: Setting, dice: random.Random) -> None:
        self.nets, self.home, self.setting, self.dice = nets, home, setting, dice

    def start(self, resume: bool) -> Process:
        return started(self.nets, self.home, self.setting, resume)

    def wait(self, most: float) -> None:
        time.sleep(self.dice.uniform(0, most))

    def wait_for_a_run(self, process: Process) -> None:
        assert process.pid is not None
        clock = OwnClock(process.pid)
        while not run_count(self.home):
            assert clock.seconds() < _HANG, "no run was begun"
            time.sleep(0.02)

    def ends(self, *processes: Process) -> list[dict[str, Any]]:
        """What came of processes that end by themselves."""
        outcomes = []
        for process in processes:
            assert ends_within(process, _HANG), "it hangs"
            result = outcome(process, self.home)
            assert result is not None, f"it ended without words, by {process.exitcode}"
            outcomes.append(result)
        return outcomes


def _two_new_runs(pair: Pair) -> None:
    first = pair.start(resume=False)
    pair.wait(0.3)
    first_end, second_end = pair.ends(first, pair.start(resume=False))
    _right(pair, first_end, second_end)
    assert first_end["run"] != second_end["run"], "they wrote into one run"


def _resumed_while_it_goes_on(pair: Pair) -> None:
    first = pair.start(resume=False)
    pair.wait_for_a_run(first)
    first_end, second_end = pair.ends(first, pair.start(resume=True))
    _right(pair, first_end)
    if second_end["end"] == "right":  # the first one had ended before
        _right(pair, first_end, second_end)
    else:
        assert f"in use by process {first.pid} on " in second_end["words"], second_end["words"]


def _two_go_on(pair: Pair) -> None:
    first = pair.start(resume=False)
    pair.wait_for_a_run(first)
    pair.wait(0.5)
    first.kill()
    first.join()
    ends = pair.ends(*[pair.start(resume=True) for _ in range(2)])
    right = [end for end in ends if end["end"] == "right"]
    assert right, f"nobody went on: {ends}"
    _right(pair, *right)
    assert all("in use by process" in end["words"] for end in ends if end not in right), ends


def _gone_on_with_while_it_is_stopped(pair: Pair) -> None:
    first = pair.start(resume=False)
    pair.wait_for_a_run(first)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    try:
        (second_end,) = pair.ends(pair.start(resume=True))
        assert f"in use by process {first.pid} on " in second_end["words"], second_end
    finally:
        os.kill(first.pid, signal.SIGCONT)
    _right(pair, *pair.ends(first))


_CASES: Sequence[Callable[[Pair], None]] = (
    _two_new_runs,
    _resumed_while_it_goes_on,
    _two_go_on,
    _gone_on_with_while_it_is_stopped,
)


def _right(pair: Pair, *ends: dict[str, Any]) -> None:
    """See that all came to the same, and that no run has a trial twice."""
    for end in ends:
        assert end["end"] == "right", end["words"]
        assert not end["warnings"] or not any("written down" in w for w in end["warnings"])
        texts = Counter(map(as_text, end["trials"]))
        assert set(texts.values()) <= {1}, f"trials came twice: {texts.most_common(1)}"
        assert texts == Counter(map(as_text, ends[0]["trials"]))
    stored = kept(pair.home)
    assert stored.words == "ok"
    runs = len({end["run"] for end in ends})
    assert Counter(stored.trials).total() == runs * len(ends[0]["trials"])


def findings(count: int, folder: Path, seed: int) -> Iterator[Finding]:
    """Start two runs at once, in every way."""
    dice, nets = random.Random(seed), folder / "nets"
    nets.mkdir()
    write_nets(nets)
    for index in range(count):
        case = _CASES[index % len(_CASES)]
        setting = _SETTINGS[index // len(_CASES) % len(_SETTINGS)]
        home = folder / f"pair {index}"
        home.mkdir()
        label = f"{case.__name__.strip('_').replace('_', ' ')}, {setting.strategy}"
        try:
            case(Pair(nets, home, setting, dice))
            yield Finding(NAME, label, Verdict.RIGHT)
        except AssertionError as error:
            yield Finding(NAME, label, Verdict.WRONG, str(error))


TOGETHER = Family(NAME, 24, findings)
