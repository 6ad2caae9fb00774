"""Events in a sentence, for chats and e-mails."""

from collections.abc import Callable, Mapping
from typing import Any, Final

Data = Mapping[str, Any]

_STATES: Final = {
    "stopped": "was stopped", "succeeded": "has ended with success", "failed": "has failed",
    "unreachable": "is unreachable: its node does not answer", "deleted": "was deleted",
}  # fmt: skip


def text_of(kind: str, data: Data, instance: str | None, project: str | None) -> str:
    """One line that says what has happened.

    Args:
        instance: the name of the instance that the event is about.
        project: the name of its project.
    """
    known = (instance, *map(data.get, ("instance_id", "node_name", "gpu_uuid", "group_id")))
    subject = next((str(each) for each in known if each is not None), "")
    place = f" in the project {project}" if project else ""
    sentence = _SENTENCES.get(kind)
    if sentence is None:
        return f"{kind}{f' of {subject}' if subject else ''}{place}{_why(data)}"
    return sentence(data, f"{subject}{place}")


def _why(data: Data) -> str:
    reason = data.get("reason") or {}
    return f": {reason['message']}" if isinstance(reason, Mapping) and reason.get("message") else ""


def _moved(data: Data, subject: str) -> str:
    to = str(data.get("to"))
    return f"Instance {subject} {_STATES.get(to, f'is {to}')}{_why(data)}"


def _expiring(data: Data, subject: str) -> str:
    return f"Instance {subject} reaches its maximum duration at {data['expires_at']}, and is stopped then"


def _nearly_used(data: Data, _subject: str) -> str:
    return (
        f"The project {data['project_name']} uses {data['percent']} % of its quota {data['quota']}: "
        f"{data['used']:g} of {data['limit']:g}"
    )


_SENTENCES: Final[Mapping[str, Callable[[Data, str], str]]] = {
    "instance.state_changed": _moved,
    "instance.expiring": _expiring,
    "project.quota_nearly_used": _nearly_used,
    "node.lost": lambda _data, subject: f"Node {subject} is lost",
    "node.state_changed": lambda data, subject: f"Node {subject} is {data.get('state')}{_why(data)}",
    "gpu.health_changed": lambda data, subject: f"GPU {subject} is {data.get('to')}{_why(data)}",
    "volume.changed": lambda data, _subject: f"Volume {data['name']}: {data['change']}",
    "webhook.ping": lambda data, _subject: f"This is a test of the webhook {data['name']}",
}
