"""What needs no torch never loads it: API workers, the scheduler, the cache and the command start in milliseconds."""

import importlib.util
import subprocess
import sys

from tests.architecture.source_tree import imports, modules

TORCH = (
    "commands.generate",
    "kernels",
    "parallel",
    "models",
    "engine.runner",
    "engine.sampling",
    "llm",
)
# Parts of the above that are free of it all the same: what reads files, and what the scheduler's side shares.
TORCH_FREE_EXCEPTIONS = (
    "engine.runner.interface",
    "models.download",
    "models.gguf",
    "models.hub",
    "models.registry",
    "models.spec",
    "models.store",
    "models.weight_files",
    "models.wheel",
)
# What cannot be imported where the package of an extra is not installed.
NEEDS = {
    "deploy.ray_serve.application": "ray",
    "deploy.ray_serve.ranks": "ray",
    "deploy.ray_serve.replica": "ray",
    "deploy.ray_serve.request_router": "ray",
    "fleet.discovery.ray_listing": "ray",
}

# Imports each module named in the arguments, one after the other, and stops at the first that brings torch along.
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} loads torch")
"""


def is_torch_free(name: str) -> bool:
    if name in TORCH_FREE_EXCEPTIONS:
        return True
    return not any(name == part or name.startswith(part + ".") for part in TORCH)


def is_importable(name: str) -> bool:
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def dotted(name: str) -> str:
    return f"penstock.{name}" if name else "penstock"


def run(names: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", IMPORT_ALL, *names], capture_output=True, text=True, check=False)


def test_importing_the_torch_free_modules_never_loads_torch() -> None:
    names = [dotted(module.name) for module in modules() if is_torch_free(module.name) and is_importable(module.name)]
    assert "penstock.engine.scheduler.scheduler" in names
    result = run(names)
    assert result.returncode == 0, result.stderr


def test_reading_the_spec_of_any_model_never_loads_torch() -> None:
    (registry,) = (module for module in modules() if module.name == "models.registry")
    names = sorted({dotted(imported) for _, imported in imports(registry)})
    assert "penstock.models.llama" in names
    result = run(names)
    assert result.returncode == 0, result.stderr


def test_the_check_sees_a_module_that_loads_torch() -> None:
    assert run(["penstock.kernels.attention.interface"]).stderr.strip() == (
        "importing penstock.kernels.attention.interface loads torch"
    )


def test_the_engine_is_started_before_what_only_others_need_is_loaded() -> None:
    heavy = "numpy", "pydantic", "fastapi", "tokenizers", "sqlalchemy", "httpx"
    code = (
        f"import sys, penstock.cli, penstock.commands.serve; print([name for name in {heavy} if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
