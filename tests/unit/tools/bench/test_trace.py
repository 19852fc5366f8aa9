"""Recorded arrivals become workloads, and a file that is none is refused with the line that shows it."""

import json
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.tools.bench.trace import read_trace

DATA = Path(__file__).resolve().parents[5] / "shared" / "data"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,600,109
2023-11-16 18:15:51.6805900,20,0
"""
MOONCAKE = [
    {"timestamp": 500, "input_length": 1000, "output_length": 5, "hash_ids": [4, 5]},
    {"timestamp": 500, "input_length": 1400, "output_length": 7, "hash_ids": [4, 5, 6]},
    {"timestamp": 2500, "input_length": 600, "output_length": 9, "hash_ids": [4, 9]},
]


def write(folder: Path, text: str) -> Path:
    file = folder / "trace.txt"
    file.write_text(text, encoding="utf-8")
    return file


def mooncake(folder: Path) -> Path:
    return write(folder, "".join(json.dumps(line) + "\n" for line in MOONCAKE))


def data_file(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"the recorded trace (../shared/data/{name}) is not here")
    return DATA / name


def test_an_azure_trace_has_times_and_lengths(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path, AZURE))
    assert workload.name == "trace"
    assert [request.start_seconds for request in workload.requests] == pytest.approx([0.0, 4.25, 5.0], abs=1e-5)
    assert [len(request.prompt.token_ids()) for request in workload.requests] == [374, 600, 20]
    assert [request.max_tokens for request in workload.requests] == [44, 109, 1]


def test_azure_prompts_have_nothing_in_common(tmp_path: Path) -> None:
    first, second, third = (item.prompt.token_ids()[:16] for item in read_trace(write(tmp_path, AZURE)).requests)
    assert len({tuple(first), tuple(second), tuple(third)}) == 3


def test_a_mooncake_trace_shares_the_blocks_that_it_says(tmp_path: Path) -> None:
    workload = read_trace(mooncake(tmp_path))
    assert [request.start_seconds for request in workload.requests] == [0.0, 0.0, 2.0]
    first, second, third = (request.prompt.token_ids() for request in workload.requests)
    assert (len(first), len(second), len(third)) == (1000, 1400, 600)
    assert first == second[:1000]
    assert third[:512] == first[:512]
    assert third[512:] != first[512:600]


def test_speed_compresses_time(tmp_path: Path) -> None:
    workload = read_trace(mooncake(tmp_path)).faster(4.0)
    assert workload.requests[-1].start_seconds == 0.5


def test_a_limit_takes_the_first(tmp_path: Path) -> None:
    assert len(read_trace(mooncake(tmp_path), 2).requests) == 2


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + AZURE,
        "\n\n" + AZURE.replace("\n", "\r\n\r\n"),
        '"TIMESTAMP", "ContextTokens", "GeneratedTokens"\n' + AZURE.partition("\n")[2].replace(",", ", "),
        "Model,GeneratedTokens,ContextTokens,TIMESTAMP\nx,44,374,2023-11-16 18:15:46.6805900\n",
    ],
    ids=["byte order mark", "empty lines", "quotes and blanks", "another order"],
)
def test_a_table_is_read_however_it_was_saved(tmp_path: Path, text: str) -> None:
    request = read_trace(write(tmp_path, text)).requests[0]
    assert (request.prompt.num_tokens, request.max_tokens) == (374, 44)


def test_json_lines_may_begin_with_a_mark_or_an_empty_line(tmp_path: Path) -> None:
    lines = mooncake(tmp_path).read_text()
    assert len(read_trace(write(tmp_path, "\ufeff\n" + lines)).requests) == len(MOONCAKE)


def test_blocks_of_ids_that_differ_by_their_sign_only_differ(tmp_path: Path) -> None:
    lines = [{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [item]} for item in (7, -7)]
    first, second = read_trace(write(tmp_path, "\n".join(map(json.dumps, lines)))).requests
    assert first.prompt.token_ids() != second.prompt.token_ids()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no requests"),
        ("\n\n", "holds no requests"),
        ("a,b,c\n1,2,3\n", "line 1: it is neither"),
        (AZURE + "yesterday,1,2\n", "line 5: it is not a time"),
        (AZURE + "2023-11-16 18:15:46,1\n", "line 5: it is not a time"),
        (AZURE + "2023-11-16 18:15:46,0,2\n", "lengths must be positive"),
        (AZURE + "2023-11-16 18:15:46,1000000000000000,2\n", "line 5: lengths must be at most 16777216"),
        (AZURE + "2023-11-16 18:15:46,1,1000000000000000\n", "line 5: lengths must be at most 16777216"),
        (AZURE + "9999-12-31 23:59:59,1,2\n", "line 5: it and a line before it are more than a year apart"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ('{"timestamp": 1}\n', "line 1: .*input_length"),
        ('{"timestamp":1,"input_length":513,"output_length":1,"hash_ids":[1]}\n', "line 1: 513 tokens need 2 hash_ids"),
        ('{"timestamp":1,"more":' + "[" * 100_000 + "\n", "line 1"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(write(tmp_path, text))


def test_a_byte_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "latin.csv"
    file.write_bytes(AZURE.encode() + b"2023-11-16 18:15:46,1,2,caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.csv.*line 5: it has a byte that is not UTF-8"):
        read_trace(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_the_recorded_azure_trace_is_read() -> None:
    workload = read_trace(data_file("azure_llm_2023_conv.csv"))
    assert len(workload.requests) == 19366
    assert 3400 < workload.requests[-1].start_seconds < 3600


def test_the_recorded_mooncake_trace_is_read() -> None:
    workload = read_trace(data_file("mooncake_conversation.jsonl"))
    assert len(workload.requests) == 12031
    first, second = (list(item.prompt.token_ids()) for item in workload.requests[:2])
    assert first[:512] == second[:512]
