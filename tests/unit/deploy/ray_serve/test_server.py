"""The server beside an actor, as far as one can tell without waiting for a model."""

import pytest

from penstock.deploy.ray_serve.server import LeashedServer, reachable_url
from penstock.errors import RemoteError


async def test_a_server_that_does_not_start_is_said_at_once():
    server = LeashedServer(["--workers", "none"], "127.0.0.1", 8765)
    assert (server.port, server.replica.url) == (8765, "http://127.0.0.1:8765")
    with pytest.raises(RemoteError, match="ended with status 2"):
        await server.start(60)
    await server.stop(0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://10.0.0.7:81"),
        ("127.0.0.1", "http://127.0.0.1:81"),
        ("fd00::7", "http://[fd00::7]:81"),
    ],
)
def test_others_find_it_at_its_own_address_or_its_nodes(host, url):
    assert reachable_url(host, 81, "10.0.0.7") == url
