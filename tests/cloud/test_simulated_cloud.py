"""A simulated cloud: started in a line, found by URL, counted, and gone when its kernel is."""

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
from cloud_clients import asker
from waiting import wait_until

from kit.cloud.simulated import simulated_cloud
from kit.errors import ConfigError, StoreError
from kit.machine import processes
from kit.machine.endpoints import VARIABLE, endpoint_of


def test_urls_lead_here_for_its_buckets_only_and_to_the_provider_when_it_is_closed(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    with simulated_cloud("no limits") as cloud:
        assert cloud.url("mine/data.zarr") == "gs://mine/data.zarr"
        assert cloud.url("mine/data.zarr", "s3") == "s3://mine/data.zarr"
        assert cloud.url("mine/data.zarr", "http") == f"{cloud.address}/mine/data.zarr"
        assert endpoint_of("gs://mine/other.zarr") == cloud.address
        assert endpoint_of("gs://theirs/data.zarr") == ""
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:1")
        assert endpoint_of("gs://theirs/data.zarr") == "http://localhost:1"
        assert VARIABLE in os.environ
    assert VARIABLE not in os.environ
    assert not cloud.alive
    assert "(closed)" in repr(cloud)
    with pytest.raises(StoreError, match="does not answer"):
        cloud.counts()


def test_two_clouds_stand_side_by_side_and_the_last_one_asked_has_a_bucket(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with simulated_cloud("no limits") as first, simulated_cloud("no limits") as second:
        first.url("a")
        second.url("b")
        assert endpoint_of("gs://a/x") == first.address
        assert endpoint_of("gs://b/x") == second.address
        second.url("a")
        first.close()
        assert endpoint_of("gs://a/x") == second.address


@pytest.mark.parametrize("path", ["", "/", "gs://bucket/x", "-/x"])
def test_a_path_without_a_bucket_is_refused(cloud, path):
    with pytest.raises(ConfigError, match="names no bucket"):
        cloud.url(path)


def test_bad_dials_are_refused_before_anything_starts_and_change_nothing(cloud, tmp_path):
    for settings in ({"situation": "the moon"}, {"latency_seconds": -1}, {"port": 1 << 16}, {"latency": 1}):
        with pytest.raises(ConfigError):
            simulated_cloud(**settings)
    with pytest.raises(ConfigError):
        cloud.turn(latency_seconds="slow")
    assert cloud.dials.latency_seconds == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is a file"):
        simulated_cloud(folder=tmp_path / "file")
    with pytest.raises(StoreError, match="did not start"):
        simulated_cloud("no limits", port=cloud.port)


def test_dials_turn_while_it_runs_and_it_says_how_they_stand(cloud):
    assert str(cloud).startswith(f"Simulated cloud at {cloud.address}, no limits: no latency\n")
    cloud.turn("across the ocean")
    assert "across the ocean: 150 ms" in str(cloud)
    cloud.turn(latency_seconds=0.2)
    assert re.search("across the ocean.*turned: 200 ms", str(cloud))


def test_requests_and_bytes_are_counted_by_kind(cloud, ask):
    cloud.url("counted")
    ask("PUT", "/counted/a", b"x" * 1000)
    for _ in range(3):
        ask("GET", "/counted/a", Range="bytes=0-99")
    ask("HEAD", "/counted/a")
    ask("GET", "/counted?list-type=2")
    ask("DELETE", "/counted/a")
    counts = cloud.counts()
    assert {kind: usage.requests for kind, usage in counts.kinds.items()} == {
        "write": 1, "read": 3, "info": 1, "list": 1, "delete": 1,
    }  # fmt: skip
    assert counts.kinds["read"].bytes_sent == 300
    assert counts.kinds["info"].bytes_sent == 0
    assert counts.bytes_received == 1000
    assert counts.statuses == {"200": 3, "206": 3, "204": 1}
    assert counts.requests == 7
    assert counts.price(price_per_thousand_reads=1000) == 7
    assert (counts.in_flight, counts.refused, dict(counts.faults)) == (0, 0, {})
    assert "read" in str(counts)
    assert "<table" in counts._repr_html_()
    assert cloud.reset_counts().counts().requests == 0


def test_counts_since_a_mark_are_what_was_added_to_it(cloud, ask):
    cloud.url("marked")
    ask("PUT", "/marked/a", b"x" * 1000)
    ask("GET", "/marked/a")
    mark = cloud.counts()
    ask("GET", "/marked/a", Range="bytes=0-9")
    ask("GET", "/marked/none")
    added = cloud.counts(since=mark)
    assert {kind: (usage.requests, usage.bytes_sent) for kind, usage in added.kinds.items()}["read"][0] == 2
    assert (added.bytes_received, dict(added.statuses)) == (0, {"206": 1, "404": 1})
    assert added.requests == 2
    assert added.elapsed_seconds <= cloud.counts().elapsed_seconds
    assert cloud.counts(since=cloud.counts()).requests == 0


def test_a_folder_or_a_file_is_uploaded_past_the_dials_and_the_counts(kept, tmp_path):
    source = tmp_path / "source"
    (source / "c").mkdir(parents=True)
    (source / "zarr.json").write_bytes(b"{}")
    (source / "c" / "0 ä+").write_bytes(b"\0chunk")
    kept.turn(latency_seconds=600, requests_per_second=0.001)
    mark = kept.counts()
    assert kept.upload(source, "mine/x.zarr") == "gs://mine/x.zarr"
    assert kept.upload(source / "zarr.json", "mine/one", "s3") == "s3://mine/one"
    assert kept.counts(since=mark).requests == 0
    kept.turn("no limits")
    read = asker(kept)
    assert read("GET", "/mine/x.zarr/c/0%20%C3%A4%2B")[2] == b"\0chunk"
    assert [read("GET", path)[2] for path in ("/mine/x.zarr/zarr.json", "/mine/one")] == [b"{}", b"{}"]
    with pytest.raises(StoreError, match="does not exist"):
        kept.upload(tmp_path / "none", "mine/none")
    with pytest.raises(StoreError, match="refused with 400"):
        kept.upload(source / "zarr.json", "mine")


def test_its_controls_need_its_token(cloud, ask):
    assert ask("POST", "/-/dials", json.dumps({"latency_seconds": 9}))[0] == 403
    assert ask("GET", "/-/counts")[0] == 403
    assert cloud._token not in repr(cloud)


def test_a_body_that_is_no_json_or_a_damaged_upload_is_an_answer_not_an_end(cloud, ask):
    cloud.url("damaged")
    kind = 'multipart/related; boundary="x"'
    upload = "/upload/storage/v1/b/damaged/o"
    for path, headers in (
        (f"{upload}?uploadType=resumable", {}),
        (f"{upload}?uploadType=multipart", {"Content_Type": kind}),
        (f"{upload}?uploadType=multipart", {}),
        ("/storage/v1/b", {}),
        ("/damaged/a?uploadId=1", {}),
    ):
        assert ask("POST", path, b"no json", **headers)[0] in (400, 404)
    assert ask("GET", "/damaged?list-type=2&max-keys=many")[0] == 400
    assert cloud.counts().in_flight == 0


def _start_elsewhere(then, before="pass"):
    """A process that starts a cloud, does `before`, prints port and process of the cloud, and goes on with `then`."""
    code = f"""
        import os, sys, time
        from kit.cloud.simulated import simulated_cloud
        cloud = simulated_cloud("no limits")
        {before}
        print(cloud.port, cloud.process_id, flush=True)
        {then}
    """
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    port, pid = map(int, started.stdout.readline().split())
    return started, port, processes.identify(pid)


@pytest.mark.parametrize(
    "before", ["pass", "os.fork() or time.sleep(600)"], ids=["alone", "with a fork that holds its pipes"]
)
def test_it_ends_when_its_kernel_is_killed(before):
    started, _, identity = _start_elsewhere("time.sleep(600)", before)
    try:
        assert processes.alive(identity)
        os.kill(started.pid, 9)
        started.wait()
        wait_until(lambda: not processes.alive(identity))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, 9)
        started.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("then", ["sys.exit()", "os._exit(1)", "del cloud; time.sleep(600)"])
def test_it_ends_with_its_kernel_and_with_its_last_name(then):
    started, _, identity = _start_elsewhere(then)
    try:
        wait_until(lambda: not processes.alive(identity))
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def test_a_fork_of_the_kernel_that_ends_leaves_it_running(cloud):
    pid = os.fork()
    if pid == 0:
        cloud.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert cloud.alive
    assert asker(cloud)("GET", "/")[0] == 200


def test_it_starts_without_torch_zarr_or_the_clients():
    heavy = "[name for name in ('torch', 'zarr', 'gcsfs') if name in sys.modules]"
    code = f"import sys, kit.cloud.server, kit.cloud.simulated; print({heavy})"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
