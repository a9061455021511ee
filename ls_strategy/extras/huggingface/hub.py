"""Uploads of folders to the Hugging Face Hub, in the background, one at a time, on one rank."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

from ls_strategy.errors import PlanError

_log = logging.getLogger(__name__)


class HubUploads:
    """Commits of one repository on the Hub."""

    def __init__(self, repository: str) -> None:
        """Create the repository if it does not exist, as a private one.

        Raises:
            PlanError: huggingface_hub is not installed, or the Hub has refused.
        """
        try:
            from huggingface_hub import HfApi  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise PlanError(
                f"Got push_to_hub={repository!r}, which needs huggingface_hub. Install it: "
                "pip install 'ls_strategy[huggingface]'."
            ) from error
        self._api: Any = HfApi()
        self._repository = repository
        self._upload: Future[Any] | None = None
        self._folder = ""
        try:
            self._api.create_repo(repository, private=True, exist_ok=True)
        except Exception as error:  # of the network, of the name, of the token
            raise PlanError(
                f"Got push_to_hub={repository!r}, but the Hub has not created or found it: {error} Give 'owner/name', "
                "log in (hf auth login, or HF_TOKEN), or leave push_to_hub out."
            ) from error

    def start(self, folder: str, message: str) -> None:
        """Upload a folder as one commit, and remove weights of earlier commits that it does not have."""
        self._folder = folder
        self._upload = self._api.upload_folder(
            repo_id=self._repository,
            folder_path=folder,
            commit_message=message,
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],
            run_as_future=True,
        )

    @property
    def in_flight(self) -> bool:
        """Return whether an upload has not ended yet."""
        return self._upload is not None and not self._upload.done()

    def wait(self) -> None:
        """Return when no upload reads the folder any more. A failed one is logged: the folder is complete."""
        upload, self._upload = self._upload, None
        try:
            if upload is not None:
                upload.result()
        except Exception as error:  # as above
            _log.warning(
                "%s could not be uploaded to %s: %s. Training continues, and the next export is uploaded in full. To "
                "repeat this one: hf upload %s %s",
                self._folder, self._repository, error, self._repository, self._folder,
            )  # fmt: skip
