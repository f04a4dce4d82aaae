"""Bytes and ranges: the answers are those of slicing."""

import base64
import hashlib

import google_crc32c
import pytest
from cloud_clients import asker
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from waiting import PATIENCE_SECONDS

from kit.cloud.http import HttpError, byte_range, parse_head, read_chunks, unwrap_aws_chunks

DATA = bytes(range(256)) * 4


@pytest.fixture
def path(cloud, ask):
    cloud.url("ranges")
    assert ask("PUT", "/ranges/a%20b/%C3%BC+c", DATA)[0] == 200
    return "/ranges/a%20b/%C3%BC+c"


@given(first=st.integers(0, 1100), last=st.integers(0, 1100))
@examples(40)
def test_a_range_is_a_slice_over_http(ask, path, first, last):
    status, headers, body = ask("GET", path, Range=f"bytes={first}-{last}")
    if last < first:  # not a range: the whole object
        assert (status, body) == (200, DATA)
    elif first >= len(DATA):
        assert (status, headers["Content-Range"]) == (416, f"bytes */{len(DATA)}")
    else:
        assert (status, body) == (206, DATA[first : last + 1])
        assert headers["Content-Range"] == f"bytes {first}-{min(last, len(DATA) - 1)}/{len(DATA)}"
        assert int(headers["Content-Length"]) == len(body)


@given(size=st.integers(0, 50), first=st.integers(0, 60), last=st.integers(0, 60))
def test_every_form_of_range_is_a_slice(size, first, last):
    def part(text):
        try:
            found = byte_range(text, size)
        except HttpError as bad:
            return None if bad.status == 416 else bad
        start, stop = found or (0, size)
        return list(range(start, stop))

    everything = list(range(size))
    assert part(f"bytes={first}-") == (everything[first:] or None)
    suffix = everything[-first:] if first else []
    assert part(f"bytes=-{first}") == (suffix or None)
    if first <= last:
        assert part(f"bytes={first}-{last}") == (everything[first : last + 1] or None)


@pytest.mark.parametrize("text", ["bytes=-", "bytes=a-b", "items=0-1", "bytes=0-1,3-4", "bytes=5-2"])
def test_what_is_no_single_range_is_ignored(ask, path, text):
    assert ask("GET", path, Range=text)[::2] == (200, DATA)


def test_every_hash_that_clients_check_is_that_of_the_bytes(ask, path):
    _, headers, _ = ask("HEAD", path)
    md5 = hashlib.md5(DATA)
    crc = base64.b64encode(google_crc32c.value(DATA).to_bytes(4, "big")).decode()
    assert headers["ETag"] == f'"{md5.hexdigest()}"'
    assert headers["x-goog-hash"] == f"crc32c={crc},md5={base64.b64encode(md5.digest()).decode()}"
    assert int(headers["Content-Length"]) == len(DATA)


def test_json_and_xml_serve_the_same_object(ask, path):
    encoded = "a%20b%2F%C3%BC%2Bc"
    root = f"/storage/v1/b/ranges/o/{encoded}"
    assert ask("GET", f"{root}?alt=media")[2] == DATA
    assert ask("GET", f"/download{root}?alt=media", Range="bytes=-3")[::2] == (206, DATA[-3:])
    assert b'"size": "1024"' in ask("GET", root)[2]


def test_an_empty_object_is_whole_and_has_no_ranges(cloud, ask):
    cloud.url("empty")
    assert ask("PUT", "/empty/none", b"")[0] == 200
    assert ask("GET", "/empty/none")[::2] == (200, b"")
    assert ask("GET", "/empty/none", Range="bytes=0-")[0] == 416
    assert ask("GET", "/empty/none", Range="bytes=-5")[0] == 416


def test_conditions_are_kept(cloud, ask):
    cloud.url("conditions")
    created = ask("PUT", "/conditions/a", b"1", If_None_Match="*")
    assert created[0] == 200
    assert ask("PUT", "/conditions/a", b"2", If_None_Match="*")[0] == 412
    assert ask("PUT", "/conditions/a", b"2", x_goog_if_generation_match="0")[0] == 412
    etag, generation = created[1]["ETag"], created[1]["x-goog-generation"]
    assert ask("GET", "/conditions/a", If_None_Match=etag)[::2] == (304, b"")
    assert ask("GET", "/conditions/a", If_Match='"other"')[0] == 412
    assert ask("PUT", "/conditions/a", b"2", x_goog_if_generation_match=generation)[0] == 200
    assert ask("PUT", "/conditions/a", b"3", If_Match=etag)[0] == 412
    assert ask("GET", "/conditions/a")[2] == b"2"
    assert ask("GET", f"/storage/v1/b/conditions/o/a?generation={generation}&alt=media")[0] == 404


