"""Probes of a runtime in a child process, with cached results.

A registered kernel does not guarantee that an op runs: some are refused, some do nothing, some
crash the process. Therefore a module runs as a child process. The child prints the name of every
case before it starts, and the results. If a case crashes the process, another child runs the
remaining cases. Results are cached on disk, by runtime version, processor and environment settings.
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

#: Prefixes in a child's output: of a case before its start, and of a result.
STARTS, FOUND = "starts: ", "found: "
#: Limits oneDNN to the ISA of an older CPU (oneDNN guide, "CPU Dispatcher Control").
ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
#: Environment variables that affect the available kernels.
_SETTINGS = ("TF_ENABLE_ONEDNN_OPTS", "DNNL_MAX_CPU_ISA", ONEDNN_LIMIT)
_LIMIT_SECONDS = 300


def try_each(
    cases: Iterable[str],
    find: Callable[[str], Iterable[str]],
    refusal: type[Exception] | tuple[()] = (),
) -> None:
    """Run the cases that no earlier child started, and print the results; for a child.

    A `refusal` of the runtime ends a case.
    """
    for case in cases:
        if case in sys.argv[1:]:
            continue
        print(f"{STARTS}{case}", flush=True)
        try:
            for fact in find(case):
                print(f"{FOUND}{fact}", flush=True)
        except refusal:
            logger.info("the runtime rejects the probe %s", case, exc_info=True)


@lru_cache(maxsize=32)
def version_of(*distributions: str) -> str:
    """Return the version of the first installed of some packages, without importing it."""
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            logger.debug("%s is not installed", name)
    return "unknown"


@lru_cache(maxsize=32)
def probe_results(module: str, version: str, onednn_limit: str | None = None) -> frozenset[str]:
    """Return the results of a module that runs as a child process.

    Empty if the child cannot run, which is not cached. `version` is a cache key besides processor
    and environment and must change with the runtime or the module. `onednn_limit` is the value of
    `ONEDNN_MAX_CPU_ISA` for the child, inherited by default.
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
    """Run the child; after a crash, again without the cases already started."""
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
                logger.warning("the probe %s failed: %s", module, done.stderr[-400:])
            return frozenset(found)
