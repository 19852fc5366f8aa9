"""The Host header that HTTP/1.1 asks for: one, and no more.

Knows nothing of which names are answered to.
"""

from penstock.errors import RequestError


def check_host(http_version: str, num_hosts: int) -> None:
    """Raise RequestError where a proxy before us could have read another host out of the request than we do."""
    if http_version != "1.0" and num_hosts != 1:
        found = "has none" if num_hosts == 0 else f"has {num_hosts}"
        raise RequestError(f"an HTTP/1.1 request needs exactly one Host header, and this one {found}")
