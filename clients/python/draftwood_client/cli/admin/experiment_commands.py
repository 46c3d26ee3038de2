"""`draftwood experiment`: A/B tests of drafting strategies on live requests. For operators."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from draftwood.admin.v1.experiments_pb2 import Experiment
from draftwood_client.cli.admin.changes import Change, DryRun, FileOption, Group, file_entry
from draftwood_client.cli.admin.documents import EXPERIMENT
from draftwood_client.cli.admin.fields import Data, as_data
from draftwood_client.cli.admin.tables import experiments_table, show_report
from draftwood_client.cli.answering import AsJson
from draftwood_client.cli.apps import new_app
from draftwood_client.cli.options import ServerOptions, command
from draftwood_client.cli.output import print_json
from draftwood_client.convert import word
from draftwood_client.errors import ArgumentValueError

_FORM = "must be NAME=STRATEGY[,OPTION=VALUE]...; max_nodes is the draft limit"


def arms_of(arms: Iterable[str], weights: Iterable[str], forks: Iterable[str]) -> list[Data]:
    """The arms, the control first. Raises ArgumentValueError."""
    made: dict[str, Data] = {}
    for text in arms:
        name, arm = _arm(text)
        if name in made:
            raise ArgumentValueError("--arm", f"two arms are named {name}")
        made[name] = arm
    for text in weights:
        name, _, number = text.partition("=")
        try:
            _named(made, name, "--weight")["weight"] = float(number)
        except ValueError as error:
            if isinstance(error, ArgumentValueError):
                raise
            raise ArgumentValueError("--weight", f"{text!r} must be NAME=NUMBER") from None
    for name in forks:
        _named(made, name, "--fork")["memory"] = "ARM_MEMORY_FORKED"
    return [*made.values()]


def _arm(text: str) -> tuple[str, Data]:
    name, equals, rest = text.partition("=")
    strategy, *settings = rest.split(",")
    options: dict[str, Any] = {}
    for setting in settings:
        option, sign, value = setting.partition("=")
        if not (option and sign) or option in options:
            raise ArgumentValueError("--arm", f"{text!r} {_FORM}, each option once")
        options[option] = _value(value)
    if not (name and equals):
        raise ArgumentValueError("--arm", f"{text!r} {_FORM}")
    drafting: Data = {"strategy": strategy} if strategy else {}
    if "max_nodes" in options:
        drafting["maxNodes"] = options.pop("max_nodes")
    if options:
        drafting["options"] = options
    return name, {"id": name, "drafting": drafting} if drafting else {"id": name}


def _named(arms: dict[str, Data], name: str, option: str) -> Data:
    if name not in arms:
        raise ArgumentValueError(option, f"there is no arm {name!r}; there are: {', '.join(arms) or 'none'}")
    return arms[name]


def _value(text: str) -> Any:
    """A number, true or false, as in JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


GROUP = Group(
    EXPERIMENT,
    experiments_table,
    name="Its name.",
    setting="Such as coverage=1 or burnIn=5m; null clears a field.",
    about_list="List all experiments.",
    about_set="Change fields of an experiment. Of a running one: coverage (upwards), guardrails, description.",
    about_apply="Create or change experiments so that they are as in a file: one, or a list under `experiments:`.",
    about_delete="Delete an experiment with its counts and the memories of its arms. A running one must be stopped "
    "first.",
    question="Delete experiment {name!r}, its counts and the memories of its arms?",
)


Name = Annotated[str, typer.Argument(metavar="EXPERIMENT", help=GROUP.name)]


def group() -> typer.Typer:
    """The group of commands; a new one, since plugins add to it."""
    app = new_app(no_args_is_help=True, help="Compare drafting strategies: on live requests, and on recorded answers.")
    GROUP.add_to(app, create)
    for function in (start, stop, conclude, report):
        app.command()(function)
    return app


