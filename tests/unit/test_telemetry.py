"""Log lines that machines and people can read."""

import io
import json
import logging

import pytest

from penstock.telemetry import RequestRecord, configure_logging, log_event, log_request


@pytest.fixture
def written(request):
    """Return a function that configures logging and gives what was written since."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    before = (root.handlers[:], root.level, uvicorn.level)
    stream = io.StringIO()

    def configure(log_format):
        configure_logging(log_format, process="worker-0", stream=stream)
        return stream.getvalue

    yield configure
    root.handlers[:], root.level = before[0], before[1]
    uvicorn.setLevel(before[2])


def test_a_json_line_is_one_object(written):
    text = written("json")
    log_event(logging.getLogger("penstock.x"), "it\nhappened", count=3, name_of="ü")
    line = json.loads(text())
    assert text().count("\n") == 1
    assert (line["message"], line["count"], line["name_of"]) == ("it\nhappened", 3, "ü")
    assert (line["level"], line["process"], line["logger"]) == ("info", "worker-0", "penstock.x")
    assert line["time"].endswith("Z")


def test_a_text_line_is_one_line_whatever_a_caller_sent(written):
    text = written("text")
    log_event(logging.getLogger("penstock.x"), "a\nb", path="/x\n2030 error forged", plain="y", escape="\x1b[31m")
    assert text().count("\n") == 1
    assert "\x1b" not in text()
    assert "plain=y" in text()


def test_an_exception_is_kept_with_its_traceback(written):
    text = written("json")
    try:
        raise ZeroDivisionError("oops")
    except ZeroDivisionError:
        logging.getLogger("penstock.x").exception("failed")
    assert "ZeroDivisionError: oops" in json.loads(text())["traceback"]


def test_a_request_is_summed_up_in_one_line(written):
    text = written("json")
    record = RequestRecord("r1", "POST", "/v1/completions", 5.0, route="/v1/completions", status=200, num_choices=1)
    record.tenant, record.output_tokens, record.ttft_seconds, record.finish = "alice", 7, 0.25, "stop"
    log_request(record)
    line = json.loads(text())
    assert (line["request_id"], line["tenant"], line["output_tokens"], line["ttft_seconds"]) == ("r1", "alice", 7, 0.25)
    assert "arrival" not in line


def test_a_request_that_made_nothing_says_nothing_of_tokens(written):
    text = written("json")
    log_request(RequestRecord("r1", "GET", "/live", 5.0, route="/live", status=200))
    assert not {"output_tokens", "prompt_tokens", "tenant", "ttft_seconds"} & set(json.loads(text()))


def test_uvicorns_own_lines_below_warnings_are_left_out(written):
    text = written("json")
    logging.getLogger("uvicorn.error").info("Started server process")
    assert text() == ""
