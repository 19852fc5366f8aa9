"""The package's source as data: its modules, what they import and where their names are."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "penstock"

# Registries name their members as "module:attribute"; that is an import as well, only later.
_REFERENCE = re.compile(r"(penstock(?:\.\w+)+):\w+")


@dataclass(frozen=True)
class Module:
    """One source file. `name` is dotted and without the package: "engine.scheduler.scheduler"."""

    name: str
    path: Path
    source: str
    tree: ast.Module

    @property
    def unit(self) -> str:
        """The root module or top-level package it belongs to."""
        return self.name.partition(".")[0]

    @property
    def label(self) -> str:
        return str(self.path.relative_to(REPOSITORY))


@functools.cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        source = path.read_text()
        found.append(Module(".".join(parts), path, source, ast.parse(source, str(path))))
    return tuple(found)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for everything of the package that a module imports or refers to."""
    names = {item.name for item in modules()}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "penstock":
                    yield node.lineno, alias.name.removeprefix("penstock").lstrip(".")
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            if base is not None:
                for alias in node.names:
                    member = f"{base}.{alias.name}".lstrip(".")
                    yield node.lineno, member if member in names else base
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            reference = _REFERENCE.fullmatch(node.value)
            if reference is not None:
                yield node.lineno, reference[1].removeprefix("penstock.")


def _absolute(module: Module, node: ast.ImportFrom) -> str | None:
    """Return the imported module's name without the package, or None where it is another package's."""
    if node.level == 0:
        first, _, rest = (node.module or "").partition(".")
        return rest if first == "penstock" else None
    parts = module.name.split(".")
    is_package = module.path.name == "__init__.py"
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])
