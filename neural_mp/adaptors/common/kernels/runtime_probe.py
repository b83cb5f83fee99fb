"""Probes of a runtime in a child process, with cached results.

A registered kernel does not guarantee that an op runs: some are refused, some do nothing, some
crash the process. Therefore a module runs as a child process. The child prints the name of every
case before it starts, and the results. If a case crashes the process, another child runs the
remaining cases. Results are cached on disk, by runtime version, processor and environment settings.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from neural_mp.core.hardware import detect
from neural_mp.io.measurement_cache import FileCache, open_machine_cache
from neural_mp.util.system.processes import make_python_command
from neural_mp.util.validators import list_of, mapping_of, string

logger = logging.getLogger(__name__)

#: Prefixes in a child's output: of a case before its start, and of a result.
STARTS, FOUND = "starts: ", "found: "
#: Limits oneDNN to the ISA of an older CPU (oneDNN guide, "CPU Dispatcher Control").
ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
#: Environment variables that affect the available kernels.
_SETTINGS = ("TF_ENABLE_ONEDNN_OPTS", "DNNL_MAX_CPU_ISA", ONEDNN_LIMIT)
#: Seconds until the first child has to end, and more for each case of a model, which take less.
#: Each child after one that did not end has half of the seconds of that one: all together take at
#: most twice as long, whatever the number of cases that do not end.
_LIMIT_SECONDS, _LIMIT_SECONDS_PER_CASE = 300.0, 2.0
#: Maximum number of cached cases of a module; the oldest are dropped.
_MAX_CASES = 5000
_CRASHES = "ends the process or does not end"


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
def find_installed_version(*distributions: str) -> str:
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
    cache = _open_result_cache(version, environment)
    _, cached = cache.get_entry(module, list_of(string))
    if cached is not None:
        return frozenset(cached)
    results, _ = _run_probe(module, environment, _LIMIT_SECONDS)
    if results:
        cache.put_entry(module, sorted(results))
    return frozenset(results)


#: Module and version → case → its result, in this process.
_RESULTS: dict[tuple[str, str], dict[str, str]] = {}


def probe_case_results(module: str, version: str, cases: Mapping[str, bytes]) -> dict[str, str]:
    """Return case → the result of a module that runs as a child process, on unknown cases only.

    The names of cases are digests of their content, which the child reads from files in a folder,
    its first argument. A result is a case, a space and some words. A case that ends the process
    has words that say so, and one without a result is missing.
    """
    case_words = _RESULTS.setdefault((module, version), {})
    if not case_words.keys() >= cases.keys():
        cache = _open_result_cache(version, os.environ)
        cached = cache.get_entry(module, mapping_of(string))[1] or {}
        case_words.update(cached)
        unknown = [case for case in cases if case not in cached]
        if unknown:
            with tempfile.TemporaryDirectory() as folder:
                for case in unknown:
                    (Path(folder) / case).write_bytes(cases[case])
                limit = _LIMIT_SECONDS + _LIMIT_SECONDS_PER_CASE * len(unknown)
                lines, started = _run_probe(module, dict(os.environ), limit, folder)
            results = dict.fromkeys(started & set(unknown), _CRASHES)
            results.update(
                {case: outcome for case, _, outcome in (f.partition(" ") for f in lines)}
            )
            case_words.update(results)
            cache.put_entry(module, dict([*cached.items(), *results.items()][-_MAX_CASES:]))
    return {case: case_words[case] for case in cases if case in case_words}


def find_deviations(module: str, version: str, cases: Mapping[str, bytes]) -> dict[str, str]:
    """Return op → the deviation that a module found, for the ops whose cases deviate.

    The module runs as a child process with `try_each_file`; `cases` are op → the content of its
    case, and `version` is as for `probe_results`.
    """
    digests = {op: hashlib.sha256(content).hexdigest()[:32] for op, content in cases.items()}
    results = probe_case_results(module, version, {digests[op]: cases[op] for op in cases})
    return {op: results[digest] for op, digest in digests.items() if results.get(digest)}


def try_each_file(find: Callable[[Path], str]) -> None:
    """Run the cases of `find_deviations` that no earlier child started; for a child."""
    folder = Path(sys.argv[1])
    names = sorted(path.name for path in folder.iterdir())
    try_each(names, lambda name: [f"{name} {find(folder / name)}"])


def _open_result_cache(version: str, environment: Mapping[str, str]) -> FileCache:
    settings = [f"{name}={environment.get(name, '')}" for name in _SETTINGS]
    flags = " ".join(sorted(detect({}).flags))
    return open_machine_cache(version=version, flags=flags, settings=" ".join(settings))


def _run_probe(
    module: str, environment: dict[str, str], seconds: float, *arguments: str
) -> tuple[set[str], set[str]]:
    """Run the child, again after a crash; return the results, and the cases that were started.

    `seconds` are those of the first child.
    """
    results: set[str] = set()
    tried: set[str] = set()
    while True:
        command = make_python_command(module, *arguments, *sorted(tried))
        begun = time.monotonic()
        output, failure = _run_child_process(command, environment, seconds)
        if time.monotonic() - begun >= seconds:
            seconds /= 2
        lines = output.splitlines()
        started = {line.removeprefix(STARTS) for line in lines if line.startswith(STARTS)}
        results |= {line.removeprefix(FOUND) for line in lines if line.startswith(FOUND)}
        tried |= started
        if failure is None or not started:
            if failure is not None:
                logger.warning("the probe %s failed: %s", module, failure)
            return results, tried


def _run_child_process(
    command: list[str], environment: dict[str, str], seconds: float
) -> tuple[str, str | None]:
    """Return the output of a child and the reason of its failure; None if it succeeded."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=False,
                env=environment,
            )
            failure = done.stderr[-400:] if done.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"no result after {seconds:g} seconds"
        output.seek(0)
        return output.read(), failure
