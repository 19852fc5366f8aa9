"""The gateway as a whole: its parts put together, started and stopped in order.

Given listening sockets; knows nothing of the command line.
"""

import asyncio
import dataclasses
import functools
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
from aiohttp import web

from penstock.connection_limits import ConnectionLimits, Crowd, raise_file_limit
from penstock.fleet.autoscaler.autoscaler import Autoscaler
from penstock.fleet.autoscaler.backends.interface import BackendContext
from penstock.fleet.autoscaler.backends.registry import BACKENDS
from penstock.fleet.config import AutoscalerSection, FleetConfig
from penstock.fleet.discovery.dns import DnsDiscovery
from penstock.fleet.discovery.interface import Discovery, follow
from penstock.fleet.discovery.kubernetes import KubernetesDiscovery
from penstock.fleet.discovery.ray import RayDiscovery
from penstock.fleet.discovery.registration import Registration
from penstock.fleet.introduction import Introductions
from penstock.fleet.replica import ReplicaPool
from penstock.fleet.rollout.book import RolloutBook, RolloutMemory
from penstock.fleet.rollout.rollouts import Rollouts
from penstock.fleet.rollout.split import VersionSplit
from penstock.fleet.router.app import GatewayContext, create_admin_app, create_app
from penstock.fleet.router.block_listener import BlockListener
from penstock.fleet.router.connection import Connections, GuardedSite
from penstock.fleet.router.decisions import DecisionLog
from penstock.fleet.router.dispatch import Dispatcher
from penstock.fleet.router.file_proxy import FileProxy
from penstock.fleet.router.health import HealthMonitor
from penstock.fleet.router.metrics import GatewayMetrics
from penstock.fleet.router.policies.registry import POLICIES
from penstock.fleet.router.proxy import Proxy
from penstock.fleet.router.replica_client import ReplicaClient
from penstock.fleet.router.upstream import new_session
from penstock.fleet.supervision import keep_running
from penstock.metering.counts import StoreCounts
from penstock.metering.meter import Meter
from penstock.store.key_ring import KeyRing
from penstock.telemetry import log_event

_STATIC = "static"
_CLOSE_SECONDS = 0.5  # for connections to end, once nothing is answered any more

log = logging.getLogger("penstock.gateway")


