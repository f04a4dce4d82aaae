"""A process that uploads or downloads until it is done or killed: `upload SOURCE URL` or `download URL PATH`."""

import sys
from pathlib import Path


def main(what, first, second):
    if what == "upload":
        from kit.data.uploads import Parcels

        Parcels.open(second).send(Path(first), part_bytes=1 << 16, at_once=2)
    else:
        from kit.data.downloads import download_once

        print("ready", flush=True)
        sys.stdin.readline()
        print(download_once(first, second), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
