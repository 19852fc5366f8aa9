"""A file or function that grows past its limit is usually two things under one name."""

import ast

from tests.architecture.source_tree import modules

MAX_FILE_LINES = 550
MAX_FUNCTION_LINES = 80
MEANINGLESS_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}


def test_files_are_short() -> None:
    sizes = {module.label: len(module.source.splitlines()) for module in modules()}
    assert {label: size for label, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = {
        f"{module.label}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_no_module_is_a_drawer_for_anything() -> None:
    assert [module.label for module in modules() if MEANINGLESS_NAMES & set(module.name.split("."))] == []


def test_every_module_says_in_one_sentence_what_it_is() -> None:
    silent = [
        module.label for module in modules() if module.source.strip() and not (ast.get_docstring(module.tree) or "")
    ]
    assert silent == []
