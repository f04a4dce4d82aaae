"""What a simulated cloud does not take: foreign pages, control characters, links out of its folder, absurd sizes."""

import json
import os
import re
import socket

import pytest
from cloud_clients import asker
from hypothesis import example, given
from hypothesis import strategies as st
from properties import examples
from waiting import PATIENCE_SECONDS

from kit.cloud.http import LARGEST_BODY_BYTES
from kit.cloud.simulated import simulated_cloud

KEPT = b"kept"


@pytest.fixture
def guarded(cloud, ask):
    """The cloud with one object; afterwards it still serves, and holds that object and nothing else."""
    cloud.url("guarded")
    assert ask("PUT", "/guarded/a", KEPT)[0] == 200
    yield cloud
    assert ask("GET", "/guarded/a")[::2] == (200, KEPT)
    assert re.findall(rb"<Key>(.*?)</Key>", ask("GET", "/guarded?list-type=2")[2]) == [b"a"]


def said(cloud, data):
    """What it answers to bytes, until it has nothing more to say."""
    with socket.create_connection(("127.0.0.1", cloud.port), timeout=PATIENCE_SECONDS) as channel:
        answer = b""
        try:
            channel.sendall(data)
            channel.shutdown(socket.SHUT_WR)
            while piece := channel.recv(1 << 16):
                answer += piece
        except ConnectionError:
            pass
        return answer


def request(cloud, method="PUT", path="/guarded/b", body=b"", **headers):
    """A request as it goes over the wire; a name with an underscore is one with a dash."""
    given = {"Host": f"127.0.0.1:{cloud.port}", **{name.replace("_", "-"): text for name, text in headers.items()}}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in given.items() if text is not None)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status(answer):
    return int(answer[9:12])


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", "127.0.0.1", "", None],
)
def test_a_foreign_host_is_refused(guarded, method, host):
    told = host and host.format(port=guarded.port)
    answer = said(guarded, request(guarded, method, "/guarded/a", Host=told))
    assert status(answer) == 421
    assert b"ForeignHost" in answer


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_every_name_of_loopback_with_its_port_is_served(guarded, host):
    assert KEPT in said(guarded, request(guarded, "GET", "/guarded/a", Host=f"{host}:{guarded.port}"))


def test_a_foreign_host_in_the_request_line_or_beside_its_own_is_refused(guarded):
    assert status(said(guarded, request(guarded, "GET", "http://evil.example/guarded/a"))) == 421
    assert KEPT in said(guarded, request(guarded, "GET", f"{guarded.address}/guarded/a"))
    twice = request(guarded, "GET", "/guarded/a").replace(b"\r\n\r\n", b"\r\nHost: evil.example\r\n\r\n")
    assert status(said(guarded, twice)) == 400


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:1", "null", ""])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/guarded/b"),
        ("DELETE", "/guarded/a"),
        ("POST", "/upload/storage/v1/b/guarded/o?uploadType=media&name=b"),
        ("POST", "/-/dials"),
        ("OPTIONS", "/guarded/a"),
        ("OPTIONS", "/guarded"),
    ],
)
def test_a_page_of_another_site_writes_nothing(guarded, method, path, origin):
    answer = said(guarded, request(guarded, method, path, b"x", Content_Length="1", Origin=origin))
    assert status(answer) == 403
    assert b"CrossOrigin" in answer
    assert b"Access-Control" not in answer


def test_what_is_written_from_its_own_address_is_taken(cloud, ask):
    cloud.url("own")
    assert ask("PUT", "/own/a", b"1", Origin=cloud.address)[0] == 200


BREAKS = ["a\r\nX-Evil: 1", "a\nX-Evil: 1", "a\rb", "\0", "\x1f", "\x7f", "a\ud800"]


@pytest.mark.parametrize("text", BREAKS)
def test_control_characters_in_metadata_of_json_are_refused(guarded, ask, text):
    upload = "/upload/storage/v1/b/guarded/o"
    for told in ({"contentType": text}, {"metadata": {"note": text}}, {"metadata": {text: "note"}}):
        for how, body, headers in (
            ("multipart", multipart({"name": "b", **told}), {"Content_Type": "multipart/related; boundary=x"}),
            ("patch", json.dumps(told), {}),
        ):
            if how == "patch":
                answer = ask("PATCH", "/storage/v1/b/guarded/o/a", body, **headers)
            else:
                answer = ask("POST", f"{upload}?uploadType={how}", body, **headers)
            assert (answer[0], b"InvalidMetadata" in answer[2]) == (400, True)
        place = ask("POST", f"{upload}?uploadType=resumable", json.dumps({"name": "b", **told}))[1]["Location"]
        assert ask("PUT", place.removeprefix(guarded.address), b"x", Content_Range="bytes 0-0/1")[0] == 400
    head = ask("HEAD", "/guarded/a")[1]
    assert head["X-Evil"] is None


def multipart(told):
    parts = [f"--x\r\nContent-Type: application/json\r\n\r\n{json.dumps(told)}\r\n", "--x\r\n\r\nx\r\n", "--x--\r\n"]
    return "".join(parts).encode()


