"""What hooks do beside the training: each act changes the folder it is given, or calls a server, and reads it back."""

import http.server
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from kit.testing import TinyModule


def _open(folder, module, url):
    with open(folder / "existing.txt", "w") as file:
        file.write("changed")
    with open(folder / "existing.txt") as file:
        assert file.read() == "changed"


def _append(folder, module, url):
    with (folder / "existing.txt").open("a") as file:
        file.write("more")
    assert (folder / "existing.txt").read_text() == "beforemore"


def _pathlib(folder, module, url):
    (folder / "new").mkdir()
    (folder / "new" / "file.txt").write_text("new")
    assert (folder / "new" / "file.txt").read_text() == "new"
    (folder / "existing.txt").unlink()
    assert not (folder / "existing.txt").exists()


def _relative(folder, module, url):
    os.chdir(folder)
    Path("relative.txt").write_text("new")


def _torch_save(folder, module, url):
    torch.save(module.state_dict(), folder / "model.pt")
    assert torch.load(folder / "model.pt").keys() == module.state_dict().keys()


def _save(folder, module, url):
    np.save(folder / "array.npy", np.ones(3))
    assert np.load(folder / "array.npy").sum() == 3


def _savez(folder, module, url):
    np.savez(folder / "array.npz", a=np.ones(3))


def _replace(folder, module, url):
    os.replace(folder / "existing.txt", folder / "moved.txt")
    assert (folder / "moved.txt").read_text() == "before"
    assert not (folder / "existing.txt").exists()


def _rmtree(folder, module, url):
    shutil.rmtree(folder / "kept")
    assert not (folder / "kept").exists()


def _copy_and_move(folder, module, url):
    shutil.copy(folder / "existing.txt", folder / "copy.txt")
    shutil.move(folder / "existing.txt", folder / "kept" / "moved.txt")
    assert (folder / "copy.txt").read_text() == (folder / "kept" / "moved.txt").read_text() == "before"


def _truncate_and_chmod(folder, module, url):
    os.truncate(folder / "existing.txt", 0)
    (folder / "kept" / "inner.txt").chmod(0o600)


def _links(folder, module, url):
    (folder / "link").symlink_to(folder / "existing.txt")
    (folder / "link").write_text("through a link")


def _subprocess(folder, module, url):
    done = subprocess.run([sys.executable, "-c", f"open({str(folder / 'by_child')!r}, 'w')"], capture_output=True)
    assert done.returncode == 0
    os.system(f"touch {folder / 'by_shell'}")


def _sqlite(folder, module, url):
    with sqlite3.connect(folder / "rows.db") as rows:
        rows.execute("create table losses (loss real)")
        rows.execute("insert into losses values (1.0)")
        assert rows.execute("select count(*) from losses").fetchone() == (1,)


def _h5py(folder, module, url):
    import h5py

    with h5py.File(folder / "rows.h5", "w") as file:
        file["a"] = np.ones(3)


def _logger(folder, module, url):
    logger = CSVLogger(str(folder), name="logs")
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.save()


def _checkpoint(folder, module, url):
    module.trainer.save_checkpoint(folder / "all.ckpt")


def _urllib(folder, module, url):
    with urllib.request.urlopen(url, data=b"{}") as answer:
        assert answer.status == 200


def _requests(folder, module, url):
    import requests

    assert requests.post(url, json={"loss": 1.0}, timeout=10).ok


def _socket(folder, module, url):
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(b"loss 1.0\n")


FILES = {
    "open": _open, "append": _append, "pathlib": _pathlib, "relative": _relative, "torch.save": _torch_save,
    "np.save": _save, "np.savez": _savez, "os.replace": _replace, "rmtree": _rmtree, "move": _copy_and_move,
    "truncate": _truncate_and_chmod, "links": _links, "sqlite3": _sqlite, "logger": _logger,
}  # fmt: skip
IN_A_FIT = {"save_checkpoint": _checkpoint}
IN_C = {"h5py": _h5py}
PROCESSES = {"subprocess": _subprocess}
CONNECTIONS = {"urllib": _urllib, "requests": _requests, "socket": _socket}
ACTS = {**FILES, **IN_A_FIT, **IN_C, **PROCESSES, **CONNECTIONS}
HOOKS = ("setup", "configure_optimizers", "training_step", "on_train_end")


class Acting(TinyModule):
    """Does one act, or several, in one of its hooks."""

    def __init__(self, acts=(), hook="", folder=".", url=""):
        super().__init__()
        self.acts, self.hook, self.folder, self.url = acts, hook, Path(folder), url

    def act(self, hook):
        if hook == self.hook and self.global_rank == 0:
            for name in self.acts:
                ACTS[name](self.folder, self, self.url)

    def setup(self, stage):
        self.act("setup")

    def configure_optimizers(self):
        self.act("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.act("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        self.act("on_train_end")


class WithCheckpoints(TinyModule):
    """Brings a callback of Lightning's that writes."""

    def __init__(self, folder="."):
        super().__init__()
        self.folder = folder

    def configure_callbacks(self):
        return [ModelCheckpoint(dirpath=self.folder, every_n_train_steps=1, save_top_k=-1)]


def filled(folder):
    """`folder` with something to lose."""
    (folder / "kept").mkdir(parents=True)
    (folder / "kept" / "inner.txt").write_text("inner")
    (folder / "existing.txt").write_text("before")
    (folder / "model.pt").write_bytes(b"an earlier model")
    return folder


def contents(folder):
    """Every path with its bytes and rights."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


@contextmanager
def counting_server():
    """A server on the loopback; yields its address and what was asked of it."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        def process_request(self, request, client_address):
            asked.append(client_address)
            super().process_request(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
