"""`penstock explain`: every option as `serve` would use it, and why. Asks the device; loads no weights."""

import dataclasses
import json
from types import MappingProxyType

from rich.table import Table
from rich.text import Text

from penstock.commands.models import fetch
from penstock.commands.tables import print_table
from penstock.config import Options, Setting, Sourced
from penstock.engine import config as engine_config
from penstock.engine.device import device_for
from penstock.models import store
from penstock.models.registry import spec_for
from penstock.server import config as server_config

# As they are written on the command line and in a file.
_WORDS = MappingProxyType({"True": "true", "False": "false", "None": "none"})


def settle(sourced: Sourced) -> list[Setting]:
    """Return every option once, in the order of the table, as its owner resolves it."""
    options = sourced.options
    spec = spec_for(fetch(options))
    _, engine_settings = engine_config.resolve(sourced, spec, device_for(options).probe(spec))
    _, server_settings = server_config.resolve(sourced)
    settled = {
        setting.option: Setting(setting.option, _WORDS.get(setting.value, setting.value), setting.why)
        for setting in engine_settings + server_settings
    }
    # What no component has to choose is as it was given.
    given = {
        item.name: Setting(item.name, _show(getattr(options, item.name)), sourced.why(item.name))
        for item in dataclasses.fields(Options)
    }
    given["cache_dir"] = Setting("cache_dir", str(store.cache_folder(options.cache_dir)), sourced.why("cache_dir"))
    return [settled.get(name, setting) for name, setting in given.items()]


def run(sourced: Sourced, *, as_json: bool) -> int:
    settings = settle(sourced)
    if as_json:
        print(json.dumps([dataclasses.asdict(setting) for setting in settings], indent=2))
        return 0
    groups = {item.name: item.metadata["group"] for item in dataclasses.fields(Options)}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("option")
    table.add_column("value", overflow="fold")
    table.add_column("why", overflow="fold")
    previous = None
    for setting in settings:
        group = groups[setting.option]
        if previous not in (None, group):
            table.add_row()
        previous = group
        table.add_row(Text(setting.option), Text(setting.value, style="bold"), Text(setting.why, style="dim"))
    print_table(table)
    return 0


def _show(value: object) -> str:
    return _WORDS.get(str(value), str(value))
