"""Questions that are answered by a child process: once, and by another one after a crash."""

import subprocess

import pytest

from neural_mp.adaptors.common.kernels import runtime_probe
from neural_mp.adaptors.common.kernels.int8_accumulation import (
    accumulation_of_cases,
    accumulation_on_target,
)
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind

EXACT, SATURATING = Int8Accumulation.EXACT, Int8Accumulation.SATURATING
CRASHING = """
import os
from neural_mp.adaptors.common.kernels.runtime_probe import try_each
with open("runs.txt", "a") as runs:
    runs.write(os.environ.get("ONEDNN_MAX_CPU_ISA", "-") + " ")
def find(case):
    if case == "deadly":
        os._exit(3)
    if case == "refused":
        raise ValueError
    yield f"{case} works"
try_each(("first", "deadly", "refused", "last"), find, ValueError)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "crashing.py").write_text(CRASHING)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    runtime_probe.probe_results.cache_clear()
    yield "crashing"
    runtime_probe.probe_results.cache_clear()


def test_what_ends_a_process_or_is_refused_is_left_out_and_the_rest_is_tried(module, tmp_path):
    assert runtime_probe.probe_results(module, "1") == {"first works", "last works"}
    assert (tmp_path / "runs.txt").read_text() == "- - "


HANGING = """
import time
from neural_mp.adaptors.common.kernels.runtime_probe import try_each
def find(case):
    if case.startswith("endless"):
        time.sleep(600)
    yield f"{case} works"
try_each(("first", *(f"endless {number}" for number in range(50))), find)
"""


@pytest.mark.slow
def test_cases_that_do_not_end_share_the_seconds_of_a_probe(module, tmp_path, monkeypatch):
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.setattr(runtime_probe, "_LIMIT_SECONDS", 8.0)
    seconds: list[float] = []
    run = subprocess.run

    def record_timeout(command, **options):
        seconds.append(options["timeout"])
        return run(command, **options)

    monkeypatch.setattr(runtime_probe.subprocess, "run", record_timeout)
    assert runtime_probe.probe_results("hanging", "1") == {"first works"}
    assert seconds == [8.0 / 2**number for number in range(len(seconds))]
    assert len(seconds) > 1


@pytest.mark.slow
def test_answers_are_kept_by_version_and_limit(module, tmp_path):
    for version, limit in (("1", None), ("1", None), ("2", None), ("2", "AVX2"), ("1", None)):
        runtime_probe.probe_results(module, version, limit)
        runtime_probe.probe_results.cache_clear()  # as in another process
    assert (tmp_path / "runs.txt").read_text() == "- - - - AVX2 AVX2 "


def test_a_child_that_cannot_be_run_says_nothing_and_is_asked_again(module, tmp_path):
    assert runtime_probe.probe_results("no_such_module", "1") == frozenset()
    assert not (tmp_path / "cache").exists()


def test_a_kind_of_kernel_is_exact_if_all_its_cases_are():
    cases = ("convolution a", "convolution b", "depthwise a", "dense a")
    accumulation = accumulation_of_cases({"convolution a", "depthwise a", "dense a"}, cases)
    assert accumulation == {
        KernelKind.CONVOLUTION: SATURATING,
        KernelKind.DEPTHWISE: EXACT,
        KernelKind.DENSE: EXACT,
    }


def test_a_runtime_is_believed_where_it_saturates_and_the_flags_where_they_do_not_tell():
    hardware = Hardware(flags=frozenset({"avx512_vnni"}))
    limits: list[str | None] = []

    def says(products):
        def ask(limit):
            limits.append(limit)
            return dict.fromkeys(KernelKind, products) | {KernelKind.DEPTHWISE: EXACT}

        return ask

    assert set(accumulation_on_target(hardware, says(EXACT)).values()) == {EXACT}
    assert accumulation_on_target(hardware, says(SATURATING))[KernelKind.DENSE] is SATURATING
    assert accumulation_on_target(hardware, says(SATURATING))[KernelKind.DEPTHWISE] is EXACT
    assert accumulation_on_target(Hardware(), says(EXACT))[KernelKind.CONVOLUTION] is SATURATING
    limits.clear()
    portable = accumulation_on_target(hardware.for_target("portable"), says(EXACT))
    assert limits == ["AVX2", "AVX512_CORE"]
    assert portable[KernelKind.CONVOLUTION] is SATURATING
    assert portable[KernelKind.DEPTHWISE] is EXACT
    limits.clear()
    assert set(accumulation_on_target(hardware.for_target("amx"), says(EXACT)).values()) == {EXACT}
    assert limits == []


CASES = """
import os, pathlib, sys
from neural_mp.adaptors.common.kernels.runtime_probe import try_each
folder = pathlib.Path(sys.argv[1])
with open("cases.txt", "a") as runs:
    runs.write(" ".join(sorted(path.name for path in folder.iterdir())) + ";")
def find(case):
    if (folder / case).read_bytes() == b"deadly":
        os._exit(3)
    yield f"{case} read {(folder / case).read_text()}"
try_each(sorted(path.name for path in folder.iterdir()), find)
"""


@pytest.mark.slow
def test_cases_in_files_are_tried_once_and_a_deadly_one_has_words_of_its_own(module, tmp_path):
    (tmp_path / "cases_in_files.py").write_text(CASES)
    cases = {"a": b"one", "b": b"deadly", "c": b"three"}
    for _ in range(2):
        results = runtime_probe.probe_case_results("cases_in_files", "1", cases)
        assert results["a"] == "read one"
        assert results["c"] == "read three"
        assert "ends the process" in results["b"]
    runtime_probe._RESULTS.clear()  # as in another process
    more = runtime_probe.probe_case_results("cases_in_files", "1", {**cases, "d": b"four"})
    assert more == {**results, "d": "read four"}
    assert (tmp_path / "cases.txt").read_text() == "a b c;a b c;d;"
