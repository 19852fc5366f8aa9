"""The repository holds together: CI runs what the README says, links lead somewhere, no machine shows through."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.markdown import anchors, blocks, commands, links
from tests.architecture.source_tree import PACKAGE, REPOSITORY

DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
EXPECTED = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml", ".ci/run"]
DOCS = [
    "architecture.md",
    "api.md",
    "metrics.md",
    "benchmarks.md",
    "log.md",
    "simulation.md",
    "promises.md",
    "security.md",
    "operations.md",
]

# Written in two parts, so that this file does not hold what it forbids.
MACHINE = re.compile(
    "|".join(
        [
            r"(?<![\w.~-])/" + "work/",
            r"(?<![\w.~-])/" + "root/",
            r"/tmp/" + "m/",
            "pypi" + r"\.org",
            "pythonhosted" + r"\.org",
        ]
    )
)


def our_files() -> list[Path]:
    """Return every file that is or would be committed."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(
        [git, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    return [path for name in names if (path := REPOSITORY / name).is_file()]


def script(path: str) -> list[str]:
    """Return the lines of a shell script that do something."""
    lines = (REPOSITORY / path).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", EXPECTED + [f"docs/{name}" for name in DOCS])
def test_what_people_look_for_is_there(name: str) -> None:
    assert (REPOSITORY / name).read_text().strip()


def test_ci_runs_exactly_the_readmes_test_command() -> None:
    text = (REPOSITORY / "README.md").read_text()
    section = text[text.index("## Test") :]
    (block, *_) = (item for item in blocks(REPOSITORY / "README.md") if item.text in section)
    (command,) = commands(block)
    assert command == "make test"
    assert script(".ci/run") == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', command]


def test_scripts_can_be_executed() -> None:
    assert os.access(REPOSITORY / ".ci/run", os.X_OK)
    assert os.access(REPOSITORY / "scripts/check", os.X_OK)


def test_make_test_runs_every_check() -> None:
    lines = script("scripts/check")
    assert [line.removeprefix("say ") for line in lines if line.startswith("say ")] == [
        "ruff check .",
        "ruff format --check .",
        "env OMP_NUM_THREADS=1 pytest --numprocesses 2 --dist loadfile tests/unit tests/architecture",
        "pytest --ignore tests/unit --ignore tests/architecture",
    ]
    # Types, beside the first tests.
    assert [line for line in lines if line.startswith(("mypy", "wait"))] == [
        'mypy >"$types" 2>&1 &',
        'wait "$checker" || { cat "$types"; exit 1; }',
    ]


def dry_run(*arguments: str) -> str:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    # As from a shell, although `make test` itself may be what runs this.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")
    }
    command = [make, "-n", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout


def test_make_serve_installs_torch_first_then_penstock_then_serves(tmp_path: Path) -> None:
    lines = [line for line in dry_run("serve", f"VENV={tmp_path}/fresh").splitlines() if not line.startswith("echo")]
    places = [
        next(index for index, line in enumerate(lines) if part in line)
        for part in ("-m venv", "install torch==2.13.0", "install --editable .", "penstock serve")
    ]
    assert places == sorted(places)
    assert lines[-1].startswith("exec ")


def test_make_passes_options_on(tmp_path: Path) -> None:
    output = dry_run("serve", f"VENV={tmp_path}/fresh", "TORCH=torch==2.12.0", "PYTHON=python9", "ARGS=--port 9000")
    assert "penstock serve --port 9000" in output
    assert "install torch==2.12.0" in output
    assert "python9 -m venv" in output


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_documents_named_in_the_readme_exist() -> None:
    for name in re.findall(r"docs/\w+\.md", (REPOSITORY / "README.md").read_text()):
        assert (REPOSITORY / name).exists(), name


def test_source_files_named_in_the_documents_exist() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"`((?:[\w]+/)+[\w]+\.(?:py|md|toml|html))`", document.read_text()):
            assert (REPOSITORY / name).exists() or (PACKAGE / name).exists(), f"{document.name}: {name}"


def test_no_file_tells_of_the_machine_it_was_written_on() -> None:
    found = []
    for path in our_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE.search(line):
                found.append(f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ("/" + "work/main", True),
        ('"/' + 'root/x"', True),
        ("https://files.pythonhosted" + ".org/x", True),
        ("the server/worker", False),
        ("~/root/x", False),
        ("paths/work/x", False),
    ],
)
def test_the_search_for_machines_itself(line: str, caught: bool) -> None:
    assert bool(MACHINE.search(line)) is caught


def test_the_licence_is_whole() -> None:
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
