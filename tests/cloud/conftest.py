"""Simulated clouds for the tests, and a client that adds nothing of its own."""

import pytest
from cloud_clients import asker

from kit.cloud.simulated import simulated_cloud
from kit.machine.endpoints import VARIABLE


@pytest.fixture(params=["memory", "folder"])
def kept(request, tmp_path, monkeypatch):
    """A cloud of its own for each place that objects are kept in."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with simulated_cloud("no limits", folder=None if request.param == "memory" else tmp_path) as cloud:
        yield cloud


@pytest.fixture
def ask(cloud):
    """`ask(method, path, body, **headers)` to the cloud without limits: status, headers, body."""
    return asker(cloud)
