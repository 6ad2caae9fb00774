"""What all messages between nodes and the control plane have in common."""

from pydantic import BaseModel, ConfigDict


class Peer(BaseModel):
    """A message between releases: fields the reader does not know are ignored."""

    # What is wrong with a message is told without the message: it may carry secrets.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)
