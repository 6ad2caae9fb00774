"""Schemas of webhooks: where events are sent, and the deliveries."""

from typing import Annotated, Literal

from pydantic import Field

from mooring_client.schemas.base import Answer, Body, Timestamp
from mooring_client.schemas.text import Name, Text

# The types of events, and `notices`: those that a person wants to know (docs/webhooks.md lists them).
WebhookEvent = Literal[
    "notices",
    "instance.state_changed",
    "instance.expiring",
    "instance.gpu_unhealthy",
    "instance.gpu_fault",
    "instance_group.changed",
    "project.quota_nearly_used",
    "node.state_changed",
    "node.lost",
    "nodes.replacement_paused",
    "nodes.replacement_resumed",
    "gpu.health_changed",
    "gpu.claimed",
    "volume.changed",
]
WebhookFormat = Literal["standard", "slack"]
DeliveryStatus = Literal["pending", "delivered", "failed", "dropped"]
WebhookEvents = Annotated[list[WebhookEvent], Field(min_length=1, max_length=32)]

# Without spaces, control characters and characters outside ASCII, which a URL must encode.
WebhookUrl = Annotated[
    Text,
    Field(
        min_length=8,
        max_length=2048,
        pattern=r"^(https?://|mailto:)[\x21-\x7e]+$",
        description="an https URL, or `mailto:` with the address of a member",
    ),
]


class WebhookApply(Body):
    """All that is requested of a webhook, as in a create."""

    name: Name | None = None
    project_id: Annotated[Text | None, Field(max_length=64, description="null: your default project")] = None
    all_projects: Annotated[
        bool, Field(description="events of all projects, nodes and GPUs; only admins may request this")
    ] = False
    url: WebhookUrl
    events: WebhookEvents = ["notices"]
    enabled: Annotated[bool, Field(description="false: nothing is sent, and later events are skipped")] = True
    format: Annotated[WebhookFormat, Field(description="slack: for Slack and Mattermost")] = "standard"


class WebhookCreate(WebhookApply):
    """A new webhook. It gets the events that are committed after it."""

    name: Annotated[Name | None, Field(description="null: a generated name")] = None


class WebhookPatch(Body):
    """The fields to change. Omitted fields stay unchanged."""

    # The defaults are never used: only the fields that were sent are read.
    name: Annotated[Name, Field(default_factory=str)]
    url: Annotated[WebhookUrl, Field(default_factory=str)]
    events: Annotated[WebhookEvents, Field(default_factory=list)]
    enabled: Annotated[bool, Field(default_factory=bool)]
    format: Annotated[WebhookFormat, Field(default_factory=lambda: "standard")]


class Webhook(Answer):
    id: str
    name: str
    project_id: Annotated[str | None, Field(description="null: all projects")]
    all_projects: bool
    url: str
    events: Annotated[list[WebhookEvent], Field(max_length=32)]
    enabled: bool
    disabled_reason: Annotated[
        Literal["gone"] | None, Field(description="gone: the receiver has answered 410")
    ]
    format: WebhookFormat
    former_secret_until: Annotated[
        Timestamp | None, Field(description="until when the former secret signs too; null: there is none")
    ]
    pending: Annotated[int, Field(description="number of deliveries that are not finished")]
    version: int
    created_at: Timestamp


class NewWebhook(Webhook):
    secret: Annotated[str, Field(description="what verifies the signatures, shown only once")]


class WebhookList(Answer):
    items: Annotated[list[Webhook], Field(max_length=200)]
    next_cursor: str | None


class WebhookDelivery(Answer):
    id: str
    webhook_id: str
    event_id: Annotated[str, Field(description="the header webhook-id, the same in all attempts")]
    type: str
    instance_id: str | None
    status: DeliveryStatus
    attempts: int
    last_code: Annotated[
        int | None, Field(description="HTTP or SMTP status of the last attempt; null: there was no answer")
    ]
    last_error: Annotated[str | None, Field(description="why the last attempt failed, as in docs/errors.md")]
    next_attempt_at: Annotated[
        Timestamp | None,
        Field(description="null: it is finished, or waits for an earlier delivery of the same instance"),
    ]
    created_at: Timestamp
    finished_at: Timestamp | None


class WebhookDeliveryList(Answer):
    items: Annotated[list[WebhookDelivery], Field(max_length=200)]
    next_cursor: str | None
