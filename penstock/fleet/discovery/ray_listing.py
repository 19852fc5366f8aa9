"""The process that asks a Ray cluster for an application's replicas: a line in, a line of JSON out.

A process of its own, because Ray ends the process of a driver whose cluster is gone for long, and a gateway must not
end with it. It ends itself when its standard input does, or when the cluster cannot be asked.
"""

import logging
import sys

import msgspec
import ray
from ray.exceptions import RayError

from penstock.fleet.discovery.ray_directory import NAMESPACE, directory_name
from penstock.stop_signals import leave_to_owner

_ANSWER_SECONDS = 10.0


def main(address: str, application: str) -> int:
    """Answer until there is nothing more to answer; return the exit status."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        leave_to_owner()  # behind Ray, which has handlers of its own
        for _ in sys.stdin:
            sys.stdout.write(msgspec.json.encode(_urls(application)).decode() + "\n")
            sys.stdout.flush()
    except (ConnectionError, RayError, RuntimeError) as error:
        print(f"the Ray cluster cannot be asked: {error}", file=sys.stderr)
        return 1
    return 0


def _urls(application: str) -> list[str]:
    try:
        directory = ray.get_actor(directory_name(application), namespace=NAMESPACE)
    except ValueError:
        return []  # nothing of this name is deployed, or nothing of it runs yet
    urls: list[str] = ray.get(directory.urls.remote(), timeout=_ANSWER_SECONDS)
    return urls


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
