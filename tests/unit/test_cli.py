"""The `penstock` command: flags come from the table of options, and mistakes end in one sentence."""

import dataclasses
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli import main
from penstock.commands import serve
from penstock.config import Options, Sourced, flag
from penstock.errors import ModelNotFound
from penstock.request import SamplingParams

# What a command reads and writes, and whether the streams of its children lead nowhere.
WITHOUT_STREAMS = """
import os, subprocess, sys, types
from penstock import __main__ as package

CHILD = "import os, sys; sys.exit(any(os.fstat(n).st_rdev != os.stat(os.devnull).st_rdev for n in range(3)))"

def command():
    print("nobody reads this", file=sys.stderr)
    print("nor this")
    assert sys.stdin.read() == ""
    return subprocess.run([sys.executable, "-c", CHILD]).returncode

sys.modules["penstock.cli"] = types.SimpleNamespace(main=command)
sys.exit(package.main())
"""


class Served:
    """Stands in for the server: remembers what it was asked to serve."""

    def __init__(self, outcome: int | BaseException = 0) -> None:
        self.sourced: Sourced | None = None
        self._outcome = outcome

    def __call__(self, sourced: Sourced) -> int:
        self.sourced = sourced
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    @property
    def options(self) -> Options:
        assert self.sourced is not None
        return self.sourced.options


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for item in dataclasses.fields(Options):
        monkeypatch.delenv(f"PENSTOCK_{item.name.upper()}", raising=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()
    monkeypatch.setattr(serve, "run", served)
    return served


def run(*arguments: str) -> int:
    """Return the exit status of a command line."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize("typed", ["version", "--version"])
def test_version_prints_the_version(capsys: pytest.CaptureFixture[str], typed: str) -> None:
    assert run(typed) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_serve_without_arguments_serves_the_defaults(served: Served) -> None:
    assert run("serve") == 0
    assert served.options == Options()


def test_the_first_argument_is_the_model(served: Served) -> None:
    run("serve", "organisation/model", "--port", "9000")
    assert served.options.model == "organisation/model"
    assert served.options.port == 9000
    assert served.sourced is not None
    assert served.sourced.why("port") == "command line"
    assert served.sourced.why("host") == "default"


def sample_value(item: dataclasses.Field[Any]) -> str:
    """Return a usable value, other than the default, as one would type it."""
    if "choices" in item.metadata:
        return str(item.metadata["choices"][-1])
    kind = str(item.type)
    if "int" in kind:
        return str(item.metadata.get("high", item.metadata["low"] + 5))
    return "7.5" if "float" in kind else "some-text"


@pytest.mark.parametrize(
    "item",
    [item for item in dataclasses.fields(Options) if item.name not in ("model", "prefix_cache")],
    ids=lambda i: i.name,
)
def test_every_option_of_the_table_is_a_flag_of_serve(served: Served, item: dataclasses.Field[Any]) -> None:
    value = sample_value(item)
    assert run("serve", flag(item.name), value) == 0
    assert str(getattr(served.options, item.name)) == value


@pytest.mark.parametrize(("typed", "value"), [("--no-prefix-cache", False), ("--prefix-cache", True)])
def test_a_switch_has_a_no(served: Served, typed: str, value: bool) -> None:
    run("serve", typed)
    assert served.options.prefix_cache is value


def test_a_file_and_the_environment_are_read(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("port = 9001\nmax-running = 3\n")
    monkeypatch.setenv("PENSTOCK_PORT", "9002")
    run("serve", "--config", str(file))
    assert served.options.port == 9002
    assert served.options.max_running == 3


def test_a_misspelt_variable_is_told_and_ignored(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_POTR", "1")
    assert run("serve") == 0
    assert capsys.readouterr().err == "PENSTOCK_POTR is no option and is ignored; did you mean PENSTOCK_PORT?\n"


def test_a_misspelt_key_is_told_by_a_command_that_takes_no_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_APIKEY", "secret")
    assert run("chat", "--url", "http://127.0.0.1:1") != 0
    assert "PENSTOCK_APIKEY is no option and is ignored; did you mean PENSTOCK_API_KEY?" in capsys.readouterr().err


def test_the_servers_exit_status_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "run", Served(7))
    assert run("serve") == 7


def test_a_bad_value_ends_in_one_sentence_and_status_2(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--port", "eighty") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "--port: 'eighty' is not usable; give a whole number from 0 to 65535\n"
    assert served.sourced is None


def test_an_error_of_a_command_ends_in_its_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "run", Served(ModelNotFound("there is no model 'x': " + "y " * 100)))
    assert run("serve") == 2
    assert capsys.readouterr().err == "there is no model 'x': " + "y " * 100 + "\n"


def test_ctrl_c_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "run", Served(KeyboardInterrupt()))
    assert run("serve") == 130
    assert capsys.readouterr().err == ""


def test_an_unknown_flag_is_refused_with_status_2(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--prot", "80") == 2
    assert "--prot" in capsys.readouterr().err
    assert served.sourced is None


def test_help_shows_the_options_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    shown = capsys.readouterr().out
    for group in ("Model", "Device", "Memory", "Scheduler", "Server"):
        assert f"{group} options" in shown


def test_standard_input_that_is_no_utf_8_is_refused_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert run("generate", "-") == 2
    assert "byte 0 is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["version"], ["serve", "--help"], ["generate", "--help"]], ids=" ".join
)
def test_help_and_version_load_neither_torch_nor_a_web_server(arguments: list[str]) -> None:
    code = (
        "import sys; from penstock.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "loaded = {'torch', 'fastapi', 'aiohttp', 'huggingface_hub', 'zmq'} & set(sys.modules)\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_generate_hands_prompt_options_and_sampling_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.commands import generate

    calls: list[tuple[Sourced, str, SamplingParams]] = []

    def record(sourced: Sourced, prompt: str, params: SamplingParams) -> int:
        calls.append((sourced, prompt, params))
        return 0

    monkeypatch.setattr(generate, "run", record)
    assert run("generate", "Once upon", "--model", "m.gguf", "--max-tokens", "3", "--temperature", "0.5") == 0
    ((sourced, prompt, params),) = calls
    assert prompt == "Once upon"
    assert sourced.options.model == "m.gguf"
    assert params == SamplingParams(max_tokens=3, temperature=0.5)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["generate", "Hi", "--max-tokens", "0"], "--max-tokens: '0' is not usable; give a whole number of at least 1"),
        (["chat", "--max-tokens", "x"], "--max-tokens: 'x' is not usable; give a whole number of at least 1"),
        (["simulate", "--replicas", "0"], "--replicas: '0' is not usable; give a whole number from 1 to 1024"),
        (["simulate", "--limit", "0"], "--limit: '0' is not usable; give a whole number of at least 1"),
        (["bench", "serve", "--seed", "-1"], "--seed: '-1' is not usable; give a whole number of at least 0"),
    ],
)
def test_a_number_out_of_bounds_is_told_with_the_bounds(
    capsys: pytest.CaptureFixture[str], arguments: list[str], right: str
) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr().err == f"{right}\n"


def test_generate_has_no_server_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "x", "--port", "1") == 2
    assert "--port" in capsys.readouterr().err


def test_chat_hands_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.commands import chat

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(chat, "run", lambda *values: calls.append(values))
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    run("chat", "--url", "http://there", "--system", "Be brief.", "--temperature", "0")
    assert calls == [("http://there", "from-environment", None, "Be brief.", {"temperature": 0.0})]


def test_the_key_of_penstock_goes_before_that_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.commands import chat

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(chat, "run", lambda *values: calls.append(values))
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    monkeypatch.setenv("PENSTOCK_API_KEY", "of-penstock")
    run("chat")
    assert calls[0][1] == "of-penstock"


def test_python_can_run_the_package(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-m", "penstock", "version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"penstock {penstock.__version__}\n"


def test_the_package_run_by_python_ends_with_the_commands_status() -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--port", "eighty"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


def test_streams_that_were_closed_before_the_command_lead_nowhere_for_its_children_too() -> None:
    command = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, WITHOUT_STREAMS]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_output_that_finds_no_room_ends_in_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "penstock", "version"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["the output could not be written: No space left on device; make room there"]


def test_a_character_that_the_output_cannot_hold_is_written_as_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="latin-1"))
    monkeypatch.setattr(serve, "run", lambda sourced: print("é 🙂"))
    run("serve")
    assert output.getvalue() == "é \\U0001f642\n".encode("latin-1")


def test_ctrl_c_while_the_command_is_imported_is_its_status_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import __main__ as package

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "penstock.cli", Interrupted())
    monkeypatch.setattr(sys, "argv", ["penstock", "version"])
    assert package.main() == 130
