"""The base of all messages between nodes and the control plane."""

from pydantic import BaseModel, ConfigDict


class Peer(BaseModel):
    """A message between nodes and the control plane. Unknown fields of newer releases are ignored."""

    # Errors do not include the message, which may contain secrets.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)
