"""Which callers are this computer's own: by the name they call, and by what a browser says of a page."""

import pytest

from penstock.errors import NotPermitted
from penstock.loopback import check_open_call

OWN = "127.0.0.1"


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.:8000", "app.localhost:3000", "127.0.0.1:8000", "127.8.8.8", "[::1]:80"],
)
def test_names_of_this_computer_are_answered(host):
    check_open_call("POST", {"host": host}, OWN)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8000", "localhost.evil.example", "evil-localhost", "127.0.0.1.evil.example",
        "0.0.0.0:8000", "10.0.0.1", "[2001:db8::1]:8000", "", ":8000", "user@localhost:8000", "::1:8000:",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_names_are_not_answered(host, method):
    with pytest.raises(NotPermitted, match="penstock keys create"):
        check_open_call(method, {"host": host}, OWN)


def test_the_address_that_was_called_is_answered():
    check_open_call("POST", {"host": "10.0.0.1:8000"}, "10.0.0.1")
    check_open_call("POST", {}, OWN)  # no browser leaves it out


def test_over_a_unix_socket_any_name_is_answered():
    check_open_call("POST", {"host": "admin", "sec-fetch-site": "cross-site"}, None)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_page_of_another_site_changes_nothing(method):
    with pytest.raises(NotPermitted, match="other sites"):
        check_open_call(method, {"host": "localhost", "sec-fetch-site": "cross-site"}, OWN)


@pytest.mark.parametrize(("method", "site"), [("GET", "cross-site"), ("POST", "same-origin"), ("POST", "none")])
def test_reading_and_pages_of_our_own_are_served(method, site):
    check_open_call(method, {"host": "localhost", "sec-fetch-site": site}, OWN)
