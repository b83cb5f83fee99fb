"""Pipes and devices in place of files are refused at once: reading them might never end."""

import os
import sys

import pytest

from neural_mp.api.loading import load_source
from neural_mp.config import load_settings
from neural_mp.core.plan import load_plan_file
from neural_mp.data import build_dataset
from neural_mp.errors import ModelLoadError, NeuralMPError
from neural_mp.io.files import read_bounded, require_regular_file
from neural_mp.jobs.driver import compute_job_digest
from neural_mp.profiling.kernel_log import read_kernel_log
from neural_mp.runs.record_schema import read_record_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="paths of Linux")

READERS = {
    "a tuning file": load_settings,
    "a tuning file of many": compute_job_digest,
    "a plan": load_plan_file,
    "a record": read_record_file,
    "a log of kernels": read_kernel_log,
    "a table": lambda path: build_dataset({"csv": {"path": str(path)}}),
    "arrays": lambda path: build_dataset({"numpy": {"inputs": str(path)}}),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("what", ["a named pipe", "a link to one", "/dev/zero"])
def test_what_does_not_end_is_not_read(reader, what, tmp_path):
    path = tmp_path / "file"
    if what == "/dev/zero":
        path.symlink_to(what)
    elif what == "a link to one":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    else:
        os.mkfifo(path)
    with pytest.raises(NeuralMPError, match="file.*not a regular file, but a pipe"):
        READERS[reader](path)


@pytest.mark.parametrize("suffix", ["onnx", "pt2", "keras", "pb", "h5"])
def test_a_model_that_does_not_end_is_not_read(suffix, tmp_path):
    os.mkfifo(tmp_path / f"net.{suffix}")
    with pytest.raises(ModelLoadError, match="net.*not a regular file, but a pipe"):
        load_source(tmp_path / f"net.{suffix}", None, None)


def test_an_image_that_does_not_end_is_not_read(tmp_path):
    pytest.importorskip("PIL.Image")
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "1.png")
    images = build_dataset({"ImageFolder": {"root": str(tmp_path)}})
    with pytest.raises(
        NeuralMPError, match=r"1\.png cannot be read as an image: .*not a regular file"
    ):
        images[0]


def test_a_pipe_that_is_open_already_is_read():
    reading, writing = os.pipe()
    try:
        os.write(writing, b"model: {}")
        os.close(writing)
        assert read_bounded(f"/dev/fd/{reading}", 100) == b"model: {}"
    finally:
        os.close(reading)


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="exceeds the limit of 1 MiB"):
        read_bounded(tmp_path / "file", 1 << 20)


@pytest.mark.parametrize("name", [".", "nothing", "loop"])
def test_who_opens_it_says_what_else_is_wrong(name, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    require_regular_file(tmp_path / name)
