"""Vouchers: they say the same when they are read, and serve nobody they were not written for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.voucher import read_voucher, sign_voucher
from penstock.tenants import Voucher

LEASE = f"{'a' * 32}.2026-01-31.10.600"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=100), st.sampled_from([None, LEASE]))
def test_a_voucher_says_the_same_when_it_is_read(model, lease):
    header = sign_voucher(Voucher(model, lease), "secret", "Bearer alice")
    assert header.isascii()
    assert read_voucher(header, "secret", "Bearer alice") == Voucher(model, lease)


@pytest.mark.parametrize(
    ("change", "secret", "authorization"),
    [
        (lambda header: header, "another", "Bearer alice"),
        (lambda header: header, "secret", "Bearer bob"),
        (lambda header: header, "secret", None),
        (lambda header: header.replace("gpt-4o", "gpt-4"), "secret", "Bearer alice"),
        (lambda header: header.replace(LEASE, "none"), "secret", "Bearer alice"),
        (lambda header: header.replace(".600", ".900"), "secret", "Bearer alice"),
        (lambda header: "0" * 64 + header[64:], "secret", "Bearer alice"),
        (lambda header: header[65:], "secret", "Bearer alice"),
        (lambda header: "", "secret", "Bearer alice"),
    ],
)
def test_a_voucher_that_was_changed_or_is_somebody_elses_is_none(change, secret, authorization):
    header = sign_voucher(Voucher("gpt-4o", LEASE), "secret", "Bearer alice")
    assert read_voucher(change(header), secret, authorization) is None
