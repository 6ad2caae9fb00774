"""Caches instance specs, so that the control plane sends each only once."""

from mooring.schemas.agent import Assignment, KnownAssignment, SyncAnswer


class Specs:
    """The specs of the newest answer, by instance. Used under the agent's lock."""

    def __init__(self) -> None:
        self._received: dict[str, Assignment] = {}

    def known(self) -> dict[str, str]:
        """The version of each instance's spec, for the next report."""
        return {each.instance_id: each.spec_version for each in self._received.values() if each.spec_version}

    def complete(self, answer: SyncAnswer) -> SyncAnswer | None:
        """The answer with all specs filled in.

        None: a spec is no longer cached, because a newer answer arrived first. Such an answer is not applied,
        since its instances must not count as removed, and the next report does not list the missing spec.
        """
        if not answer.unchanged:
            return answer
        completed = [self._completed(each) for each in answer.unchanged]
        if None in completed:
            return None
        whole = [each for each in completed if each is not None]
        return answer.model_copy(update={"assignments": [*answer.assignments, *whole], "unchanged": []})

    def keep(self, answer: SyncAnswer) -> None:
        """Keep the specs of a complete answer that was applied, and no others."""
        self._received = {each.instance_id: each for each in answer.assignments}

    def _completed(self, update: KnownAssignment) -> Assignment | None:
        received = self._received.get(update.instance_id)
        if received is None or received.spec_version != update.spec_version:
            return None
        fields = {name: getattr(update, name) for name in KnownAssignment.model_fields}
        return Assignment.model_construct(
            **fields,
            spec=received.spec,
            asks_for_secrets=received.asks_for_secrets,
            registry_listed=received.registry_listed,
            secrets={},
            registry=None,
        )
