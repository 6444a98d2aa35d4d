"""Drafters on the Hugging Face hub: a folder goes up as it is, and comes down without anything that could be run.

Knows huggingface_hub. Does not know what the files hold: their readers trust none of them.
"""

import os
from pathlib import Path

from paceline.models.errors import Refusal

# what a drafter consists of; pickles are read as tensors by name or not at all (models/stored.py)
KINDS = ("*.json", "*.safetensors", "*.md", "*.bin", "*.pt", "*.txt", "*.jinja", "*.model")


def push_to_hub(folder: str | Path, repo: str, private: bool = True, dry_run: bool = False) -> list[str]:
    """Upload a folder to the model repository `repo` (OWNER/NAME), which is made where there is none.

    Returns the names of the files: those that would be uploaded, with dry_run, which asks no one.

    Raises Refusal where there is nothing to upload, or the hub does not take it.
    """
    folder = Path(folder)
    there = sorted(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    files = [str(file.relative_to(folder)) for file in there if any(file.match(kind) for kind in KINDS)]
    if "config.json" not in files:
        raise Refusal(f"push={repo}: {folder} holds no drafter (no config.json)")
    if dry_run:
        return files
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(folder), allow_patterns=files)
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise Refusal(f"push={repo}: the hub refused it ({_reason(error)})") from error
    return files


def from_hub(repo: str, revision: str | None = None, option: str = "from") -> Path:
    """The folder with the files of a model repository, downloaded where it is not yet. Raises Refusal."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(KINDS)))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise Refusal(f"{option}={repo}: neither a folder nor to be had from the hub ({_reason(error)})") from error


def found(place: str, option: str = "from") -> Path:
    """A folder there is, or what the hub has under that name."""
    return Path(place) if os.path.isdir(place) else from_hub(place, option=option)


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
