"""What the tests of the CUDA emulation share: fake tensors that can be stepped on, and bytes counted by storage."""

import contextlib

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from kit.confinement.stand_ins import replaced
from kit.memory.record.cuda import cuda_emulation
from kit.memory.record.recorder import BlockRecorder


@contextlib.contextmanager
def fakes():
    """Fake tensors; a number read from one is 1."""
    table = fake_impls.op_implementations_dict
    read = {**table, torch.ops.aten._local_scalar_dense.default: lambda mode, func, value: 1.0}
    with replaced(fake_impls, "op_implementations_dict", read), FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextlib.contextmanager
def emulated(capability=(8, 0), attention="auto", precision=None):
    """Fake tensors that follow a GPU of `capability`, under autocast to `precision`."""
    autocast = torch.autocast("cpu", precision) if precision else contextlib.nullcontext()
    with fakes(), cuda_emulation(capability, attention) as emulation, autocast:
        yield emulation


def kept_bytes(compute, *there):
    """Bytes that autograd keeps of `compute()`, each storage once, beside those of the tensors that were there."""
    known = {tensor.untyped_storage()._cdata for tensor in there}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = compute()
    return sum(storage.nbytes() for storage in kept.values()), result


def record(module, make_batch, optimizer=None, steps=2, workspace=None):
    """The recording of a few plain steps: forward, clear gradients, backward, optimizer."""
    with BlockRecorder(workspace) as recorder:
        recorder.track(module)
        batch = make_batch()
        for tensor in batch:
            recorder.note(tensor, "inputs")
        for _ in range(steps):
            recorder.begin_batch()
            loss = module(*batch)
            module.zero_grad()
            loss.backward()
            del loss
            if optimizer is not None:
                optimizer.step()
    return recorder.recording(len(batch[0]), 1)


def alive(recording):
    """(events,) bytes alive after each event."""
    signs = torch.tensor(recording.event_allocates).int() * 2 - 1
    return (signs * torch.tensor(recording.block_bytes)[torch.tensor(recording.event_block).long()]).cumsum(0)


def peak_bytes(recording):
    return int(alive(recording).max())
