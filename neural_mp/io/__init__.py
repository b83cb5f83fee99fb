"""Access to untrusted files: bounded readers, atomic writes, archives, trust."""
