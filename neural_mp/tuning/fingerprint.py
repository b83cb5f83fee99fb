"""What a run is about, and where that differs from what another one is about."""

from __future__ import annotations

from collections.abc import Mapping


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What a run is about that differs from what another one was about, in words."""
    return [key for key in now if before.get(key) != now[key]]
