"""The public options: one table, one source of truth for flags, environment, file and `penstock explain`.

`None` means "auto": a value is chosen once, from the model and the device, by the component that owns the option
(`engine.config.resolve` and `server.config.resolve`), and explained. Knows nothing of models, devices or HTTP.

An option is taken from the first of: the command line, the environment (PENSTOCK_MAX_RUNNING for --max-running), the
TOML file named by --config, the default.
"""

import dataclasses
import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError

_PREFIX = "PENSTOCK_"
COMMAND_LINE = "command line"  # a source
_OTHER_VARIABLES = frozenset({"PENSTOCK_API_KEY"})  # the key that commands send to servers and gateways

Group = Literal["model", "device", "memory", "scheduler", "server"]

_MOST_BYTES = float(2**63)  # more than any memory; what is too much for this one is refused by whoever takes it
_DEPLOY_TABLE = "deploy"  # a table of the file that is not about serving: `penstock deploy` reads it


def _option(group: Group, help: str, default: Any, **limits: Any) -> Any:
    return field(default=default, metadata={"group": group, "help": help, **limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the operator asked for. Every field is a public option; a test freezes the list."""

    model: str = _option("model", "Alias, Hugging Face folder, .gguf file or hub id", "smollm2-135m")
    served_name: str | None = _option("model", "Model name that clients use", None)
    revision: str | None = _option("model", "Branch, tag or commit of a hub model", None)
    load_format: str = _option(
        "model", "Where weights come from; dummy: random, for benchmarks", "auto", choices=("auto", "dummy")
    )
    precision: str = _option(
        "model",
        "auto: the fastest that passes the accuracy check; exact: float32, the reference's tokens",
        "auto",
        choices=("auto", "exact", "float32", "bfloat16", "float16"),
    )
    max_context_tokens: int | None = _option("model", "Longest prompt plus answer", None, low=16)
    chat_template: str | None = _option("model", "Jinja file that replaces the model's chat template", None)
    cache_dir: str | None = _option("model", "Folder for fetched models and what was found out about devices", None)

    device: str = _option("device", "Where the model runs", "auto", choices=("auto", "cpu", "cuda", "simulated"))
    simulated_profile: str = _option(
        "device",
        "What --device simulated is like: a name or file; NAME@0.1 takes a tenth of the time",
        "h200-llama-8b",
    )
    threads: int | None = _option("device", "CPU threads for tensor work", None, low=1, high=1024)
    attention_backend: str | None = _option("device", "Attention implementation", None)
    tensor_parallel: int = _option("device", "Ranks that share each layer", 1, low=1, high=1)

    kv_memory: str | None = _option("memory", "Bytes for the KV cache, such as 2GiB", None)
    host_kv_memory: str = _option("memory", "Host bytes for blocks evicted from the KV cache, such as 4GiB", "0")
    block_tokens: int = _option("memory", "Tokens in a KV block", 16, low=8, high=256)
    prefix_cache: bool = _option("memory", "Reuse the KV of equal prompt beginnings", True)

    max_running: int | None = _option("scheduler", "Most requests in one step", None, low=1, high=4096)
    max_step_tokens: int | None = _option("scheduler", "Most tokens in one step (sizes prefill chunks)", None, low=1)
    target_ttft_ms: float | None = _option(
        "scheduler", "Time to first token that is promised where a request names none; else none is", None, low=1.0
    )
    target_time_per_token_ms: float | None = _option(
        "scheduler", "Mean time per token that is promised where a request names none; else none is", None, low=0.1
    )
    target_deadline_ms: float | None = _option(
        "scheduler", "Time after which a request ends that names none, whatever it has; else none does", None, low=1.0
    )
    max_waiting: int = _option(
        "scheduler", "Most requests in the queue, of batches as many again; more get 429", 1024, low=0
    )
    speculative: str = _option(
        "scheduler",
        "Guess tokens and verify several per step; the output stays the same",
        "none",
        choices=("none", "ngram"),
    )
    draft_tokens: int = _option("scheduler", "Most guesses per request and step", 4, low=1, high=32)
    role: str = _option(
        "scheduler",
        "What the engine does; prefill: end requests with their first token and keep their KV for export",
        "both",
        choices=("both", "prefill"),
    )

    host: str = _option("server", "Address to listen on; beyond loopback needs keys", "127.0.0.1")
    port: int = _option("server", "Port to listen on", 8000, low=0, high=65535)
    workers: int | None = _option("server", "API worker processes", None, low=1, high=64)
    keys: str | None = _option("server", "TOML file of API keys (default: those in the store)", None)
    store: str | None = _option(
        "server", "Keys, limits and usage: a file, a PostgreSQL URL, or none (default: in your state folder)", None
    )
    admin_listen: str | None = _option(
        "server", "Admin routes: ADDRESS:PORT on loopback, or unix:PATH (default: a socket in the run folder)", None
    )
    shared_prefixes: str | None = _option(
        "server", "TOML file of prompt beginnings whose cached blocks all tenants share", None
    )
    gateway: str | None = _option(
        "server", "Gateways to register with: URLs, or unix:PATH of an admin socket, with commas between", None
    )
    max_body_bytes: int = _option("server", "Largest request body", 8 * 1024 * 1024, low=1024)
    drain_seconds: float = _option("server", "How long open requests may go on after SIGTERM", 30.0, low=0.0)
    log_format: str = _option("server", "How log lines look", "auto", choices=("auto", "json", "text"))


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved option: what `penstock explain` prints."""

    option: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Sourced:
    """Options and, for each that was given, where it came from."""

    options: Options
    sources: Mapping[str, str]
    deploy: Mapping[str, Any] = field(default_factory=dict)  # the file's [deploy] table, as it stands there

    def why(self, name: str) -> str:
        return self.sources.get(name, "default")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def gather(
    given: Mapping[str, Any],
    *,
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
    offered: Collection[str] = (),
) -> Sourced:
    """Merge the command line, environment and file over the defaults, and check every value.

    `given` holds the options that the command line named; a value of None counts as not given. `defaults` go before
    the table's. `offered` are the options to name to whoever gave one that there is not: all, where none are told.
    """
    fields = {item.name: item for item in dataclasses.fields(Options)}
    types_of = typing.get_type_hints(Options)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    deploy: dict[str, Any] = {}

    def take(name: str, value: Any, source: str, shown: str) -> None:
        if name not in fields:
            close = ", ".join(flag(other) for other in fields if not offered or other in offered)
            raise ConfigError(shown, value, f"there is no such option; the options are: {close}")
        values[name] = _convert(shown, value, types_of[name], fields[name].metadata)
        sources[name] = source

    if file is not None:
        entries = _read_file(file)
        deploy = entries.pop(_DEPLOY_TABLE, {})
        if not isinstance(deploy, dict):
            raise ConfigError(_DEPLOY_TABLE, deploy, f"give a table: [{_DEPLOY_TABLE}], and its settings below")
        for name, value in entries.items():
            take(name.replace("-", "_"), value, f"file {file}", name)
    for name in fields:
        variable = _variable(name)
        if variable in environ:
            take(name, environ[variable], f"environment {variable}", variable)
    for name, value in given.items():
        if value is not None:
            take(name, value, COMMAND_LINE, flag(name))
    return Sourced(Options(**{**defaults, **values}), sources, deploy)


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable that looks like an option's but is none."""
    known = {*(_variable(item.name) for item in dataclasses.fields(Options)), *_OTHER_VARIABLES}
    # Compared without what all have in common, or any would be near.
    names = {variable.removeprefix(_PREFIX): variable for variable in sorted(known)}
    sentences = []
    for variable in sorted(environ):
        if variable.startswith(_PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable.removeprefix(_PREFIX), names, n=1)
            advice = f"did you mean {names[close[0]]}?" if close else "`penstock explain` lists the options"
            sentences.append(f"{variable} is no option and is ignored; {advice}")
    return sentences


def parse_bytes(option: str, text: str) -> int:
    """Return the number of bytes in "512MiB", "2GB" or "1048576"."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in units:
        raise ConfigError(option, text, "give a number of bytes such as 512MiB or 2GiB")
    return int(min(float(match[1]) * units[match[2].upper()], _MOST_BYTES))


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError("--config", str(file), f"it cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--config", str(file), f"it is not valid TOML: {error}") from error


def _convert(shown: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
    """Check a raw value against its type and limits, and return it typed."""
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if kind is bool:
        return _to_bool(shown, value)
    if kind in (int, float):
        return to_number(shown, value, kind, limits["low"], limits.get("high", math.inf))
    text = str(value)
    if "choices" in limits and text not in limits["choices"]:
        raise ConfigError(shown, value, f"give one of: {', '.join(limits['choices'])}")
    return text


def _to_bool(shown: str, value: Any) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    word = str(value).lower()
    if word not in words:
        raise ConfigError(shown, value, "give true or false")
    return words[word]


def to_number(
    shown: str, value: Any, kind: type[int] | type[float], low: float, high: float = math.inf, *, open_low: bool = False
) -> int | float:
    """Return a finite number from `low` (over it, with `open_low`) to `high`. Raises ConfigError."""
    number = _read_number(value, kind)
    if number is None or number < low or number > high or (open_low and number == low):
        if low == high:
            raise ConfigError(shown, value, f"give {low:g}, the only value there is so far")
        what = "a whole number" if kind is int else "a number"
        least = f"over {low:g}" if open_low else f"of at least {low:g}" if high == math.inf else f"from {low:g}"
        most = "" if high == math.inf else f" {'and at most' if open_low else 'to'} {high:.15g}"
        raise ConfigError(shown, value, f"give {what} {least}{most}")
    return number


def _read_number(value: Any, kind: type[int] | type[float]) -> int | float | None:
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        return None
    try:
        number = kind(value)
        return number if math.isfinite(number) else None
    except (ValueError, TypeError, OverflowError):
        return None
