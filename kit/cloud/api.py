"""What a request asks for: the JSON API of GCS, its XML API, and S3 in path style, as far as their clients use them.

Paths under `/storage`, `/upload`, `/download` and `/batch` are the JSON API, which gcsfs, tensorstore and
google-cloud-storage speak. Every other path is `/bucket/key`: the XML API of GCS and S3, which s3fs, obstore and
tensorstore speak, and which differ in the names of a few headers. Nothing is authenticated.

A request is first understood (`call`) and then done (`ApiCall.run`), so that between the two it can be counted, refused
or made to fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape, unescape

from kit.cloud.http import (
    HttpError,
    MemoryBody,
    Request,
    Response,
    byte_range,
    json_response,
    unwrap_aws_chunks,
    xml_response,
)
from kit.cloud.objects import Objects, Page, StoredObject, describe, list_page

JSON_ROOTS = ("/storage/", "/upload/storage/", "/download/storage/", "/batch/storage/")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_COPY = re.compile(r"b/[^/]+/o/(.+?)/(rewriteTo|copyTo)/b/([^/]+)/o/(.+)")
_HEADERS_END = re.compile(rb"\r?\n\r?\n")
_METADATA = ("x-goog-meta-", "x-amz-meta-")
_CONDITIONS = {"x-goog-if-generation-match", "if-match", "if-none-match"}
_MOST_RESULTS = 1000
_MOST_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A request that is understood."""

    kind: str
    """One of `kit.cloud.counts.KINDS_OF_REQUEST`."""
    bucket: str
    key: str
    """Empty when it names no object."""
    run: Callable[[], Response]


def is_json(path: str) -> bool:
    return path.startswith(JSON_ROOTS)


class _Api:
    """What both APIs do with `objects`; `generation()` counts up."""

    def __init__(self, objects: Objects, generation: Callable[[], int]) -> None:
        self._objects = objects
        self._generation = generation

    def _check_bucket(self, bucket: str) -> None:
        if not self._objects.has_bucket(bucket):
            raise HttpError(404, "NoSuchBucket", f"no bucket {bucket}")

    def _create_bucket(self, bucket: str) -> None:
        if self._objects.has_bucket(bucket):
            raise HttpError(409, "BucketAlreadyOwnedByYou", f"bucket {bucket} is there")
        self._objects.create_bucket(bucket)

    def _delete_bucket(self, bucket: str) -> Response:
        if not self._objects.delete_bucket(bucket):
            raise HttpError(409, "BucketNotEmpty", f"bucket {bucket} is not empty")
        return Response(204)

    def _find(self, bucket: str, key: str, generation: str = "") -> StoredObject:
        item = self._objects.find(bucket, key)
        if item is None or generation not in ("", str(item.generation)):
            raise HttpError(404, "NoSuchKey", f"No such object: {bucket}/{key}")
        return item

    def _put(
        self, bucket: str, key: str, data: bytes, content_type: str = "", metadata: Mapping[str, str] | None = None,
        etag: str = "",
    ) -> StoredObject:  # fmt: skip
        return self._objects.put(bucket, key, describe(data, self._generation(), content_type, metadata, etag))

    def _list(self, bucket: str, query: Mapping[str, str], after: str, limit: str) -> tuple[int, Page]:
        """The page of a listing, and how much it may hold."""
        self._check_bucket(bucket)
        most = min(_MOST_RESULTS, int(limit or _MOST_RESULTS))
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        return most, list_page(self._objects, bucket, prefix, delimiter, after, most)

    def _found(self, bucket: str, keys: Iterable[str]) -> list[tuple[str, StoredObject]]:
        """Those of the keys that are still there."""
        found = ((key, self._objects.find(bucket, key)) for key in keys)
        return [(key, item) for key, item in found if item is not None]

    def _check_conditions(self, bucket: str, key: str, request: Request) -> None:
        check_conditions(self._objects.find(bucket, key), request)


