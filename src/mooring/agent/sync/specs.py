"""The specs that the agent has heard, so that the control plane sends each only once."""

from mooring.schemas.agent import Assignment, KnownAssignment, SyncAnswer


class Specs:
    """The specs of the newest answer, by instance. Used under the agent's lock."""

    def __init__(self) -> None:
        self._heard: dict[str, Assignment] = {}

    def known(self) -> dict[str, str]:
        """Instance -> version of its spec, for the next report."""
        return {key: heard.spec_version for key, heard in self._heard.items() if heard.spec_version}

    def complete(self, answer: SyncAnswer) -> SyncAnswer | None:
        """The answer with all specs in it.

        None: it leaves out a spec that is not here any more, since a newer answer came first. Such an answer
        is not obeyed, and the next report asks for the spec: an instance without one is never taken for gone.
        """
        if not answer.unchanged:
            return answer
        completed = [self._completed(each) for each in answer.unchanged]
        if None in completed:
            return None
        whole = [each for each in completed if each is not None]
        return answer.model_copy(update={"assignments": [*answer.assignments, *whole], "unchanged": []})

    def keep(self, answer: SyncAnswer) -> None:
        """Remember the specs of a complete answer that was obeyed, and no others."""
        self._heard = {each.instance_id: each for each in answer.assignments}

    def _completed(self, update: KnownAssignment) -> Assignment | None:
        heard = self._heard.get(update.instance_id)
        if heard is None or heard.spec_version != update.spec_version:
            return None
        fields = {name: getattr(update, name) for name in KnownAssignment.model_fields}
        return Assignment.model_construct(
            **fields,
            spec=heard.spec,
            asks_for_secrets=heard.asks_for_secrets,
            registry_listed=heard.registry_listed,
            secrets={},
            registry=None,
        )
