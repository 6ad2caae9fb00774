"""The specs that an agent has, and the answers that omit them."""

from mooring.agent.sync.specs import Specs
from mooring.schemas.agent import Assignment, KnownAssignment, SyncAnswer
from tests.agent.builders import assignment as an_assignment


def _assignment(name: str, version: str = "1.1") -> Assignment:
    return an_assignment(instance_id=name).model_copy(
        update={"spec_version": version, "asks_for_secrets": True}
    )


def _known(assignment: Assignment, **fields: object) -> KnownAssignment:
    return KnownAssignment.model_validate({**assignment.model_dump(), **fields})


def _answer(*assignments: Assignment, unchanged: tuple[KnownAssignment, ...] = ()) -> SyncAnswer:
    return SyncAnswer(
        control_plane_id="c", node_id="n", generation=1, report_interval_s=1,
        assignments=list(assignments), unchanged=list(unchanged),
    )  # fmt: skip


def test_a_received_spec_completes_later_answers() -> None:
    specs, first = Specs(), _assignment("ins_1")
    specs.keep(_answer(first))
    assert specs.known() == {"ins_1": "1.1"}
    complete = specs.complete(_answer(_assignment("ins_2"), unchanged=(_known(first, want="stopped"),)))
    assert complete is not None
    assert [each.instance_id for each in complete.assignments] == ["ins_2", "ins_1"]
    completed = complete.assignments[1]
    assert (completed.want, completed.spec, completed.asks_for_secrets) == ("stopped", first.spec, True)
    assert isinstance(completed, Assignment)


def test_an_answer_that_lacks_a_spec_is_not_applied() -> None:
    """An instance whose spec is missing never counts as removed."""
    specs, first = Specs(), _assignment("ins_1")
    assert specs.complete(_answer(unchanged=(_known(first),))) is None
    specs.keep(_answer(first))
    assert specs.complete(_answer(unchanged=(_known(first, spec_version="2.2"),))) is None


def test_only_the_specs_of_the_newest_answer_are_kept() -> None:
    specs = Specs()
    specs.keep(_answer(_assignment("ins_1"), _assignment("ins_2")))
    specs.keep(_answer(_assignment("ins_2")))
    assert specs.known() == {"ins_2": "1.1"}


def test_specs_without_a_version_are_not_listed_as_known() -> None:
    specs, old = Specs(), _assignment("ins_1", "")
    specs.keep(_answer(old))
    assert specs.known() == {}
    assert specs.complete(_answer(old)) == _answer(old)
