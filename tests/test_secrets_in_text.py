"""Secrets in text: no password, token or signature gets into a Config or a declaration, nor into the refusing error."""

import traceback

import pytest

import kit
from kit.config import Config
from kit.data.tables.declare import read_sources
from kit.errors import ConfigError
from kit.secrets_in_text import secret_in

CANARY = "canary-7f3a9b2c"
SECRETS = [
    f"https://user:{CANARY}@host/x.zarr",
    f"https://{CANARY}@host/x.zarr",
    f"s3://key:{CANARY}@bucket/x.zarr",
    f"postgresql://user:{CANARY}@host/db",
    f"postgres://user:p/{CANARY}@host/db",
    f"host=db user=me password={CANARY}",
    f"dbname = x password = '{CANARY}'",
    f"password={CANARY}",
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={CANARY}==",
    f"Server=h;Uid=me;Pwd={CANARY};",
    f"https://bucket.s3.amazonaws.com/x?X-Amz-Algorithm=A&X-Amz-Signature={CANARY}",
    f"https://storage.googleapis.com/b/x?x-goog-signature={CANARY}",
    f"https://a.blob.core.windows.net/c/x?sv=1&sig={CANARY}",
    f"https://host/x?token={CANARY}",
    f"https://host/x#access_token={CANARY}",
    f"gs://b/x?api_key={CANARY}",
    f"simplecache::https://user:{CANARY}@host/x",
]
FAIR = [
    "data/ocean.zarr", "gs://bucket/run-7", "https://host:8080/a@b/x.zarr", "/data/user=me/key=3/x", "file:///tmp/a b",
    "abfs://container@account.dfs.core.windows.net/x", "s3://bucket/token=5/part.zarr", "kit.models:GPT", "a@b.org",
    "datasets/ocean/source.py:Ocean", "memory://x", "the password is kept elsewhere", "host=db user=me dbname=x",
    "host=db password=env:NAME",
]  # fmt: skip


@pytest.mark.parametrize("text", FAIR)
def test_fair_texts_hold_no_secret(text):
    assert secret_in(text) == ""
    assert Config().replace({"data.arguments": {"place": [text]}}).get("data.arguments")["place"] == (text,)


def whole(error):
    return "".join(traceback.format_exception(error)) + repr(error) + str(error)


@pytest.mark.parametrize("secret", SECRETS)
def test_every_text_field_of_a_config_refuses_it_without_showing_it(secret):
    fields = [info for info in Config.fields() if info.kind in ("text", "names", "arguments", "choice", "devices")]
    assert len(fields) > 20
    for info in fields:
        value = [secret] if info.kind == "names" else {"deep": [{"x": secret}]} if info.kind == "arguments" else secret
        with pytest.raises(ConfigError) as caught:
            Config().replace({info.path: value})
        assert CANARY not in whole(caught.value)
        assert caught.value.problems[0].path.startswith(info.path)
        assert "env:NAME" in str(caught.value)


@pytest.mark.parametrize("secret", SECRETS)
def test_no_way_of_making_a_config_takes_or_shows_it(secret):
    with pytest.raises(ConfigError) as direct:
        Config(data={"url": secret})
    with pytest.raises(ConfigError) as unknown:
        Config.make({"data": {"urll": secret}, secret: 1})
    with pytest.raises(ConfigError) as twice:
        Config.from_yaml(f'data:\n  url: "{secret}"\n  url: "{secret}"\n')
    with pytest.raises(ConfigError) as written:
        kit.Config.from_yaml(f'checkpoint:\n  url: "{secret}"\n', where="mine.yaml")
    for caught in (direct, unknown, twice, written):
        assert CANARY not in str(caught.value) + repr(caught.value)


def test_a_key_in_place_of_the_name_of_a_variable_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        Config().replace({"data.credentials": CANARY})
    assert CANARY not in whole(caught.value)
    assert "env:NAME" in str(caught.value)


@pytest.mark.parametrize("field", ["database", "service", "user", "host"])
@pytest.mark.parametrize("secret", [text for text in SECRETS if "postgres" in text or "password" in text])
def test_a_declared_table_refuses_it_too(field, secret):
    connection = {"kind": "postgresql", "database": "shop", field: secret}
    entry = {"type": "attribute", "name": "t", "table": "t", "connection": connection}
    with pytest.raises(ConfigError, match=rf"data_sources\.0\.connection\.{field}: .*password") as caught:
        read_sources({"data_sources": [entry]})
    assert CANARY not in whole(caught.value)


def test_a_condition_on_a_column_called_password_is_no_secret():
    connection = {"kind": "duckdb", "path": "shop.duckdb"}
    for where in ("password = 'x'", "token <> 'y' AND key = 3", "password='x' OR user='y@z'"):
        read_sources({"data_sources": [
            {"type": "attribute", "name": "t", "table": "t", "connection": connection, "where": where}
        ]})  # fmt: skip
