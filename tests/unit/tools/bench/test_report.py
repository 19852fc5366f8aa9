"""A report is written, read back, compared, and shown as tables and one page."""

import base64
import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from penstock.errors import ConfigError
from penstock.tools.bench import html_report
from penstock.tools.bench.comparison import compare
from penstock.tools.bench.document import (
    GeneratorHealth,
    Goodput,
    Report,
    RequestRow,
    Run,
    new_report,
    read_report,
    write_report,
)
from penstock.tools.bench.html_report import check_html_possible, render_html, write_html
from penstock.tools.bench.summary import distribution
from penstock.tools.bench.tables import comparison_table, overview_table, run_table


def make_run(label: str = "rate10", scale: float = 1.0, **changes: object) -> Run:
    times = [scale * value for value in (40.0, 50.0, 60.0)]
    health = GeneratorHealth(loop_lag_p99_ms=0.1, loop_lag_max_ms=0.2, late_send_p99_ms=0.3, cpu_share=0.1, warnings=[])
    run = Run(
        label=label,
        rate=10.0 / scale,
        num_requests=4,
        num_completed=3,
        seconds=2.0 * scale,
        input_tokens=300,
        output_tokens=30,
        counted_by="usage",
        errors={"http 429": 1},
        error_examples={"http 429": "the queue is <full>"},
        ttft_ms=distribution(times),
        time_per_token_ms=distribution(times),
        inter_token_ms=distribution(times),
        end_to_end_ms=distribution(times),
        goodput=Goodput(500.0, 30.0, 2, 1.0 / scale),
        generator=health,
        requests=[RequestRow(0.0, value, value / 10, value * 2, 100, 10) for value in times],
    )
    return msgspec.structs.replace(run, **changes)


def make_report(*runs: Run) -> Report:
    return new_report(list(runs), target="http://x", model="m<1>", prompts="token ids", ignored_end_of_text=True)


