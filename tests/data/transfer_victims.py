"""A process that uploads or downloads until it is done or killed: `upload SOURCE URL` or `download URL PATH`.

An upload says when ten parts are there, and goes on when it is told to.
"""

import sys
from pathlib import Path


def stay_after(count, store):
    put, written = store.set, []

    async def noting(key, value):
        await put(key, value)
        written.append(key)
        if len(written) == count:
            print(f"{count} parts are there", flush=True)
            sys.stdin.readline()

    store.set = noting


def main(what, first, second):
    if what == "upload":
        from kit.checkpoints.uploading import BundleStore

        bundles = BundleStore.open(second)
        stay_after(10, bundles.store)
        bundles.send(Path(first), part_bytes=1 << 16, at_once=2)
    else:
        from kit.checkpoints.downloading import download_once

        print("ready", flush=True)
        sys.stdin.readline()
        print(download_once(first, second), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
