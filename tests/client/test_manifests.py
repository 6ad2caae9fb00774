"""Files for `mooring apply`: what is read from YAML, and what is refused, with its line."""

from typing import Any

import pytest
import yaml

from mooring_client.manifests import documents
from mooring_client.manifests.documents import MAX_BYTES, BadDocument, Document, read
from mooring_client.manifests.kinds import KINDS, manifests_of

KNOWN = ", ".join(kind.name for kind in KINDS)

_BOMB = """
a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]
b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]
c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]
"""


@pytest.fixture(params=["in C", "in Python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two parsers that PyYAML may have."""
    if request.param == "in Python":
        monkeypatch.setattr(documents, "_LOADER", yaml.SafeLoader)


def _values(text: str) -> list[Any]:
    return [each.value for each in read(text.encode(), "f.yaml")]


@pytest.mark.usefixtures("parser")
class TestYaml:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("a: 1", 1), ("a: -1", -1), ("a: 1.5", 1.5), ("a: 1e3", 1000.0), ("a: true", True),
            ("a: False", False), ("a: ~", None), ("a:", None), ("a: null", None), ('a: "1"', "1"),
            ("a: 'true'", "true"), ('a: ""', ""), ("a: |\n  x\n  y\n", "x\ny\n"), ("a: [1, [2]]", [1, [2]]),
            ("a: {b: {c: 1}}", {"b": {"c": 1}}), ("a: # nothing", None), ("a: b # c", "b"),
            # Text, though YAML 1.1 takes it for something else.
            ("a: yes", "yes"), ("a: off", "off"), ("a: 12:30", "12:30"), ("a: 010", "010"),
            ("a: 0x1f", "0x1f"), ("a: 1_000", "1_000"), ("a: 2026-01-01", "2026-01-01"), ("a: .inf", ".inf"),
            ("a: .NaN", ".NaN"), ("a: 2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z"), ("a: 1e999", "1e999"),
            ("a: ${HOME}", "${HOME}"), ("a: " + "9" * 5000, "9" * 5000), ("a: =", "="), ("a: <<", "<<"),
        ],
    )  # fmt: skip
    def test_values_are_those_of_json(self, text: str, value: Any) -> None:
        (found,) = _values(text)
        assert found == {"a": value}
        assert type(found["a"]) is type(value)

    def test_names_of_fields_are_text(self) -> None:
        assert _values("1: a\ntrue: b\n~: c\n") == [{"1": "a", "true": "b", "~": "c"}]

    def test_empty_documents_are_left_out(self) -> None:
        assert _values("---\n---\n# nothing\n---\na: 1\n---\nb: 2\n...\n") == [{"a": 1}, {"b": 2}]
        assert _values("") == []

    def test_a_byte_order_mark_and_carriage_returns_are_accepted(self) -> None:
        assert read(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n", "f")[0].value == {"a": 1, "b": 2}

    def test_each_value_has_its_line(self) -> None:
        (found,) = read(b'# first\na:\n  b: 1\n  c:\n    - x\n    - d: 2\n"e/~": 3\n', "f.yaml")
        assert dict(found.lines) == {
            "": 2, "/a": 2, "/a/b": 3, "/a/c": 4, "/a/c/0": 5, "/a/c/1": 6, "/a/c/1/d": 6, "/e~1~0": 7,
        }  # fmt: skip
        assert found.where("/a/c/1/unknown/more") == "f.yaml:6"
        assert found.where("/unknown") == "f.yaml:2"

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (_BOMB, "f.yaml:2: anchors (&) and aliases (*) are not supported"),
            ("a: 1\nb: *a", "f.yaml:2: anchors (&) and aliases (*) are not supported"),
            ("a:\n  <<: {b: 1}", "f.yaml:2: merge keys (<<) are not supported"),
            ("a: !!python/object/apply:os.system [ls]", "f.yaml:1: tags (tag:yaml.org,2002:python/object"),
            ("a: !secret x", "f.yaml:1: tags (!secret) are not supported"),
            ("a: 1\nb: 2\na: 3", "f.yaml:3: a is given twice, first in line 1"),
            ("a:\n  b: 1\n  b: 1", "f.yaml:3: b is given twice, first in line 2"),
            ("? [a]\n: 1", "f.yaml:1: the name of a field must be text"),
            ("? {a: b}\n: 1", "f.yaml:1: the name of a field must be text"),
            ("[" * 40, "f.yaml:1: values are nested deeper than 32 levels"),
            ("a: [1", "f.yaml:"),
            ("a: b: c", "f.yaml:1: "),
            ("a: 'x", "f.yaml:"),
            ("\ta: 1", "f.yaml:1: "),
            ("a: @x", "f.yaml:1: "),
            ("a: \x07", "f.yaml: "),
        ],
        ids=str,
    )
    def test_what_could_harm_or_mislead_is_refused(self, text: str, problem: str) -> None:
        with pytest.raises(BadDocument) as caught:
            read(text.encode(), "f.yaml")
        assert str(caught.value).startswith(problem)
        assert "\n" not in str(caught.value)

    def test_100_open_brackets_are_too_many(self) -> None:
        with pytest.raises(BadDocument) as caught:
            read(b"[" * 100, "f.yaml")
        assert str(caught.value) == "f.yaml:1: values are nested deeper than 32 levels"

    def test_100_000_open_brackets_are_refused(self) -> None:
        with pytest.raises(BadDocument):
            read(b"[" * 100_000, "f.yaml")

    def test_a_file_that_is_not_utf_8_is_refused(self) -> None:
        with pytest.raises(BadDocument) as caught:
            read(b"a: 1\nb: \xff", "f.yaml")
        assert str(caught.value) == "f.yaml:2: the file is not UTF-8"

    def test_a_large_file_is_refused(self) -> None:
        line = b"a: 1 # "
        assert read(line + b"x" * (MAX_BYTES - len(line)), "f")[0].value == {"a": 1}
        with pytest.raises(BadDocument) as caught:
            read(line + b"x" * (MAX_BYTES - len(line) + 1), "f.yaml")
        assert str(caught.value) == "f.yaml is larger than 1024 KiB"


