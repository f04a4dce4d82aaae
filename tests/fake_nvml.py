"""NVIDIA's management library, without a GPU."""

from types import SimpleNamespace

GIB = 1 << 30


class FakeNvml:
    """The part of `pynvml` that is used, over a table of cards; a missing key is a question the card does not know."""

    class NVMLError(Exception):
        pass

    def __init__(self, cards, driver=True):
        self.cards, self.driver, self.open = cards, driver, 0

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for card in self.cards:
            found = card["nvmlDeviceGetUUID"]
            if (found.decode() if isinstance(found, bytes) else found) == uuid:
                return card
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, place):
        return self.answer(handle["instances"], place)

    def answer(self, card, key):
        try:
            value = card[key]
        except (KeyError, IndexError):
            raise self.NVMLError("Not Supported") from None
        if value == "lost":
            raise self.NVMLError("GPU is lost")
        return value

    def __getattr__(self, name):
        return lambda handle: self.answer(handle, name)


def card(**changes):
    return {
        "nvmlDeviceGetName": "NVIDIA H100", "nvmlDeviceGetUUID": b"GPU-h100",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, free=60 * GIB, used=20 * GIB),
        "nvmlDeviceGetCudaComputeCapability": (9, 0), "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=37, memory=5),
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1), SimpleNamespace(pid=2)], **changes,
    }  # fmt: skip
