"""The newest generation on disk, so that a restarted agent accepts no older desired state."""

import logging
from typing import Final

from mooring.agent.sync.identity import StateDirectory
from mooring_client.schemas.states import Reason

NOT_SAVED: Final = Reason(
    code="state_not_saved", message="The agent cannot write to its data directory (full?); see its log"
)

log = logging.getLogger(__name__)


class SavedGeneration:
    """A full disk is reported and does not stop the node. Not thread-safe."""

    def __init__(self, directory: StateDirectory) -> None:
        self._directory = directory
        self.newest = directory.generation()
        self._is_saved = True
        self._problem: Reason | None = None  # of the last attempt to save

    def save(self, generation: int) -> None:
        """Called before any action of this generation."""
        if generation != self.newest:
            self.newest, self._is_saved = generation, False
        self.retry()

    def retry(self) -> Reason | None:
        """Save the newest generation if it is not saved yet. Returns a problem of the node.

        Called for every report: a node that cannot save gets no new instances, so it may receive no new
        generation after its disk has space again.
        """
        if not self._is_saved:
            try:
                self._directory.save_generation(self.newest)
            except OSError:
                if self._problem is None:
                    log.exception("cannot save generation %s", self.newest)
                self._problem = NOT_SAVED
            else:
                self._is_saved, self._problem = True, None
        return self._problem
