"""A script for Intel Neural Compressor, run in this process."""

import runpy
import sys
import textwrap


def run(folder, script, *arguments):
    """Run a script as `python script.py …` does, and give back what it has defined."""
    path = folder / "main.py"
    path.write_text(textwrap.dedent(script))
    before = sys.argv
    sys.argv = [str(path), *arguments]
    try:
        return runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
