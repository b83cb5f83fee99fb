"""A program decides how much is printed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import neural_mp
from neural_mp.errors import ConfigurationError

LOGGING = """
import logging, sys
import neural_mp
if len(sys.argv) > 1:
    neural_mp.set_verbosity(sys.argv[1])
logger = logging.getLogger("neural_mp.tuning")
for name in ("debug", "info", "warning", "error"):
    getattr(logger, name)(name)
logging.getLogger("other").warning("other")
"""


@pytest.mark.parametrize(
    ("level", "printed"),
    [
        ((), "warning error other"),
        (("debug",), "debug info warning error other"),
        (("info",), "info warning error other"),
        (("error",), "error other"),
        (("silent",), "other"),
    ],
)
def test_messages_below_the_level_are_not_printed(level, printed):
    run = subprocess.run(
        [sys.executable, "-c", LOGGING, *level], capture_output=True, text=True, check=True
    )
    assert run.stderr.split() == printed.split()


def test_a_handler_of_the_program_prints_each_message_once():
    code = "import logging; logging.basicConfig(format='%(message)s')" + LOGGING
    run = subprocess.run(
        [sys.executable, "-c", code, "info"], capture_output=True, text=True, check=True
    )
    assert run.stderr.split() == ["info", "warning", "error", "other"]


def test_an_unknown_level_names_the_levels():
    with pytest.raises(ConfigurationError, match=r"one of debug, info.*got 'infos'.*'info'"):
        neural_mp.set_verbosity("infos")


def test_disabled_progress_bars_leave_a_terminal_alone(monkeypatch):
    from neural_mp.api import mixed_precision

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(mixed_precision, "LiveListener", lambda: "progress")
    converter = neural_mp.MixedPrecision()
    try:
        neural_mp.disable_progress_bars()
        assert converter._check_listener_option() != "progress"
    finally:
        neural_mp.enable_progress_bars()
    assert converter._check_listener_option() == "progress"