def _arms(help: str, name: str, metavar: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, help=help, metavar=metavar, rich_help_panel="Experiment")
    return option


@command
def create(
    server: ServerOptions,
    name: Annotated[
        str | None, typer.Argument(metavar="[EXPERIMENT]", help="a to z, 0 to 9 and -.", show_default=False)
    ] = None,
    file: FileOption = None,
    arm: Annotated[
        list[str] | None,
        _arms("An arm; two to eight, the first is the control.", "--arm", "NAME=STRATEGY[,OPTION=VALUE]..."),
    ] = None,
    weight: Annotated[list[str] | None, _arms("Share of the units; 1 by default.", "--weight", "NAME=NUMBER")] = None,
    fork: Annotated[list[str] | None, _arms("The arm's memory begins as the tenant's.", "--fork", "NAME")] = None,
    coverage: Annotated[float | None, _arms("Share of the units that take part.", "--coverage", "SHARE")] = None,
    unit: Annotated[str | None, _arms("What gets an arm as a whole.", "--unit", "request|session")] = None,
    tenant: Annotated[
        list[str] | None, _arms("Takes part; may be repeated; all by default.", "--tenant", "TENANT")
    ] = None,
    burn_in: Annotated[str | None, _arms("Not counted after the start, such as 5m.", "--burn-in", "TIME")] = None,
    alpha: Annotated[float | None, _arms("Probability of a false alarm; 0.05.", "--alpha", "NUMBER")] = None,
    description: Annotated[str | None, _arms("For people.", "--description", "TEXT")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make a draft of an experiment, from a file, from options, or both; `start` it then."""
    experiment, definition = file_entry(EXPERIMENT, file, name)
    if arm:
        definition["arms"] = arms_of(arm, weight or [], fork or [])
    elif weight or fork:
        raise ArgumentValueError("--weight" if weight else "--fork", "needs --arm")
    given: Data = {
        "coverage": coverage,
        "unit": unit,
        "tenants": tenant or None,
        "burnIn": burn_in,
        "alpha": alpha,
        "description": description,
    }
    definition.update({field: value for field, value in given.items() if value is not None})
    with server.admin_client() as admin:
        Change(EXPERIMENT, admin.experiments, dry_run, as_json).create(experiment, definition)


@command
def start(server: ServerOptions, name: Name, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Begin to assign requests to the arms."""
    with server.admin_client() as admin:
        _tell(admin.experiments.start(name, validate_only=dry_run), dry_run, as_json)


@command
def stop(server: ServerOptions, name: Name, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """End the assignment for good; the counts stay."""
    with server.admin_client() as admin:
        _tell(admin.experiments.stop(name, validate_only=dry_run), dry_run, as_json)


@command
def conclude(
    server: ServerOptions,
    name: Name,
    winner: Annotated[
        str, typer.Option("--winner", metavar="ARM", help="By default the arm that the report says is better.")
    ] = "",
    keep_tenants: Annotated[
        bool, typer.Option("--keep-tenants", help="Leave the tenants' configuration as it is.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Stop an experiment if it runs, and make an arm's drafting that of the tenants in scope."""
    with server.admin_client() as admin:
        concluded = admin.experiments.conclude(name, winner, keep_tenants=keep_tenants, validate_only=dry_run)
    _tell(concluded, dry_run, as_json)


@command
def report(
    server: ServerOptions,
    name: Name,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every few seconds, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="With --watch: seconds in between.")] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Show what was counted of each arm, and what may be concluded from it."""
    with server.admin_client() as admin:
        show_report(lambda: admin.experiments.report(name), watch=interval if watch else None, as_json=as_json)


def _tell(experiment: Experiment, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json(as_data(experiment))
        return
    name = experiment.name.removeprefix(EXPERIMENT.prefix)
    done = f"experiment {name} {'would be' if dry_run else 'is'} {word(experiment, 'state')}"
    typer.echo(done + (f", winner {experiment.winner}" if experiment.winner else ""))
