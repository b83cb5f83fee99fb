"""The most memory a process ever held."""

from pathlib import Path


def peak_memory() -> float:
    """In bytes. Not `ru_maxrss`: that begins with what the parent process held."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) * 1024.0
