"""What belongs to this computer: its own addresses and names, and the callers that a server without keys answers.

Any program here may call such a server, but no page that its owner looks at in a browser. Knows nothing of keys, nor of
any web framework.
"""

import ipaddress
from collections.abc import Mapping

from penstock.errors import NotPermitted

# What is listened on to be found at every address: of both kinds, or of IPv4 alone.
ANY_ADDRESS, ANY_IPV4_ADDRESS = "::", "0.0.0.0"

_READING_METHODS = ("GET", "HEAD")


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is this computer's own and nobody else's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name may point anywhere


def local_address(host: str) -> str:
    """Return where a program on this computer finds what listens on `host`."""
    return "127.0.0.1" if host in (ANY_ADDRESS, ANY_IPV4_ADDRESS) else host


def check_open_call(method: str, headers: Mapping[str, str], own_address: str | None) -> None:
    """Raise NotPermitted for a call without a key that a page of another site may have made.

    `headers` are looked up by names in lower case. `own_address` is where the connection came in; None: a Unix socket,
    which no browser opens.
    """
    if own_address is None:
        return
    # A page's owner can point its name at this computer, and the browser then takes our answers for the page's own.
    # It still says by which name it called.
    name = _name_in(headers.get("host", own_address))
    if not (name == own_address or is_loopback(name) or name.endswith(".localhost")):
        raise NotPermitted(
            f"without API keys this server answers to localhost and 127.0.0.1 only, not to {name[:100]!r};"
            " call it so, or use keys: penstock keys create NAME"
        )
    if method not in _READING_METHODS and headers.get("sec-fetch-site") == "cross-site":
        raise NotPermitted("without API keys this server takes nothing from pages of other sites")


def _name_in(host: str) -> str:
    """Return the name or address in a Host header, without its port."""
    head, colon, port = host.strip().rpartition(":")
    name = head if colon and port.isdigit() and (":" not in head or head.endswith("]")) else host.strip()
    return name.strip("[]").lower().removesuffix(".")
