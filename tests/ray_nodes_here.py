"""Nodes of a Ray cluster on this machine, for tests that skip where Ray is not installed."""

from __future__ import annotations

#: What a node has.
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


def added_raylet(cluster):
    """The number of the process that is the parent of all others of a node that is added."""
    return cluster.add_node(**NODE).all_processes["raylet"][0].process.pid
