"""Amount of output of a process: log messages on standard error, and progress bars."""

from __future__ import annotations

import logging

from neural_mp.errors import ConfigurationError, did_you_mean

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "silent": logging.CRITICAL + 1,
}
_shows_progress = True


def set_verbosity(level: str) -> None:
    """Set the least severe log messages that are printed: `debug`, `info`, `warning` or `error`.

    `silent` prints none. Errors are raised at every level. Handlers that the program has installed
    receive the same messages.

    Raises:
        ConfigurationError: the level has another name.
    """
    if level not in _LEVELS:
        raise ConfigurationError(
            f"level must be one of {', '.join(_LEVELS)}, got {level!r}"
            f"{did_you_mean(str(level), _LEVELS)}"
        )
    logger = logging.getLogger("neural_mp")
    logger.setLevel(_LEVELS[level])
    # Without a handler, Python prints warnings and errors only, whatever the level.
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def disable_progress_bars() -> None:
    """Show no progress bars and tables of trials unless a listener is set."""
    global _shows_progress
    _shows_progress = False


def enable_progress_bars() -> None:
    """Show progress bars again, in terminals and notebooks."""
    global _shows_progress
    _shows_progress = True


def shows_progress() -> bool:
    """Whether progress bars are shown in terminals and notebooks."""
    return _shows_progress
