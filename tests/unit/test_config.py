"""Options come from the command line, the environment, a file or the default, and are checked alike."""

import math
from pathlib import Path

import pytest

from penstock.config import Options, flag, gather, parse_bytes, unknown_variables
from penstock.errors import ConfigError


def test_nothing_given_gives_the_defaults() -> None:
    sourced = gather({}, environ={})
    assert sourced.options == Options()
    assert sourced.why("port") == "default"


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("port = 1\nhost = '127.0.0.2'\nthreads = 3\n")
    environ = {"PENSTOCK_PORT": "2", "PENSTOCK_HOST": "127.0.0.3", "OTHER_PORT": "9"}
    sourced = gather({"port": 3}, environ=environ, file=file)
    assert (sourced.options.port, sourced.options.host, sourced.options.threads) == (3, "127.0.0.3", 3)
    assert sourced.why("port") == "command line"
    assert sourced.why("host") == "environment PENSTOCK_HOST"
    assert sourced.why("threads") == f"file {file}"


def test_a_file_may_write_options_as_the_flags_are(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("max-running = 7\nprefix_cache = false\n")
    options = gather({}, environ={}, file=file).options
    assert options.max_running == 7
    assert options.prefix_cache is False


def test_none_counts_as_not_given() -> None:
    sourced = gather({"port": None}, environ={"PENSTOCK_PORT": "81"})
    assert sourced.options.port == 81


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("port", "http", "give a whole number from 0 to 65535"),
        ("port", "65536", "give a whole number from 0 to 65535"),
        ("port", "1e999", "give a whole number from 0 to 65535"),
        ("port", 1.5, "give a whole number from 0 to 65535"),
        ("port", True, "give a whole number from 0 to 65535"),
        ("port", 10**400, "give a whole number from 0 to 65535"),
        ("max_context_tokens", "15", "give a whole number of at least 16"),
        ("drain_seconds", math.nan, "give a number of at least 0"),
        ("drain_seconds", "inf", "give a number of at least 0"),
        ("drain_seconds", "1e999", "give a number of at least 0"),
        ("drain_seconds", "-1", "give a number of at least 0"),
        ("device", "tpu", "give one of: auto, cpu, cuda, simulated"),
        ("tensor_parallel", "2", "give 1, the only value there is so far"),
        ("prefix_cache", "perhaps", "give true or false"),
    ],
)
def test_a_bad_value_names_the_option_the_value_and_what_would_be_right(name: str, value: object, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gather({name: value}, environ={})
    assert str(caught.value) == f"{flag(name)}: {value!r} is not usable; {right}"


def test_a_bad_environment_variable_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match=r"^PENSTOCK_PORT: 'x' is not usable"):
        gather({}, environ={"PENSTOCK_PORT": "x"})


def test_an_unknown_option_in_a_file_lists_the_options(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigError, match=r"prot: 1 is not usable; there is no such option.*--port"):
        gather({}, environ={}, file=file)


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "penstock.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"penstock\.toml.*it is not valid TOML"):
        gather({}, environ={}, file=file)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml.*cannot be read"):
        gather({}, environ={}, file=tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("10B", 10),
        ("1KB", 1000),
        ("512MiB", 512 * 2**20),
        ("1.5 gib", 3 * 2**29),
        (" 2GB ", 2 * 10**9),
        ("1TiB", 2**40),
        ("9" * 400 + "GiB", 2**63),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert parse_bytes("--kv-memory", text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e9"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory: .* give a number of bytes such as 512MiB"):
        parse_bytes("--kv-memory", text)


def test_every_option_has_a_group_and_a_help_text() -> None:
    import dataclasses

    for item in dataclasses.fields(Options):
        assert item.metadata["group"] in ("model", "device", "memory", "scheduler", "server")
        assert item.metadata["help"][0].isupper() or item.metadata["help"].startswith("auto:")
        assert not item.metadata["help"].endswith(".")


def test_a_misspelt_variable_is_named_with_the_nearest_option():
    environ = {"PENSTOCK_POTR": "1", "PENSTOCK_PORT": "2", "PENSTOCK_API_KEY": "x", "POTR": "3", "PENSTOCK_XQZW": "4"}
    environ["PENSTOCK_APIKEY"] = "5"
    assert unknown_variables(environ) == [
        "PENSTOCK_APIKEY is no option and is ignored; did you mean PENSTOCK_API_KEY?",
        "PENSTOCK_POTR is no option and is ignored; did you mean PENSTOCK_PORT?",
        "PENSTOCK_XQZW is no option and is ignored; `penstock explain` lists the options",
    ]
