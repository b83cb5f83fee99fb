"""Questions to a runtime that are answered by trying, in a child process; the answers are kept.

A registered kernel is no proof that an op runs: some are refused, some do nothing, some end the
process. So a module is run as a child process. It prints the name of every case before it tries it,
and the facts it finds. Where a case ends the process, the rest is tried in another one. The answers
are kept on disk, by version of the runtime, processor and the environment's settings.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import metadata

from neural_mp.core.hardware import detect
from neural_mp.io.measurement_cache import machine_cache
from neural_mp.util.processes import python_command
from neural_mp.util.validators import list_of, string

logger = logging.getLogger(__name__)

#: What a child prints before the name of a case, ahead of trying it, and before a fact.
STARTS, FOUND = "starts: ", "found: "
#: Limits oneDNN to what an older processor has (oneDNN's guide, "CPU Dispatcher Control").
ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
#: Settings of the environment that change which kernels there are.
_SETTINGS = ("TF_ENABLE_ONEDNN_OPTS", "DNNL_MAX_CPU_ISA", ONEDNN_LIMIT)
_LIMIT_SECONDS = 300


def try_each(
    cases: Iterable[str],
    find: Callable[[str], Iterable[str]],
    refusal: type[Exception] | tuple[()] = (),
) -> None:
    """In a child: try the cases that no child before has begun with, and say what is found.

    Args:
        cases: the names of the cases.
        find: tries a case, and gives the facts one by one.
        refusal: what is raised where the runtime refuses a case, of which nothing more is found.
    """
    for case in cases:
        if case in sys.argv[1:]:
            continue
        print(f"{STARTS}{case}", flush=True)
        try:
            for fact in find(case):
                print(f"{FOUND}{fact}", flush=True)
        except refusal:
            logger.info("%s is refused", case, exc_info=True)


def version_of(*distributions: str) -> str:
    """The version of the first of these distributions that is installed, found without importing.

    Args:
        distributions: the names under which a package may have been installed.
    """
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            logger.debug("%s is not installed", name)
    return "unknown"


@lru_cache(maxsize=32)
def probe_results(module: str, version: str, onednn_limit: str | None = None) -> frozenset[str]:
    """What a module finds when it is run as a child process.

    Args:
        module: the module.
        version: what the answers depend on beside processor and environment; another one for
            another version of the runtime, or of the module.
        onednn_limit: the value of `ONEDNN_MAX_CPU_ISA` for the child; the process's by default.

    Returns:
        The facts; no fact where the child cannot be run, which is not kept.
    """
    environment = dict(os.environ)
    if onednn_limit is not None:
        environment[ONEDNN_LIMIT] = onednn_limit
    settings = [f"{name}={environment.get(name, '')}" for name in _SETTINGS]
    flags = " ".join(sorted(detect({}).flags))
    cache = machine_cache(version=version, flags=flags, settings=" ".join(settings))
    _, known = cache.get(module, list_of(string))
    if known is not None:
        return frozenset(known)
    found = _run(module, environment)
    if found:
        cache.put(module, sorted(found))
    return found


def _run(module: str, environment: dict[str, str]) -> frozenset[str]:
    """Run the child, and again without the cases that it began with where one ended it."""
    found: set[str] = set()
    tried: set[str] = set()
    while True:
        done = subprocess.run(
            python_command(module, *sorted(tried)),
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
            env=environment,
        )
        lines = done.stdout.splitlines()
        started = {line.removeprefix(STARTS) for line in lines if line.startswith(STARTS)}
        found |= {line.removeprefix(FOUND) for line in lines if line.startswith(FOUND)}
        tried |= started
        if done.returncode == 0 or not started:
            if done.returncode:
                logger.warning("%s cannot be run: %s", module, done.stderr[-400:])
            return frozenset(found)
