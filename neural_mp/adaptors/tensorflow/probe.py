"""Which forms of integer kernel work on this machine, found by running each in a child process.

A registered kernel is no proof that an op runs: some forms are refused, some do nothing, some crash
the process. So every form is run once on small numbers and compared with the float op. The answers
are kept on disk, by version of TensorFlow and processor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import tensorflow as tf

from neural_mp.hardware import detect

logger = logging.getLogger(__name__)

#: What a child process writes before the name of a form, ahead of running it and when it worked.
STARTS, WORKS = "starts: ", "works: "
#: Raised when what is probed, or how, changes.
_VERSION = 2
_LIMIT_SECONDS = 300


@lru_cache(maxsize=1)
def forms_that_work() -> frozenset[str]:
    """The forms of integer kernel that gave the right numbers here, such as `Conv2D Sum`."""
    file = _cache_file()
    try:
        return frozenset(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        logger.debug("no probed kernels in %s", file)
    found = _probe()
    if not found:
        return found  # perhaps something was wrong with the process, not with the kernels
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as scratch:
            json.dump(sorted(found), scratch)
        Path(scratch.name).replace(file)
    except OSError:
        logger.debug("the probed kernels cannot be kept in %s", file, exc_info=True)
    return found


def _cache_file() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    machine = f"{_VERSION} {tf.__version__} {sorted(detect().flags)} {_settings()}"
    digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
    return Path(home) / "neural_mp" / f"tensorflow_kernels_{digest}.json"


def _settings() -> str:
    """Settings of the environment that change which kernels there are."""
    names = ("TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA")
    return " ".join(f"{name}={os.environ.get(name, '')}" for name in names)


def _probe() -> frozenset[str]:
    """Run every form in a child process, and again without those that ended it."""
    works: set[str] = set()
    tried: set[str] = set()
    while True:
        command = [sys.executable, "-m", "neural_mp.adaptors.tensorflow.probe_run", *sorted(tried)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
        )
        lines = done.stdout.splitlines()
        started = {line.removeprefix(STARTS) for line in lines if line.startswith(STARTS)}
        works |= {line.removeprefix(WORKS) for line in lines if line.startswith(WORKS)}
        tried |= started
        if done.returncode == 0 or not started:
            if done.returncode:
                logger.warning("integer kernels cannot be probed: %s", done.stderr[-400:])
            return frozenset(works)
