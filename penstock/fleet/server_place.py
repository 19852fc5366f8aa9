"""Where the server is that a URL names, however the URL is written.

Reads URLs only: whether two names lead to one address it does not know.
"""

from urllib.parse import urlsplit


def place_of(url: str) -> str:
    """Return the same for every way to write one server's URL; what is no URL is its own place."""
    try:
        parts = urlsplit(url)
        port = parts.port or default_port(parts.scheme)
    except ValueError:
        return url
    host = parts.hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}{parts.path.rstrip('/')}"


def default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80