def check_conditions(item: StoredObject | None, request: Request) -> None:
    """Refuse a write or a read whose conditions do not hold.

    Raises:
        HttpError: 412, or 304 for a read of what the caller already has.
    """
    query, headers = request.query, request.headers
    if not query and _CONDITIONS.isdisjoint(headers):
        return
    generation = str(item.generation) if item else "0"
    required = query.get("ifGenerationMatch", headers.get("x-goog-if-generation-match"))
    if required not in (None, generation):
        raise HttpError(412, "PreconditionFailed", f"the generation is {generation}, not {required}")
    if "if-match" in headers and not _names(headers["if-match"], item):
        raise HttpError(412, "PreconditionFailed", "the ETag is another one")
    if query.get("ifGenerationNotMatch") == generation or _names(headers.get("if-none-match", ""), item):
        if request.method in ("GET", "HEAD"):
            raise HttpError(304, "NotModified")
        raise HttpError(412, "PreconditionFailed", "the object is there")


def _names(etags: str, item: StoredObject | None) -> bool:
    """Whether one of the ETags in a header is that of the object."""
    return item is not None and any(
        tag.strip().removeprefix("W/").strip('"') in ("*", item.etag) for tag in etags.split(",")
    )


def media(item: StoredObject, request: Request) -> Response:
    """The bytes of an object, or the range of them that is asked for, with everything clients check.

    Raises:
        HttpError: 416 beyond the end, 304 or 412 by its conditions, 404 when the file has gone.
    """
    check_conditions(item, request)
    headers = object_headers(item)
    part = byte_range(request.headers.get("range", ""), item.size)
    start, stop = part or (0, item.size)
    try:
        body = item.open(start, stop)
    except OSError:
        raise HttpError(404, "NoSuchKey", "the object is gone") from None
    if part is None:
        return Response(200, headers, body)
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{item.size}"
    return Response(206, headers, body)


def object_headers(item: StoredObject) -> dict[str, Any]:
    headers = _headers(
        item.content_type, item.etag, item.updated, item.generation, item.size, crc32c=item.crc32c, md5=item.md5
    )
    return {**headers, **{f"{prefix}{name}": value for prefix in _METADATA for name, value in item.metadata.items()}}


@lru_cache(maxsize=256)
def _headers(content_type: str, etag: str, updated: float, generation: int, size: int, **hashes: str) -> dict[str, Any]:
    """Those of an object without its metadata; a shard is asked for many times."""
    headers = {
        "Content-Type": content_type,
        "ETag": f'"{etag}"',
        "Last-Modified": formatdate(updated, usegmt=True),
        "Accept-Ranges": "bytes",
        "x-goog-generation": generation,
        "x-goog-metageneration": 1,
        "x-goog-storage-class": "STANDARD",
        "x-goog-stored-content-length": size,
        "x-goog-stored-content-encoding": "identity",
    }
    known = [f"{name}={value}" for name, value in hashes.items() if value]
    return headers | ({"x-goog-hash": ",".join(known)} if known else {})


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- JSON


@dataclass(slots=True)
class _Upload:
    """A resumable upload that has begun; the conditions of its first request hold at the end."""

    request: Request
    bucket: str
    key: str
    content_type: str
    metadata: dict[str, str]
    data: bytearray = field(default_factory=bytearray)


