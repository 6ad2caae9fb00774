"""Disk space in the scheduler: how much a request takes of a node, and which nodes have too little.

A node that does not report its disk (its agent is older) accepts requests without `disk_mib`.
"""

from mooring.core.disk import DEFAULT_DISK_MIB, default_disk_mib
from mooring.scheduler.model import NodeView, Request


def fixed(request: Request) -> int:
    """MiB that count against quotas, on any node."""
    return DEFAULT_DISK_MIB * request.stands_for if request.disk_mib is None else request.disk_mib


def needed(request: Request, node: NodeView) -> int:
    """MiB that the request takes on this node."""
    if request.disk_mib is None:
        return default_disk_mib(node.disk_mib) * request.stands_for
    return request.disk_mib


def lacking(request: Request, node: NodeView) -> int:
    """MiB that the node lacks; 0 or less if it has room or does not report its disk."""
    return 0 if node.disk_mib is None else needed(request, node) - node.disk_mib_free


def unsuitable(request: Request, node: NodeView) -> bool:
    """Whether the node cannot host it, even if its instances released their disk."""
    unknown = node.disk_mib is None and request.disk_mib is not None
    return unknown or node.disk_pressure or (request.disk_limits and not node.disk_enforced)


def fits(request: Request, node: NodeView) -> bool:
    return not unsuitable(request, node) and lacking(request, node) <= 0
