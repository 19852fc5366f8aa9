"""Command-line flags made from the table of options.

The table in `penstock.config` is the one place where an option is written; here each becomes a flag in its group's
panel. Values stay text: `gather` checks them, so that a flag, an environment variable and a file entry fail alike.
"""

import dataclasses
import functools
import inspect
import math
import os
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from penstock.config import Group, Options, flag, gather, to_number
from penstock.errors import ConfigError

CONFIG_HELP = "TOML file of options, named as the flags are"

_Field = dataclasses.Field[Any]
_METAVARS: Mapping[type, str] = MappingProxyType({int: "INTEGER", float: "NUMBER"})


def number_flag(
    name: str,
    text: str | None = None,
    *,
    kind: type[int] | type[float] = float,
    low: float = 0.0,
    high: float = math.inf,
    open_low: bool = False,
    metavar: str | None = None,
    **looks: Any,
) -> Any:
    """Return the typer option of a flag that takes a number, which fails as the flags of options do.

    Typer's own bounds would ask of a NaN that it be larger.
    """

    def parse(value: Any) -> float:
        return to_number(name, value, kind, low, high, open_low=open_low)

    return typer.Option(name, parser=parse, help=text, metavar=metavar or _METAVARS[kind], **looks)


def output_flag(name: str, text: str, **looks: Any) -> Any:
    """Return the typer option of a file to write, which fails before the work whose result it is to hold."""

    def parse(value: str) -> Path:
        file = Path(value)
        if file.is_dir():
            raise ConfigError(name, value, "it is a folder; name a file in it")
        if not file.parent.is_dir():
            raise ConfigError(name, value, "it cannot be written: its folder does not exist; make it, or name another")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(name, value, "it cannot be written; name another file")
        return file

    return typer.Option(name, parser=parse, help=text, metavar="FILE", **looks)


def options_of(*groups: Group) -> tuple[str, ...]:
    """Return the names of the options in these groups."""
    return tuple(item.name for item in dataclasses.fields(Options) if item.metadata["group"] in groups)


# Of the groups that an engine has to do with: what only servers heed, and the simulator of one.
_ONLY_SERVERS = frozenset(
    {"served_name", "chat_template", "target_ttft_ms", "target_time_per_token_ms", "target_deadline_ms"}
)
ENGINE_OPTIONS = tuple(
    name for name in options_of("model", "device", "memory", "scheduler") if name not in _ONLY_SERVERS
)


def takes_options(
    *names: str, model_is_argument: bool = True, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Give a command the named options (none named: all of them), gathered into its argument `sourced`.

    `model`, where it is among them, is the command's first argument or, if not `model_is_argument`, a flag like the
    others. `defaults` are the command's own, where they differ from the table's. The command's other parameters stay
    its own. It returns the exit status.
    """
    fields = [item for item in dataclasses.fields(Options) if not names or item.name in names]
    offered = [item.name for item in fields]

    def decorate(command: Callable[..., int]) -> Callable[..., None]:
        own = [item for item in inspect.signature(command).parameters.values() if item.name != "sourced"]
        made = [_parameter(item, defaults.get(item.name, item.default), model_is_argument) for item in fields]
        config = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Path | None, typer.Option(metavar="FILE", help=CONFIG_HELP, show_default=False)],
        )

        @functools.wraps(command)
        def run(**values: Any) -> None:
            file = values.pop("config")
            given = {item.name: values.pop(item.name) for item in fields}
            status = command(sourced=gather(given, file=file, defaults=defaults, offered=offered), **values)
            if status:
                raise typer.Exit(status)

        # The command's own parameters come first: they are what the command is about.
        parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own] + made + [config]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        return run

    return decorate


def _parameter(item: _Field, default: Any, model_is_argument: bool) -> inspect.Parameter:
    """Return the typer parameter of one option. Not given is None, whatever the option's default."""
    text = item.metadata["help"]
    if default is not None:
        text += f" (default: {str(default).lower() if _is_bool(item) else default})"
    annotation: Any
    if item.name == "model" and model_is_argument:
        annotation = Annotated[str | None, typer.Argument(metavar="MODEL", help=text, show_default=False)]
    elif _is_bool(item):
        annotation = Annotated[bool | None, typer.Option(help=text, show_default=False, rich_help_panel=_panel(item))]
    else:
        annotation = Annotated[
            str | None,
            typer.Option(
                flag(item.name), metavar=_metavar(item), help=text, show_default=False, rich_help_panel=_panel(item)
            ),
        ]
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _panel(item: _Field) -> str:
    return f"{item.metadata['group'].capitalize()} options"


def _metavar(item: _Field) -> str:
    if "choices" in item.metadata:
        return "|".join(item.metadata["choices"])
    kinds = _kinds(item)
    return next((text for kind, text in _METAVARS.items() if kind in kinds), "TEXT")


def _is_bool(item: _Field) -> bool:
    return bool in _kinds(item)


def _kinds(item: _Field) -> tuple[Any, ...]:
    return typing.get_args(item.type) or (item.type,)
