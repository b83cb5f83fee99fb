"""Imported by every Python process that a test starts: garbage is collected as rarely as in tests.

Of the import of a framework, collections take a third, and half of these come at the end, where
nothing is left to be used: what is frozen is out of them.
"""

import atexit
import gc

gc.set_threshold(400_000, 10, 100)
atexit.register(gc.freeze)
