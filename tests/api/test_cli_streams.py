"""A standard output that is full or that nobody reads costs no file and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tune_many_jobs import write_jobs_into

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "neural_mp.cli.entry_point"]
#: Arguments of each command that writes files, and the file that is complete at its end.
WRITING = {
    "tune": ("tune jobs/first.yaml -o new", "new/neural_mp.json"),
    "tune --json": ("tune jobs/first.yaml -o new --json", "new/neural_mp.json"),
    "convert": ("convert first.onnx --plan tuned/plan.yaml -o new", "new/neural_mp.json"),
    "report": ("report tuned -o new.html", "new.html"),
    "init": ("init first.onnx --data test.npz -o new.yaml", "new.yaml"),
    "tune-many": ("tune-many jobs -o new", "new/index.html"),
    "kernels": ("kernels -o new.log -- cat of_onednn.log", "new.log"),
}
#: Commands that only print.
PRINTING = (
    "--help",
    "--version",
    "convert --help",
    "kernels of_onednn.log",
    "inspect first.onnx --json",
)
KERNEL = (
    "onednn_verbose,v1,primitive,exec,cpu,convolution,jit:uni,forward_inference,src:f32,,,mb1,0.5\n"
)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, digits) -> Path:
    """A folder with a job, its model, data, metrics and result."""
    folder = tmp_path_factory.mktemp("streams")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_jobs_into(folder, digits)("first")
    (folder / "of_onednn.log").write_text(KERNEL)
    subprocess.run([*COMMAND, "tune", "jobs/first.yaml", "-o", "tuned"], cwd=folder, check=True)
    return folder


@pytest.fixture
def folder(tuned) -> Path:
    """The folder, without files of other tests."""
    for path in tuned.glob("new*"):
        path.rename(tuned / f"old {path.name} {time.monotonic_ns()}")
    return tuned


def run_full(arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command with a standard output on a full disk."""
    with open("/dev/full", "w") as full:  # noqa: PTH123
        return _run_into(full, arguments, folder)


def run_unread(arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command with a standard output whose reader has closed."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        return _run_into(pipe, arguments, folder)


def _run_into(stdout, arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments.split()],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device of this system is full")
@pytest.mark.parametrize("name", WRITING)
def test_files_are_complete_and_named_if_standard_output_is_full(folder, name):
    arguments, file = WRITING[name]
    done = run_full(arguments, folder)
    assert done.returncode == 2, done.stderr
    assert (folder / file).stat().st_size > 0
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("NeuralMPError: standard output cannot be written: No space left")
    assert f"; saved to {file.partition('/neural')[0]}" in last


@pytest.mark.parametrize("name", WRITING)
def test_files_are_complete_if_nobody_reads_standard_output(folder, name):
    arguments, file = WRITING[name]
    done = run_unread(arguments, folder)
    assert done.returncode == 128 + signal.SIGPIPE, done.stderr
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr
    if name != "kernels":  # whose program would write for ever
        assert (folder / file).stat().st_size > 0


@pytest.mark.parametrize("arguments", PRINTING)
def test_a_command_that_only_prints_says_in_one_line_that_it_could_not(folder, arguments):
    full, unread = run_full(arguments, folder), run_unread(arguments, folder)
    assert full.returncode == 2
    assert full.stderr.splitlines() == [
        "NeuralMPError: standard output cannot be written: No space left on device; nothing was "
        "saved"
    ]
    assert (unread.returncode, unread.stderr) == (128 + signal.SIGPIPE, "")


def test_a_search_goes_on_if_its_progress_cannot_be_shown(folder):
    """Neither a full nor a closed standard error ends a run, nor do both streams in one pipe."""
    command = [*COMMAND, "tune", "jobs/first.yaml", "--json", "-o"]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [*command, "new"], stdout=subprocess.PIPE, stderr=full, cwd=folder, check=False
        )
    assert done.returncode == 0
    assert b'"met": true' in done.stdout
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*command, "new2"], stdout=writing, stderr=writing, cwd=folder, check=False
    )
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert (folder / "new2" / "neural_mp.json").is_file()


def test_a_metric_that_prints_to_a_closed_pipe_does_not_fail(folder):
    """The user's own output is lost like ours, instead of an exception of the user's code."""
    metrics = folder / "metrics_of_mine.py"
    text = metrics.read_text()
    metrics.write_text(text.replace('note("end")', 'print("x" * 9000)'))
    try:
        done = run_unread("tune jobs/first.yaml -o new", folder)
    finally:
        metrics.write_text(text)
    assert done.returncode == 128 + signal.SIGPIPE, done.stderr
    assert (folder / "new" / "neural_mp.json").is_file()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_does_not_block_gets_all_of_the_output(unbuffered):
    """Such a pipe reports that it is full where others wait, e.g. those of Node.js."""
    code = (
        "import sys\nfrom neural_mp.cli.streams import check_written, guard_streams\n"
        "with guard_streams():\n"
        "    print('x' * 400_000)\n    check_written(sys.stdout, '')\n"
    )
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writing)
    time.sleep(1)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "x" * 400_000 + "\n"
    assert process.communicate()[1] == ""
    assert process.returncode == 0
