"""Disk space in the scheduler: what a request takes of a node, and which nodes cannot give it.

A node that does not report its disk (its agent is of an earlier release) takes what names no `disk_mib`.
"""

from mooring.core.disk import DEFAULT_DISK_MIB, default_disk_mib
from mooring.scheduler.model import NodeView, Request


def fixed(request: Request) -> int:
    """What it counts as wherever it is placed: for quotas, before there is a node."""
    return DEFAULT_DISK_MIB * request.stands_for if request.disk_mib is None else request.disk_mib


def needed(request: Request, node: NodeView) -> int:
    """MiB that it takes on this node."""
    if request.disk_mib is None:
        return default_disk_mib(node.disk_mib) * request.stands_for
    return request.disk_mib


def lacking(request: Request, node: NodeView) -> int:
    """MiB that the node has too few; 0 or less where there is room, or where nothing is known to compare."""
    return 0 if node.disk_mib is None else needed(request, node) - node.disk_mib_free


def unsuitable(request: Request, node: NodeView) -> bool:
    """Whether the node cannot host it, however much disk its instances give back."""
    unknown = node.disk_mib is None and request.disk_mib is not None
    return unknown or node.disk_pressure or (request.disk_limits and not node.disk_enforced)


def fits(request: Request, node: NodeView) -> bool:
    return not unsuitable(request, node) and lacking(request, node) <= 0
