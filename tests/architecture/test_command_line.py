"""The command's surface is frozen: adding to it is a decision, not a side effect."""

import dataclasses

import pytest
import typer.main

from penstock.cli import app
from penstock.config import Options, flag

COMMANDS = ["serve", "pull", "models", "chat", "generate", "explain", "doctor", "version"]
# Commands for those who develop or operate; like the groups, their flags are their own.
TOOLS = ["gateway", "simulate", "plan-memory", "usage"]
# Groups of commands for those who develop or operate; their flags are their own.
GROUPS = {
    "bench": ["serve", "offline", "profile", "compare"],
    "deploy": ["kubernetes", "ray"],
    "keys": ["create", "list", "revoke", "rotate"],
    "rollout": ["start", "status", "abort"],
}

OPTIONS = [
    "model",
    "served_name",
    "revision",
    "load_format",
    "precision",
    "max_context_tokens",
    "chat_template",
    "cache_dir",
    "device",
    "simulated_profile",
    "threads",
    "attention_backend",
    "tensor_parallel",
    "kv_memory",
    "host_kv_memory",
    "block_tokens",
    "prefix_cache",
    "max_running",
    "max_step_tokens",
    "target_ttft_ms",
    "target_time_per_token_ms",
    "target_deadline_ms",
    "max_waiting",
    "speculative",
    "draft_tokens",
    "role",
    "host",
    "port",
    "workers",
    "keys",
    "store",
    "admin_listen",
    "shared_prefixes",
    "gateway",
    "max_body_bytes",
    "drain_seconds",
    "log_format",
]

# Flags of commands that are not options of the table.
OWN_FLAGS = {
    "pull": [],
    "models": ["--json"],
    "chat": ["--url", "--api-key", "--model", "--system", "--max-tokens", "--temperature"],
    "generate": ["--max-tokens", "--temperature"],
    "explain": ["--json"],
    "plan-memory": ["--json"],
    "doctor": ["--json"],
    "usage": ["--tenant", "--since", "--json"],
    "version": [],
    "serve": [],
    "gateway": ["--replica", "--fleet", "--policy"],
    "simulate": [
        "--profile",
        "--replicas",
        "--policy",
        "--workload",
        "--shape",
        "--shared-tokens",
        "--trace",
        "--speed",
        "--limit",
        "--rate",
        "--rates",
        "--concurrency",
        "--seed",
        "--slo-ttft",
        "--slo-tpot",
        "--json",
        "--against",
        "--autoscale",
        "--start-seconds",
    ],
}
BENCH_FLAGS = {
    "serve": [
        "--url",
        "--api-key",
        "--model",
        "--workload",
        "--shape",
        "--shared-tokens",
        "--trace",
        "--speed",
        "--limit",
        "--rate",
        "--rates",
        "--concurrency",
        "--seed",
        "--warmup",
        "--text",
        "--chat",
        "--temperature",
        "--ignore-eos",
        "--slo-ttft",
        "--slo-tpot",
        "--json",
        "--html",
    ],
    "offline": [
        "--workload",
        "--shape",
        "--shared-tokens",
        "--trace",
        "--limit",
        "--seed",
        "--warmup",
        "--temperature",
        "--ignore-eos",
        "--slo-ttft",
        "--slo-tpot",
        "--json",
        "--html",
    ],
    "profile": ["--out", "--commit"],
    "compare": [],
}
KEYS_FLAGS = {
    "create": [
        "--admin",
        "--weight",
        "--priority",
        "--models",
        "--requests-per-minute",
        "--input-tokens-per-minute",
        "--output-tokens-per-minute",
        "--concurrent-requests",
        "--tokens-per-day",
        "--longest-context",
        "--ttft-seconds",
        "--time-per-token-seconds",
        "--deadline-seconds",
        "--json",
    ],
    "list": ["--json"],
    "revoke": [],
    "rotate": ["--overlap", "--json"],
}
ROLLOUT_FLAGS = {"start": ["--fleet"], "status": ["--json", "--out"], "abort": []}
DEPLOY_FLAGS = {
    "kubernetes": [
        "--out",
        "--fleet",
        "--name",
        "--namespace",
        "--image",
        "--replicas",
        "--max-replicas",
        "--gpus",
        "--hostname",
    ],
    "ray": [
        "--address",
        "--name",
        "--replicas",
        "--max-replicas",
        "--cpus",
        "--gpus",
        "--key-file",
        "--policy",
        "--route-prefix",
        "--remove",
    ],
}
MAX_OPTIONS = 40


def flags_of(command: str, *inner: str) -> list[str]:
    """Return the long flags of a command, switches by their positive name."""
    found = typer.main.get_command(app)
    for name in (command, *inner):
        found = found.commands[name]  # type: ignore[attr-defined]
    parameters = found.params
    return [item.opts[-1] for item in parameters if item.param_type_name == "option" and item.opts[-1] != "--help"]


def test_the_options_are_frozen() -> None:
    assert [item.name for item in dataclasses.fields(Options)] == OPTIONS


def test_the_commands_are_frozen() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert sorted(commands) == sorted([*COMMANDS, *TOOLS, *GROUPS])
    for name, members in GROUPS.items():
        assert list(commands[name].commands) == members


@pytest.mark.parametrize("command", [*COMMANDS, *TOOLS])
def test_a_commands_own_flags_are_frozen(command: str) -> None:
    table = {flag(name) for name in OPTIONS} | {"--config"}
    own = [item for item in flags_of(command) if item in OWN_FLAGS[command] or item not in table]
    assert own == OWN_FLAGS[command]


def test_serve_and_explain_take_every_option() -> None:
    every = {flag(name) for name in OPTIONS if name != "model"} | {"--config"}
    assert set(flags_of("serve")) == every
    assert set(flags_of("explain")) == every | {"--json"}


@pytest.mark.parametrize("command", [["generate"], ["bench", "offline"], ["bench", "profile"]])
def test_an_engine_without_a_server_is_not_offered_what_only_servers_heed(command: list[str]) -> None:
    offered = flags_of(*command)
    assert "--max-running" in offered
    servers = {"--served-name", "--chat-template"}
    assert [item for item in offered if item in servers or item.startswith("--target-")] == []


def test_there_are_at_most_40_options() -> None:
    assert len(OPTIONS) <= MAX_OPTIONS


@pytest.mark.parametrize("command", BENCH_FLAGS)
def test_the_benchmarks_own_flags_are_frozen(command: str) -> None:
    table = {flag(name) for name in OPTIONS if name != "model"} | {"--config"}
    assert [item for item in flags_of("bench", command) if item not in table] == BENCH_FLAGS[command]


@pytest.mark.parametrize("command", KEYS_FLAGS)
def test_the_key_commands_own_flags_are_frozen(command: str) -> None:
    assert [item for item in flags_of("keys", command) if item not in ("--store", "--config")] == KEYS_FLAGS[command]


@pytest.mark.parametrize("command", ROLLOUT_FLAGS)
def test_the_rollout_commands_own_flags_are_frozen(command: str) -> None:
    own = [item for item in flags_of("rollout", command) if item not in ("--store", "--config")]
    assert own == ROLLOUT_FLAGS[command]


@pytest.mark.parametrize("command", DEPLOY_FLAGS)
def test_the_deploy_commands_own_flags_are_frozen(command: str) -> None:
    table = {flag(name) for name in OPTIONS if name != "model"} | {"--config"}
    assert [item for item in flags_of("deploy", command) if item not in table] == DEPLOY_FLAGS[command]
