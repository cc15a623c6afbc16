"""Models and data sets of the Hugging Face Hub, fetched to the cache of the node as transformers does.

HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE act as everywhere; Ray's workers get the driver's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from pixelis.config.references import HUB_ID, is_hub_id
from pixelis.errors import MissingFile
from pixelis.files import disk_failures

SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHTS = ("*.safetensors",)
_fetches_weights: ContextVar[bool] = ContextVar("_fetches_weights", default=True)


@contextmanager
def without_weights() -> Iterator[None]:
    """Fetch only configuration and tokenizer of models, for a dry run."""
    token = _fetches_weights.set(False)
    try:
        yield
    finally:
        _fetches_weights.reset(token)


def local(name: str) -> Path:
    """The folder of a model that is named by its path, or by its id on the hub. Raises as `fetch` does."""
    return fetch(name) if is_hub_id(name) else Path(name).expanduser()


def fetch(name: str) -> Path:
    """Folder of a model in the cache, fetched if it is not complete. Processes of a node wait for each other.

    Raises MissingFile for a model that the hub lacks or does not show, without safetensors, or if the hub
    cannot be reached, InfraFailure for a full disk.
    """
    with_weights = _fetches_weights.get()
    cached = _snapshot(name, "model", [], local_files_only=True)
    if cached is not None and (not with_weights or is_complete(cached)):
        return cached
    fetched = _snapshot(name, "model", [*SETTINGS, *(WEIGHTS if with_weights else ())])
    assert fetched is not None
    if with_weights and not is_complete(fetched):
        fix = "name a repository with them, or save the model with save_pretrained and name its folder"
        raise MissingFile(f"{name} has no weights in safetensors files", fix=fix)
    return fetched


def fetch_dataset(name: str, split: str) -> Path:
    """Folder of a data set in the cache, with the files whose path names the split. Raises as `fetch` does."""
    fetched = _snapshot(name, "dataset", [f"*{split}*"])
    assert fetched is not None
    return fetched


def _snapshot(name: str, kind: str, patterns: list[str], local_files_only: bool = False) -> Path | None:
    """The folder of a revision; None if only local files may be used and there are none."""
    from huggingface_hub import constants, errors, snapshot_download

    match = HUB_ID.fullmatch(name)
    repository, revision = (match["repository"], match["revision"]) if match else (name, None)
    missing = f"no {kind} in {name}: there is no such folder, and"
    try:
        with disk_failures(Path(constants.HF_HUB_CACHE)):
            folder = snapshot_download(
                repository,
                repo_type=kind,
                revision=revision,
                allow_patterns=patterns,
                local_files_only=local_files_only,
            )
        return Path(folder)
    except errors.GatedRepoError:
        fix = "accept its terms on its page, and set HF_TOKEN to a token of yours"
        raise MissingFile(f"{repository} is gated", fix=fix) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        what = "revision" if isinstance(error, errors.RevisionNotFoundError) else "repository"
        fix = "correct the name, or set HF_TOKEN for a private one"
        raise MissingFile(f"{missing} the Hugging Face Hub shows you no such {what}", fix=fix) from None
    except OSError as error:
        if local_files_only:
            return None
        fix = "name a folder, or check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        cause = str(error).partition("\n")[0]
        raise MissingFile(f"{missing} the Hugging Face Hub cannot be reached ({cause})", fix=fix) from None


def is_complete(folder: Path) -> bool:
    """Whether a folder has all weights."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return all((folder / name).is_file() for name in set(files))


def remaining_bytes(name: str) -> int:
    """Bytes of weights that `fetch` would still get, as the hub states them."""
    from huggingface_hub import HfApi

    match = HUB_ID.fullmatch(name)
    if not is_hub_id(name) or match is None or is_complete(fetch(name)):
        return 0
    info = HfApi().model_info(match["repository"], revision=match["revision"], files_metadata=True)
    return sum(f.size or 0 for f in info.siblings or () if f.rfilename.endswith(".safetensors"))