class Gateway:
    """Make it in an event loop, `start` it, and `stop` it there."""

    def __init__(
        self,
        config: FleetConfig,
        ring: KeyRing | None = None,
        *,
        meter: Meter | None = None,
        store: str | None = None,
        fleet_secret: str | None = None,
        counts: StoreCounts | None = None,
        max_body_bytes: int = 8 * 1024 * 1024,
        limits: ConnectionLimits | None = None,
        rollout_book: RolloutBook | None = None,
        replica_environment: Mapping[str, str] | None = None,
    ) -> None:
        """`meter` counts what goes to servers that do not count themselves, and `counts` is what it tells of that.

        `store` is the identity of the store that it counts in: servers on the same one count for themselves,
        and know by its secret, `fleet_secret`, what this gateway vouches for.
        """
        self._config = config
        self._replica_environment = replica_environment or {}
        self.pool = ReplicaPool(config.health, default_key_file=config.key_file)
        ring = ring if ring is not None else KeyRing(())
        introductions = Introductions(ring, store)
        limits = limits if limits is not None else ConnectionLimits()
        limits = dataclasses.replace(limits, max_connections=min(limits.max_connections, raise_file_limit(limits)))
        self._session = new_session(config.health)
        self._client = ReplicaClient(config.health, limits)
        split = VersionSplit(config.rollouts)
        dispatcher = Dispatcher(config, self.pool, split)
        self.autoscalers = [
            self._autoscaler(model, section, dispatcher, split) for model, section in config.autoscaler.items()
        ]
        counts = counts if counts is not None else StoreCounts()
        metrics = GatewayMetrics(self.pool, dispatcher, split, counts, self.autoscalers)
        book = rollout_book if rollout_book is not None else RolloutMemory()
        self.rollouts = Rollouts(split, self.pool, self._session, book, metrics.count_shadow)
        self.registration = Registration(self.pool, config.discovery.lease_seconds)
        self.monitor = HealthMonitor(self.pool, self._session, dispatcher.call_waiting, introductions, self._client)
        connections = Connections(Crowd(limits, metrics.count_cut))
        self.context = GatewayContext(
            config=config,
            pool=self.pool,
            ring=ring,
            introductions=introductions,
            monitor=self.monitor,
            dispatcher=dispatcher,
            proxy=Proxy(self._client, dispatcher, metrics, self.rollouts.trials, fleet_secret),
            files=FileProxy(self._session, self.pool, connections),
            connections=connections,
            metrics=metrics,
            decisions=DecisionLog(),
            registration=self.registration,
            rollouts=self.rollouts,
            autoscalers=self.autoscalers,
            max_body_bytes=max_body_bytes,
            meter=meter,
        )
        self._runners: list[web.AppRunner] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self, listener: socket.socket, admin: socket.socket | None = None, *, drain_seconds: float = 30.0
    ) -> None:
        """Serve; returns when the replicas of the configuration have been asked once."""
        self.pool.replace(_STATIC, self._config.replicas)
        self._run("the watch over leases", self.registration.run)
        for discovery in self._discoveries():
            self._run(f"the discovery {discovery.name}", functools.partial(follow, discovery, self.pool))
        await self.monitor.probe_all()
        self._run("the health monitor", self.monitor.run)
        await self.rollouts.controller.look()  # before the first request: what was rolled back gets none
        self._run("the controller of rollouts", self.rollouts.controller.run)
        for autoscaler in self.autoscalers:
            self._run(f"the autoscaler of {autoscaler.model}", autoscaler.run)
        if any(POLICIES.load(name).uses_blocks for name in self._config.policies):
            self._run("the listener to block events", BlockListener(self.pool, self._session).run)
        self.context.drain_seconds = drain_seconds
        await self._listen(create_app(self.context), listener)
        if admin is not None:
            app = create_admin_app(self.context, needs_key=admin.family != socket.AF_UNIX)
            await self._listen(app, admin)

    async def stop(self) -> None:
        """Take no new requests, let open ones finish for as long as the drain may take, and let go of everything."""
        self.context.draining = True
        num_open = sum(replica.num_in_flight for replica in self.pool)
        log_event(log, "draining: open requests may finish", open_requests=num_open)
        await asyncio.gather(*[runner.cleanup() for runner in self._runners])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.rollouts.stop()
        await asyncio.gather(*[autoscaler.close() for autoscaler in self.autoscalers])
        self._client.close()
        await self._session.close()

    def cut(self) -> None:
        """End whatever callers have open, at once; `stop` has nothing to wait for then but replicas of its own."""
        self.context.connections.cut_all()

    def _discoveries(self) -> list[Discovery]:
        sections = self._config.discovery
        return [
            *[DnsDiscovery(section) for section in sections.dns],
            *[KubernetesDiscovery(section, self._session) for section in sections.kubernetes],
            *[RayDiscovery(section) for section in sections.ray],
        ]

    def _autoscaler(
        self, model: str, section: AutoscalerSection, dispatcher: Dispatcher, split: VersionSplit
    ) -> Autoscaler:
        kind = BACKENDS.load(section.backend["kind"])
        fields = {name: value for name, value in section.backend.items() if name != "kind"}
        settings = msgspec.convert(fields, kind.Settings)
        version = split.section_of(model).stable
        return Autoscaler(
            model,
            section,
            kind(settings, BackendContext(model, self.pool, self._session, self._replica_environment, version)),
            self.pool,
            num_held=lambda: dispatcher.num_waiting_for(model),
            on_change=dispatcher.call_waiting,
            on_trouble=lambda summary: dispatcher.note_trouble(model, summary),
        )

    def _run(self, name: str, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(asyncio.create_task(keep_running(name, begin)))

    async def _listen(self, app: web.Application, listener: socket.socket) -> None:
        runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a caller who leaves frees the replica at once
            shutdown_timeout=_CLOSE_SECONDS,  # the app's own drain comes before it
        )
        await runner.setup()
        self._runners.append(runner)
        await GuardedSite(runner, listener, self.context.connections).start()
