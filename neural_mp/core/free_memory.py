"""How much memory is left, by all accounts that set a limit."""

from __future__ import annotations

from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that can still be used, by the machine's account and by that of the control group."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        lines = (_CONTROL_GROUP / "memory.stat").read_text().splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return free  # no such group, or `max`: it sets no limit
    return max(0, min(free, limit - used + cached))
