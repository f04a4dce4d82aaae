"""Checkpoints in a bucket: uploaded beside the training, complete or not at all, and found again.

`CheckpointUpload` sends each as it is written; `upload`, `latest`, `download` and `unfinished` do so by hand. Names are
loaded when first used.
"""

from typing import TYPE_CHECKING

from kit.registry import lazy

if TYPE_CHECKING:
    from kit.checkpoints.callback import CheckpointUpload as CheckpointUpload
    from kit.checkpoints.downloading import fetch_checkpoint as download
    from kit.checkpoints.uploading import latest_checkpoint as latest
    from kit.checkpoints.uploading import unfinished_uploads as unfinished
    from kit.checkpoints.uploading import upload_checkpoint as upload

__getattr__, __dir__ = lazy(__name__)
