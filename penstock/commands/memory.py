"""`penstock plan-memory`: what a model will take of the device, and what fits. Asks the device; loads no weights."""

import dataclasses
import json

from rich.table import Table
from rich.text import Text

from penstock.commands.models import fetch
from penstock.commands.tables import print_table
from penstock.config import Sourced
from penstock.engine import config as engine_config
from penstock.engine.device import device_for
from penstock.models.registry import spec_for


def run(sourced: Sourced, *, as_json: bool) -> int:
    spec = spec_for(fetch(sourced.options))
    config, _ = engine_config.resolve(sourced, spec, device_for(sourced.options).probe(spec))
    plan = config.memory
    if as_json:
        print(json.dumps(dataclasses.asdict(plan), indent=2))
        return 0
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in plan.rows():
        table.add_row(Text(name), Text(value, style="bold"))
    print_table(table)
    return 0
