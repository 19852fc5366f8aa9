import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deploy.toml_text import toml_text

scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8")),
)
documents = st.dictionaries(
    st.text(st.characters(codec="utf-8")),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(documents)
def test_what_was_written_is_read(document):
    assert tomllib.loads(toml_text(document)) == document


def test_what_is_none_is_left_out():
    assert toml_text({"keys": None, "queue": {"hold_seconds": 1.0, "name": None}}) == "queue = {hold_seconds = 1.0}\n"


@pytest.mark.parametrize("number", [1e22, 5e-324, 1e16, float("inf")])
def test_numbers_of_every_size_are_numbers(number):
    assert tomllib.loads(toml_text({"number": number})) == {"number": number}
