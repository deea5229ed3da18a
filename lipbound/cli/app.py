"""The ``lipbound`` application: its commands and the function that runs a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lipbound import __version__
from lipbound.cli.attack import attack
from lipbound.cli.audit import audit
from lipbound.cli.certify import certify
from lipbound.cli.export import export
from lipbound.cli.paper import bench, reproduce
from lipbound.cli.train import train
from lipbound.report.progress import bar

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure, certify and control the Lipschitz constant of convolutional networks.",
)
for command in (audit, train, attack, certify, export, reproduce, bench):
    app.command()(command)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and raise usage errors as a one-line ``ValueError``."""
    command = typer.main.get_command(app)
    bar.start()
    _show_flags_without_type(command)
    try:
        return command.main(list(arguments), "lipbound", standalone_mode=False) or 0
    except Exception as error:
        # Some versions of Typer raise their own copy of click's exceptions, others raise click's.
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is already printed
            return 0
        if hasattr(error, "format_message"):
            said = error.format_message().rstrip(".")
            said = said.replace("Input should be", f"{_value(error, arguments)} should be")
            path = getattr(getattr(error, "ctx", None), "command_path", "lipbound")
            known = getattr(command, "commands", ())
            if path == "lipbound" and arguments and arguments[0] in known:
                path = f"lipbound {arguments[0]}"
            raise ValueError(f"{said}; try '{path} --help'") from None
        if type(error).__name__ == "Abort":
            raise KeyboardInterrupt from None
        raise


def _show_flags_without_type(command: Any) -> None:
    """A flag takes no value, so its help names no type."""
    for each in (command, *getattr(command, "commands", {}).values()):
        for option in each.params:
            if getattr(option, "is_flag", False):
                option.metavar = ""
        about = each.get_help_option(each.context_class(each))
        if about is not None:
            about.metavar = ""


def _value(error: Exception, arguments: Sequence[str]) -> str:
    """Return the quoted value that the user gave for the option that the error names."""
    names = getattr(getattr(error, "param", None), "opts", [])
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names and (equals or place + 1 < len(arguments)):
            return repr(value if equals else arguments[place + 1])
    return "it"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lipbound {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Take the options that come before the command."""
