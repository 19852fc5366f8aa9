"""What works on this machine and cannot in a cluster: refused, with what to write instead, before it is deployed.

Looks at a server's options and the gateway's fleet file. Knows nothing of manifests.
"""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config import Options, flag
from penstock.deploy.kubernetes.settings import Settings
from penstock.errors import ConfigError
from penstock.fleet.config import FleetConfig
from penstock.loopback import is_loopback
from penstock.server.registration import read_gateways

_FLEET = "--fleet"
_ANY_HOST = "::"  # where a pod's server listens
_UNREACHABLE = "in a pod that is the pod itself: give an address that pods reach"


def refuse_local_options(options: Options, settings: Settings, cache_folder: str) -> None:
    """Raise ConfigError where a server's options name what only this machine has."""
    model = options.model
    if is_path(model) and not settings.model_in_image:
        in_claim = settings.cache_claim and Path(model).is_relative_to(cache_folder)
        if not in_claim:
            right = (
                "pods do not have this path: give a hub id; or a path below "
                f"{cache_folder} and, in [deploy], cache_claim, which holds it; or set model_in_image = true there"
            )
            raise ConfigError("model", model, right)
    profile = options.simulated_profile
    if is_path(profile.partition("@")[0]):
        raise ConfigError(flag("simulated_profile"), profile, "pods do not have this file: give a profile by its name")
    for address in read_gateways(options.gateway, _ANY_HOST) if options.gateway is not None else ():
        if address.strip().startswith("unix:") or _is_loopback(_host(address)):
            right = (
                "in a cluster gateways find the servers themselves: leave it out, or give an address that pods reach"
            )
            raise ConfigError(flag("gateway"), address, right)


def refuse_local_fleet(fleet: FleetConfig, settings: Settings, key_file: str) -> None:
    """Raise ConfigError where a fleet file names what only this machine has. `key_file` is the one that pods have."""
    for where, path in _key_files(fleet):
        if path is not None and path != key_file:
            right = f"pods do not have this file: give {key_file}, where the key of {settings.metrics_secret_name} is"
            raise ConfigError(f"{_FLEET}: {where}", path, f"{right}, or leave it out")
    for place, entry in enumerate(fleet.replicas):
        if _is_loopback(_host(entry.url)):
            raise ConfigError(f"{_FLEET}: replicas[{place}].url", entry.url, _UNREACHABLE)
    for place, section in enumerate(fleet.discovery.dns):
        if _is_loopback(section.name):
            raise ConfigError(f"{_FLEET}: discovery.dns[{place}].name", section.name, _UNREACHABLE)
    for place, ray in enumerate(fleet.discovery.ray):
        if ray.address == "auto" or _is_loopback(_host(ray.address)):
            right = "no Ray cluster is in the gateway's pod: give one that pods reach, such as ray://HEAD:10001"
            raise ConfigError(f"{_FLEET}: discovery.ray[{place}].address", ray.address, right)
    for model, autoscaler in fleet.autoscaler.items():
        _refuse_local_backend(f"{_FLEET}: autoscaler.{model}.backend", autoscaler.backend, settings)


def _refuse_local_backend(where: str, backend: dict[str, object], settings: Settings) -> None:
    kind = backend["kind"]
    ours = f'{{ kind = "kubernetes", deployment = "{settings.name}" }}'
    if kind == "local":
        right = f"pods start no servers: give {ours}, with gateway_scales = true in [deploy], or leave scaling to KEDA"
        raise ConfigError(f"{where}.kind", kind, right)
    if kind == "kubernetes":
        if not settings.gateway_scales:
            right = "the gateway may not, and KEDA scales: set gateway_scales = true in [deploy], or leave this out"
            raise ConfigError(f"{where}.kind", kind, right)
        if backend["deployment"] != settings.name:
            right = f"give {settings.name}: that is the one whose scale the gateway may change"
            raise ConfigError(f"{where}.deployment", backend["deployment"], right)
    if kind == "ray":
        dashboard = str(backend.get("dashboard", "http://127.0.0.1:8265"))
        if _is_loopback(_host(dashboard)):
            raise ConfigError(f"{where}.dashboard", dashboard, _UNREACHABLE)


def _key_files(fleet: FleetConfig) -> Iterator[tuple[str, str | None]]:
    """Every file of a key that the fleet names, and where."""
    yield "key_file", fleet.key_file
    for place, entry in enumerate(fleet.replicas):
        yield f"replicas[{place}].key_file", entry.key_file
    found = {
        "dns": [section.key_file for section in fleet.discovery.dns],
        "kubernetes": [section.key_file for section in fleet.discovery.kubernetes],
        "ray": [section.key_file for section in fleet.discovery.ray],
    }
    for name, paths in found.items():
        for place, path in enumerate(paths):
            yield f"discovery.{name}[{place}].key_file", path


def is_path(name: str) -> bool:
    """Whether a model is named by where it is."""
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf"):
        return True
    try:
        return Path(name).exists()
    except OSError:  # too long for a file's name, say
        return False


def _host(url: str) -> str:
    try:
        return urlsplit(url.strip() if "//" in url else f"//{url.strip()}").hostname or ""
    except ValueError:  # no URL at all, which is for others to say
        return ""


def _is_loopback(host: str) -> bool:
    """Whether a host is the machine that asks."""
    return is_loopback(host) or host.endswith(".localhost") or host in ("0.0.0.0", "::")
