"""`penstock simulate` and `penstock bench profile` from their flags to their files."""

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.engine.simulated.profile import read_profile, write_profile
from penstock.tools.bench.document import read_report
from tests.fakes.small_profile import small_profile
from tests.server_process import write_tiny_model

LOAD = ["--shape", "6x40+10", "--rate", "5"]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    write_profile(small_profile(), tmp_path / "small.json")
    return str(tmp_path / "small.json")


def run(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)


def test_the_table_is_that_of_a_measured_server(profile: str, capsys: pytest.CaptureFixture[str]):
    assert run("simulate", "--profile", profile, *LOAD, "--slo-ttft", "500") == 0
    shown = capsys.readouterr().out
    assert "tiny at 1 × simulated Abacus" in shown
    assert "TTFT" in shown
    assert "6 of 6 kept TTFT ≤ 500 ms" in shown


def test_a_simulation_agrees_with_itself(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = str(tmp_path / "report.json")
    assert run("simulate", "--profile", profile, *LOAD, "--json", file) == 0
    assert read_report(Path(file)).runs[0].num_completed == 6
    assert run("simulate", "--profile", profile, *LOAD, "--against", file) == 0
    shown = capsys.readouterr().out
    assert "+0.0%" in shown
    assert "largest error 0.0%; 10% is the limit" in shown


def test_a_simulation_that_is_far_off_is_status_1(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = str(tmp_path / "report.json")
    run("simulate", "--profile", profile, *LOAD, "--json", file)
    assert run("simulate", "--profile", f"{profile}@2", *LOAD, "--against", file) == 1
    assert "time per token p95" in capsys.readouterr().out


def test_a_report_of_other_work_is_refused(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = str(tmp_path / "report.json")
    run("simulate", "--profile", profile, "--shape", "1x8+2", "--json", file)
    assert run("simulate", "--profile", profile, *LOAD, "--against", file) == 2
    assert "it has none of the runs that were simulated: 6x40+10" in capsys.readouterr().err


def test_the_engines_options_count(profile: str, capsys: pytest.CaptureFixture[str]):
    assert run("simulate", "--profile", profile, *LOAD, "--max-running", "1", "--max-waiting", "0") == 0
    assert "requests failed: overloaded" in capsys.readouterr().out


def test_a_profile_that_is_not_measured_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    write_profile(small_profile(provisional=True), tmp_path / "guess.json")
    assert run("simulate", "--profile", str(tmp_path / "guess.json"), "--shape", "1x8+2") == 0
    assert "provisional" in capsys.readouterr().out


def test_an_engine_on_this_cpu_is_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, out = write_tiny_model(tmp_path / "tiny"), tmp_path / "tiny.json"
    options = ["--load-format", "dummy", "--device", "cpu", "--threads", "1", "--kv-memory", "8MiB"]
    limits = ["--max-running", "2", "--max-step-tokens", "16", "--max-context-tokens", "128"]
    # Whether it fits is up to how busy this machine is.
    assert run("bench", "profile", str(model), *options, *limits, "--out", str(out), "--commit", "abc1234") in (0, 1)
    assert "median error" in capsys.readouterr().out
    found = read_profile(str(out))
    assert (found.commit, found.vocab_size, found.device_kind) == ("abc1234", 512, "cpu")
    assert found.kv_token_bytes == 2 * 2 * 16 * 4
    assert found.fit is not None and found.fit.num_steps == 30
    assert json.loads(out.read_text())["format"] == "penstock-profile-1"
    assert run("simulate", "--profile", str(out), "--shape", "3x20+4") == 0


@pytest.mark.parametrize(
    ("option", "small", "least"), [("--max-context-tokens", "16", "128"), ("--max-step-tokens", "8", "16")]
)
def test_an_engine_with_too_small_steps_is_not_profiled(
    option: str, small: str, least: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, out = write_tiny_model(tmp_path / "tiny"), tmp_path / "tiny.json"
    options = ["--load-format", "dummy", "--device", "cpu", "--threads", "1", "--kv-memory", "8MiB"]
    assert run("bench", "profile", str(model), *options, "--max-running", "2", option, small, "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{option}: {small} is not usable") and least in error


@pytest.mark.parametrize("name", ["nosuch", "h200-llama-8b@x", "nosuch@2"])
def test_a_wrong_profile_is_refused_by_the_flag_that_named_it(name: str, capsys: pytest.CaptureFixture[str]):
    assert run("simulate", "--profile", name, *LOAD) == 2
    assert capsys.readouterr().err.startswith("--profile: ")


@pytest.mark.parametrize("option", ["--json", "--against"])
def test_a_scaled_fleet_has_no_report_to_write(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", *LOAD, "--slo-ttft", "500", "--autoscale", "promises", option, str(tmp_path / "a.json")) == 2
    assert capsys.readouterr().err.startswith(f"{option}: ")


@pytest.mark.parametrize("option", ["--slo-ttft", "--slo-tpot"])
@pytest.mark.parametrize("command", [["simulate"], ["bench", "serve"]])
def test_a_negative_service_level_is_refused(
    command: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command, *LOAD, option, "-1") == 2
    assert option in capsys.readouterr().err
