"""The bar draws nothing for nothing, and two lines where nobody watches."""

import io

from rich.console import Console

from penstock.commands.progress import fetch_bar


def shown(reports: list[tuple[int, int | None, str]], *, terminal: bool) -> str:
    output = io.StringIO()
    with fetch_bar(Console(file=output, force_terminal=terminal, width=120)) as report:
        for done, total, what in reports:
            report(done, total, what)
    return output.getvalue()


def test_nothing_fetched_shows_nothing() -> None:
    assert shown([], terminal=True) == ""
    assert shown([], terminal=False) == ""


def test_a_log_gets_one_line_at_each_end() -> None:
    reports: list[tuple[int, int | None, str]] = [(done, 4_000_000, "model") for done in range(0, 4_000_001, 400_000)]
    assert shown(reports, terminal=False) == "fetching model (4 MB)\nfetched model: 4 MB\n"


def test_a_terminal_gets_a_bar_with_name_and_sizes() -> None:
    text = shown([(1_000_000, 4_000_000, "model"), (4_000_000, 4_000_000, "model")], terminal=True)
    assert "fetching model" in text
    assert "4.0/4.0 MB" in text


def test_a_size_that_is_not_known_is_not_made_up() -> None:
    assert shown([(1_000_000, None, "model")], terminal=False) == "fetching model\nfetched model: 1 MB\n"
    assert "fetching model" in shown([(1_000_000, None, "model")], terminal=True)
