"""The device's clock with CUDA's own events: work of known proportions, seen in the right parts."""

import pytest

torch = pytest.importorskip("torch")

from kit.trial.recorder import DeviceClock  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_three_times_the_work_takes_about_three_times_the_time():
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        matrix @ matrix
    torch.cuda.synchronize()
    clock = DeviceClock(lambda: torch.cuda.Event(enable_timing=True), "other")
    for part, times in (("forward", 10), ("backward", 30)):
        clock.turn(part)
        for _ in range(times):
            matrix @ matrix
    seconds = clock.take().seconds()
    assert 2 < seconds["backward"] / seconds["forward"] < 4.5
