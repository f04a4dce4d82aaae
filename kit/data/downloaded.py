"""DownloadedData: a data module whose files are brought once to each machine before any rank reads them.

Lightning calls `prepare_data` in one rank of each node and holds the others until it returns; trainers of several
processes that share a machine without knowing of each other take turns besides (see `kit.data.downloads`).
"""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from kit.config import resolve_path
from kit.data.downloads import download_once


class DownloadedData(LightningDataModule):
    """Derive from it and read `self.path` in `setup` and in the loaders.

    Args:
        url: What to bring: a folder of objects, or one object.
        path: Where it goes, under its final name; a relative one starts at the project folder.
        credentials: As `data.credentials`.
        sha256: Of one object, when it is known.
    """

    def __init__(self, url: str, path: str | Path, *, credentials: str = "default", sha256: str = "") -> None:
        super().__init__()
        self.url, self.path = url, resolve_path(path)
        self.credentials, self.sha256 = credentials, sha256

    @override
    def prepare_data(self) -> None:
        """Bring it, unless it is there.

        Raises:
            StoreError: when that fails; see `kit.download_once`.
        """
        download_once(self.url, self.path, credentials=self.credentials, sha256=self.sha256)
