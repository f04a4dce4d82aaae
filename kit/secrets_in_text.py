"""Secrets in text: passwords, tokens and signatures that someone wrote into a URL or a connection string.

They would go into files, rows and logs with the setting, so a setting that holds one is refused, and never shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_IN_QUERY = (
    r"x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|googleaccessid|signature|sig|sas|"
    r"(?:access_?|auth_?|id_?|refresh_?|bearer_?)?token|api_?key|access_?key|account_?key|key|"
    r"(?:client_?)?secret|password|passwd|pwd|sslpassword"
)
_OF_CONNECTION = r"password|passwd|pwd|sslpassword|accountkey|sharedaccesskey|sharedaccesssignature"
_KINDS = {
    "a user's password": re.compile(
        r"://[^/\s@?#]*:[^/\s@?#]*@|(?i:https?|ftp)://[^/\s?#]*@|(?i:postgres\w*)://.*:.*@"
    ),
    "a token or signature in its query": re.compile(rf"(?i)(?:://|^/|\.)\S*[?&;#](?:{_IN_QUERY})=[^&\s]"),
    "a password among its parameters": re.compile(
        rf"(?is)^\s*(?:{_OF_CONNECTION})=[^'\"\s]+\s*$|"
        rf"(?!.*\b(?:and|or)\b)(?=.*\b(?:host|hostaddr|dbname|user|port|server|uid|accountname|endpoint|service)\s*=).*"
        rf"\b(?:{_OF_CONNECTION})\s*=\s*(?!env:)\S"
    ),
}
_LONGEST = 4000
"""Of a URL or connection string; a longer text is none, and is not searched beyond it."""


def secret_in(text: str) -> str:
    """What kind of secret a URL or connection string holds; empty for none."""
    if "=" not in text and "@" not in text:
        return ""
    head = text[:_LONGEST]
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(head)), "")


def secrets_of(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, kind) of every text in nested values that holds one."""
    if isinstance(values, str):
        kind = secret_in(values)
        if kind:
            yield path, kind
    elif isinstance(values, Mapping):
        for key, value in values.items():
            if isinstance(key, str) and secret_in(key):
                yield path, secret_in(key)
            else:
                yield from secrets_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list | tuple):
        for place, value in enumerate(values):
            yield from secrets_of(value, f"{path}.{place}")
    elif hasattr(values, "model_dump"):
        yield from secrets_of(values.model_dump(), path)
