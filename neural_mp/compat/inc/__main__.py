"""`python -m neural_mp.compat.inc script.py …`: runs a script that imports `neural_compressor`."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # Where `-m` has put the working directory; the script's folder takes its place, as if the
    # script were run without us. Now, before it is looked into for what is imported here.
    sys.path.append(sys.path.pop(0))

import runpy
from pathlib import Path

from neural_mp.compat.inc.import_aliases import THEIRS, register
from neural_mp.errors import ConfigurationError


def main(arguments: list[str]) -> None:
    """Run a script.

    Args:
        arguments: its path, and what it is given.

    Raises:
        ConfigurationError: there is no such file.
    """
    if not arguments or not Path(arguments[0]).is_file():
        raise ConfigurationError(
            "give the script to run: python -m neural_mp.compat.inc script.py [its arguments]"
        )
    register(THEIRS)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigurationError as problem:
        print(problem, file=sys.stderr)
        raise SystemExit(2) from None
