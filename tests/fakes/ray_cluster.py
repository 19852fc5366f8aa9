"""A small real Ray cluster on this machine, and `penstock deploy ray` on it. Needs the extra `ray`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from penstock.deploy.ray_serve.settings import ReplicaSettings
from tests.architecture.source_tree import REPOSITORY

_STORE_BYTES = 80 * 1024 * 1024


def simulated_options(model: Path, pace: str) -> list[str]:
    """Options of `penstock serve` for a device that takes about 5 ms a token times `pace`."""
    device = ["--device", "simulated", "--simulated-profile", f"h200-llama-8b@{pace}"]
    return [str(model), "--load-format", "dummy", *device, "--store", "none"]


def simulated_replica(model: Path, pace: str, **settings: Any) -> ReplicaSettings:
    return ReplicaSettings(arguments=tuple(simulated_options(model, pace)), host="127.0.0.1", **settings)


class RayCluster:
    """Two nodes, each with a CPU, so that each has room for one replica. Use as a context manager."""

    def __init__(self, num_nodes: int = 2) -> None:
        # Actors import this checkout, whatever is installed.
        os.environ["PYTHONPATH"] = str(REPOSITORY)
        self._cluster = Cluster(initialize_head=True, head_node_args={**_node(), "include_dashboard": True})
        if num_nodes == 2:
            self.add_node()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def dashboard(self) -> str:
        return f"http://{self._cluster.webui_url}"

    def kill_node(self) -> None:
        """End the second node as a machine that loses power does."""
        self._cluster.remove_node(self._node, allow_graceful=False)

    def add_node(self, **arguments: Any) -> None:
        self._node = self._cluster.add_node(**{**_node(), **arguments})

    def deploy(self, *arguments: str, seconds: float = 180.0) -> str:
        """Run the command; return what it printed."""
        command = [sys.executable, "-m", "penstock", "deploy", "ray", "--address", self.address, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()


def _node() -> dict[str, Any]:
    return {"num_cpus": 1, "object_store_memory": _STORE_BYTES}
