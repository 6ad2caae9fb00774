"""Every refusal Mooring can give, as one tree; `api/http/problems.py` maps each branch to its HTTP status.

    MooringError
    ├── BadRequest           400  bad_request · bad_cursor · bad_json
    ├── Unauthorized         401  unauthorized
    ├── Forbidden            403  forbidden · image_not_allowed · node_selector_conflict
    │   └── QuotaExceeded         quota_exceeded
    ├── NotFound             404  not_found
    ├── MethodNotAllowed     405  method_not_allowed
    ├── RequestTimeout       408  request_timeout
    ├── Conflict             409
    │   ├── NameTaken             name_taken
    │   ├── InvalidTransition     invalid_transition
    │   ├── MemberOfGroup         member_of_group
    │   ├── InsufficientCapacity  insufficient_capacity
    │   ├── IdempotencyInProgress idempotency_in_progress
    │   ├── ReplayTooLarge        replay_too_large
    │   ├── NodeInUse             node_in_use
    │   ├── ProjectInUse          project_in_use
    │   ├── StaleSession          stale_session
    │   └── NotRunning            not_running
    ├── Gone                 410  events_expired
    ├── PreconditionFailed   412  precondition_failed
    ├── TooLarge             413  body_too_large
    ├── UnsupportedMediaType 415  unsupported_media_type
    ├── Invalid              422  validation_failed · not_supported_yet · registry_not_allowed · …
    │   └── IdempotencyKeyReused  idempotency_key_reused
    ├── TooManyRequests      429  too_many_requests · too_many_questions ·
    │   │                         too_many_streams · too_many_streams_on_node
    │   └── DailyWriteLimit       daily_write_limit
    ├── HeadersTooLarge      431  headers_too_large
    └── Unavailable          503  database_unavailable · sso_unavailable · node_unreachable · node_timeout ·
                                  server_ending

The message is for the user: what is wrong and what to do next. Fields carry the numbers behind it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class MooringError(Exception):
    """A refusal with a stable `code`; `fields` become members of the problem document.

    Attributes:
        retry_after_s: when trying again is worth it, where that is known.
    """

    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Internal error"
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, code: str | None = None, retry_after_s: int | None = None, **fields: Any
    ) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = code or self.code
        self.retry_after_s = retry_after_s
        self.fields: Mapping[str, Any] = fields


class BadRequest(MooringError):
    code, title = "bad_request", "Bad request"


class Unauthorized(MooringError):
    code, title = "unauthorized", "Authentication required"


class Forbidden(MooringError):
    code, title = "forbidden", "Not allowed"


class QuotaExceeded(Forbidden):
    """More than the project may hold. Fields: `quota`, `limit`, `used`, `asked`, of GPU-hours `resets_at`."""

    code, title = "quota_exceeded", "Quota exceeded"


class NotFound(MooringError):
    code, title = "not_found", "Not found"


class MethodNotAllowed(MooringError):
    code, title = "method_not_allowed", "Method not allowed"


class RequestTimeout(MooringError):
    code, title = "request_timeout", "Request timeout"
    retryable = True


class Conflict(MooringError):
    code, title = "conflict", "Conflict"


class NameTaken(Conflict):
    code, title = "name_taken", "Name already taken"


class InvalidTransition(Conflict):
    code, title = "invalid_transition", "The instance's state forbids this"


class MemberOfGroup(Conflict):
    """It can be done only to the whole group. Fields: `group_id`."""

    code, title = "member_of_group", "It is a member of a group"


class InsufficientCapacity(Conflict):
    code, title = "insufficient_capacity", "No node can host this now"
    retryable = True


class IdempotencyInProgress(Conflict):
    code, title = "idempotency_in_progress", "The first request with this key is still running"
    retryable = True


class ReplayTooLarge(Conflict):
    """The first request took effect; its answer was not kept. Fields: `first_status`, `location`."""

    code, title = "replay_too_large", "The first answer was too large to keep"


class ProjectInUse(Conflict):
    code, title = "project_in_use", "Instances live in this project"


class NodeInUse(Conflict):
    code, title = "node_in_use", "Instances live on this node"


class StaleSession(Conflict):
    code, title = "stale_session", "A newer agent speaks for this node"


class NotRunning(Conflict):
    code, title = "not_running", "The instance has no running container"


class Gone(MooringError):
    code, title = "events_expired", "No longer kept"


class PreconditionFailed(MooringError):
    code, title = "precondition_failed", "It changed since you read it"


class TooLarge(MooringError):
    code, title = "body_too_large", "Request body too large"


class UnsupportedMediaType(MooringError):
    code, title = "unsupported_media_type", "Unsupported media type"


class HeadersTooLarge(MooringError):
    code, title = "headers_too_large", "Request head too large"


class Invalid(MooringError):
    """A well-formed request that asks for something impossible. `errors` name each place in the body."""

    code, title = "validation_failed", "The request is not valid"


class IdempotencyKeyReused(Invalid):
    code, title = "idempotency_key_reused", "Idempotency-Key was used for another request"


class TooManyRequests(MooringError):
    code, title = "too_many_requests", "Too many requests"
    retryable = True


class DailyWriteLimit(TooManyRequests):
    """The project wrote too many bytes today. Fields: `limit`, `used`, `asked`, `resets_at`."""

    code, title = "daily_write_limit", "Too much written today"


class Unavailable(MooringError):
    code, title = "unavailable", "Temporarily unavailable"
    retryable = True
