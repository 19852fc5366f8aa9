"""`penstock gateway`: one address in front of any number of servers."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from penstock import telemetry
from penstock.config import Sourced
from penstock.fleet.config import FleetConfig
from penstock.fleet.fleet_file import check_key_files, check_not_itself, read_fleet
from penstock.fleet.gateway import Gateway
from penstock.loopback import local_address
from penstock.metering.counts import StoreCounts
from penstock.metering.tenancy import Tenancy
from penstock.run_folder import run_folder
from penstock.server import config as server_config
from penstock.server.config import ServerConfig
from penstock.server.listeners import joined, listen, listen_for_admin, remove_socket
from penstock.server.store_opening import prepare_store
from penstock.stop_signals import stop_signals
from penstock.store.database import Database
from penstock.store.rollouts import RolloutStore

_CUT_SECONDS = 1.0  # for what was cut to be noted


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command's own flags."""

    replicas: Sequence[str]
    fleet: Path | None
    policy: str | None


def run(sourced: Sourced, wanted: Wanted) -> int:
    """Serve until told to stop; return the exit status."""
    fleet = read_fleet(wanted.fleet, wanted.replicas, wanted.policy)
    config, _ = server_config.resolve(sourced)
    check_key_files(fleet)
    check_not_itself(fleet, config.host, config.port)
    telemetry.configure_logging(config.log_format, process="gateway")
    with run_folder("gateway-") as folder:
        try:
            listener, admin = listen(config.host, config.port), listen_for_admin(config.admin, folder)
            config = prepare_store(config)
            # What was imported stays: a full collection need not look through all of it, which holds up every stream.
            gc.collect()
            gc.freeze()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(config, fleet, listener, admin))
        finally:
            remove_socket(config.admin)
    return 0


async def _serve(config: ServerConfig, fleet: FleetConfig, listener: socket.socket, admin: socket.socket) -> None:
    stopping, leaving = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (leaving if stopping.is_set() else stopping).set()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    counts = StoreCounts()
    database = Database.open(config.store) if config.store is not None else None
    tenancy = Tenancy(config, counts, database)
    tenancy.start()
    # Without a store nobody can be counted, and keys with limits were refused.
    meter = tenancy.meter if database is not None else None
    gateway = Gateway(
        fleet,
        tenancy.ring,
        meter=meter,
        store=tenancy.store_identity,
        fleet_secret=tenancy.fleet_secret,
        counts=counts,
        max_body_bytes=config.max_body_bytes,
        rollout_book=RolloutStore(database) if database is not None else None,
        # Replicas that are started here keep the same limits and books, unless they are told otherwise.
        replica_environment={"PENSTOCK_STORE": config.store or "none"},
    )
    try:
        await gateway.start(listener, admin, drain_seconds=config.drain_seconds)
        _announce(gateway, listener, admin)
        await stopping.wait()
    finally:
        await _stop(gateway, leaving)
        await tenancy.close()


async def _stop(gateway: Gateway, leaving: asyncio.Event) -> None:
    """Drain, but end what is open where the second signal comes. Replicas that were started here end with us."""
    draining, hurry = asyncio.create_task(gateway.stop()), asyncio.create_task(leaving.wait())
    await asyncio.wait((draining, hurry), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        gateway.cut()
        await asyncio.wait((draining,), timeout=_CUT_SECONDS)
    hurry.cancel()
    draining.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await draining


def _announce(gateway: Gateway, listener: socket.socket, admin: socket.socket) -> None:
    console = Console()
    host, port = listener.getsockname()[:2]
    name = admin.getsockname()
    where = f"unix:{name}" if admin.family == socket.AF_UNIX else f"http://{joined(*name[:2])}"
    num_up = sum(replica.is_up for replica in gateway.pool)
    url = f"http://{joined(local_address(host), port)}"
    console.print(f"Gateway: {url}/v1", soft_wrap=True, highlight=False, markup=False)
    console.print(f"Admin:   {where}", soft_wrap=True, highlight=False, markup=False)
    console.print(
        f"Ready:   {num_up} of {len(gateway.pool)} replicas; models: {', '.join(sorted(gateway.pool.models())) or '–'}",
        soft_wrap=True, highlight=False, markup=False,
    )  # fmt: skip
