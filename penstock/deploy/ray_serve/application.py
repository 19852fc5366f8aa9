"""Replicas on a Ray cluster as one Ray Serve application: made from settings, started, taken away.

Knows nothing of the command line, and of gateways only that they find the replicas themselves.
"""

import logging
from dataclasses import asdict
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from penstock.config import gather
from penstock.deploy.ray_serve.ranks import STRATEGY
from penstock.deploy.ray_serve.replica import PenstockReplica
from penstock.deploy.ray_serve.request_router import PolicyRouter
from penstock.deploy.ray_serve.scaling import ControllerPolicy
from penstock.deploy.ray_serve.settings import DEPLOYMENT, ApplicationSettings, Wanted, make_settings
from penstock.errors import ConfigError, RemoteError
from penstock.fleet.discovery.ray_directory import NAMESPACE, directory_name

_STOP_SECONDS = 30.0  # behind a drain
_HEALTH_PERIOD_SECONDS = 5.0
_HEALTH_TIMEOUT_SECONDS = 10.0
_ROUTING_STATS_SECONDS = 2.0
# Requests that come through Serve: the server beside the replica has its own queue and its own limits.
_MAX_ONGOING = 4096


def connect(address: str) -> None:
    """Join a cluster. Raises ConfigError where there is none."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError("--address", address, "no Ray cluster is there; start one: ray start --head") from error


def has_gpus() -> bool:
    """Whether the cluster has any; after `connect`."""
    return bool(ray.cluster_resources().get("GPU"))


def deployment_options(settings: ApplicationSettings) -> dict[str, Any]:
    """Return what Serve is told of the deployment."""
    replica = settings.replica
    first = replica.bundles[0]
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": {"num_cpus": first.get("CPU", 0), "num_gpus": first.get("GPU", 0)},
        "placement_group_bundles": replica.bundles,
        "placement_group_strategy": STRATEGY,
        "max_ongoing_requests": _MAX_ONGOING,
        "health_check_period_s": _HEALTH_PERIOD_SECONDS,
        "health_check_timeout_s": _HEALTH_TIMEOUT_SECONDS,
        "graceful_shutdown_timeout_s": replica.drain_seconds + _STOP_SECONDS,
        "request_router_config": RequestRouterConfig(
            request_router_class=PolicyRouter,
            request_router_kwargs={"policy": settings.policy},
            request_routing_stats_period_s=_ROUTING_STATS_SECONDS,
        ),
    }
    if settings.max_replicas is None:
        return {**options, "num_replicas": settings.num_replicas}
    limits = {"min_replicas": settings.num_replicas, "max_replicas": settings.max_replicas}
    policy = AutoscalingPolicy(policy_function=ControllerPolicy, policy_kwargs={**settings.scaling, **limits})
    # Serve would delay any policy's decisions by half a minute up and ten minutes down; ours has its own cooldowns.
    config = AutoscalingConfig(policy=policy, upscale_delay_s=0.0, downscale_delay_s=0.0, **limits)
    return {**options, "autoscaling_config": config}


def build(arguments: dict[str, Any]) -> Application:
    """Return the application, for Serve's own configuration files and KubeRay's RayService.

    `arguments` are those of `penstock deploy ray`: `options` holds the server's by name, beside it `name`, `replicas`
    and so on. Raises ConfigError.
    """
    given = dict(arguments)
    sourced = gather(given.pop("options", {}), environ={})
    return _bound(make_settings(sourced, msgspec.convert(given, Wanted)))


def start(settings: ApplicationSettings) -> None:
    """Start the replicas, or change those that run; return when they are ready.

    Raises RemoteError, and ConfigError for a route prefix where Ray Serve already runs without proxies.
    """
    try:
        # Without a prefix nothing needs proxies. Where Serve runs already, it stays as it was started.
        serve.start(proxy_location="Disabled" if settings.route_prefix is None else "EveryNode")
        serve.run(
            _bound(settings),
            name=settings.name,
            route_prefix=settings.route_prefix,
            external_scaler_enabled=settings.max_replicas is None,
        )
    except (RuntimeError, RayError, RayServeException) as error:
        raise RemoteError(f"Ray Serve could not start the replicas: {error}") from error
    if settings.route_prefix is not None and not serve.status().proxies:
        right = "Ray Serve was started without proxies, and is so until `serve shutdown`"
        raise ConfigError("--route-prefix", settings.route_prefix, right)


def _bound(settings: ApplicationSettings) -> Application:
    return serve.deployment(**deployment_options(settings))(PenstockReplica).bind(asdict(settings.replica))


def remove(application: str) -> None:
    """Drain the replicas and take the application away. Raises RemoteError where there is none."""
    status = serve.status().applications.get(application)
    if status is None or status.status is ApplicationStatus.DELETING:
        raise RemoteError(f"no application {application!r} runs on this cluster")
    serve.delete(application)
    try:
        ray.kill(ray.get_actor(directory_name(application), namespace=NAMESPACE))
    except ValueError:
        return  # it never had a replica
