"""How each client is pointed at a simulated cloud, and one that adds nothing of its own."""

import http.client
import json

from waiting import PATIENCE_SECONDS


def obstore_of(cloud, scheme, bucket):
    from obstore.store import GCSStore, S3Store

    options = {"allow_http": True}
    if scheme == "gs":
        key = {"gcs_base_url": cloud.address, "disable_oauth": True, "client_email": "", "private_key": "",
               "private_key_id": ""}  # fmt: skip
        return GCSStore(bucket, service_account_key=json.dumps(key), client_options=options)
    return S3Store(
        bucket, endpoint=cloud.address, skip_signature=True, region="us-east-1", client_options=options,
        virtual_hosted_style_request=False,
    )  # fmt: skip


def asker(cloud):
    """`ask(method, path, body, **headers)`: status, headers, body."""

    def send(method, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", cloud.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    return send
