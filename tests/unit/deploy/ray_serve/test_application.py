"""What Ray Serve is told, without a cluster."""

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'penstock[ray]'")

from penstock.deploy.ray_serve.application import build, deployment_options
from penstock.deploy.ray_serve.request_router import PolicyRouter
from penstock.deploy.ray_serve.scaling import ControllerPolicy
from penstock.deploy.ray_serve.settings import ApplicationSettings, ReplicaSettings


def options(replica=None, **settings):
    return deployment_options(ApplicationSettings(replica=replica or ReplicaSettings(), **settings))


def test_ranks_are_packed_on_one_node():
    told = options(ReplicaSettings(num_ranks=2, cpus_per_rank=1, gpus_per_rank=1))
    assert told["placement_group_bundles"] == [{"CPU": 1, "GPU": 1}] * 2
    assert told["placement_group_strategy"] == "STRICT_PACK"
    assert told["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}


def test_ray_waits_for_a_drain():
    assert options(ReplicaSettings(drain_seconds=100))["graceful_shutdown_timeout_s"] > 100


def test_our_router_routes_by_the_policy_that_was_named():
    config = options(policy="session-affinity")["request_router_config"]
    assert config.get_request_router_class().__name__ == PolicyRouter.__name__
    assert config.request_router_kwargs == {"policy": "session-affinity"}


def test_a_fixed_number_is_not_scaled_by_serve():
    told = options(num_replicas=3)
    assert told["num_replicas"] == 3
    assert "autoscaling_config" not in told


def test_our_controller_scales_between_the_limits():
    config = options(num_replicas=1, max_replicas=5)["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas) == (1, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0.0, 0.0)
    assert config.policy.get_policy().__name__ == ControllerPolicy.__name__
    assert config.policy.get_policy()(**config.policy.policy_kwargs)


def test_serves_own_configuration_files_can_name_it():
    application = build({"name": "fleet", "replicas": 2, "options": {"device": "simulated", "host": "127.0.0.1"}})
    assert application._bound_deployment.num_replicas == 2
    (replica,) = application._bound_deployment.init_args
    assert (replica["application"], replica["arguments"]) == ("fleet", ("--device", "simulated"))
