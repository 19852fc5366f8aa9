"""`penstock deploy`: what it writes, and what it tells."""

from pathlib import Path

import pytest
import yaml

from penstock.cli import main


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_STORE", "PENSTOCK_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> int:
    try:
        return main(["deploy", "kubernetes", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_it_writes_one_file_for_each_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run("Qwen/Qwen3-8B", "--out", str(out), "--image", "registry.example.com/penstock:1", "--gpus", "1") == 0
    deployment = yaml.safe_load((out / "servers/deployment.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.com/penstock:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert 'model = "Qwen/Qwen3-8B"' in (out / "core/server-configmap.yaml").read_text()
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert told[-4:] == [  # a Secret needs its namespace, and a pod its Secrets
        f"kubectl apply -f {out}/core/00-namespace.yaml",
        "kubectl -n penstock create secret generic penstock-keys --from-file=keys.toml",
        'kubectl -n penstock create secret generic penstock-metrics --from-literal=key="$KEY"',
        f"kubectl apply -f {out}/core -f {out}/servers",
    ]


def test_every_secret_that_a_pod_needs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "penstock.toml"
    names = ("store", "hub", "metrics", "keys")
    config.write_text("[deploy]\n" + "".join(f'{name}_secret = "our-{name}"\n' for name in names))
    assert run("--config", str(config), "--out", str(tmp_path / "out")) == 0
    told = capsys.readouterr().out
    for secret in ("our-store --from-literal=url=", "our-hub --from-literal=token=", "our-keys", "our-metrics"):
        assert f"create secret generic {secret}" in told


def test_options_that_the_cluster_decides_are_said_to_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text("port = 9000\n")  # for `penstock serve`, which reads the same file
    assert run("--out", str(tmp_path), "--config", str(config)) == 0
    assert "Left out, because the cluster decides: --port" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["--port=80", "--host=10.0.0.1", "--admin-listen=127.0.0.1:9", "--cache-dir=/x"])
def test_an_address_that_the_command_names_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    assert run("--out", str(tmp_path / "out"), given) == 2
    error = capsys.readouterr().err
    assert given.partition("=")[0] in error
    assert "leave it out" in error
    assert not (tmp_path / "out").exists()


def test_a_store_is_to_be_named_as_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", str(tmp_path), "--store", "postgresql://u:hunter2@db/p") == 2
    error = capsys.readouterr().err
    assert "store_secret" in error
    assert "hunter2" not in error


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "core").write_text("in the way")
    assert run("--out", str(tmp_path)) == 2
    assert "--out" in capsys.readouterr().err


def test_what_else_is_in_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine")
    assert run("--out", str(tmp_path)) == 0
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_a_model_of_this_machine_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(tmp_path), "--out", str(tmp_path / "out")) == 2
    assert "pods do not have this path: give a hub id" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["ray", "kubernetes"])
@pytest.mark.parametrize(("flag", "value"), [("--max-replicas", "0"), ("--replicas", "-1"), ("--replicas", "two")])
def test_a_number_of_replicas_that_cannot_be_is_refused_as_any_option(
    command: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", command, "m", flag, value]) != 0
    least = 0 if (command, flag) == ("kubernetes", "--replicas") else 1
    assert capsys.readouterr().err == f"{flag}: {value!r} is not usable; give a whole number of at least {least}\n"


def test_its_help_names_the_table_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "The [deploy] table" in capsys.readouterr().out
