"""Where a server listens: told at once when it cannot, and the admin socket is its owner's alone."""

import socket
import stat

import pytest

from penstock.errors import ConfigError
from penstock.loopback import local_address
from penstock.server.listeners import bind, joined, let_in, listen, listen_for_admin, remove_socket


def test_a_taken_port_is_told_with_its_option():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        for take in (bind, listen):
            with pytest.raises(ConfigError, match="give another --port"):
                take("127.0.0.1", port)
        with pytest.raises(ConfigError, match="give another --admin-listen"):
            listen_for_admin(f"127.0.0.1:{port}", folder=None)


def test_a_port_is_taken_before_its_server_listens():
    with bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="give another --port"):
        bind("127.0.0.1", first.getsockname()[1])


def test_a_port_where_connections_of_a_server_before_linger_is_free():
    with bind("127.0.0.1", 0) as first:
        let_in(first)
        address = first.getsockname()
        with socket.create_connection(address, 5) as caller:
            first.setblocking(True)
            first.accept()[0].close()  # who closes first keeps the connection for a minute
            assert caller.recv(1) == b""
    listen(*address).close()


def test_where_nobody_accepts_yet_callers_are_refused_and_may_go_elsewhere():
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname(), 5)


def test_by_default_the_admin_socket_is_in_the_run_folder(tmp_path):
    with listen_for_admin(None, tmp_path) as listener:
        assert listener.family == socket.AF_UNIX
        assert stat.S_IMODE((tmp_path / "admin.sock").stat().st_mode) == 0o600


def test_a_run_folder_of_too_long_a_path_for_a_socket_is_told_with_its_variable(tmp_path):
    with pytest.raises(ConfigError, match=r"TMPDIR: .* a shorter path"):
        listen_for_admin(None, tmp_path / ("x" * 100))


def test_a_run_folder_where_no_socket_can_be_made_is_told_with_its_variable(tmp_path):
    with pytest.raises(ConfigError, match=r"TMPDIR: .* another local folder"):
        listen_for_admin(None, tmp_path / "gone")


def test_the_admin_routes_may_have_a_port_on_loopback(tmp_path):
    with listen_for_admin("127.0.0.1:0", tmp_path) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_socket_that_a_dead_server_left_is_taken_over_and_a_live_ones_is_not(tmp_path):
    wanted = f"unix:{tmp_path / 'admin.sock'}"
    listen_for_admin(wanted, tmp_path).close()
    with listen_for_admin(wanted, tmp_path), pytest.raises(ConfigError, match="another server"):
        listen_for_admin(wanted, tmp_path)
    remove_socket(wanted)
    assert not (tmp_path / "admin.sock").exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "admin.sock"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="cannot be listened on"):
        listen_for_admin(f"unix:{path}", tmp_path)
    remove_socket(f"unix:{path}")
    assert path.read_text() == "mine"


def test_an_address_is_joined_as_urls_have_it():
    assert joined("127.0.0.1", 80) == "127.0.0.1:80"
    assert joined("::1", 80) == "[::1]:80"


def test_any_address_is_of_either_kind():
    with listen("::", 0) as listener:
        port = listener.getsockname()[1]
        for address in [local_address("::"), *(["::1"] if socket.has_dualstack_ipv6() else [])]:
            socket.create_connection((address, port), 5).close()


def test_without_ipv6_any_address_is_every_one_of_ipv4(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen("::", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
