"""What a gateway vouches for when it passes a request on: the name that was asked for, and what it goes on with.

A server honours it from those only that share its store, and with it a secret that no caller knows:

    x-penstock-gateway: DIGEST model=NAME lease=LEASE

NAME is the model as the caller named it, before the gateway's aliases. LEASE is what the server that had the request
before held for it, or none. The digest covers both and the caller's own key, so that a voucher serves nobody else.
Knows nothing of HTTP or of stores.
"""

import hashlib
import hmac
import re
from urllib.parse import quote, unquote

from penstock.tenants import Voucher

VOUCHER_HEADER = "x-penstock-gateway"
_NONE = "none"
_SHAPE = re.compile(r"([0-9a-f]{64}) (model=([^ ]{0,2000}) lease=([0-9A-Za-z.-]{1,128}))")


def sign_voucher(voucher: Voucher, secret: str, authorization: str | None) -> str:
    """Return the header of a request with this authorization."""
    text = f"model={quote(voucher.asked_model, safe='')} lease={voucher.lease or _NONE}"
    return f"{_digest(text, secret, authorization)} {text}"


def read_voucher(header: str, secret: str, authorization: str | None) -> Voucher | None:
    """Return what a header vouches for; None where nobody who knows the secret wrote it for this authorization."""
    found = _SHAPE.fullmatch(header)
    if found is None or not hmac.compare_digest(found[1], _digest(found[2], secret, authorization)):
        return None
    return Voucher(unquote(found[3]), None if found[4] == _NONE else found[4])


def _digest(text: str, secret: str, authorization: str | None) -> str:
    message = f"{text}\n{authorization or ''}".encode("utf-8", "surrogateescape")
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()