class JsonApi(_Api):
    """The JSON API of GCS."""

    def __init__(self, objects: Objects, generation: Callable[[], int]) -> None:
        super().__init__(objects, generation)
        self._uploads: dict[str, _Upload] = {}

    def call(self, request: Request) -> ApiCall:
        """What the request asks for."""
        root, _, rest = request.path.partition("storage/v1")
        if root == "/batch/":
            return ApiCall("delete", "", "", lambda: self._batch(request))
        parts = rest.strip("/").split("/")
        bucket = unquote(parts[1]) if len(parts) > 1 else ""
        if parts[0] != "b":
            raise HttpError(404, "notFound", "no such path")
        if root == "/upload/":
            return self._upload_call(request, bucket)
        if len(parts) <= 2:
            return ApiCall("bucket", bucket, "", lambda: self._bucket(request, bucket))
        if parts[2] != "o":
            return ApiCall("bucket", bucket, "", lambda: self._about(bucket, parts[2]))
        if len(parts) == 3:
            return ApiCall("list", bucket, "", lambda: self._listing(request, bucket))
        if copy := _COPY.fullmatch(rest.strip("/")):
            source, verb, other, name = map(unquote, copy.groups())
            return ApiCall("write", bucket, source, lambda: self._copy(request, (bucket, source), (other, name), verb))
        key = unquote("/".join(parts[3:]))
        is_media = root == "/download/" or request.query.get("alt") == "media"
        kind = {"GET": "read" if is_media else "info", "DELETE": "delete"}.get(request.method, "info")
        return ApiCall(kind, bucket, key, lambda: self._object(request, bucket, key, is_media))

    def _bucket(self, request: Request, bucket: str) -> Response:
        if request.method == "POST" and not bucket:
            bucket = _json_body(request.body).get("name", "")
            if not bucket:
                raise HttpError(400, "required", "a bucket needs a name")
            self._create_bucket(bucket)
        elif not bucket:
            buckets = [_bucket_entry(name) for name in self._objects.buckets()]
            return json_response({"kind": "storage#buckets", "items": buckets})
        self._check_bucket(bucket)
        return self._delete_bucket(bucket) if request.method == "DELETE" else json_response(_bucket_entry(bucket))

    def _about(self, bucket: str, what: str) -> Response:
        self._check_bucket(bucket)
        if what != "storageLayout":
            raise HttpError(501, "notImplemented", f"{what} of a bucket is not simulated")
        return json_response({"kind": "storage#storageLayout", "bucket": bucket, "location": "SIMULATED",
                              "locationType": "region"})  # fmt: skip

    def _listing(self, request: Request, bucket: str) -> Response:
        query = request.query
        after, start = base64.urlsafe_b64decode(query.get("pageToken", "")).decode(), query.get("startOffset", "")
        if start and not after:  # a page starts after a key, an offset at one: take what only later keys come after
            after = start[:-1] + chr(max(0, ord(start[-1]) - 1)) + "\U0010ffff"
        _, page = self._list(bucket, query, after, query.get("maxResults", ""))
        end, more = query.get("endOffset", ""), page.next_after
        keys, prefixes = ([name for name in names if not end or name < end] for names in (page.keys, page.prefixes))
        entries = [_entry(bucket, key, item) for key, item in self._found(bucket, keys)]
        answer: dict[str, Any] = {"kind": "storage#objects", "items": entries}
        if prefixes:
            answer["prefixes"] = prefixes
        if more and (not end or more < end):
            answer["nextPageToken"] = base64.urlsafe_b64encode(more.encode()).decode()
        return json_response(answer)

    def _object(self, request: Request, bucket: str, key: str, is_media: bool) -> Response:
        item = self._find(bucket, key, request.query.get("generation", ""))
        if request.method in ("PATCH", "PUT"):  # new metadata for the same bytes
            given = _json_body(request.body)
            metadata = {**item.metadata, **(given.get("metadata") or {})}
            changed = self._put(bucket, key, item.read(), given.get("contentType", item.content_type), metadata)
            return json_response(_entry(bucket, key, changed))
        if request.method == "DELETE":
            check_conditions(item, request)
            self._objects.delete(bucket, key)
            return Response(204)
        if is_media:
            return media(item, request)
        check_conditions(item, request)
        return json_response(_entry(bucket, key, item))

    def _copy(self, request: Request, source: tuple[str, str], target: tuple[str, str], verb: str) -> Response:
        item = self._find(*source, request.query.get("generation", ""))
        self._check_bucket(target[0])
        self._check_conditions(*target, request)
        entry = _entry(*target, self._put(*target, item.read(), item.content_type, item.metadata))
        if verb == "copyTo":
            return json_response(entry)
        return json_response({
            "kind": "storage#rewriteResponse", "done": True, "objectSize": entry["size"],
            "totalBytesRewritten": entry["size"], "resource": entry,
        })  # fmt: skip

    def _batch(self, request: Request) -> Response:
        """Several deletions in one request: how clients delete a folder."""
        answers = []
        for part in _multipart(request):
            line = re.search(rb"^(DELETE) (\S+) HTTP", part, re.MULTILINE)
            if line is None:
                raise HttpError(501, "notImplemented", "only deletions are simulated in a batch")
            try:
                status = self.call(Request("DELETE", line[2].decode().partition("?")[0], {}, {})).run().status
            except HttpError as error:
                status = error.status
            answers.append(f"--kit\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {status} done\r\n\r\n\r\n")
        body = "".join(answers) + "--kit--"
        return Response(200, {"Content-Type": "multipart/mixed; boundary=kit"}, MemoryBody(body.encode()))

    # -- uploads

    def _upload_call(self, request: Request, bucket: str) -> ApiCall:
        query, headers = request.query, request.headers
        if "upload_id" in query:
            begun = self._uploads.get(query["upload_id"])
            return ApiCall("write", bucket, begun.key if begun else "", lambda: self._continue(request))
        given: dict[str, Any] = {}
        how, kind, data = query.get("uploadType", "media"), headers.get("content-type", ""), request.body
        if how == "resumable":
            given, kind = _json_body(data), headers.get("x-upload-content-type", "")
        elif how == "multipart":
            (_, described), (head, data) = (_HEADERS_END.split(part, maxsplit=1) for part in _multipart(request))
            match = re.search(rb"(?i)content-type:\s*([^\r\n]+)", head)
            given, kind = _json_body(described), match[1].decode() if match else ""
        key = query.get("name") or given.get("name", "")
        kind, metadata = given.get("contentType") or kind, given.get("metadata") or {}
        upload = _Upload(request, bucket, key, kind, metadata, bytearray(b"" if how == "resumable" else data))
        run = self._begin if how == "resumable" else self._finish
        return ApiCall("write", bucket, key, lambda: run(upload))

    def _begin(self, upload: _Upload) -> Response:
        self._check_bucket(upload.bucket)
        number = f"{self._generation():x}"
        self._uploads[number] = upload
        host = upload.request.headers.get("host", "localhost")
        place = f"http://{host}/upload/storage/v1/b/{quote(upload.bucket)}/o?uploadType=resumable&upload_id={number}"
        return json_response({}, headers={"Location": place, "X-GUploader-UploadID": number})

    def _continue(self, request: Request) -> Response:
        number = request.query["upload_id"]
        upload = self._uploads.get(number)
        if upload is None:
            raise HttpError(404, "notFound", "no such upload")
        if request.method == "DELETE":
            del self._uploads[number]
            return Response(204)
        match = _CONTENT_RANGE.fullmatch(request.headers.get("content-range", ""))
        start = int(match[1]) if match and match[1] else len(upload.data)
        if start <= len(upload.data):  # a part sent again replaces what came of it
            upload.data[start:] = request.body or upload.data[start:]
        total = match[3] if match else str(len(upload.data))
        if total == "*" or len(upload.data) < int(total):
            return Response(308, {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {})
        del self._uploads[number]
        return self._finish(upload)

    def _finish(self, upload: _Upload) -> Response:
        bucket, key = upload.bucket, upload.key
        self._check_bucket(bucket)
        if not key:
            raise HttpError(400, "required", "an object needs a name")
        self._check_conditions(bucket, key, upload.request)
        item = self._put(bucket, key, bytes(upload.data), upload.content_type, upload.metadata)
        return json_response(_entry(bucket, key, item))


def _json_body(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds; an empty one for none.

    Raises:
        HttpError: when it is none.
    """
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise HttpError(400, "parseError", "the body is no JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("name", ""), str):
        raise HttpError(400, "parseError", "the body is no JSON object with a text for its name")
    if not isinstance(found.get("metadata") or {}, dict):
        raise HttpError(400, "parseError", "metadata is no JSON object")
    return found


def _multipart(request: Request) -> list[bytes]:
    """The parts of a body, each with its own headers. Clients end lines with CRLF or LF alone; data may end in CR."""
    match = re.search(r'boundary=(?:"([^"]+)"|([^;]+))', request.headers.get("content-type", ""))
    if match is None:
        raise HttpError(400, "required", "a body in parts needs a boundary")
    boundary = (match[1] or match[2]).strip("'").encode("latin-1")
    end = b"\r\n" if request.body.partition(b"\n")[0].endswith(b"\r") else b"\n"
    return (end + request.body).split(end + b"--" + boundary)[1:-1]


def _bucket_entry(bucket: str) -> dict[str, Any]:
    return {"kind": "storage#bucket", "id": bucket, "name": bucket, "location": "SIMULATED", "locationType": "region",
            "storageClass": "STANDARD"}  # fmt: skip


def _entry(bucket: str, key: str, item: StoredObject) -> dict[str, Any]:
    when = _timestamp(item.updated)
    known = {"md5Hash": item.md5, "crc32c": item.crc32c, "metadata": dict(item.metadata)}
    return {
        "kind": "storage#object", "id": f"{bucket}/{key}/{item.generation}", "name": key, "bucket": bucket,
        "generation": str(item.generation), "metageneration": "1", "contentType": item.content_type,
        "storageClass": "STANDARD", "size": str(item.size), "timeCreated": when, "updated": when, "etag": item.etag,
    } | {name: value for name, value in known.items() if value}  # fmt: skip


# -- XML


class XmlApi(_Api):
    """S3 in path style, and the XML API of GCS."""

    def __init__(self, objects: Objects, generation: Callable[[], int]) -> None:
        super().__init__(objects, generation)
        self._uploads: dict[str, dict[int, bytes]] = {}

    def call(self, request: Request) -> ApiCall:
        """What the request asks for."""
        bucket, _, key = unquote(request.path[1:]).partition("/")
        query, method = request.query, request.method
        if not key:
            if method == "POST" and "delete" in query:
                return ApiCall("delete", bucket, "", lambda: self._delete_many(request, bucket))
            if method == "GET" and bucket and not {"location", "versioning"} & query.keys():
                return ApiCall("list", bucket, "", lambda: self._listing(request, bucket))
            return ApiCall("bucket", bucket, "", lambda: self._bucket(request, bucket))
        kinds = {"GET": "read", "HEAD": "info", "DELETE": "delete", "PUT": "write", "POST": "write"}
        actions = {"GET": self._get, "HEAD": self._get, "DELETE": self._delete, "PUT": self._write, "POST": self._post}
        if method not in kinds:
            raise HttpError(405, "MethodNotAllowed")
        return ApiCall(kinds[method], bucket, key, lambda: actions[method](request, bucket, key))

    def _bucket(self, request: Request, bucket: str) -> Response:
        if not bucket:
            names = [_xml("Bucket", Name=name, CreationDate=_timestamp(0)) for name in self._objects.buckets()]
            return xml_response(_wrap("ListAllMyBucketsResult", _wrap("Buckets", "".join(names))))
        if request.method == "PUT":
            self._create_bucket(bucket)
            return Response(200)
        self._check_bucket(bucket)
        if request.method == "DELETE":
            return self._delete_bucket(bucket)
        if "location" in request.query:
            return xml_response(_wrap("LocationConstraint", ""))
        if "versioning" in request.query:
            return xml_response(_wrap("VersioningConfiguration", ""))
        return Response(200, {"x-amz-bucket-region": "us-east-1"})

    def _listing(self, request: Request, bucket: str) -> Response:
        query = request.query
        second = query.get("list-type") == "2"
        after = (query.get("continuation-token") or query.get("start-after", "")) if second else query.get("marker", "")
        limit, page = self._list(bucket, query, after, query.get("max-keys", ""))
        encode: Callable[[str], str] = quote if query.get("encoding-type") == "url" else str
        known: dict[str, Any] = {
            "Name": bucket, "Prefix": encode(query.get("prefix", "")), "Delimiter": encode(query.get("delimiter", "")),
            "MaxKeys": limit, "KeyCount": len(page.keys) + len(page.prefixes),
            "IsTruncated": str(bool(page.next_after)).lower(),
        }  # fmt: skip
        known |= {"EncodingType": "url"} if encode is quote else {}
        known |= {"NextContinuationToken" if second else "NextMarker": page.next_after} if page.next_after else {}
        objects = [
            _xml(
                "Contents", Key=encode(key), LastModified=_timestamp(item.updated), ETag=f'"{item.etag}"',
                Size=item.size, StorageClass="STANDARD",
            )
            for key, item in self._found(bucket, page.keys)
        ]  # fmt: skip
        groups = [_xml("CommonPrefixes", Prefix=encode(group)) for group in page.prefixes]
        return xml_response(_wrap("ListBucketResult", _tags(known), *objects, *groups))

    def _delete_many(self, request: Request, bucket: str) -> Response:
        self._check_bucket(bucket)
        keys = re.findall(r"<Key>(.*?)</Key>", request.body.decode(), re.DOTALL)
        names = [unescape(key, {"&quot;": '"', "&apos;": "'"}) for key in keys]
        for name in names:
            self._objects.delete(bucket, name)
        return xml_response(_wrap("DeleteResult", *(_xml("Deleted", Key=name) for name in names)))

    def _get(self, request: Request, bucket: str, key: str) -> Response:
        self._check_bucket(bucket)
        return media(self._find(bucket, key), request)

    def _delete(self, request: Request, bucket: str, key: str) -> Response:
        if "uploadId" in request.query:
            self._uploads.pop(request.query["uploadId"], None)
            return Response(204)
        self._check_bucket(bucket)
        self._check_conditions(bucket, key, request)
        self._objects.delete(bucket, key)
        return Response(204)

    def _write(self, request: Request, bucket: str, key: str) -> Response:
        self._check_bucket(bucket)
        headers, body = request.headers, request.body
        signed = headers.get("x-amz-content-sha256", "").startswith("STREAMING")
        if signed or "aws-chunked" in headers.get("content-encoding", ""):
            body = unwrap_aws_chunks(body)
        if "partNumber" in request.query:
            return self._write_part(request, body)
        self._check_conditions(bucket, key, request)
        source = headers.get("x-amz-copy-source") or headers.get("x-goog-copy-source")
        if source:
            other, _, name = unquote(source).lstrip("/").partition("?")[0].partition("/")
            item = self._find(other, name)
            copy = self._put(bucket, key, item.read(), item.content_type, item.metadata)
            return xml_response(_xml("CopyObjectResult", ETag=f'"{copy.etag}"', LastModified=_timestamp(copy.updated)))
        metadata = {
            name.removeprefix(prefix): value
            for prefix in _METADATA for name, value in headers.items() if name.startswith(prefix)
        }  # fmt: skip
        found = object_headers(self._put(bucket, key, body, headers.get("content-type", ""), metadata))
        return Response(200, {name: found[name] for name in ("ETag", "x-goog-generation", "x-goog-hash")})

    def _upload(self, request: Request) -> dict[int, bytes]:
        """The parts of an upload so far."""
        try:
            return self._uploads[request.query.get("uploadId", "")]
        except KeyError:
            raise HttpError(404, "NoSuchUpload") from None

    def _write_part(self, request: Request, data: bytes) -> Response:
        parts, number = self._upload(request), int(request.query["partNumber"])
        if not 1 <= number <= _MOST_PARTS:
            raise HttpError(400, "InvalidArgument", f"partNumber is {number}, but must be 1 to {_MOST_PARTS}")
        parts[number] = data
        return Response(200, {"ETag": f'"{_md5(data).hex()}"'})

    def _post(self, request: Request, bucket: str, key: str) -> Response:
        """Begin an upload in parts, or put the parts together."""
        self._check_bucket(bucket)
        if "uploads" in request.query:
            number = f"{self._generation():x}"
            self._uploads[number] = {}
            return xml_response(_xml("InitiateMultipartUploadResult", Bucket=bucket, Key=key, UploadId=number))
        parts = self._upload(request)
        self._check_conditions(bucket, key, request)
        numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", request.body.decode())]
        if not numbers or any(number not in parts for number in numbers):
            raise HttpError(400, "InvalidPart")
        chosen = [parts[number] for number in numbers]
        etag = f"{_md5(b''.join(map(_md5, chosen))).hex()}-{len(chosen)}"
        item = self._put(bucket, key, b"".join(chosen), etag=etag)
        del self._uploads[request.query["uploadId"]]
        return xml_response(_xml("CompleteMultipartUploadResult", Bucket=bucket, Key=key, ETag=f'"{item.etag}"'))


def _tags(values: Mapping[str, Any]) -> str:
    return "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in values.items())


def _wrap(name: str, *inner: str) -> str:
    return f"<{name}>{''.join(inner)}</{name}>"


def _xml(name: str, **values: Any) -> str:
    return _wrap(name, _tags(values))


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
