"""Text that is no place of a store: one named error from everything that takes a URL, before any connection."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

import kit
from kit.config import resolve_path
from kit.data.stores import url as stores
from kit.data.stores.url import redact, resolve_url
from kit.errors import KitError, StoreError

ODD = (
    "s3://", "gs:///x", "http://[::1", "://", "   ", "", "a\0b", "gs://\0", "file:///\0", "memory://\0", "s3://[",
    "gs://b\nc/d", " s3://b/c", "gs://[::1/x", "http://a]b/", "http://[::1]:x/", "http://127.0.0.1:99999/x", "http://.",
    "http://a..b/x", "http://\u202e/x", "http://\ud800/x", "\ud800", "~nosuchuser/x", "x" * 300, "x" * 100_000,
    "http://" + "x" * 64, "http://" + "x" * 100_000, "/" + "a/" * 5000, "C:\\x", "data:,x", "zip://x",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_connection(monkeypatch):
    """Nothing here may reach a network."""

    def refuse(*_, **__):
        raise OSError("no network in this test")

    monkeypatch.setattr(stores.socket, "create_connection", refuse)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize("url", ODD, ids=lambda url: ascii(url[:20]))
def test_an_odd_url_is_a_named_error_for_every_taker(url):
    takers = (
        lambda: kit.open_dataset(kit.Config().replace({"data.url": url})),
        lambda: kit.plan_chunks(kit.Config().replace({"data.source": url})),
        lambda: kit.data.open_rows(url),
        lambda: kit.Config.load(url),
    )
    for take in takers:
        with pytest.raises(KitError) as caught:
            take()
        assert len(str(caught.value)) < 1000
    with contextlib.suppress(KitError):
        assert kit.checkpoints.download(url) is None  # a path where nothing is


SCHEMES = st.sampled_from(["", "s3://", "gs://", "http://", "https://", "file://", "memory://", "://", "xx://"])


@given(SCHEMES, st.text(max_size=30))
@examples(300)
def test_any_text_resolves_or_is_a_named_error(scheme, text):
    try:
        found = resolve_url(scheme + text)
    except StoreError:
        return
    assert "\0" not in found
    assert resolve_url(found) == found


@given(st.sampled_from(["http://[", "s3://[::1", "gs://a]b"]), st.sampled_from(["/x?token=hidden", "/#hidden"]))
@examples(20)
def test_what_is_no_url_hides_its_secrets_too(place, end):
    shown = redact(re.sub("//", "//me:hidden@", place) + end)
    assert "hidden" not in shown


def test_text_that_is_no_path_is_a_config_error():
    with pytest.raises(kit.errors.ConfigError, match="no path"):
        resolve_path("x" * 5000)
