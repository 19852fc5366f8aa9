"""The server's own configuration: resolved once from the options, frozen, explained.

Also reads what the options name, so that a wrong file is an error at start-up: the keys, the chat template and the
shared prefixes. The store is opened later, by `server.store_opening`. Knows nothing of the engine.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock import machine
from penstock.config import Options, Setting, Sourced
from penstock.errors import ConfigError
from penstock.home_folder import expand_home
from penstock.loopback import is_loopback
from penstock.request import Targets
from penstock.server.prefix_file import DeclaredPrefix, load_prefixes
from penstock.server.registration import read_gateways
from penstock.server.template_file import read_template
from penstock.store.key_ring import load_keys
from penstock.store.location import NO_STORE, default_location, shown
from penstock.telemetry import LogFormat
from penstock.tenants import ApiKey

_CORES_PER_WORKER = 8
_MAX_AUTO_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str
    port: int
    workers: int
    served_name: str
    keys: tuple[ApiKey, ...]  # as they were at the start; those of the store come with `prepare_store`
    keys_file: str | None = None  # where they come from; None: from the store
    needs_keys: bool = False  # else, without keys, open to anyone who can connect
    store: str | None = None  # a path or URL; None: no usage is kept, and no key has limits
    store_is_default: bool = False
    admin: str | None = None  # ADDRESS:PORT or unix:PATH; None: a socket in the run folder
    shared_prefixes: tuple[DeclaredPrefix, ...] = ()
    gateways: tuple[str, ...] = ()  # to register with
    chat_template: str | None  # the template's text, where it replaces the model's
    targets: Targets  # promised where neither the request nor its key names any
    max_body_bytes: int
    drain_seconds: float
    log_format: LogFormat


def resolve(sourced: Sourced) -> tuple[ServerConfig, list[Setting]]:
    """Return the configuration and why each value is what it is. Raises ConfigError."""
    options = sourced.options
    store = None if options.store == NO_STORE else options.store or default_location()
    keys = load_keys(options.keys) if options.keys is not None else ()
    _check_host(options.host, store, has_keys_file=bool(keys))
    if store is None and any(key.terms.limits.are_metered for key in keys):
        raise ConfigError("--store", options.store, "keys with limits need a store to count in; leave --store out")
    _check_admin(options.admin_listen)
    workers, why_workers = _workers(sourced)
    log_format, why_log_format = _log_format(sourced)
    served_name, why_served_name = _served_name(sourced)
    config = ServerConfig(
        host=options.host,
        port=options.port,
        workers=workers,
        served_name=served_name,
        keys=keys,
        keys_file=options.keys,
        needs_keys=bool(keys) or not is_loopback(options.host),
        store=store,
        store_is_default=options.store is None,
        admin=options.admin_listen,
        shared_prefixes=load_prefixes(options.shared_prefixes) if options.shared_prefixes is not None else (),
        gateways=read_gateways(options.gateway, options.host) if options.gateway is not None else (),
        chat_template=read_template(options.chat_template) if options.chat_template is not None else None,
        targets=Targets(
            *map(_seconds, (options.target_ttft_ms, options.target_time_per_token_ms, options.target_deadline_ms))
        ),
        max_body_bytes=options.max_body_bytes,
        drain_seconds=options.drain_seconds,
        log_format=log_format,
    )
    settings = [
        Setting("served_name", served_name, why_served_name),
        Setting("chat_template", options.chat_template or "the model's own", sourced.why("chat_template")),
        Setting("host", options.host, sourced.why("host")),
        Setting("port", str(options.port), sourced.why("port")),
        Setting("workers", str(workers), why_workers),
        Setting("keys", _describe_keys(options, keys, store), sourced.why("keys")),
        Setting("store", NO_STORE if store is None else shown(store), sourced.why("store")),
        Setting("admin_listen", options.admin_listen or "a socket in the run folder", sourced.why("admin_listen")),
        Setting("shared_prefixes", options.shared_prefixes or "none", sourced.why("shared_prefixes")),
        Setting("gateway", options.gateway or "none", sourced.why("gateway")),
        Setting("target_ttft_ms", _shown(options.target_ttft_ms), sourced.why("target_ttft_ms")),
        Setting(
            "target_time_per_token_ms",
            _shown(options.target_time_per_token_ms),
            sourced.why("target_time_per_token_ms"),
        ),
        Setting("target_deadline_ms", _shown(options.target_deadline_ms), sourced.why("target_deadline_ms")),
        Setting("max_body_bytes", str(options.max_body_bytes), sourced.why("max_body_bytes")),
        Setting("drain_seconds", f"{options.drain_seconds:g}", sourced.why("drain_seconds")),
        Setting("log_format", log_format, why_log_format),
    ]
    return config, settings


def admin_address(text: str) -> tuple[str, int] | Path:
    """Return what `--admin-listen` names: an address and a port, or a Unix socket's path. Raises ConfigError."""
    if text.startswith("unix:"):
        return expand_home(text.removeprefix("unix:")).absolute()
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or int(port) > 65535 or not is_loopback(host):
        raise ConfigError("--admin-listen", text, "give unix:PATH, or a loopback address such as 127.0.0.1:8001")
    return host, int(port)


def _check_admin(text: str | None) -> None:
    if text is not None:
        admin_address(text)


def _check_host(host: str, store: str | None, *, has_keys_file: bool) -> None:
    """Raise unless the address is loopback's or callers will need keys."""
    if is_loopback(host) or has_keys_file:
        return
    # Only here must the store be asked before the port is bound; its database takes long to load.
    from penstock.server.store_opening import had_keys

    if store is None or not had_keys(store):
        right = "beyond loopback API keys are needed: penstock keys create NAME, --keys FILE, or --host 127.0.0.1"
        raise ConfigError("--host", host, right)


def _describe_keys(options: Options, keys: tuple[ApiKey, ...], store: str | None) -> str:
    if options.keys is not None:
        return f"{options.keys} ({len(keys)} keys)"
    return "none: open" if store is None else "those in the store; without any: open"


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _shown(milliseconds: float | None) -> str:
    return "none" if milliseconds is None else f"{milliseconds:g}"


def _workers(sourced: Sourced) -> tuple[int, str]:
    if sourced.options.workers is not None:
        return sourced.options.workers, sourced.why("workers")
    cores = machine.usable_cores()
    workers = max(1, min(int(cores / _CORES_PER_WORKER), _MAX_AUTO_WORKERS))
    why = f"auto: one for each {_CORES_PER_WORKER} of {cores:g} cores, at least 1, at most {_MAX_AUTO_WORKERS}"
    return workers, why


def _log_format(sourced: Sourced) -> tuple[LogFormat, str]:
    wanted = sourced.options.log_format
    if wanted == "auto":
        if sys.stderr.isatty():
            return "text", "auto: standard error is a terminal"
        return "json", "auto: standard error is not a terminal"
    return ("json" if wanted == "json" else "text"), sourced.why("log_format")


def _served_name(sourced: Sourced) -> tuple[str, str]:
    options: Options = sourced.options
    if options.served_name is not None:
        if not options.served_name.strip():
            raise ConfigError("--served-name", options.served_name, "give a name, or leave it out")
        return options.served_name, sourced.why("served_name")
    path = expand_home(options.model)
    if path.suffix.lower() == ".gguf":
        return path.stem, "auto: the model file's name"
    if path.name == "config.json":
        path = path.parent  # of random weights
    if os.path.isdir(path):  # False also of a name that no folder can have
        return os.path.basename(os.path.abspath(path)), "auto: the model folder's name"
    return options.model, "auto: the model's name"
