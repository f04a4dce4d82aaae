"""Every fault is what it says, met by the requests it was meant for."""

import http.client
import random
import socket

import pytest
from cloud_clients import asker
from waiting import PATIENCE_SECONDS, wait_until

from kit.cloud.counts import KINDS, FaultPlan, Script
from kit.errors import ConfigError

DATA = random.Random(1).randbytes(1 << 20)


@pytest.fixture
def path(cloud, ask):
    cloud.url("faulty")
    ask("PUT", "/faulty/a", DATA)
    cloud.reset_counts()
    return "/faulty/a"


@pytest.mark.parametrize("status", [403, 404, 408, 429, 500, 502, 503, 504])
def test_a_status_is_answered_in_both_apis_and_the_next_request_passes(cloud, ask, path, status):
    cloud.script("faulty/*", [status, "ok", status])
    assert ask("GET", path)[0] == status
    assert ask("GET", path)[::2] == (200, DATA)
    answer = ask("GET", "/storage/v1/b/faulty/o/a?alt=media")
    assert (answer[0], answer[1]["Content-Type"]) == (status, "application/json")
    assert ask("GET", path)[0] == 200
    assert cloud.counts().faults == {str(status): 2}


def test_a_reset_comes_before_the_first_byte_and_undoes_no_write_it_did_not_do(cloud, ask, path):
    cloud.script("faulty/*", ["reset", "reset"])
    with pytest.raises(ConnectionResetError):
        ask("GET", path)
    with pytest.raises(ConnectionResetError):
        ask("PUT", path, b"new")
    assert ask("GET", path)[2] == DATA


def test_a_lost_answer_leaves_the_write_done(cloud, ask, path):
    cloud.script("faulty/*", ["lost"], kind="write")
    with pytest.raises(ConnectionResetError):
        ask("PUT", path, b"new")
    assert ask("GET", path)[2] == b"new"


def test_a_truncated_body_is_half_of_what_its_head_promises(cloud, ask, path):
    cloud.script("faulty/a", ["truncate"])
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask("GET", path)
    assert caught.value.partial == DATA[: len(DATA) // 2]
    assert caught.value.expected == len(DATA) // 2
    assert ask("GET", path)[2] == DATA


def test_a_dripping_body_comes_in_small_pieces(cloud, path):
    cloud.turn(faults={"drip": 1.0}, drip_bytes_per_second=100)
    with socket.create_connection(("127.0.0.1", cloud.port), timeout=PATIENCE_SECONDS) as channel:
        channel.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{cloud.port}\r\n\r\n".encode())
        data = b""
        while data.find(b"\r\n\r\n") < 0 or len(data.partition(b"\r\n\r\n")[2]) < 20:
            data += channel.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(DATA)}".encode() in head
    assert DATA.startswith(body)
    assert len(body) < len(DATA) // 100
    assert cloud.counts().faults == {"drip": 1}


def test_requests_beyond_the_rate_are_refused_and_counted(cloud, ask, path):
    cloud.turn(requests_per_second=0.001, refusal=503)
    assert [ask("GET", path)[0] for _ in range(3)] == [200, 503, 503]
    assert cloud.counts().refused == 2
    cloud.turn("no limits")
    assert ask("GET", path)[0] == 200


def test_a_fault_by_chance_depends_on_seed_key_and_number_not_on_order():
    names = [f"bucket/{number % 500}" for number in range(2000)]
    plan = FaultPlan({"503": 0.2, "reset": 0.1}, seed=3)
    drawn = {}
    for name in names:
        drawn.setdefault(name, []).append(plan.draw(name, "read"))
    again = FaultPlan({"503": 0.2, "reset": 0.1}, seed=3)
    shuffled = {}
    for name in random.Random(2).sample(names, len(names)):
        shuffled.setdefault(name, []).append(again.draw(name, "read"))
    assert drawn == shuffled
    everything = [fault for faults in drawn.values() for fault in faults]
    assert everything.count("503") / 2000 == pytest.approx(0.2, abs=0.03)
    assert everything.count("reset") / 2000 == pytest.approx(0.1, abs=0.03)
    assert FaultPlan({"503": 0.2}, seed=4).draw("bucket/1", "read") in ("", "503")


def test_a_script_counts_the_requests_of_each_key_and_of_its_kind():
    plan = FaultPlan({}, 0, [Script("b/*.zarr/c/*", ("ok", "503"), "read")])
    asked = [("b/x.zarr/c/0", "read"), ("b/x.zarr/c/1", "read"), ("b/x.zarr/c/0", "info"), ("b/x.zarr/c/0", "read"),
             ("b/x.zarr/c/0", "read"), ("b/x.zarr/zarr.json", "read"), ("b/x.zarr/c/1", "read")]  # fmt: skip
    assert [plan.draw(*one) for one in asked] == ["", "", "", "503", "", "", "503"]


def test_an_unknown_fault_is_refused_with_the_nearest(cloud):
    with pytest.raises(ConfigError, match="resets.*mean 'reset'"):
        cloud.script("faulty/*", ["resets"])
    with pytest.raises(ConfigError, match="reads.*kind of request"):
        cloud.script("faulty/*", ["reset"], kind="reads")
    assert "ok" not in KINDS


def test_gcsfs_gets_over_a_bad_day(cloud, ask, path):
    from gcsfs.core import GCSFileSystem

    fs = GCSFileSystem(**cloud.storage_options(), skip_instance_cache=True)
    cloud.script("faulty/a", [503, "reset"])
    assert fs.cat_file("faulty/a", 10, 2000) == DATA[10:2000]
    cloud.script("faulty/none", [404])
    with pytest.raises(FileNotFoundError):
        fs.cat_file("faulty/none", 0, 1)
    counts = cloud.counts()
    assert counts.faults == {"503": 1, "reset": 1, "404": 1}
    assert counts.kinds["read"].requests == 4


def test_obstore_gets_over_a_bad_day(cloud, ask, path):
    obstore = pytest.importorskip("obstore")
    from cloud_clients import obstore_of

    store = obstore_of(cloud, "s3", "faulty")
    cloud.script("faulty/a", [503, "reset", "truncate"])
    assert bytes(obstore.get(store, "a").bytes()) == DATA
    assert cloud.counts().faults == {"503": 1, "reset": 1, "truncate": 1}


def test_a_client_that_leaves_in_the_middle_holds_nothing(cloud, path):
    with socket.create_connection(("127.0.0.1", cloud.port), timeout=PATIENCE_SECONDS) as channel:
        cloud.turn(bandwidth_bytes_per_second=1000)
        channel.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{cloud.port}\r\n\r\n".encode())
        channel.recv(100)
        assert cloud.counts().in_flight == 1
    ask = asker(cloud)
    cloud.turn("no limits")
    wait_until(lambda: ask("HEAD", path) and cloud.counts().in_flight == 0)
