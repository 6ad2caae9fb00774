"""What an XID (the driver's error number) says about the card: the program's fault, or the hardware's."""

from typing import Literal

Verdict = Literal["application", "hardware"]

# The list NVIDIA's own Kubernetes device plugin passes over. 31 and 43 follow every wild pointer of a
# user's kernel; taking the card away for them would let any user empty the fleet.
APPLICATION_XIDS = frozenset(
    {
        13,  # graphics engine exception
        31,  # GPU memory page fault
        43,  # GPU stopped processing
        45,  # preemptive cleanup, due to previous errors
        68,  # video processor exception
        109,  # context switch timeout
    }
)


def verdict(xid: int, application_xids: frozenset[int] = APPLICATION_XIDS) -> Verdict:
    """Whether the card may go on (`application`) or should be checked (`hardware`, also when unknown)."""
    return "application" if xid in application_xids else "hardware"
