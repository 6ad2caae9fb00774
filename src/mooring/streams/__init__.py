"""Streams into instances, as a process of the control plane serves them: a replica, or a gateway."""
