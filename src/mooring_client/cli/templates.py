"""`mooring templates`: named specs with parameters, for `mooring run --template`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mooring_client.cli import values
from mooring_client.cli.completion import names_of
from mooring_client.cli.confirming import YesOption, confirm
from mooring_client.cli.output import Column, Format, FormatOption, show_list
from mooring_client.cli.resources import every, for_each, is_id
from mooring_client.cli.session import connect, project_id
from mooring_client.errors import NotFound

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="List templates, and show what they run. `mooring apply` creates and changes them.",
)

PATH: Final = "/v1/templates"
TemplateArgument = Annotated[
    str, typer.Argument(help="name or ID", metavar="TEMPLATE", autocompletion=names_of(PATH))
]
ParametersOption = Annotated[
    list[str] | None, typer.Option("--param", help="NAME=value: a parameter of the template")
]


@app.command("ls")
def list_templates(output: FormatOption = Format.TABLE) -> None:
    """List the templates of your project, and the global ones.

    The JSON is a list of the objects of GET /v1/templates.
    """
    columns = (
        Column("NAME", lambda row: row["name"]),
        Column("ID", lambda row: row["id"], wide=True),
        Column("SCOPE", lambda row: "project" if row["project_id"] else "global"),
        Column("PARAMETERS", lambda row: ", ".join(map(_shown, row["parameters"].items()))),
        Column("IMAGE", lambda row: row["spec"].get("image", "-"), wide=True),
        Column("DESCRIPTION", lambda row: row["description"]),
    )
    with connect() as client:
        items = sorted(every(client, PATH, project_id=project_id(client)), key=lambda each: str(each["name"]))
    show_list(items, columns, output, empty="no templates; `mooring apply` creates them from files")


def _shown(parameter: tuple[str, Any]) -> str:
    name, fields = parameter
    default = fields["default"]
    return f"{name} (required)" if default is None else f"{name}={values.as_text(default)}"


@app.command()
def show(template: TemplateArgument) -> None:
    """Show a template as a file for `mooring apply`."""
    import yaml

    with connect() as client:
        found = find_template(client, template)
    shown = {"kind": "template", "name": found["name"]}
    if found["project_id"] is None:
        shown["scope"] = "global"
    else:
        shown["project"] = found["project_id"]
    fields = {name: found[name] for name in ("description", "parameters", "spec") if found[name]}
    print(yaml.safe_dump({**shown, **_without_nulls(fields)}, sort_keys=False, allow_unicode=True), end="")


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    parameters = fields.get("parameters")
    if parameters is None:
        return fields
    kept = {
        name: {field: value for field, value in each.items() if value not in {None, ""}}
        for name, each in parameters.items()
    }
    return {**fields, "parameters": kept}


@app.command()
def render(
    template: TemplateArgument,
    param: ParametersOption = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="json or yaml")] = Format.YAML,
) -> None:
    """Show the instance that a template would run."""
    from mooring_client.cli.output import show_one

    with connect() as client:
        spec = rendered(client, template, param or ())
    show_one(spec, output, [])


@app.command()
def rm(
    templates: Annotated[
        list[str],
        typer.Argument(help="names or IDs", metavar="TEMPLATE...", autocompletion=names_of(PATH)),
    ],
    yes: YesOption = False,
) -> None:
    """Delete templates. Instances that were created with them stay as they are."""
    with connect() as client:
        found = [find_template(client, each) for each in templates]
        confirm(f"delete {', '.join(each['name'] for each in found)}?", yes=yes)
        for_each(found, lambda each: _delete(client, each))


def _delete(client: "Mooring", template: Any) -> str:
    client.templates.delete(template["id"])
    return str(template["name"])


def find_template(client: "Mooring", reference: str) -> Any:
    """The template with this ID or name: that of the project comes before a global one.

    Raises:
        NotFound: there is none that you can see.
    """
    from mooring_client.calls import path

    if is_id(reference, "tpl"):
        return client.request("GET", path("/v1/templates/{}", reference))
    found = list(every(client, PATH, name=reference, project_id=project_id(client)))
    if not found:
        raise NotFound(
            f"there is no template {reference!r} that you can see; `mooring templates ls` lists all"
        )
    return next((each for each in found if each["project_id"]), found[0])


def rendered(client: "Mooring", reference: str, given: Iterable[str]) -> dict[str, Any]:
    """The spec of a template with these parameters, each `NAME=value`.

    Raises:
        NotFound: there is no such template.
        InvalidParameters: a value is missing, unknown or not allowed.
        typer.BadParameter: a value has not the form of its type.
    """
    template = find_template(client, reference)
    texts = values.pairs(given, "--param")
    types = {name: each["type"] for name, each in template["parameters"].items()}
    parameters = {name: values.typed(text, types.get(name, "string"), name) for name, text in texts.items()}
    return dict(client.templates.render(template["id"], parameters).spec)
