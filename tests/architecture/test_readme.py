"""The README is short, and everything it tells the reader to run is run here."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.architecture.markdown import blocks, commands
from tests.architecture.source_tree import REPOSITORY

README = REPOSITORY / "README.md"
MAX_LINES = 150
DEFAULT_URL = "http://127.0.0.1:8000"

# How each command of the README is proved.
RUN_AS_IS = {
    "penstock models",
    "penstock explain",
    "penstock plan-memory",
    "penstock doctor",
    "penstock version",
    "penstock keys list",
    "penstock simulate --workload rate10",
}
RUN_WITH_THE_MODEL = {'penstock generate "The capital of France is" --max-tokens 8', "penstock pull smollm2-135m"}
DRY_RUN = {"make serve", "make test"}
AGAINST_A_SERVER = {"curl", "penstock chat"}
# `pip install .` is what `make` does, and `penstock serve` what `make serve` ends in.
PROVED_ELSEWHERE = {"pip install .", "penstock serve"}


def readme_commands() -> list[str]:
    return [line for block in blocks(README) if block.language == "bash" for line in commands(block)]


def python_blocks() -> list[str]:
    return [block.text for block in blocks(README) if block.language == "python"]


def run(command: list[str], *, timeout: float = 120, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with this environment's programs first in the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        input=stdin,
        timeout=timeout,
        check=False,
    )


@contextmanager
def default_server() -> Iterator[str]:
    """Serve the default model with the real command on a free port; yield its URL."""
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0"]
    server = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            found = re.search(r"curl -sS (http://[\d.:]+)/", line)
            if found:
                yield found[1]
                break
        else:
            pytest.fail("the server ended before it was ready")
    finally:
        server.terminate()
        server.communicate(timeout=60)


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) < MAX_LINES


def test_every_command_is_one_that_is_proved() -> None:
    known = RUN_AS_IS | RUN_WITH_THE_MODEL | DRY_RUN | PROVED_ELSEWHERE
    unknown = [line for line in readme_commands() if line not in known and not line.startswith(tuple(AGAINST_A_SERVER))]
    assert unknown == []


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in blocks(README)} <= {"bash", "python", ""}
    for block in blocks(README):
        if not block.language:
            assert block.text.startswith("penstock/\n"), "only the tree is neither shell nor Python"


@pytest.mark.parametrize("command", sorted(RUN_AS_IS))
def test_a_command_runs(command: str, default_model_path: Path) -> None:
    assert command in readme_commands()
    result = run(shlex.split(command))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("command", sorted(DRY_RUN))
def test_a_make_target_exists(command: str) -> None:
    assert command in readme_commands()
    assert run(["make", "-n", *command.split()[1:]]).returncode == 0


def test_the_python_parses_and_names_what_exists() -> None:
    import penstock

    for source in python_blocks():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module == "penstock":
                assert {alias.name for alias in node.names} <= set(penstock.__all__)


def test_the_request_asks_for_the_default_model() -> None:
    from penstock.config import Options

    (line,) = (line for line in readme_commands() if line.startswith("curl"))
    arguments = shlex.split(line)
    assert arguments[1] == f"{DEFAULT_URL}/v1/chat/completions"
    assert json.loads(arguments[arguments.index("-d") + 1])["model"] == Options().model


def test_the_tree_names_what_exists() -> None:
    (tree,) = (block.text for block in blocks(README) if not block.language)
    folder = REPOSITORY
    for line in tree.splitlines():
        indent, names = re.match(r"( *)([\w./]+(?:, [\w./]+)*)", line).groups()  # type: ignore[union-attr]
        if not indent:
            folder = REPOSITORY / names
        for name in names.split(", "):
            assert ((folder if indent else REPOSITORY) / name).exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(RUN_WITH_THE_MODEL))
def test_a_command_that_needs_the_model_runs(command: str, default_model_path: Path) -> None:
    assert command in readme_commands()
    result = run(shlex.split(command), timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip()


@pytest.mark.slow
def test_the_python_for_no_server_runs(default_model_path: Path) -> None:
    (source,) = (source for source in python_blocks() if "from penstock import" in source)
    result = run([sys.executable, "-c", source], timeout=300)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


@pytest.mark.slow
def test_what_talks_to_a_server_works(default_model_path: Path) -> None:
    (curl,) = (line for line in readme_commands() if line.startswith("curl"))
    (client,) = (source for source in python_blocks() if "openai" in source)
    with default_server() as url:
        answer = run(shlex.split(curl.replace(DEFAULT_URL, url)))
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
        assert run([sys.executable, "-c", client.replace(DEFAULT_URL, url)]).stdout.strip()
        chat = run([sys.executable, "-m", "penstock", "chat", "--url", url, "--max-tokens", "8"], stdin="Hello.\n")
        assert chat.returncode == 0, chat.stderr
        assert chat.stdout.strip()
