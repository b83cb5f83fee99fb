"""Nodes of a Ray cluster on this machine, for tests that skip where Ray is not installed."""

from __future__ import annotations

#: What a node has.
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
#: What the first node has besides: no process that draws pages, reads logs or starts machines.
HEAD = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}


def raylet_of(node):
    """The number of the process that is the parent of all others of a node."""
    return node.all_processes["raylet"][0].process.pid


def added_raylet(cluster):
    """That of a node that is added."""
    return raylet_of(cluster.add_node(**NODE))
