"""Imports point down: the tree is the architecture diagram."""

from pathlib import Path

import pytest

from tests.architecture.source_tree import PACKAGE, Module, imports, modules

# From the top down. A unit sees itself and what lies below its line; units on one line do not see each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("deploy", "tools"),
    ("llm",),
    ("server", "fleet", "dashboard"),
    ("engine",),
    ("models",),
    ("parallel", "kernels"),
    ("metering",),
    ("protocol", "store"),
)
# The bottom. They see each other, and nothing above.
ROOT_MODULES = (
    "block_hash",
    "child_setup",
    "config",
    "connection_limits",
    "errors",
    "home_folder",
    "leash",
    "loopback",
    "machine",
    "registry",
    "request",
    "run_folder",
    "stop_signals",
    "telemetry",
    "tenants",
)

# Where a unit sees less of another than the layers allow: only these of its modules.
NARROW: dict[tuple[str, str], tuple[str, ...]] = {
    # In one's own process text is made as the server makes it, without the server.
    ("llm", "server"): ("server.chat_template", "server.template_file", "server.text_assembly"),
    ("server", "engine"): (
        "engine.ahead",
        "engine.client",
        "engine.config",
        "engine.messages",
        "engine.setup",
        "engine.timeline",
        "engine.tokenizer",
    ),
    ("server", "models"): ("models.store", "models.spec", "models.registry"),
    ("server", "parallel"): (),
    ("server", "kernels"): (),
    ("fleet", "engine"): (),
    ("fleet", "models"): (),
    ("fleet", "parallel"): (),
    ("fleet", "kernels"): (),
    ("dashboard", "engine"): (),
    ("dashboard", "models"): (),
    ("dashboard", "parallel"): (),
    ("dashboard", "kernels"): (),
}


def depth(unit: str) -> int:
    if unit in ROOT_MODULES:
        return len(LAYERS)
    for index, layer in enumerate(LAYERS):
        if unit in layer:
            return index
    raise AssertionError(f"penstock/{unit} has no place in LAYERS")


def is_allowed(unit: str, imported: str) -> bool:
    target = imported.partition(".")[0]
    if target in ("", unit):
        return True
    if unit in ROOT_MODULES and target in ROOT_MODULES:
        return True
    if depth(target) <= depth(unit):
        return False
    only = NARROW.get((unit, target))
    return only is None or imported in only


def wrong_imports(module: Module) -> list[str]:
    return [
        f"{module.label}:{line} imports penstock.{imported}"
        for line, imported in imports(module)
        if not is_allowed(module.unit, imported)
    ]


def test_every_unit_has_a_place() -> None:
    placed = {*ROOT_MODULES, *(unit for layer in LAYERS for unit in layer)}
    assert {module.unit for module in modules() if module.name} - placed == set()


def test_imports_point_down() -> None:
    # The package itself is the door for Python: it names `llm`, and imports it when asked.
    wrong = [line for module in modules() if module.name for line in wrong_imports(module)]
    assert wrong == []


def test_the_packages_door_names_nothing_but_the_python_interface() -> None:
    (door,) = (module for module in modules() if not module.name)
    assert {imported for _, imported in imports(door)} <= {"llm", "request"}


@pytest.mark.parametrize(
    ("unit", "imported", "allowed"),
    [
        ("server", "engine.client", True),
        ("server", "engine.scheduler.scheduler", False),
        ("engine", "server.app", False),
        ("kernels", "parallel.groups", False),
        ("models", "kernels.norm_rope", True),
        ("fleet", "engine.client", False),
        ("fleet", "protocol.errors", True),
        ("fleet", "store.quotas", True),
        ("protocol", "errors", True),
        ("errors", "protocol.errors", False),
        ("config", "errors", True),
        ("cli", "commands.chat", True),
        ("commands", "cli", False),
    ],
)
def test_the_rule_itself(unit: str, imported: str, allowed: bool) -> None:
    assert is_allowed(unit, imported) is allowed


def test_an_import_is_seen_however_it_is_written() -> None:
    source = (
        "import penstock.server.app\n"
        "from penstock.engine import messages\n"
        "from penstock.engine.messages import Submit\n"
        "from .scheduler import step_plan\n"
        "MEMBERS = {'x': 'penstock.models.spec:ModelSpec'}\n"
        "import torch\n"
    )
    module = make_module("engine.sample", source)
    assert [imported for _, imported in imports(module)] == [
        "server.app",
        "engine.messages",
        "engine.messages",
        "engine.scheduler.step_plan",
        "models.spec",
    ]


def make_module(name: str, source: str) -> Module:
    import ast

    path: Path = PACKAGE / (name.replace(".", "/") + ".py")
    return Module(name, path, source, ast.parse(source))