def _problems(text: str) -> list[str]:
    return manifests_of(read(text.encode(), "f.yaml"))[1]


class TestKinds:
    def test_projects_come_first_and_the_order_of_the_file_is_kept(self) -> None:
        text = """
kind: instance_group
name: g
count: 1
template: {image: busybox}
---
{kind: instance, name: b, image: busybox, project: research}
---
{kind: instance, name: a, image: busybox, project_id: prj_1}
---
{kind: reservation, name: r, gpus: {count: 1}, to: 2099-01-01T00:00:00Z}
---
{kind: project, name: research}
"""
        found, problems = manifests_of(read(text.encode(), "f.yaml"))
        assert problems == []
        assert [each.title for each in found] == [
            "project/research", "reservation/r", "instance/b", "instance/a", "instance_group/g",
        ]  # fmt: skip
        assert [each.project for each in found] == [None, None, "research", "prj_1", None]
        assert dict(found[3].body) == {"name": "a", "image": "busybox"}

    @pytest.mark.parametrize(
        ("text", "problems"),
        [
            ("- a", ["f.yaml:1: a document must have fields, such as `kind: instance`"]),
            ("just text", ["f.yaml:1: a document must have fields, such as `kind: instance`"]),
            ("name: a", [f"f.yaml:1: `kind` is missing: {KNOWN}"]),
            ("name: a\nkind: pod", [
                f"f.yaml:2: unknown kind 'pod'; it is one of: {KNOWN}",
            ]),
            ("kind: [a]", [
                f"f.yaml:1: unknown kind ['a']; it is one of: {KNOWN}",
            ]),
            ("kind: instance\nimage: x", [
                "f.yaml:1: `name` is missing: it is what the resource is found by",
            ]),
            ("kind: instance\nname: a", ["f.yaml:1: `image` is missing"]),
            ("kind: instance\nname: a\nimgae: x\nimage: x", [
                "f.yaml:3: unknown field imgae in instance; did you mean image?",
            ]),
            ("kind: instance\nname: a\nimage: x\ngpus:\n  count: 1\n  kind: H100", [
                "f.yaml:6: unknown field gpus.kind in instance",
            ]),
            ("kind: instance\nname: a\nimage: x\nenv:\n  A: 1\n  B: {secrt: x}", [
                "f.yaml:5: env.A: must be text; quote the value", "f.yaml:6: env.B: must be text",
            ]),
            ("kind: instance\nname: a\nimage: x\ntty: yes", [
                "f.yaml:4: tty: Input should be a valid boolean",
            ]),
            ("kind: instance\nname: a\nimage: x\nproject: a\nproject_id: prj_1", [
                "f.yaml:4: give project or project_id, not both",
            ]),
            ("kind: instance\nname: a\nimage: x\nproject: 1", [
                "f.yaml:4: project must be the name or ID of a project",
            ]),
            ("kind: project\nname: a\nproject: b", [
                "f.yaml:3: unknown field project in project",
            ]),
            ("kind: project\nname: a\nmembers:\n- {email: a@b.c, role: king}\n- {role: owner}", [
                "f.yaml:4: members.0.role: Input should be 'viewer', 'member' or 'owner'",
                "f.yaml:5: members.1: give user_id or email, not both",
            ]),
            ("kind: reservation\nname: a\ngpus: {count: 1}\nto: 2099-01-01", [
                "f.yaml:4: to: must be RFC 3339 with a zone, such as 2026-11-21T08:00:00Z",
            ]),
            ("{kind: project, name: a}\n---\n{kind: project, name: a}", [
                "f.yaml:3: project/a is also in f.yaml:1",
            ]),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_named_with_its_line(self, text: str, problems: list[str]) -> None:
        assert _problems(text) == problems

    def test_two_projects_may_have_instances_of_one_name(self) -> None:
        one = "{kind: instance, name: a, image: busybox, project: %s}"
        assert _problems(one % "b" + "\n---\n" + one % "c") == []

    def test_a_document_knows_its_file(self) -> None:
        assert Document("f", {}, {"": 3}).where() == "f:3"
