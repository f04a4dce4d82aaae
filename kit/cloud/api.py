"""Routes: what a request asks for, before it is done, so that it can be counted, refused or made to fail first.

Paths under `/storage`, `/upload`, `/download` and `/batch` are the GCS JSON API; every other path is `/bucket/key`, the
GCS XML API and S3 in path style, which differ in the names of a few headers. Nothing is authenticated.

The GCS JSON API, as far as gcsfs, tensorstore and google-cloud-storage use it to read, write, list and delete.

S3 in path style and the GCS XML API, as far as s3fs, obstore and tensorstore use them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape, unescape

from kit.cloud.http import (
    BadRequest,
    MemoryBody,
    Request,
    Response,
    byte_range,
    decoded,
    json_response,
    unwrap_aws_chunks,
    xml_response,
)
from kit.cloud.objects import KeyRefused, Objects, StoredObject, describe, list_page

JSON_ROOTS = ("/storage/", "/upload/storage/", "/download/storage/", "/batch/storage/")


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A request that is understood."""

    kind: str
    """One of `kit.cloud.counts.KINDS_OF_REQUEST`."""
    bucket: str
    key: str
    """Empty when it names no object."""
    run: Callable[[], Response]

    @property
    def name(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else ""


class Refused(Exception):  # noqa: N818 - an answer, not a failure of this program
    """A request that is answered with an error; each API writes it in its own way."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        self.status, self.code, self.message = status, code, message or code


def is_json(path: str) -> bool:
    return path.startswith(JSON_ROOTS)


def check_conditions(item: StoredObject | None, request: Request) -> None:
    """Refuse a write or a read whose conditions do not hold.

    Raises:
        Refused: 412, or 304 for a read of what the caller already has.
    """
    query, headers = request.query, request.headers
    generation = str(item.generation) if item else "0"
    wanted = query.get("ifGenerationMatch", headers.get("x-goog-if-generation-match"))
    if wanted is not None and wanted != generation:
        raise Refused(412, "PreconditionFailed", f"the generation is {generation}, not {wanted}")
    if (other := query.get("ifGenerationNotMatch")) is not None and other == generation:
        raise _unchanged(request)
    etags = headers.get("if-match")
    if etags is not None and (item is None or not _names(etags, item)):
        raise Refused(412, "PreconditionFailed", "the ETag is another one")
    etags = headers.get("if-none-match")
    if etags is not None and item is not None and _names(etags, item):
        raise _unchanged(request)


def _unchanged(request: Request) -> Refused:
    is_read = request.method in ("GET", "HEAD")
    return Refused(304, "NotModified") if is_read else Refused(412, "PreconditionFailed", "the object is there")


def _names(etags: str, item: StoredObject) -> bool:
    return any(tag.strip().removeprefix("W/").strip('"') in ("*", item.etag) for tag in etags.split(","))


def media(item: StoredObject, request: Request) -> Response:
    """The bytes of an object, or the range of them that is asked for, with everything clients check.

    Raises:
        Refused: 416 beyond the end, 304 or 412 by its conditions, 404 when the file has gone.
    """
    check_conditions(item, request)
    headers = object_headers(item)
    try:
        part = byte_range(request.headers["range"], item.size) if "range" in request.headers else None
    except BadRequest:
        raise Refused(416, "InvalidRange", f"bytes */{item.size}") from None
    start, stop = part or (0, item.size)
    try:
        body = item.open(start, stop)
    except OSError:
        raise Refused(404, "NoSuchKey", "the object is gone") from None
    if part is None:
        return Response(200, headers, body)
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{item.size}"
    return Response(206, headers, body)


def object_headers(item: StoredObject) -> dict[str, Any]:
    headers = {
        "Content-Type": item.content_type,
        "ETag": f'"{item.etag}"',
        "Last-Modified": formatdate(item.updated, usegmt=True),
        "Accept-Ranges": "bytes",
        "x-goog-generation": item.generation,
        "x-goog-metageneration": 1,
        "x-goog-storage-class": "STANDARD",
        "x-goog-stored-content-length": item.size,
        "x-goog-stored-content-encoding": "identity",
    }
    hashes = [f"crc32c={item.crc32c}"] * bool(item.crc32c) + [f"md5={item.md5}"] * bool(item.md5)
    if hashes:
        headers["x-goog-hash"] = ",".join(hashes)
    for prefix in ("x-goog-meta-", "x-amz-meta-"):
        headers.update({f"{prefix}{name}": value for name, value in item.metadata.items()})
    return headers


_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_PART_END = re.compile(rb"\r?\n\r?\n")
_MOST_RESULTS = 1000
_COPIES = ("rewriteTo", "copyTo")


@dataclass(slots=True)
class _Upload:
    bucket: str
    key: str
    request: Request
    """The one that began it: its conditions hold at the end."""
    content_type: str
    metadata: dict[str, str]
    data: bytearray


class JsonApi:
    """Requests to calls on `objects`; `generation()` counts up."""

    def __init__(self, objects: Objects, generation: Callable[[], int]) -> None:
        self._objects = objects
        self._generation = generation
        self._uploads: dict[str, _Upload] = {}

    def call(self, request: Request) -> ApiCall:
        """What the request asks for."""
        root, _, rest = request.path.partition("storage/v1")
        if root == "/batch/":
            return ApiCall("delete", "", "", lambda: self._batch(request))
        parts = rest.strip("/").split("/")
        if parts[0] != "b":
            return ApiCall("bucket", "", "", _missing)
        bucket = decoded(parts[1]) if len(parts) > 1 else ""
        if root == "/upload/":
            return self._upload_call(request, bucket)
        if len(parts) <= 2:
            return ApiCall("bucket", bucket, "", lambda: self._bucket(request, bucket))
        if parts[2] != "o":
            return ApiCall("bucket", bucket, "", lambda: self._about(bucket, parts[2]))
        if len(parts) == 3:
            return ApiCall("list", bucket, "", lambda: self._list(request, bucket))
        verb = next((word for word in _COPIES if _marks_copy(parts, word)), "")
        if verb:
            return self._copy_call(request, bucket, parts, verb)
        key = decoded("/".join(parts[3:]))
        is_media = root == "/download/" or request.query.get("alt") == "media"
        kind = {"GET": "read" if is_media else "info", "DELETE": "delete"}.get(request.method, "info")
        return ApiCall(kind, bucket, key, lambda: self._object(request, bucket, key, is_media))

    def _copy_call(self, request: Request, bucket: str, parts: list[str], verb: str) -> ApiCall:
        place = parts.index(verb, 4)
        source, target = decoded("/".join(parts[3:place])), parts[place + 2 :]
        return ApiCall("write", bucket, source, lambda: self._copy(request, bucket, source, target, verb))

    # -- buckets

    def _bucket(self, request: Request, bucket: str) -> Response:
        if request.method == "POST" and not bucket:
            return self._create(_told(request.body).get("name", ""))
        if not bucket:
            return json_response({
                "kind": "storage#buckets", "items": [_bucket_entry(name) for name in self._objects.buckets()],
            })  # fmt: skip
        self._check_bucket(bucket)
        if request.method == "DELETE":
            if not self._objects.delete_bucket(bucket):
                raise Refused(409, "conflict", "the bucket is not empty")
            return Response(204)
        return json_response(_bucket_entry(bucket))

    def _create(self, bucket: str) -> Response:
        if not bucket:
            raise Refused(400, "required", "a bucket needs a name")
        if self._objects.has_bucket(bucket):
            raise Refused(409, "conflict", "the bucket is there")
        self._objects.create_bucket(bucket)
        return json_response(_bucket_entry(bucket))

    def _about(self, bucket: str, what: str) -> Response:
        self._check_bucket(bucket)
        if what != "storageLayout":
            raise Refused(501, "notImplemented", f"{what} of a bucket is not simulated")
        return json_response({"kind": "storage#storageLayout", "bucket": bucket, "location": "SIMULATED",
                              "locationType": "region"})  # fmt: skip

    def _check_bucket(self, bucket: str) -> None:
        if not self._objects.has_bucket(bucket):
            raise Refused(404, "notFound", f"no bucket {bucket}")

    # -- objects

    def _list(self, request: Request, bucket: str) -> Response:
        self._check_bucket(bucket)
        query = request.query
        token = base64.urlsafe_b64decode(query["pageToken"]).decode() if query.get("pageToken") else ""
        first = token or _just_before(query.get("startOffset", ""))
        limit = min(_MOST_RESULTS, int(query.get("maxResults") or _MOST_RESULTS))
        page = list_page(self._objects, bucket, query.get("prefix", ""), query.get("delimiter", ""), first, limit)
        end, after = query.get("endOffset", ""), page.next_after
        keys = [key for key in page.keys if not end or key < end]
        prefixes = [prefix for prefix in page.prefixes if not end or prefix < end]
        found = [(key, self._objects.find(bucket, key)) for key in keys]
        answer: dict[str, Any] = {
            "kind": "storage#objects", "items": [_entry(bucket, key, item) for key, item in found if item],
        }  # fmt: skip
        if prefixes:
            answer["prefixes"] = prefixes
        if after and (not end or after < end):
            answer["nextPageToken"] = base64.urlsafe_b64encode(after.encode()).decode()
        return json_response(answer)

    def _object(self, request: Request, bucket: str, key: str, is_media: bool) -> Response:
        item = self._find(request, bucket, key)
        if request.method == "DELETE":
            check_conditions(item, request)
            self._objects.delete(bucket, key)
            return Response(204)
        if request.method in ("PATCH", "PUT"):
            return self._describe(request, bucket, key, item)
        if is_media:
            return media(item, request)
        check_conditions(item, request)
        return json_response(_entry(bucket, key, item))

    def _describe(self, request: Request, bucket: str, key: str, item: StoredObject) -> Response:
        """New metadata for the same bytes."""
        told = _told(request.body)
        changed = describe(item.read(), self._generation(), told.get("contentType", item.content_type),
                           {**item.metadata, **(told.get("metadata") or {})})  # fmt: skip
        return json_response(_entry(bucket, key, self._put(bucket, key, changed)))

    def _find(self, request: Request, bucket: str, key: str) -> StoredObject:
        item = self._objects.find(bucket, key)
        generation = request.query.get("generation", "")
        if item is None or (generation and generation != str(item.generation)):
            raise Refused(404, "notFound", f"No such object: {bucket}/{key}")
        return item

    def _copy(self, request: Request, bucket: str, key: str, target: list[str], verb: str) -> Response:
        item = self._find(request, bucket, key)
        if len(target) < 3 or target[1] != "o":
            raise Refused(400, "invalid", "no target")
        other, name = decoded(target[0]), decoded("/".join(target[2:]))
        self._check_bucket(other)
        check_conditions(self._objects.find(other, name), request)
        copy = self._put(other, name, describe(item.read(), self._generation(), item.content_type, item.metadata))
        entry = _entry(other, name, copy)
        if verb == "copyTo":
            return json_response(entry)
        size = str(copy.size)
        return json_response({
            "kind": "storage#rewriteResponse", "done": True, "objectSize": size, "totalBytesRewritten": size,
            "resource": entry,
        })  # fmt: skip

    def _put(self, bucket: str, key: str, item: StoredObject) -> StoredObject:
        try:
            return self._objects.put(bucket, key, item)
        except KeyRefused:
            raise Refused(400, "invalid", f"a folder cannot hold the key {key}") from None

    def _batch(self, request: Request) -> Response:
        """Several deletions in one request: how clients delete a folder."""
        boundary = _boundary(request)
        answers = []
        for part in request.body.split(b"--" + boundary)[1:-1]:
            line = re.search(rb"^(DELETE) (\S+) HTTP", part, re.MULTILINE)
            if line is None:
                raise Refused(501, "notImplemented", "only deletions are simulated in a batch")
            inner = Request("DELETE", line[2].decode().partition("?")[0], {}, {})
            try:
                status = self.call(inner).run().status
            except Refused as refused:
                status = refused.status
            answers.append(f"--kit\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {status} done\r\n\r\n\r\n")
        body = "".join(answers) + "--kit--"
        return Response(200, {"Content-Type": "multipart/mixed; boundary=kit"}, MemoryBody(body.encode()))

    # -- uploads

    def _upload_call(self, request: Request, bucket: str) -> ApiCall:
        if "upload_id" in request.query:
            upload = self._uploads.get(request.query["upload_id"])
            key = upload.key if upload else ""
            return ApiCall("write", bucket, key, lambda: self._continue(request))
        name = request.query.get("name", "")
        how = request.query.get("uploadType", "media")
        if how == "resumable":
            told = _told(request.body)
            name = name or told.get("name", "")
            return ApiCall("write", bucket, name, lambda: self._begin(request, bucket, name, told))
        if how == "multipart":
            told, kind, data = _parts(request)
            name = name or told.get("name", "")
            kind, metadata = told.get("contentType", kind), told.get("metadata") or {}
            return ApiCall("write", bucket, name, lambda: self._store(request, bucket, name, data, kind, metadata))
        kind = request.headers.get("content-type", "")
        return ApiCall("write", bucket, name, lambda: self._store(request, bucket, name, request.body, kind, {}))

    def _store(
        self, request: Request, bucket: str, key: str, data: bytes, content_type: str, metadata: dict[str, str]
    ) -> Response:
        self._check_bucket(bucket)
        if not key:
            raise Refused(400, "required", "an object needs a name")
        check_conditions(self._objects.find(bucket, key), request)
        item = self._put(bucket, key, describe(data, self._generation(), content_type, metadata))
        return json_response(_entry(bucket, key, item))

    def _begin(self, request: Request, bucket: str, key: str, told: dict[str, Any]) -> Response:
        self._check_bucket(bucket)
        number = f"{self._generation():x}"
        kind = told.get("contentType") or request.headers.get("x-upload-content-type", "")
        self._uploads[number] = _Upload(bucket, key, request, kind, told.get("metadata") or {}, bytearray())
        host = request.headers.get("host", "localhost")
        place = f"http://{host}/upload/storage/v1/b/{quote(bucket)}/o?uploadType=resumable&upload_id={number}"
        return json_response({}, headers={"Location": place, "X-GUploader-UploadID": number})

    def _continue(self, request: Request) -> Response:
        number = request.query["upload_id"]
        upload = self._uploads.get(number)
        if upload is None:
            raise Refused(404, "notFound", "no such upload")
        if request.method == "DELETE":
            del self._uploads[number]
            return Response(204)
        match = _CONTENT_RANGE.fullmatch(request.headers.get("content-range", ""))
        start = int(match[1]) if match and match[1] else len(upload.data)
        if start <= len(upload.data):  # a part sent again replaces what came of it
            upload.data[start:] = request.body or upload.data[start:]
        total = match[3] if match else str(len(upload.data))
        if total == "*" or len(upload.data) < int(total):
            held = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
            return Response(308, held)
        del self._uploads[number]
        return self._store(upload.request, upload.bucket, upload.key, bytes(upload.data), upload.content_type,
                           upload.metadata)  # fmt: skip


def _just_before(key: str) -> str:
    """A text that only keys from `key` on come after, since pages start after a key and offsets at one."""
    return key[:-1] + chr(max(0, ord(key[-1]) - 1)) + "\U0010ffff" if key else ""


def _marks_copy(parts: list[str], verb: str) -> bool:
    """Whether a path goes `b/bucket/o/key/verb/b/…`."""
    return verb in parts[4:] and parts[parts.index(verb, 4) + 1 :][:1] == ["b"]


def _missing() -> Response:
    raise Refused(404, "notFound", "no such path")


def _told(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds; an empty one for none.

    Raises:
        Refused: when it is none.
    """
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise Refused(400, "parseError", "the body is no JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("name", ""), str):
        raise Refused(400, "parseError", "the body is no JSON object with a text for its name")
    if not isinstance(found.get("metadata") or {}, dict):
        raise Refused(400, "parseError", "metadata is no JSON object")
    return found


def _boundary(request: Request) -> bytes:
    match = re.search(r'boundary=(?:"([^"]+)"|([^;]+))', request.headers.get("content-type", ""))
    if match is None:
        raise Refused(400, "invalid", "no boundary")
    return (match[1] or match[2]).strip("'").encode("latin-1")


def _parts(request: Request) -> tuple[dict[str, Any], str, bytes]:
    """Metadata, content type and bytes of an upload in one request."""
    boundary = _boundary(request)
    body = request.body
    marker = b"--" + boundary
    first = body.find(marker)
    second = body.find(b"\n" + marker, first + len(marker))
    last = body.rfind(b"\n" + marker + b"--")
    if first < 0 or second < 0 or last <= second:
        raise Refused(400, "invalid", "two parts are needed")
    told = _PART_END.split(body[first:second], maxsplit=1)[1]
    head, data = _PART_END.split(body[second + 1 : last], maxsplit=1)
    kind = re.search(rb"(?i)content-type:\s*([^\r\n]+)", head)
    data = data[:-1] if data.endswith(b"\r") and body[second - 1 : second] == b"\r" else data
    return _told(told), kind[1].decode() if kind else "", data


def _bucket_entry(bucket: str) -> dict[str, Any]:
    return {"kind": "storage#bucket", "id": bucket, "name": bucket, "location": "SIMULATED", "locationType": "region",
            "storageClass": "STANDARD"}  # fmt: skip


def _entry(bucket: str, key: str, item: StoredObject) -> dict[str, Any]:
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(item.updated)) + f".{int(item.updated % 1 * 1000):03d}Z"
    entry: dict[str, Any] = {
        "kind": "storage#object", "id": f"{bucket}/{key}/{item.generation}", "name": key, "bucket": bucket,
        "generation": str(item.generation), "metageneration": "1", "contentType": item.content_type,
        "storageClass": "STANDARD", "size": str(item.size), "timeCreated": when, "updated": when, "etag": item.etag,
    }  # fmt: skip
    entry |= {"md5Hash": item.md5} if item.md5 else {}
    entry |= {"crc32c": item.crc32c} if item.crc32c else {}
    return entry | ({"metadata": dict(item.metadata)} if item.metadata else {})


_MOST_PARTS = 10_000
_NO_DATE = "<CreationDate>1970-01-01T00:00:00.000Z</CreationDate>"
_REGION = {"x-amz-bucket-region": "us-east-1"}


class XmlApi:
    """Requests to calls on `objects`; `generation()` counts up."""

    def __init__(self, objects: Objects, generation: Callable[[], int]) -> None:
        self._objects = objects
        self._generation = generation
        self._uploads: dict[str, dict[int, bytes]] = {}

    def call(self, request: Request) -> ApiCall:
        """What the request asks for."""
        bucket, _, key = decoded(request.path[1:]).partition("/")
        query, method = request.query, request.method
        if not key:
            if method == "POST" and "delete" in query:
                return ApiCall("delete", bucket, "", lambda: self._delete_many(request, bucket))
            if method == "GET" and bucket and not {"location", "versioning"} & query.keys():
                return ApiCall("list", bucket, "", lambda: self._list(request, bucket))
            return ApiCall("bucket", bucket, "", lambda: self._bucket(request, bucket))
        kinds = {"GET": "read", "HEAD": "info", "DELETE": "delete", "PUT": "write", "POST": "write"}
        actions = {"GET": self._get, "HEAD": self._get, "DELETE": self._delete, "PUT": self._put, "POST": self._post}
        if method not in kinds:
            return ApiCall("info", bucket, key, _not_allowed)
        return ApiCall(kinds[method], bucket, key, lambda: actions[method](request, bucket, key))

    # -- buckets

    def _bucket(self, request: Request, bucket: str) -> Response:
        if not bucket:
            known = self._objects.buckets()
            names = "".join(f"<Bucket><Name>{escape(name)}</Name>{_NO_DATE}</Bucket>" for name in known)
            return xml_response(f"<ListAllMyBucketsResult><Buckets>{names}</Buckets></ListAllMyBucketsResult>")
        if request.method == "PUT":
            self._create(bucket)
            return Response(200)
        self._check_bucket(bucket)
        if request.method == "DELETE":
            if not self._objects.delete_bucket(bucket):
                raise Refused(409, "BucketNotEmpty")
            return Response(204)
        if "location" in request.query:
            return xml_response("<LocationConstraint></LocationConstraint>")
        if "versioning" in request.query:
            return xml_response("<VersioningConfiguration></VersioningConfiguration>")
        return Response(200, dict(_REGION))

    def _create(self, bucket: str) -> None:
        if self._objects.has_bucket(bucket):
            raise Refused(409, "BucketAlreadyOwnedByYou")
        try:
            self._objects.create_bucket(bucket)
        except KeyRefused:
            raise Refused(400, "InvalidBucketName") from None

    def _check_bucket(self, bucket: str) -> None:
        if not self._objects.has_bucket(bucket):
            raise Refused(404, "NoSuchBucket")

    def _list(self, request: Request, bucket: str) -> Response:
        self._check_bucket(bucket)
        query = request.query
        second = query.get("list-type") == "2"
        after = (query.get("continuation-token") or query.get("start-after", "")) if second else query.get("marker", "")
        limit = min(_MOST_RESULTS, int(query.get("max-keys") or _MOST_RESULTS))
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        page = list_page(self._objects, bucket, prefix, delimiter, after, limit)
        write = quote if query.get("encoding-type") == "url" else escape
        found = [(key, self._objects.find(bucket, key)) for key in page.keys]
        parts = [
            f"<Name>{escape(bucket)}</Name><Prefix>{write(prefix)}</Prefix><Delimiter>{write(delimiter)}</Delimiter>",
            f"<MaxKeys>{limit}</MaxKeys><KeyCount>{len(page.keys) + len(page.prefixes)}</KeyCount>",
            f"<IsTruncated>{str(bool(page.next_after)).lower()}</IsTruncated>",
            "<EncodingType>url</EncodingType>" if write is quote else "",
        ]
        if page.next_after:
            name = "NextContinuationToken" if second else "NextMarker"
            parts.append(f"<{name}>{escape(page.next_after)}</{name}>")
        parts += [_contents(write(key), item) for key, item in found if item]
        parts += [f"<CommonPrefixes><Prefix>{write(group)}</Prefix></CommonPrefixes>" for group in page.prefixes]
        return xml_response(f"<ListBucketResult>{''.join(parts)}</ListBucketResult>")

    def _delete_many(self, request: Request, bucket: str) -> Response:
        self._check_bucket(bucket)
        names = [unescape(name, {"&quot;": '"', "&apos;": "'"})
                 for name in re.findall(r"<Key>(.*?)</Key>", request.body.decode(), re.DOTALL)]  # fmt: skip
        for name in names:
            self._objects.delete(bucket, name)
        done = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        return xml_response(f"<DeleteResult>{done}</DeleteResult>")

    # -- objects

    def _get(self, request: Request, bucket: str, key: str) -> Response:
        self._check_bucket(bucket)
        item = self._objects.find(bucket, key)
        if item is None:
            raise Refused(404, "NoSuchKey", f"no object {key}")
        return media(item, request)

    def _delete(self, request: Request, bucket: str, key: str) -> Response:
        if "uploadId" in request.query:
            self._uploads.pop(request.query["uploadId"], None)
            return Response(204)
        self._check_bucket(bucket)
        item = self._objects.find(bucket, key)
        check_conditions(item, request)
        self._objects.delete(bucket, key)
        return Response(204)

    def _put(self, request: Request, bucket: str, key: str) -> Response:
        self._check_bucket(bucket)
        headers = request.headers
        if "partNumber" in request.query:
            return self._put_part(request)
        check_conditions(self._objects.find(bucket, key), request)
        source = headers.get("x-amz-copy-source") or headers.get("x-goog-copy-source")
        if source:
            return self._copy(source, bucket, key)
        item = describe(_content(request), self._generation(), headers.get("content-type", ""), _metadata(headers))
        return Response(200, _answer_headers(self._store(bucket, key, item)))

    def _copy(self, source: str, bucket: str, key: str) -> Response:
        other, _, name = decoded(source).lstrip("/").partition("?")[0].partition("/")
        item = self._objects.find(other, name)
        if item is None:
            raise Refused(404, "NoSuchKey", f"no object {name}")
        copied = describe(item.read(), self._generation(), item.content_type, item.metadata)
        copy = self._store(bucket, key, copied)
        return xml_response(
            f"<CopyObjectResult><ETag>&quot;{copy.etag}&quot;</ETag>"
            f"<LastModified>{_when(copy.updated)}</LastModified></CopyObjectResult>"
        )

    def _store(self, bucket: str, key: str, item: StoredObject) -> StoredObject:
        try:
            return self._objects.put(bucket, key, item)
        except KeyRefused:
            raise Refused(400, "InvalidObjectName", f"a folder cannot hold the key {key}") from None

    # -- uploads in parts

    def _put_part(self, request: Request) -> Response:
        parts = self._uploads.get(request.query.get("uploadId", ""))
        if parts is None:
            raise Refused(404, "NoSuchUpload")
        data = _content(request)
        number = int(request.query["partNumber"])
        if not 1 <= number <= _MOST_PARTS:
            raise Refused(400, "InvalidArgument", f"partNumber is {number}, but must be 1 to {_MOST_PARTS}")
        parts[number] = data
        return Response(200, {"ETag": f'"{_md5(data)}"'})

    def _post(self, request: Request, bucket: str, key: str) -> Response:
        self._check_bucket(bucket)
        if "uploads" in request.query:
            number = f"{self._generation():x}"
            self._uploads[number] = {}
            return xml_response(
                f"<InitiateMultipartUploadResult><Bucket>{escape(bucket)}</Bucket><Key>{escape(key)}</Key>"
                f"<UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            )
        number = request.query.get("uploadId", "")
        if number not in self._uploads:
            raise Refused(404, "NoSuchUpload")
        check_conditions(self._objects.find(bucket, key), request)
        parts = self._uploads[number]
        named = [int(part) for part in re.findall(r"<PartNumber>(\d+)</PartNumber>", request.body.decode())]
        if not named or any(part not in parts for part in named):
            raise Refused(400, "InvalidPart")
        etag = f"{_md5(b''.join(bytes.fromhex(_md5(parts[part])) for part in named))}-{len(named)}"
        data = b"".join(parts[part] for part in named)
        item = self._store(bucket, key, describe(data, self._generation(), etag=etag))
        del self._uploads[number]
        return xml_response(
            f"<CompleteMultipartUploadResult><Bucket>{escape(bucket)}</Bucket><Key>{escape(key)}</Key>"
            f"<ETag>&quot;{item.etag}&quot;</ETag></CompleteMultipartUploadResult>"
        )


def _not_allowed() -> Response:
    raise Refused(405, "MethodNotAllowed")


def _content(request: Request) -> bytes:
    headers = request.headers
    in_chunks = "aws-chunked" in headers.get("content-encoding", "")
    if in_chunks or headers.get("x-amz-content-sha256", "").startswith("STREAMING"):
        return unwrap_aws_chunks(request.body)
    return request.body


def _metadata(headers: dict[str, str]) -> dict[str, str]:
    found = {}
    for name, value in headers.items():
        for prefix in ("x-amz-meta-", "x-goog-meta-"):
            if name.startswith(prefix):
                found[name.removeprefix(prefix)] = value
    return found


def _answer_headers(item: StoredObject) -> dict[str, object]:
    headers = object_headers(item)
    return {name: headers[name] for name in ("ETag", "x-goog-generation", "x-goog-hash") if name in headers}


def _contents(key: str, item: StoredObject) -> str:
    return (
        f"<Contents><Key>{key}</Key><LastModified>{_when(item.updated)}</LastModified>"
        f"<ETag>&quot;{item.etag}&quot;</ETag><Size>{item.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
