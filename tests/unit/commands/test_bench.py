"""`penstock bench` from its flags to its files."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.llm import LLM, Completion
from penstock.request import SamplingParams
from penstock.tools.bench.document import Run, new_report, read_report, write_report
from tests.server_process import write_tiny_model
from tests.unit.tools.bench.stream_server import Script, served


@contextmanager
def server(script: Script) -> Iterator[str]:
    """Serve a script from a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = AsyncExitStack()
    url = asyncio.run_coroutine_threadsafe(stack.enter_async_context(served(script)), loop).result()
    try:
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run(*arguments: str) -> int:
    try:
        return main(["bench", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_a_server_is_measured_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    script = Script(first_seconds=0.0, token_seconds=0.0)
    json, html = tmp_path / "a.json", tmp_path / "a.html"
    files = ["--json", str(json), "--html", str(html)]
    with server(script) as url:
        assert run("serve", "--url", url, "--shape", "3x8+4", "--rates", "200,400", "--slo-ttft", "60000", *files) == 0
    shown = capsys.readouterr().out
    assert "3x8+4 @ 200/s" in shown
    assert "TTFT" in shown
    report = read_report(json)
    assert [run.num_completed for run in report.runs] == [3, 3]
    assert report.runs[0].generator is not None
    assert "<svg" not in html.read_text()
    assert "data:image/svg+xml" in html.read_text()


def test_a_server_that_refuses_everything_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with server(Script(status=429)) as url:
        assert run("serve", "--url", url, "--shape", "2x8+4", "--warmup", "0") == 1
    assert "2 of 2 requests failed: http 429" in capsys.readouterr().out


@pytest.fixture
def heard_ctrl_c() -> Iterator[None]:
    """A shell that runs the tests in the background has had Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_ctrl_c")
def test_ctrl_c_ends_the_load_and_reports_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, json = Script(first_seconds=0.0, token_seconds=0.0, silent_after=3), tmp_path / "a.json"

    def press_when_silent() -> None:
        while len(script.requests) < 4:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    person = threading.Thread(target=press_when_silent)
    flags = ["--shape", "5x8+4", "--concurrency", "1", "--warmup", "0", "--json", str(json)]
    with server(script) as url:
        person.start()
        assert run("serve", "--url", url, *flags) == 130
        person.join()
    shown = capsys.readouterr()
    assert "Cut short: 3 of 5 requests had not ended." in shown.out
    assert "Cut short" in shown.err
    report = read_report(json)
    assert report.cut_short
    assert report.runs[0].num_completed == 2


def test_a_bad_workload_is_one_sentence_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--workload", "rate11") == 2
    assert "--workload: 'rate11' is not usable; give one of: mixed256" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize("place", ["none/a.file", "."])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    option: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    with server(script) as url:
        assert run("serve", "--url", url, "--shape", "2x8+4", option, str(tmp_path / place)) == 2
    assert capsys.readouterr().err.startswith(f"{option}: ")
    assert not script.requests


def test_one_file_for_both_reports_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, other_name, script = tmp_path / "a", tmp_path / ".." / tmp_path.name / "a", Script()
    with server(script) as url:
        files = ["--json", str(file), "--html", str(other_name)]
        assert run("serve", "--url", url, "--shape", "2x8+4", *files) == 2
    assert "--json names the same file" in capsys.readouterr().err
    assert not script.requests


@pytest.mark.parametrize("value", ["nan", "0", "-1", "inf", "fast"])
@pytest.mark.parametrize("option", ["--rate", "--speed"])
def test_a_rate_that_is_none_is_one_sentence(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--shape", "2x8+4", option, value) == 2
    assert capsys.readouterr().err == f"{option}: {value!r} is not usable; give a number over 0\n"


TINY_ENGINE = ["--load-format", "dummy", "--device", "cpu", "--threads", "1", "--kv-memory", "8MiB"]


def test_an_engine_runs_a_trace_all_at_once_and_shares_what_it_shares(tmp_path: Path) -> None:
    model, trace, json = write_tiny_model(tmp_path / "tiny"), tmp_path / "a.jsonl", tmp_path / "a.json"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 3, "hash_ids": [1, %d]}\n'
    trace.write_text("".join(line % (number * 60_000, number + 2) for number in range(3)))
    assert run("offline", str(model), *TINY_ENGINE, "--trace", str(trace), "--limit", "2", "--json", str(json)) == 0
    (found,) = read_report(json).runs
    assert (found.label, found.num_completed, found.input_tokens, found.output_tokens) == ("a", 2, 1200, 6)
    assert found.cached_tokens


def test_what_an_engine_measured_is_reported_before_a_workload_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, json = write_tiny_model(tmp_path / "tiny"), tmp_path / "a.json"
    flags = ["--max-context-tokens", "256", "--workload", "cpu1,rate10", "--json", str(json)]
    assert run("offline", str(model), *TINY_ENGINE, *flags) == 2
    shown = capsys.readouterr()
    assert "output tokens/s" in shown.out
    assert "rate10, request 1: the prompt has 1024 tokens" in shown.err
    assert read_report(json).cut_short
    assert [item.label for item in read_report(json).runs] == ["cpu1"]


def test_ctrl_c_reports_the_runs_that_an_engine_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, json = write_tiny_model(tmp_path / "tiny"), tmp_path / "a.json"
    generate = LLM.generate

    def interrupted(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        if len(prompts) == 4:
            raise KeyboardInterrupt
        return generate(llm, prompts, params)

    monkeypatch.setattr(LLM, "generate", interrupted)
    assert run("offline", str(model), *TINY_ENGINE, "--workload", "cpu1,cpu4", "--json", str(json)) == 130
    assert "Cut short" in capsys.readouterr().err
    assert [item.label for item in read_report(json).runs] == ["cpu1"]


def test_two_reports_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json = tmp_path / "a.json"
    with server(Script(first_seconds=0.0, token_seconds=0.0)) as url:
        run("serve", "--url", url, "--shape", "2x8+4", "--json", str(json))
    capsys.readouterr()
    assert run("compare", str(json), str(json)) == 0
    shown = capsys.readouterr().out
    assert "1.000" in shown
    assert "worse" not in shown


def test_reports_with_nothing_in_common_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    with server(Script(first_seconds=0.0, token_seconds=0.0)) as url:
        run("serve", "--url", url, "--shape", "2x8+4", "--json", str(first))
        run("serve", "--url", url, "--shape", "2x8+5", "--json", str(second))
    assert run("compare", str(first), str(second)) == 2
    assert "it has no run that the first has too" in capsys.readouterr().err


def test_reports_of_one_run_without_any_figure_are_refused_as_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of_nothing = Run(
        label="a", num_requests=2, num_completed=0, seconds=0.0, input_tokens=0, output_tokens=0, counted_by="usage"
    )
    file = tmp_path / "a.json"
    report = new_report([run_of_nothing], target="x", model="m", prompts="text", ignored_end_of_text=True)
    write_report(report, file)
    assert run("compare", str(file), str(file)) == 2
    assert "neither report has a figure of the runs that are in both" in capsys.readouterr().err


def test_help_does_not_load_what_measuring_needs() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from penstock.cli import main\n"
        "try: main(['bench', 'serve', '--help'])\n"
        "except SystemExit: pass\n"
        "loaded = {'torch', 'aiohttp', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