@pytest.mark.parametrize("told", [5, [], "x", {"name": 5}, {"metadata": 5}, {"metadata": {"a": 5}}, {"contentType": 5}])
def test_json_of_another_shape_is_refused(guarded, ask, told):
    answer = ask("POST", "/upload/storage/v1/b/guarded/o?uploadType=multipart&name=b", multipart(told),
                 Content_Type="multipart/related; boundary=x")  # fmt: skip
    assert answer[0] == 400


def test_json_that_is_too_deep_is_refused(guarded, ask):
    assert ask("POST", "/storage/v1/b", b"[" * 100_000)[0] == 400


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\0b", "a\x1fb", "a\x7fb"])
def test_control_characters_in_headers_are_refused(guarded, text):
    for name in ("x-amz-meta-note", "Content-Type", "x-goog-meta-note"):
        answer = said(guarded, request(guarded, body=b"x", Content_Length="1", **{name: text}))
        assert (status(answer), b"InvalidHeader" in answer) == (400, True)
    assert status(said(guarded, request(guarded, **{f"x-amz-meta-{text}": "1"}))) == 400


@pytest.mark.parametrize("key", ["%0a", "a%0d%0ab", "%00", "%7f", "%c2%85", "x" * 1025])
def test_names_with_control_characters_or_without_measure_are_refused(guarded, ask, key):
    assert ask("PUT", f"/guarded/{key}", b"1")[0] == 400
    assert ask("PUT", f"/{key}", b"")[0] == 400
    assert ask("POST", f"/upload/storage/v1/b/guarded/o?uploadType=media&name={key}", b"1")[0] == 400
    assert ask("PUT", "/guarded/copy", None, **{"x-amz-copy-source": f"/guarded/{key}"})[0] == 404


def test_metadata_is_given_back_as_it_was_put_and_no_more_than_the_providers_take(guarded, ask):
    assert ask("PUT", "/guarded/a", KEPT, **{"x-amz-meta-note": "Größe À".encode().decode("latin-1")})[0] == 200
    assert ask("HEAD", "/guarded/a")[1]["x-amz-meta-note"].encode("latin-1").decode() == "Größe À"
    assert ask("PUT", "/guarded/b", b"1", **{"x-amz-meta-note": "x" * 9000})[0] == 400


SIZES = ["-1", "+1", "1_0", "0x1", "1.0", "1e3", "", "²", "1, 2", "nan", "9" * 5000, str(LARGEST_BODY_BYTES + 1)]


@pytest.mark.parametrize("size", SIZES)
def test_a_length_that_is_none_is_refused(guarded, size):
    assert status(said(guarded, request(guarded, body=b"x", Content_Length=size))) in (400, 413)


@pytest.mark.parametrize(
    "size", ["-6", "+6", "0x1", "1_0", " 6", "", "²", "zz", "F" * 17, "FFFFFFFFFFFFFFFF", "1" * 5000]
)
def test_a_chunk_whose_size_is_none_is_refused(guarded, size):
    body = f"{size}\r\nabcdef\r\n0\r\n\r\n".encode()
    assert status(said(guarded, request(guarded, body=body, Transfer_Encoding="chunked"))) in (400, 413)
    signed = request(guarded, body=body, Content_Length=str(len(body)), x_amz_content_sha256="STREAMING-X")
    assert status(said(guarded, signed)) == 400


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Transfer_Encoding": "chunked", "Content_Length": "5"}, b"0\r\n\r\n"),
        ({"Transfer_Encoding": "gzip"}, b"x"),
        ({"Transfer_Encoding": "chunked"}, b"3\r\nabcdef\r\n0\r\n\r\n"),
        ({"Transfer_Encoding": "chunked"}, b"1" * 10_000),
        ({"Transfer_Encoding": "chunked"}, b"0\r\n" + b"a: b\r\n" * 20_000 + b"\r\n"),
        ({"x_amz_content_sha256": "STREAMING-X", "Content_Length": "8"}, b"9\r\nabc\r\n"),
        ({f"a{number}": "b" for number in range(201)}, b""),
        ({"a": "b" * 70_000}, b""),
    ],
)
def test_a_body_or_a_head_that_does_not_add_up_is_refused(guarded, headers, body):
    assert status(said(guarded, request(guarded, body=body, **headers))) in (400, 431)


@pytest.mark.parametrize("number", ["0", "-1", "10001", "x", "9" * 5000])
def test_a_part_whose_number_is_none_is_refused(guarded, ask, number):
    upload = re.search(rb"<UploadId>(.*?)<", ask("POST", "/guarded/b?uploads")[2])[1].decode()
    assert ask("PUT", f"/guarded/b?uploadId={upload}&partNumber={number}", b"x")[0] == 400


@pytest.mark.parametrize("text", ["bytes=-0", f"bytes={'9' * 5000}-", "bytes=9-", f"bytes=-{'9' * 5000}"])
def test_a_range_that_is_absurd_is_answered(guarded, ask, text):
    assert ask("GET", "/guarded/a", Range=text)[0] in (206, 400, 416)


