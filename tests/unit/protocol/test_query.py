"""Queries: what a route does not know is not passed over."""

import pytest

from penstock.errors import RequestError
from penstock.protocol.query import check_query


@pytest.mark.parametrize("names", [[], ["since"], ["since", "tenant"]])
def test_parameters_that_a_route_knows_are_taken(names):
    check_query(names, ("tenant", "since"))


@pytest.mark.parametrize(
    ("names", "known", "message"),
    [
        (["limt"], ("limit",), "unknown parameter 'limt'; the query may have: limit"),
        (["x"], (), "unknown parameter 'x'; there is none that the query could have here"),
        (["url", "url"], ("url",), "url stands twice in the query; give it once"),
    ],
)
def test_others_and_repeated_ones_are_refused(names, known, message):
    with pytest.raises(RequestError) as caught:
        check_query(names, known)
    assert (str(caught.value), caught.value.param) == (message, names[-1])


def test_a_long_name_is_shown_in_part():
    with pytest.raises(RequestError) as caught:
        check_query(["x" * 5000], ())
    assert len(str(caught.value)) < 200
