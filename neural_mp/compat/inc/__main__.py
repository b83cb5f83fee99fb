"""`python -m neural_mp.compat.inc script.py …`: run a script that imports `neural_compressor`."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # `-m` puts the working directory first; the script's folder goes there, as if the script were
    # run directly. Must come before the imports below, which search the path.
    sys.path.append(sys.path.pop(0))

import runpy
from pathlib import Path

from neural_mp.compat.inc.import_aliases import THEIRS, register
from neural_mp.errors import ConfigurationError


def main(arguments: list[str]) -> None:
    """Run a script.

    Args:
        arguments: path of the script, and its arguments.

    Raises:
        ConfigurationError: the file does not exist.
    """
    if not arguments or not Path(arguments[0]).is_file():
        raise ConfigurationError(
            f"the first argument must be a script, got {' '.join(arguments) or 'none'}; run "
            f"python -m neural_mp.compat.inc script.py [its arguments]"
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
