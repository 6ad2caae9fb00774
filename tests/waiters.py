"""The requests of a service that wait for a change."""

from mooring.db.signals import AnyTopic, Signals, Waiter


def waiters(signals: Signals, topic: AnyTopic) -> int:
    """The number of requests that wait for the topic, after they have read the present state."""
    with signals._lock:
        wakes = list(signals._wakes.get(topic, ()))
    owners = [getattr(wake, "__self__", None) for wake in wakes]
    return sum(isinstance(owner, Waiter) and _waits(owner) for owner in owners)


def _waits(waiter: Waiter) -> bool:
    return waiter._waiting is not None and not waiter._waiting.done()
