"""Modules of this package in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class ChildError(SystemExit):
    """A child process that ended with an error; ends the program with the error of the child."""


def child_command(module: str, *arguments: object, python: object = sys.executable) -> list[str]:
    """Return the command that runs a module of this package."""
    return [str(python), "-m", f"benchmarks.{module}", *map(str, arguments)]


def run_child(
    module: str,
    *arguments: object,
    python: object = sys.executable,
    folder: Path | str | None = None,
    variables: Mapping[str, str] = NO_VARIABLES,
    max_seconds: float | None = None,
) -> Any:
    """Return what a module prints as JSON on its last line; None if that is no JSON.

    Raises:
        ChildError: the process ended with an error, or not within the limit.
    """
    try:
        done = subprocess.run(
            child_command(module, *arguments, python=python),
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={**os.environ, **variables},
            timeout=max_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"no end within {max_seconds:.0f} s") from error
    if done.returncode:
        raise ChildError(done.stderr.strip()[-2000:] or f"exit code {done.returncode}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith(("{", "[")) else None
