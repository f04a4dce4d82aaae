"""The GCS JSON API, as far as gcsfs, tensorstore and google-cloud-storage use it to read, write, list and delete."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kit.cloud.message import Memory, Request, Response, decoded, json_response
from kit.cloud.objects import KeyRefused, Objects, StoredObject, describe, list_page
from kit.cloud.routes import Call, Refused, check_conditions, media

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

    def call(self, request: Request) -> Call:
        """What the request asks for."""
        root, _, rest = request.path.partition("storage/v1")
        if root == "/batch/":
            return Call("delete", "", "", lambda: self._batch(request))
        parts = rest.strip("/").split("/")
        if parts[0] != "b":
            return Call("bucket", "", "", _missing)
        bucket = decoded(parts[1]) if len(parts) > 1 else ""
        if root == "/upload/":
            return self._upload_call(request, bucket)
        if len(parts) <= 2:
            return Call("bucket", bucket, "", lambda: self._bucket(request, bucket))
        if parts[2] != "o":
            return Call("bucket", bucket, "", lambda: self._about(bucket, parts[2]))
        if len(parts) == 3:
            return Call("list", bucket, "", lambda: self._list(request, bucket))
        verb = next((word for word in _COPIES if _marks_copy(parts, word)), "")
        if verb:
            return self._copy_call(request, bucket, parts, verb)
        key = decoded("/".join(parts[3:]))
        is_media = root == "/download/" or request.query.get("alt") == "media"
        kind = {"GET": "read" if is_media else "info", "DELETE": "delete"}.get(request.method, "info")
        return Call(kind, bucket, key, lambda: self._object(request, bucket, key, is_media))

    def _copy_call(self, request: Request, bucket: str, parts: list[str], verb: str) -> Call:
        place = parts.index(verb, 4)
        source, target = decoded("/".join(parts[3:place])), parts[place + 2 :]
        return Call("write", bucket, source, lambda: self._copy(request, bucket, source, target, verb))

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
        return Response(200, {"Content-Type": "multipart/mixed; boundary=kit"}, Memory(body.encode()))

    # -- uploads

    def _upload_call(self, request: Request, bucket: str) -> Call:
        if "upload_id" in request.query:
            upload = self._uploads.get(request.query["upload_id"])
            key = upload.key if upload else ""
            return Call("write", bucket, key, lambda: self._continue(request))
        name = request.query.get("name", "")
        how = request.query.get("uploadType", "media")
        if how == "resumable":
            told = _told(request.body)
            name = name or told.get("name", "")
            return Call("write", bucket, name, lambda: self._begin(request, bucket, name, told))
        if how == "multipart":
            told, kind, data = _parts(request)
            name = name or told.get("name", "")
            kind, metadata = told.get("contentType", kind), told.get("metadata") or {}
            return Call("write", bucket, name, lambda: self._store(request, bucket, name, data, kind, metadata))
        kind = request.headers.get("content-type", "")
        return Call("write", bucket, name, lambda: self._store(request, bucket, name, request.body, kind, {}))

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
