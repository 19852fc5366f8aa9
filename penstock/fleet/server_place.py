"""Where the server is that a URL names, however the URL is written.

Reads URLs only: whether two names lead to one address it does not know, but for `localhost`.
"""

import ipaddress
from urllib.parse import urlsplit


def place_of(url: str) -> str:
    """Return the same for every way to write one server's URL; what is no URL is its own place."""
    try:
        parts = urlsplit(url)
        port = parts.port or default_port(parts.scheme)
    except ValueError:
        return url
    return f"{parts.scheme}://{_host(parts.hostname or '')}:{port}{parts.path.rstrip('/')}"


def _host(name: str) -> str:
    if ":" not in name:
        plain = name.removesuffix(".")
        return "127.0.0.1" if plain == "localhost" else plain
    try:
        return f"[{ipaddress.IPv6Address(name)}]"
    except ValueError:
        return f"[{name}]"


def default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80
