"""S3 in path style and the GCS XML API, as far as s3fs, obstore and tensorstore use them."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from urllib.parse import quote
from xml.sax.saxutils import escape, unescape

from kit.cloud.message import Request, Response, decoded, unwrap_aws_chunks, xml_response
from kit.cloud.objects import KeyRefused, Objects, StoredObject, describe, list_page
from kit.cloud.routes import Call, Refused, check_conditions, media, object_headers

_MOST_RESULTS = 1000
_MOST_PARTS = 10_000
_NO_DATE = "<CreationDate>1970-01-01T00:00:00.000Z</CreationDate>"
_REGION = {"x-amz-bucket-region": "us-east-1"}


class XmlApi:
    """Requests to calls on `objects`; `generation()` counts up."""

    def __init__(self, objects: Objects, generation: Callable[[], int]) -> None:
        self._objects = objects
        self._generation = generation
        self._uploads: dict[str, dict[int, bytes]] = {}

    def call(self, request: Request) -> Call:
        """What the request asks for."""
        bucket, _, key = decoded(request.path[1:]).partition("/")
        query, method = request.query, request.method
        if not key:
            if method == "POST" and "delete" in query:
                return Call("delete", bucket, "", lambda: self._delete_many(request, bucket))
            if method == "GET" and bucket and not {"location", "versioning"} & query.keys():
                return Call("list", bucket, "", lambda: self._list(request, bucket))
            return Call("bucket", bucket, "", lambda: self._bucket(request, bucket))
        kinds = {"GET": "read", "HEAD": "info", "DELETE": "delete", "PUT": "write", "POST": "write"}
        actions = {"GET": self._get, "HEAD": self._get, "DELETE": self._delete, "PUT": self._put, "POST": self._post}
        if method not in kinds:
            return Call("info", bucket, key, _not_allowed)
        return Call(kinds[method], bucket, key, lambda: actions[method](request, bucket, key))

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
