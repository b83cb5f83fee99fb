"""Files from outside: bounded readers, atomic writes, archives, trust."""