def shown(renderable: object) -> str:
    output = io.StringIO()
    Console(width=200, file=output).print(renderable)
    return output.getvalue()


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    report = make_report(make_run(), make_run("rate20", 2.0))
    write_report(report, tmp_path / "a.json")
    assert read_report(tmp_path / "a.json") == report


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"format": "another"}')
    with pytest.raises(ConfigError, match="was not written by"):
        read_report(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_report(tmp_path / "none.json")


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(make_report(), tmp_path / "no" / "a.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_html(make_report(), tmp_path / "no" / "a.html")


def test_runs_are_compared_by_their_label() -> None:
    compared = compare(make_report(make_run("a"), make_run("b")), make_report(make_run("b", 2.0), make_run("c")))
    assert {item.label for item in compared} == {"b"}
    by_name = {item.figure: item for item in compared}
    assert by_name["TTFT p50, ms"].ratio == pytest.approx(2.0)
    assert by_name["TTFT p50, ms"].gain == pytest.approx(0.5)
    assert by_name["output tokens/s"].ratio == pytest.approx(0.5)
    assert by_name["output tokens/s"].gain == pytest.approx(0.5)


def test_a_figure_that_one_lacks_is_not_compared() -> None:
    compared = compare(make_report(make_run(goodput=None)), make_report(make_run()))
    assert "goodput, requests/s" not in {item.figure for item in compared}


@pytest.mark.parametrize("value", [0.0, -5.0])
def test_a_figure_that_cannot_be_is_not_compared(value: float) -> None:
    broken = make_report(make_run(ttft_ms=distribution([value])))
    compared = compare(make_report(make_run()), broken)
    assert not [item for item in compared if item.figure.startswith("TTFT")]
    assert "geometric mean" in shown(comparison_table(compared))


def test_what_falls_to_nothing_is_worse_and_not_in_the_mean() -> None:
    good = make_report(make_run(errors={}))
    bad = make_report(
        make_run(scale=0.5, output_tokens=0, ttft_ms=None, errors={"cut": 3}, goodput=Goodput(500.0, 30.0, 0, 0.0))
    )
    text = shown(comparison_table(compare(good, bad)))
    for row in (
        r"failed requests, % +0\.00 +75\.00 +– +worse",
        r"TTFT p50, ms +50\.00 +– +– +worse",
        r"goodput, requests/s +1\.00 +0\.00 +– +worse",
        r"output tokens/s +15\.00 +0\.00 +– +worse",
        r"geometric mean of gains, without 6 that have no ratio +2\.000",
    ):
        assert re.search(row, text)
    back = shown(comparison_table(compare(bad, good)))
    assert re.search(r"failed requests, % +75\.00 +0\.00 +– +better", back)
    assert re.search(r"TTFT p50, ms +– +50\.00 +– +better", back)
    assert re.search(r"output tokens/s +0\.00 +15\.00 +– +better", back)


def test_a_run_of_which_every_request_failed_is_compared_without_a_mean() -> None:
    failed = Run(
        label="rate10",
        num_requests=4,
        num_completed=0,
        seconds=1.0,
        input_tokens=0,
        output_tokens=0,
        counted_by="chunks",
        errors={"http 500": 4},
    )
    text = shown(comparison_table(compare(make_report(make_run(errors={})), make_report(failed))))
    assert re.search(r"failed requests, % +0\.00 +100\.0 +– +worse", text)
    assert re.search(r"requests/s +1\.50 +0\.00 +– +worse", text)
    assert "mean" not in text
    assert "better" not in text


def test_the_comparison_says_which_is_better() -> None:
    text = shown(comparison_table(compare(make_report(make_run()), make_report(make_run(scale=2.0)))))
    assert "2.000" in text
    assert "worse" in text
    assert "better" not in text


def test_a_run_is_shown_with_what_to_know_before_believing_it() -> None:
    health = GeneratorHealth(
        loop_lag_p99_ms=50, loop_lag_max_ms=60, late_send_p99_ms=0, cpu_share=0.1, warnings=["its event loop ran late"]
    )
    text = shown(run_table(make_run(generator=health, num_short=2)))
    assert "3 of 4 in 2.00 s" in text
    assert "counted by usage" in text
    assert "2 of 4 kept TTFT ≤ 500 ms and time per token ≤ 30 ms" in text
    assert "1 of 4 requests failed: http 429 (the queue is <full>)" in text
    assert "The load generator may be the bottleneck: its event loop ran late." in text
    assert "2 answers were shorter" in text
    assert re.search(r"TTFT +50\.00 +50\.00 +58\.00 +59\.00 +59\.80 +60\.00", text)


def test_answers_without_text_are_told() -> None:
    silent = RequestRow(0.0, None, None, 50.0, 100, 10)
    assert "2 answers ended well but brought no text" in shown(run_table(make_run(requests=[silent, silent])))
    assert "no text" not in shown(run_table(make_run()))


def test_the_overview_has_a_line_for_each_run() -> None:
    text = shown(overview_table(make_report(make_run("a"), make_run("b", 2.0))))
    assert re.search(r"^a .*50\.00", text, re.MULTILINE)
    assert re.search(r"^b .*100\.0", text, re.MULTILINE)


def test_the_page_holds_its_plots_and_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_html(make_report(make_run(), make_run("rate20", 0.5)), tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(images) == 3
    assert all(b"<svg" in base64.b64decode(image) for image in images)
    for title in ("Latency against rate", "Goodput against rate", "Latency distribution"):
        assert f"<h2>{title}</h2>" in page
    assert len(re.findall(r"(?:src|href)=", page)) == 3


def test_what_others_wrote_is_escaped_in_the_page() -> None:
    pytest.importorskip("matplotlib")
    page = render_html(make_report(make_run(label="<script>")))
    assert "<script>" not in page
    assert "m&lt;1&gt;" in page
    assert "the queue is &lt;full&gt;" in page


@pytest.mark.parametrize("label", [r"a $\foo{$ b", "_hidden", "日本語"])
def test_any_name_is_shown_in_the_plots_as_it_is(label: str) -> None:
    pytest.importorskip("matplotlib")
    page = render_html(make_report(make_run(label), make_run("rate20", 0.5)))
    distribution_plot = re.findall(r'base64,([^"]+)"', page)[-1]
    assert label in base64.b64decode(distribution_plot).decode()


def test_a_rate_at_which_all_failed_has_its_place_among_goodputs() -> None:
    pytest.importorskip("matplotlib")
    failed = make_run("rate77", rate=77.0, requests=[], num_completed=0, goodput=Goodput(500.0, None, 0, 0.0))
    plots = re.findall(r'base64,([^"]+)"', render_html(make_report(make_run(), failed)))
    has_its_tick = [">70<" in base64.b64decode(plot).decode() for plot in plots]
    assert has_its_tick == [False, True, False]


def plotted(report: Report) -> list[str]:
    """Return the page's plots as SVG."""
    return [base64.b64decode(plot).decode() for plot in re.findall(r'base64,([^"]+)"', render_html(report))]


def test_each_workload_of_a_sweep_has_lines_of_its_own() -> None:
    pytest.importorskip("matplotlib")
    steps = [make_run(f"{name} @ {rate}/s", rate=float(rate)) for name in ("cpu4", "cpu8") for rate in (10, 20, 40)]
    latency, goodput, _ = plotted(make_report(*steps))
    # TTFT, time per token and end to end, each with three percentiles.
    assert [latency.count(f">cpu4 {name}<") for name in ("p50", "p90", "p99")] == [3, 3, 3]
    assert latency.count(">cpu8 p50<") == 3
    for name in ("cpu4 completed", "cpu8 completed", "cpu4 within the limits", "cpu4", "cpu8", "offered"):
        assert f">{name}<" in goodput
    for single in (steps[:3], [make_run("rate10", rate=10.0), make_run("rate20", rate=20.0)]):
        assert plotted(make_report(*single))[0].count(">p50<") == 3


def test_what_was_not_offered_at_a_rate_is_not_drawn_as_offered() -> None:
    pytest.importorskip("matplotlib")
    loops = [make_run(str(count), rate=None, concurrency=count) for count in (1, 2)]
    assert ">offered<" not in plotted(make_report(*loops))[1]
    assert ">offered<" in plotted(make_report(make_run()))[1]


def test_a_run_without_requests_has_no_plots() -> None:
    page = render_html(make_report(make_run(requests=[])))
    assert "<img" not in page
    assert "rate10" in page


def test_a_missing_matplotlib_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[bench\]'"):
        check_html_possible()
