"""The commands of other packages: their entry points are read when a command is unknown, and for the help."""

from typing import Any

import typer
from typer.core import TyperGroup

from granular._support.plugins import plugin, plugins

_GROUP = 'granular.commands'


class Commands(TyperGroup):
    """The commands of granular, and those of other packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in plugins(_GROUP) if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        function = plugin(_GROUP, cmd_name) if own is None else None
        if function is None:
            return own
        other = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        other.command(cmd_name)(function)
        return typer.main.get_command(other)
