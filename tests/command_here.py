"""The command line in this process, for fixtures that several tests share."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from neural_mp.cli import app


def run_main(*arguments: str) -> tuple[int, str, str]:
    """Run `neural-mp`, piped; return the exit code, the output and the errors."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(streams[0]),
        redirect_stderr(streams[1]),
    ):
        patch.setattr(sys, "argv", ["neural-mp", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
    out, err = (stream.detach().getvalue().decode() for stream in streams)
    return int(ended.value.code or 0), out, err
