"""Endpoints: where a bucket really is, when that is not the provider's own address.

One environment variable holds a JSON object from `gs://bucket` or `s3://bucket` to an `http://` address, so that every
process started from this one (ranks, loader workers) finds the same store by the same URL, while other buckets stay
where they are. The variables that the providers' own clients read count for buckets it does not name. An address is
never a secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from kit.json_text import read_json

VARIABLE = "KIT_ENDPOINTS"
_PROVIDERS = {"gs": ("STORAGE_EMULATOR_HOST",), "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")}


def endpoint_of(url: str) -> str:
    """The address that serves the bucket of a `gs://` or `s3://` URL; empty for the provider's own."""
    scheme, _, rest = url.partition("://")
    known = _read().get(f"{scheme}://{rest.partition('/')[0]}", "")
    given = known or next((os.environ[name] for name in _PROVIDERS.get(scheme, ()) if os.environ.get(name)), "")
    return given if "://" in given or not given else f"http://{given}"


def takes_no_key(url: str) -> bool:
    """Whether what serves the bucket is known to ask for no credentials: a simulated cloud, or an emulator of GCS."""
    scheme, _, rest = url.partition("://")
    if f"{scheme}://{rest.partition('/')[0]}" in _read():
        return True
    if scheme == "s3":
        return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() == "true"
    return bool(endpoint_of(url))


def name_endpoint(buckets: Iterable[str], address: str) -> None:
    """From now on, here and in processes started from here, `address` serves these buckets (`gs://name`)."""
    _write(_read() | dict.fromkeys(buckets, address))


def forget_endpoint(address: str) -> None:
    """Let go of every bucket that `address` serves."""
    _write({bucket: other for bucket, other in _read().items() if other != address})


def _read() -> dict[str, str]:
    try:
        known = read_json(os.environ.get(VARIABLE, "") or "{}")
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def _write(known: dict[str, str]) -> None:
    if known:
        os.environ[VARIABLE] = json.dumps(known, separators=(",", ":"))
    else:
        os.environ.pop(VARIABLE, None)
