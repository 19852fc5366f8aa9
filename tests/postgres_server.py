"""A real PostgreSQL of the tests' own, on a Unix socket in a folder of its own."""

import contextlib
import glob
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def _program(name: str) -> str | None:
    found = shutil.which(name)
    return found or next(iter(sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), reverse=True)), None)


def _stranger() -> str | None:
    """The user to run it as: PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Start a server and yield the URL of its database; skips, saying so, where there is none to start."""
    initdb, pg_ctl = _program("initdb"), _program("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed")
    pytest.importorskip("psycopg")
    user = _stranger()
    folder = Path(tempfile.mkdtemp(prefix="penstock-pg-", dir="/tmp"))  # a socket's path must be short
    try:
        if user is not None:
            shutil.chown(folder, user)

        def run(*command: str) -> None:
            done = subprocess.run(command, user=user, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr

        run(initdb, "-D", f"{folder}/data", "-U", "penstock", "--auth=trust", "--no-sync", "-E", "UTF8")
        options = f"-c listen_addresses= -k {folder} -c fsync=off"
        run(pg_ctl, "-D", f"{folder}/data", "-o", options, "-l", f"{folder}/log", "-w", "start")
        try:
            yield f"postgresql://penstock@/postgres?host={folder}"
        finally:
            run(pg_ctl, "-D", f"{folder}/data", "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
