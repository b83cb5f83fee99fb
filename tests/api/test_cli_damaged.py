"""Commands with a damaged file end with the exit code of a mistake, and with one short line."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

NET = ("nets:small_net", "--input-shape", "2,1,8,8")
KERNEL = (
    "onednn_verbose,v1,primitive,exec,cpu,convolution,jit:uni,forward_inference,src:f32,,,mb1,0.5\n"
)
PLANS = {
    "a list for a precision": ("ops: {head: [fp32]}", "ops.head: expected a precision"),
    "aliases without end": ("ops: &a {head: *a}", "has no anchor before it"),
    "no number": (
        "ops: {head: fp32}\nobservations: {nsr: {head: abc}}",
        "observations.nsr.head: expected a finite number from 0, found 'abc'",
    ),
    "brackets": (f"ops: {'[' * 100_000}", "nesting exceeds"),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("command", ["convert", "explain"])
def test_a_plan_file(command, name, run):
    content, message = PLANS[name]
    Path("plan.yaml").write_text(f"neural_mp_plan: 2\n{content}\n")
    op = ("head",) if command == "explain" else ("--output", "out")
    code, out, err = run(command, NET[0], *op, *NET[1:], "--plan", "plan.yaml", "--quiet")
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "PlanError: 'plan.yaml': " in err
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "file", "message"),
    [
        (("audit", "saved"), "neural_mp.json", "expected the key 'framework'"),
        (("benchmark", "saved"), "neural_mp.json", "expected the key 'framework'"),
        (("compare", "saved", "saved", "--quiet"), "neural_mp.json", "the key 'framework'"),
        (("report", "saved"), "run.json.gz", "expected the key 'setup'"),
    ],
)
def test_a_saved_model(arguments, file, message, run):
    Path("saved").mkdir()
    (Path("saved") / file).write_text('{"neural_mp": 2}')
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert f"'saved/{file}'" in err
    assert message in err


def test_a_history(run):
    Path("workspace").mkdir()
    (Path("workspace") / "history.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    code, _, err = run("report", "workspace")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert "HistoryError" in err


def test_a_seed_in_a_tuning_file(run):
    Path("conf.yaml").write_text("model: {name: net.onnx}\ntuning: {random_seed: -1}\n")
    code, _, err = run("tune", "conf.yaml")
    assert code == 2
    assert "conf.yaml, line 2: tuning.random_seed: expected a whole number from 0 to" in err


@pytest.mark.parametrize("command", ["sensitivity", "audit", "inspect", "report", "kernels"])
def test_a_name_that_is_too_long(command, run):
    code, _, err = run(command, "x" * 300)
    assert code == 2
    assert "Traceback" not in err


def _ended(closed: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a shell runs it, with some of its streams closed."""
    command = [sys.executable, "-m", "neural_mp.cli.app", *arguments]
    return subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *command], capture_output=True, text=True, check=False
    )


@pytest.fixture(params=["", "--json"])
def printing(request) -> tuple[str, ...]:
    """A command that prints, and takes less time than most."""
    Path("kernels.log").write_text(KERNEL)
    return ("kernels", "kernels.log", *filter(None, [request.param]))


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_change_nothing_else(closed, printing):
    done = _ended(closed, *printing)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (">&-" not in closed.split())


@pytest.mark.slow
def test_frameworks_that_are_imported_without_a_stream_change_nothing_else():
    done = _ended("<&- >&- 2>&-", "hardware")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_mistake_is_one_whichever_streams_are_closed(closed):
    done = _ended(closed, "inspect", "missing")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == ("2>&-" not in closed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is of Linux")
def test_an_output_that_is_full_is_one_line(printing):
    done = _ended(">/dev/full", *printing)
    assert done.returncode == 2
    assert done.stderr.startswith("NeuralMPError: standard output cannot be written: No space")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("printing", ["--json"], indirect=True)
def test_json_for_a_reader_that_has_seen_enough(printing):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "neural_mp.cli.app", *printing]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