def test_a_refusal_reaches_a_client_that_is_still_sending(guarded):
    data = request(guarded, body=b"x" * (8 << 20), Content_Length=str(8 << 20), Origin="https://evil.example")
    assert status(said(guarded, data)) == 403


def test_a_client_that_says_half_a_request_holds_up_nobody(guarded, ask):
    whole = request(guarded, "GET", "/guarded/a")
    halves = [socket.create_connection(("127.0.0.1", guarded.port), timeout=PATIENCE_SECONDS) for _ in range(20)]
    try:
        for half in halves:
            half.sendall(whole[:-2])
        assert ask("GET", "/guarded/a")[2] == KEPT
        for half in halves:
            half.sendall(whole[-2:])
            assert half.recv(1 << 16).startswith(b"HTTP/1.1 200")
    finally:
        for half in halves:
            half.close()


PIECES = st.sampled_from(
    [b"PUT ", b"GET ", b"OPTIONS ", b"/guarded/a", b"/guarded", b"/storage/v1/b", b" HTTP/1.1\r\n", b"\r\n",
     b"\r\n\r\n",
     b"Host: 127.0.0.1:PORT\r\n", b"Host: evil\r\n", b"Origin: null\r\n", b"Content-Length: 5\r\n", b"-6\r\n",
     b"Content-Length: -5\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"Range: bytes=-9\r\n", b"%00", b"?",
     b"Expect: 100-continue\r\n", b"uploadType=resumable&name=", b"/upload/storage/v1/b/nowhere/o", b"{", b"x" * 5000]
)  # fmt: skip


@examples(300)
@given(parts=st.lists(st.one_of(PIECES, st.binary(max_size=30)), max_size=14))
@example(parts=[b"PUT /a/b HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n", b"Transfer-Encoding: chunked\r\n\r\n-6\r\n"])
def test_whatever_bytes_come_it_answers_or_closes_and_serves_the_next(cloud, parts):
    """An end that never comes, or an error of its own (500), fails this."""
    answer = said(cloud, b"".join(parts).replace(b"PORT", str(cloud.port).encode()))
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500" not in answer
    assert asker(cloud)("GET", "/")[0] == 200


@pytest.fixture
def linked(tmp_path):
    """A cloud in a folder with links: to a folder and a file outside it, to nothing, in circles, and of a bucket."""
    outside, kept = tmp_path / "outside", tmp_path / "kept"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (kept / "bucket" / "deep").mkdir(parents=True)
    (kept / "bucket" / "a").write_bytes(KEPT)
    for name, target in {
        "bucket/folder": outside, "bucket/file": outside / "secret", "bucket/none": outside / "new", "b": outside,
        "bucket/deep/circle": kept / "bucket", "bucket/inside": kept / "bucket" / "a",
    }.items():  # fmt: skip
        (kept / name).symlink_to(target)
    with simulated_cloud("no limits", folder=kept) as cloud:
        yield asker(cloud), outside, kept
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"secret": b"secret"}
    assert len([path for path in kept.rglob("*") if path.is_symlink()]) == 6


@pytest.mark.parametrize(
    "key",
    ["bucket/folder/secret", "bucket/file", "bucket/none", "b/secret", "bucket/deep/circle/a", "bucket/folder/new"],
)
def test_a_link_is_not_read_written_or_deleted_through(linked, key):
    ask, _, _ = linked
    bucket, _, name = key.partition("/")
    path = f"/storage/v1/b/{bucket}/o/{name.replace('/', '%2F')}"
    assert [ask("GET", f"/{key}")[0], ask("GET", f"{path}?alt=media")[0]] == [404, 404]
    assert ask("PUT", f"/{key}", b"1")[0] in (400, 404)
    assert ask("POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}", b"1")[0] in (400, 404)
    ask("DELETE", f"/{key}")
    ask("DELETE", path)


def test_a_link_is_neither_listed_nor_lost_with_its_bucket(linked):
    ask, _, _ = linked
    assert re.findall(rb"<Key>(.*?)</Key>", ask("GET", "/bucket?list-type=2")[2]) == [b"a"]
    assert ask("GET", "/bucket?list-type=2&prefix=folder/")[2].count(b"<Key>") == 0
    assert re.findall(rb"<Name>(.*?)</Name>", ask("GET", "/")[2]) == [b"bucket"]
    assert ask("GET", "/b?list-type=2")[0] == 404
    assert ask("DELETE", "/bucket/a")[0] == 204
    assert ask("DELETE", "/bucket")[0] == 409
    ask("DELETE", "/b")
    ask("PUT", "/bucket/a", KEPT)


def test_a_folder_that_is_itself_a_link_is_served(tmp_path):
    (tmp_path / "real" / "bucket").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with simulated_cloud("no limits", folder=tmp_path / "link") as cloud:
        ask = asker(cloud)
        assert ask("PUT", "/bucket/a/b", KEPT)[0] == 200
        assert ask("GET", "/bucket/a/b")[2] == KEPT
    assert os.listdir(tmp_path / "real" / "bucket" / "a") == ["b"]
