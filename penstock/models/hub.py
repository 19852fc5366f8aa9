"""Models from a Hugging Face hub: settings, tokenizer and safetensors or GGUF, never pickled weights.

`huggingface_hub` does the work: it resumes, locks, and honours HF_TOKEN and HF_HUB_OFFLINE. No torch.
"""

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from httpx import HTTPError, NetworkError, TimeoutException
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm

from penstock.errors import ModelError, ModelNotFound
from penstock.models.download import Progress, storing_in

_SETTINGS_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
]
_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]
# Other people's formats of the same weights, and what lies in subfolders (ONNX, original checkpoints).
_UNWANTED = ["*/*", "consolidated*"]


def default_folder() -> Path:
    """Where `huggingface_hub` keeps what it fetched."""
    return Path(constants.HF_HUB_CACHE)


def fetch_folder(
    hub_id: str, *, folder: Path, revision: str | None, weights: bool, progress: Progress | None = None
) -> Path:
    """Return the local snapshot of a repository, fetched or brought up to date. Its name is the commit."""
    _log_once()
    patterns = _SETTINGS_FILES + (_WEIGHT_FILES if weights else [])
    with storing_in(folder), _explained(hub_id, revision):
        path = snapshot_download(
            hub_id,
            revision=revision,
            cache_dir=folder,
            allow_patterns=patterns,
            ignore_patterns=_UNWANTED,
            endpoint=os.environ.get("HF_ENDPOINT"),
            tqdm_class=_reporting_bar(hub_id, progress),
        )
    return Path(path)


def fetch_file(
    hub_id: str, file_name: str, *, folder: Path, revision: str | None, progress: Progress | None = None
) -> Path:
    """Return the local copy of one file of a repository, such as a GGUF file."""
    _log_once()
    with storing_in(folder), _explained(hub_id, revision, file_name):
        path = hf_hub_download(
            hub_id,
            file_name,
            revision=revision,
            cache_dir=folder,
            endpoint=os.environ.get("HF_ENDPOINT"),
            tqdm_class=_reporting_bar(hub_id, progress),
            local_files_only=not _is_in_reach(hub_id, file_name, revision),
        )
    return Path(path)


def _is_in_reach(hub_id: str, file_name: str, revision: str | None) -> bool:
    """Whether the hub answers at all: the library tries six times before it says that it does not."""
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        get_hf_file_metadata(hf_hub_url(hub_id, file_name, revision=revision, endpoint=endpoint), endpoint=endpoint)
    except (NetworkError, TimeoutException, OfflineModeIsEnabled):
        return False
    except HfHubHTTPError:
        pass  # an answer, of which the download makes what is to be made
    return True


def _log_once() -> None:
    """Take away the library's own way to standard error: its lines go where all of the process's go."""
    logging.getLogger("huggingface_hub").handlers.clear()


@contextmanager
def _explained(hub_id: str, revision: str | None, file_name: str | None = None) -> Iterator[None]:
    """Turn the hub's errors into sentences that say what to do."""
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"hub model {hub_id} asks you to accept its terms: do so on its page, then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {hub_id}, or it is private: check the spelling, or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        wanted = f"branch, tag or commit {revision!r}" if revision else "main branch; name another with --revision"
        raise ModelNotFound(f"hub model {hub_id} has no {wanted}") from error
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _refusal(hub_id, error.__cause__.response.status_code) from error
        raise ModelError(
            f"hub model {hub_id} is not here yet, and the hub cannot be reached; "
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error
    except EntryNotFoundError as error:
        raise ModelNotFound(f"hub model {hub_id} has no file {file_name}") from error
    except HFValidationError as error:
        raise ModelNotFound(f"{hub_id!r} is no hub id; give one such as organisation/model") from error
    except HfHubHTTPError as error:
        raise _refusal(hub_id, error.response.status_code) from error
    except HTTPError as error:
        raise ModelError(
            f"the connection to the hub broke ({error}); what came is kept, and the next try goes on from there"
        ) from error


def _refusal(hub_id: str, status: int) -> ModelError:
    """What to do about an answer of the hub that names no reason."""
    advice = {
        401: "it does not know you: check HF_TOKEN",
        403: "you may not have it: check what HF_TOKEN permits",
        404: "it has no such model or file: check the spelling and HF_ENDPOINT",
        429: "it has had too many requests from you: wait some minutes, or set HF_TOKEN",
    }
    refusal = ModelNotFound if status == HTTPStatus.NOT_FOUND else ModelError
    return refusal(f"the hub answered {status} for model {hub_id}; {advice.get(status, 'try again later')}")


def _reporting_bar(hub_id: str, progress: Progress | None) -> type[Any]:
    """Return a progress bar class that draws nothing and passes bytes on to `progress`."""

    class ReportingBar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)  # the hub's own bars have a name, tqdm's do not
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

        def display(self, *_args: Any, **_options: Any) -> bool:
            if progress is not None and self.unit == "B" and self.total:
                progress(int(self.n), int(self.total), hub_id)
            return True

    return ReportingBar
