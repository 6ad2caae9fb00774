"""Ids: a prefix for the kind of resource and a lower-case ULID, so that ids sort by creation time."""

from typing import Final

INSTANCE: Final = "ins"
NODE: Final = "nod"
PROJECT: Final = "prj"
API_KEY: Final = "key"
EVENT: Final = "evt"
JOIN_TOKEN: Final = "tok"  # noqa: S105 - a prefix, not a secret
STREAM: Final = "str"
CONTROL_PLANE: Final = "cpl"
REQUEST: Final = "req"
USER: Final = "usr"
SECRET: Final = "sec"  # noqa: S105 - a prefix, not a secret
SSH_KEY: Final = "ssh"
REGISTRY: Final = "reg"
AUDIT_ENTRY: Final = "aud"
INSTANCE_GROUP: Final = "grp"
RESERVATION: Final = "rsv"
GPU_INCIDENT: Final = "inc"
PORT_LINK: Final = "lnk"
TEMPLATE: Final = "tpl"
WEBHOOK: Final = "whk"
DELIVERY: Final = "dlv"
VOLUME: Final = "vol"

PATTERN: Final = r"^[a-z]{3}_[0-9a-hjkmnp-tv-z]{26}$"