def test_what_is_not_there_is_404_in_the_words_of_each_provider(cloud, ask):
    cloud.url("there")
    assert b"NoSuchKey" in ask("GET", "/there/none")[2]
    assert b"NoSuchBucket" in ask("PUT", "/nowhere/none", b"1")[2]
    status, headers, body = ask("GET", "/storage/v1/b/there/o/none?alt=media")
    assert (status, headers["Content-Type"]) == (404, "application/json")
    assert b"No such object: there/none" in body


def test_a_folder_serves_what_lies_in_it_and_nothing_outside(tmp_path):
    from kit.cloud.simulated import simulated_cloud

    (tmp_path / "secret").write_text("secret")
    (tmp_path / "kept" / "bucket").mkdir(parents=True)
    (tmp_path / "kept" / "bucket" / "a").write_bytes(DATA)
    with simulated_cloud("no limits", folder=tmp_path / "kept") as cloud:
        ask = asker(cloud)
        assert ask("GET", "/bucket/a", Range="bytes=10-19")[2] == DATA[10:20]
        for path in (
            "/bucket/../../secret",
            "/../secret",
            "/bucket/%2e%2e/%2e%2e/secret",
            "/bucket//a",
            "/%2e%2e/secret",
        ):
            assert ask("GET", path)[0] == 404
            assert ask("PUT", path, b"1")[0] in (400, 404)
        assert (tmp_path / "secret").read_text() == "secret"
        assert ask("PUT", "/bucket/a/b", b"1")[0] == 400  # below another key
        (tmp_path / "kept" / "bucket" / "a").write_bytes(b"new")
        assert ask("GET", "/bucket/a")[2] == b"new"


@given(parts=st.lists(st.binary(min_size=1, max_size=40)), rest=st.binary(max_size=10), step=st.integers(1, 60))
def test_bodies_in_chunks_are_put_together_whole_or_not_at_all(parts, rest, step):
    wire = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    signed = b"".join(b"%x;chunk-signature=ab\r\n%s\r\n" % (len(part), part) for part in parts) + b"0;x\r\n\r\n"
    assert unwrap_aws_chunks(signed) == b"".join(parts)
    buffer, whole = bytearray(), wire + b"0\r\n\r\n"
    reading = read_chunks(buffer)
    for place in range(0, len(whole) - 1, step):
        buffer += whole[place : min(place + step, len(whole) - 1)]
        next(reading)
    buffer += whole[-1:] + rest
    with pytest.raises(StopIteration) as ended:
        next(reading)
    assert ended.value.value == b"".join(parts)
    assert bytes(buffer) == rest


@pytest.mark.parametrize("head", [b"GET", b"GET / FTP/1", b"GET / HTTP/1.1\r\nno colon"])
def test_what_is_no_request_is_refused(head):
    with pytest.raises(HttpError):
        parse_head(head)


def test_many_requests_in_one_piece_are_answered_in_order(cloud, ask):
    import socket

    cloud.url("order")
    for name in ("a", "b", "c"):
        ask("PUT", f"/order/{name}", name.encode() * 3)
    with socket.create_connection(("127.0.0.1", cloud.port), timeout=PATIENCE_SECONDS) as channel:
        ends = ("", "", "Connection: close\r\n")
        host = f"Host: 127.0.0.1:{cloud.port}\r\n"
        requests = [f"GET /order/{name} HTTP/1.1\r\n{host}{end}\r\n" for name, end in zip("abc", ends, strict=True)]
        channel.sendall("".join(requests).encode())
        data = b""
        while piece := channel.recv(65536):
            data += piece
    assert [body[:3] for body in data.split(b"\r\n\r\n")[1:]] == [b"aaa", b"bbb", b"ccc"]
