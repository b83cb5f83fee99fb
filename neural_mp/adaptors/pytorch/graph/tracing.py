"""Lock of everything that traces code with torch."""

from __future__ import annotations

import threading

#: Held while code is traced, exported or read as a program: torch keeps the modes of a trace, and
#: this package exchanges kernels, methods and the error output, for the whole process. A trace in
#: another thread would fail, or restore what the first one still needs.
TRACING = threading.RLock()
