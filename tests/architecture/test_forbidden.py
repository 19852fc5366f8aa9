"""No way to run code that came as data, and no state that outlives its owner: a walk over every module's syntax."""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import modules

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# (owner, attribute): the owner is the name before the dot as it is written.
ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("torch", "package"),
    ("torch", "multiprocessing"),
    ("os", "system"),
    ("os", "popen"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
}
# Methods that pickle what they are given, whoever owns them.
METHODS = {
    "send_pyobj",
    "recv_pyobj",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "ProcessPoolExecutor",
}
KEYWORDS = {("shell", True), ("trust_remote_code", True), ("allow_pickle", True), ("weights_only", False)}

MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "bytearray"}


def forbidden(tree: ast.Module) -> Iterator[str]:
    """Yield "line: what" for each forbidden thing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [item.name for item in node.names]
            for name in names:
                if name.split(".")[0] in MODULES or name.startswith("torch.multiprocessing"):
                    yield f"{node.lineno}: import of {name}"
            if isinstance(node, ast.ImportFrom):
                for item in node.names:
                    if (node.module, item.name) in ATTRIBUTES or item.name in METHODS:
                        yield f"{node.lineno}: import of {node.module}.{item.name}"
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner, node.attr) in ATTRIBUTES or node.attr in METHODS:
                yield f"{node.lineno}: {owner}.{node.attr}"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
                yield f"{node.lineno}: {node.func.id}()"
            for keyword in node.keywords:
                if isinstance(keyword.value, ast.Constant) and (keyword.arg, keyword.value.value) in KEYWORDS:
                    yield f"{node.lineno}: {keyword.arg}={keyword.value.value}"


def module_state(tree: ast.Module) -> Iterator[str]:
    """Yield "line: name" for each module-level collection that the module changes, and each `global`."""
    owned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_mutable(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global {', '.join(node.names)}"
        elif isinstance(node, ast.Subscript | ast.Attribute):
            name = node.value.id if isinstance(node.value, ast.Name) else ""
            stores = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
            mutates = isinstance(node, ast.Attribute) and node.attr in MUTATORS
            if name in owned and (stores or mutates):
                yield f"{node.lineno}: {name} is changed"


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def test_nothing_forbidden_is_used() -> None:
    assert [f"{module.label}:{item}" for module in modules() for item in forbidden(module.tree)] == []


def test_no_module_changes_its_own_collections() -> None:
    assert [f"{module.label}:{item}" for module in modules() for item in module_state(module.tree)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "from shelve import open",
        "from multiprocessing.connection import Client",
        "import torch.multiprocessing",
        "torch.load('x')",
        "from torch import load",
        "loader = torch.load",
        "eval('1')",
        "exec('1')",
        "__import__('os')",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "yaml.load(text)",
        "numpy.load(path, allow_pickle=True)",
        "socket.send_pyobj(x)",
        "torch.distributed.all_gather_object(a, b)",
        "concurrent.futures.ProcessPoolExecutor()",
    ],
)
def test_the_walk_sees_what_is_forbidden(source: str) -> None:
    assert list(forbidden(ast.parse(source)))


@pytest.mark.parametrize("source", ["model.eval()", "re.compile('x')", "json.load(f)", "run(shell=False)"])
def test_the_walk_lets_harmless_namesakes_pass(source: str) -> None:
    assert list(forbidden(ast.parse(source))) == []


@pytest.mark.parametrize(
    "source",
    [
        "cache = {}\ndef f(x):\n    cache[x] = 1",
        "SEEN: set[int] = set()\ndef f(x):\n    SEEN.add(x)",
        "count = 0\ndef f():\n    global count",
    ],
)
def test_the_walk_sees_module_state(source: str) -> None:
    assert list(module_state(ast.parse(source)))


def test_a_table_that_nobody_changes_is_not_state() -> None:
    assert list(module_state(ast.parse("TABLE = {'a': 1}\ndef f(x):\n    own = {}\n    own[x] = TABLE[x]"))) == []
