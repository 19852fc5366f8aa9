"""The sockets a server listens on: its port, and the admin routes' own.

Bound before anything costly starts. An API worker listens on its port when it can accept: whoever comes earlier is
refused, and may go elsewhere. Knows nothing of what is served on them.
"""

import errno
import os
import socket
from pathlib import Path

from penstock.errors import ConfigError
from penstock.loopback import ANY_ADDRESS, ANY_IPV4_ADDRESS
from penstock.run_folder import socket_path
from penstock.server.config import admin_address

_BACKLOG = 2048


def joined(host: str, port: int) -> str:
    """Return an address as it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_for_admin(wanted: str | None, folder: Path) -> socket.socket:
    """Bind the admin socket: where it was asked for, or in our own folder, where only we may connect."""
    address = admin_address(wanted) if wanted is not None else socket_path(folder, "admin.sock")
    if not isinstance(address, Path):
        return listen(*address, option="--admin-listen")
    if _is_listened_on(address):
        raise ConfigError("--admin-listen", wanted, "another server listens there; give another path")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # the socket is its owner's from its first moment
    try:
        remove_socket(wanted)
        listener.bind(str(address))
    except OSError as error:
        listener.close()
        if wanted is None:
            right = f"no socket can be made there ({error.strerror or error}); name another local folder"
            raise ConfigError("TMPDIR", str(folder.parent), right) from error
        raise ConfigError("--admin-listen", wanted, f"it cannot be listened on ({error.strerror or error})") from error
    finally:
        os.umask(mask)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(str(path))
        except OSError:
            return False
        return True


def remove_socket(wanted: str | None) -> None:
    """Take away the socket file that an earlier server, or this one, left where it was asked to."""
    address = admin_address(wanted) if wanted is not None else None
    if isinstance(address, Path) and address.is_socket():
        address.unlink()


def listen(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """Bind and listen: whoever comes from now on is answered, if not at once."""
    listener = bind(host, port, option=option)
    let_in(listener)
    return listener


def bind(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """Bind before anything costly starts: a port that another server has is told at once."""
    if host == ANY_ADDRESS and not socket.has_dualstack_ipv6():
        host = ANY_IPV4_ADDRESS  # which is every address of a machine that knows no other kind
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if host == ANY_ADDRESS:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        _bind_alone(listener, (host, port))
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("--host", host, "give an address of this machine") from error
        right = f"it cannot be listened on at {host} ({os.strerror(error.errno or 0)}); give another {option}"
        raise ConfigError(option, port, right) from error
    listener.setblocking(False)
    return listener


def let_in(listener: socket.socket) -> None:
    """Listen on a bound socket. Raises OSError (EADDRINUSE) where another was bound to its port too, and was sooner."""
    # Its connections have it from here; without it, what lingers of them would keep the next server from the port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.listen(_BACKLOG)


def _bind_alone(listener: socket.socket, address: tuple[str, int]) -> None:
    """Bind so that no other server can meanwhile, unless connections of the one before linger on the port."""
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
