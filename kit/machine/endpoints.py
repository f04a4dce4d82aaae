"""Endpoints: where a bucket really is, when that is not the provider's own address.

One environment variable holds a JSON object from `gs://bucket` or `s3://bucket` to an `http://` address, so that every
process started from this one (ranks, loader workers) finds the same store by the same URL, while other buckets stay
where they are. The variables that the providers' own clients read count for buckets it does not name. An address is
never a secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from kit.json_text import read_json

VARIABLE = "KIT_ENDPOINTS"
_PROVIDERS = {"gs": ("STORAGE_EMULATOR_HOST",), "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")}


def endpoint_of(url: str) -> str:
    """The address that serves the bucket of a `gs://` or `s3://` URL; empty for the provider's own."""
    scheme, _, rest = url.partition("://")
    known = _read().get(f"{scheme}://{rest.partition('/')[0]}", "")
    given = known or next((os.environ[name] for name in _PROVIDERS.get(scheme, ()) if os.environ.get(name)), "")
    return given if "://" in given or not given else f"http://{given}"


def server_of(url: str, options: Mapping[str, Any]) -> tuple[str, bool]:
    """What has to be there for a store to be read, and whether all of it is reached by a connection to that.

    Amazon and Azure may be reached by private ways, which lead to some of their servers only.

    Args:
        url: Of the store.
        options: fsspec's.

    Returns:
        An address, empty where it is not known here; and whether to connect to it. Else its name alone tells.
    """
    scheme = url.partition("://")[0]
    if scheme in ("http", "https"):
        return url, True
    if scheme == "gs":
        return endpoint_of(url) or "https://storage.googleapis.com", True
    if scheme == "s3":
        given = endpoint_of(url) or options.get("endpoint_url") or options.get("client_kwargs", {}).get("endpoint_url")
        return (given, True) if given else (_amazon_server(), False)
    return _azure_server(options) if scheme == "az" else ("", False)


def _amazon_server() -> str:
    """Amazon's own; empty where the profile may lead elsewhere."""
    try:
        from botocore.session import Session

        profile = Session().get_scoped_config()
    except Exception:  # not installed, or no such profile: whoever opens the store says so
        return ""
    return "" if {"endpoint_url", "services"} & {*profile} else "https://s3.amazonaws.com"


def _azure_server(options: Mapping[str, Any]) -> tuple[str, bool]:
    """That of the account."""
    text = str(options.get("connection_string") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    told = dict(part.partition("=")[::2] for part in text.split(";"))
    if told.get("BlobEndpoint"):
        return told["BlobEndpoint"], True
    account = told.get("AccountName") or options.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    known = account and "account_host" not in options
    return (f"https://{account}.blob.{told.get('EndpointSuffix', 'core.windows.net')}" if known else ""), False


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
