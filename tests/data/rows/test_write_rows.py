"""An array is told before it is made, and written whole or not at all, whatever its size."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from row_files import numbers
from waiting import wait_until

import kit
from kit.data.rows import write
from kit.errors import BuildError, ConfigError, RowsError, StoreLockedError

PLACES = ("x.npy", "x.zarr")
VICTIMS = Path(__file__).with_name("write_victims.py")


def square(start, stop):
    """Rows that tell where they belong."""
    return np.arange(start, stop, dtype="float64")[:, None] * [1, 1, 2]


def whole(rows):
    found = rows.take(slice(None))
    rows.close()
    return found.numpy()


def test_places_are_told_as_they_are_called_from_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = kit.data.write_rows("data/x.npy", numbers(), progress=False)
    for shown in (str(written), str(kit.data.array_bytes((53, 7)))):
        assert "data" in shown
        assert str(tmp_path) not in shown


def test_the_size_of_an_array_is_told_before_there_is_one(tmp_path):
    size = kit.data.array_bytes((500_000, 100_000), path=tmp_path / "large.npy")
    assert (size.memory_bytes, size.disk_bytes) == (200_000_000_000, 200_000_000_128)
    assert size.gibibytes == pytest.approx(186.26, abs=0.01)
    assert size.fits_memory is (size.free_memory_bytes >= 200_000_000_000)
    assert str(size).startswith("500,000 × 100,000 float32: 186 GiB\n")
    assert "in memory" in size._repr_html_()
    small = kit.data.array_bytes((3000, 2000))
    assert str(small).startswith("3,000 × 2,000 float32: 22.9 MiB\n")  # in the words of the table below it
    assert not [*tmp_path.iterdir()]
    np.save(tmp_path / "x.npy", numbers())
    assert kit.data.array_bytes((53, 7), path=tmp_path).disk_bytes == (tmp_path / "x.npy").stat().st_size
    assert kit.data.array_bytes(8, "bfloat16").memory_bytes == 16


@pytest.mark.parametrize(("shape", "dtype", "why"), [
    ((0, 3), "float32", "whole numbers of 1 or more"), ((), "float32", "whole numbers"),
    ((2.5,), "int8", "whole numbers"), ((2,), "floot", "no type"), ((2,), "object", "no type"),
])  # fmt: skip
def test_what_is_no_size_is_refused(shape, dtype, why):
    with pytest.raises(ConfigError, match=why):
        kit.data.array_bytes(shape, dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("row_block", [1, 7, 0])
def test_a_function_is_written_block_by_block(tmp_path, place, row_block):
    seen = []
    rows = kit.data.write_rows(
        tmp_path / place, square, (53, 3), row_block=row_block, progress=lambda *told: seen.append(told)
    )
    assert np.array_equal(whole(rows), square(0, 53))
    blocks = -(-53 // (row_block or 53))
    assert seen[-1][:2] == (blocks, blocks)
    assert rows.stored_dtype == "float32"


def test_the_columns_of_a_function_are_found_out(tmp_path):
    assert kit.data.write_rows(tmp_path / "x.npy", square, 5, dtype="int16", progress=False).shape == (5, 3)


@pytest.mark.parametrize("place", PLACES)
def test_rows_are_copied_in_their_order_or_drawn_whatever_the_blocks(tmp_path, place):
    rows = kit.data.open_rows(torch.from_numpy(numbers(dtype="int32")))
    copied = kit.data.write_rows(tmp_path / place, rows, progress=False)
    assert copied.stored_dtype == "int32"
    assert np.array_equal(whole(copied), numbers())
    drawn = {
        block: whole(kit.data.write_rows(tmp_path / f"{block}{place}", rows, 200, row_block=block, progress=False))
        for block in (3, 64, 0)
    }
    expected = whole(kit.data.write_rows(tmp_path / f"same{place}", rows, (200, 7), seed=13, progress=False))
    assert all(np.array_equal(found, expected) for found in drawn.values())
    assert {*map(tuple, expected)} <= {*map(tuple, numbers())}
    other = whole(kit.data.write_rows(tmp_path / f"other{place}", rows, (200, 7), seed=1, progress=False))
    assert not np.array_equal(other, expected)


def test_drawn_rows_are_drawn_evenly(tmp_path):
    rows = np.arange(10, dtype="int32").reshape(10, 1)
    drawn = kit.data.write_rows(tmp_path / "x.npy", rows, 100_000, seed=5, row_block=777, progress=False)
    assert np.bincount(whole(drawn)[:, 0], minlength=10).min() > 9_600


def test_what_is_there_is_not_lost(tmp_path):
    kit.data.write_rows(tmp_path / "x.npy", square, (5, 3), progress=False)
    before = (tmp_path / "x.npy").read_bytes()
    with pytest.raises(RowsError, match="is there already"):
        kit.data.write_rows(tmp_path / "x.npy", square, (9, 3), progress=False)

    def fails(start, stop):
        if start:
            raise RuntimeError("no more rows")
        return square(start, stop)

    with pytest.raises(RuntimeError, match="no more rows"):
        kit.data.write_rows(tmp_path / "x.npy", fails, (9, 3), row_block=4, overwrite=True, progress=False)
    assert (tmp_path / "x.npy").read_bytes() == before
    assert len(kit.data.write_rows(tmp_path / "x.npy", square, (9, 3), overwrite=True, progress=False)) == 9
    assert [item.name for item in tmp_path.iterdir()] == ["x.npy"]
    kit.data.write_rows(tmp_path / "x.zarr", square, (5, 3), progress=False)
    with pytest.raises(BuildError):
        kit.data.write_rows(tmp_path / "x.zarr", square, (9, 3), progress=False)


HELD = {  # what a type can hold, though another than the function's
    "whole numbers as floats": ([0.0, 1.0, -128.0], "int8"), "true and false": ([0, 1, 1], "bool"),
    "rounded": ([0.1, 1e-60, 3e38], "float32"), "infinite before": ([float("inf"), float("nan"), 1.0], "float16"),
    "large whole numbers": ([2**62, 1, -1], "float32"), "unsigned": (np.array([1, 2, 3], "uint64"), "int64"),
}  # fmt: skip
NOT_HELD = {
    "nan": ([1.0, float("nan"), 2.0], "int16", "int16 cannot hold the nan of row 1;"),
    "too large": ([1.0, 70000.0, 70000.0], "int16", "70000.0 of row 1, one of 2 such numbers in its block"),
    "wraps": ([1, 2, -1], "uint8", "uint8 cannot hold the -1 of row 2"),
    "a fraction": ([0.5, 1.0, 2.0], "int32", "int32 cannot hold the 0.5 of row 0"),
    "neither true nor false": ([0, 1, 2], "bool", "bool cannot hold the 2 of row 2|bool; kit stores"),
    "becomes infinite": ([1.0, 2.0, 1e39], "float32", "float32 cannot hold the 1e\\+39 of row 2"),
    "becomes infinite as half": (np.array([1, 2, 70000]), "float16", "float16 cannot hold the 70000 of row 2"),
    "imaginary": ([1j, 2.0, 3.0], "float32", "no real number"),
    "text": (["1", "2", "3"], "float32", "no real number"),
}


@pytest.mark.parametrize("case", HELD)
def test_numbers_that_a_type_can_hold_are_stored(tmp_path, case):
    values, dtype = HELD[case]
    column = np.asarray(values).reshape(3, 1)
    stored = kit.data.write_rows(tmp_path / "x.npy", lambda a, b: column[a:b], 3, dtype=dtype, progress=False)
    assert stored.stored_dtype == dtype
    stored.close()
    found = np.load(tmp_path / "x.npy").astype("float64")
    np.testing.assert_allclose(found, column.astype("float64"), rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", NOT_HELD)
def test_numbers_that_a_type_cannot_hold_are_no_other_numbers(tmp_path, case, place):
    values, dtype, why = NOT_HELD[case]
    column = np.asarray(values).reshape(3, 1)
    with pytest.raises((ConfigError, BuildError), match=why):
        kit.data.write_rows(tmp_path / place, lambda a, b: column[a:b], 3, dtype=dtype, progress=False)
    assert not (tmp_path / "x.npy").exists()


REFUSED = {
    "no shape": ({"source": square}, "say how many"),
    "no rows": ({"source": square, "shape": (0, 3)}, "whole numbers of 1 or more"),
    "other columns": ({"source": square, "shape": (5, 4)}, r"shape \(5, 3\), not \(5, 4\)"),
    "other columns of rows": ({"source": numbers(), "shape": (5, 4)}, "columns"),
    "no number": ({"source": square, "shape": (5, 3), "dtype": "object"}, "no real number"),
    "no type of numpy": ({"source": square, "shape": (5, 3), "dtype": "bfloat16"}, "cannot be stored"),
    "large block": ({"source": square, "shape": (5, 3), "row_block": 5, "memory_bytes": 100}, "allow 180 B"),
    "large row": ({"source": square, "shape": (5, 3), "memory_bytes": 10}, "does not hold a row"),
    "torch": ({"path": "x.pt", "source": square, "shape": (5, 3)}, "x.npy"),
    "text": ({"path": "x.csv", "source": square, "shape": (5, 3)}, "x.npy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, case):
    arguments, why = REFUSED[case]
    given = {"path": "x.npy", **arguments}
    with pytest.raises((ConfigError, RowsError), match=why):
        kit.data.write_rows(tmp_path / given.pop("path"), given.pop("source"), progress=False, **given)
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_refused_before_a_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "free_disk_bytes", lambda _: 100)
    with pytest.raises(BuildError, match="takes 636 B and 100 B is free"):
        kit.data.write_rows(tmp_path / "x.npy", square, (53, 3), progress=False)
    assert not [*tmp_path.iterdir()]


def test_memory_stays_that_of_the_blocks(tmp_path):
    block = 4 << 20

    def make(start, stop):
        return np.ones((stop - start, 1024), "float32")

    kit.data.write_rows(tmp_path / "warm.npy", make, (1024, 1024), memory_bytes=block, progress=False)
    before, most = psutil.Process().memory_info().rss, []
    kit.data.write_rows(
        tmp_path / "x.npy", make, (32 << 10, 1024), memory_bytes=block,
        progress=lambda *_: most.append(psutil.Process().memory_info().rss),
    )  # fmt: skip
    assert (tmp_path / "x.npy").stat().st_size == (128 << 20) + 128
    assert max(most) - before < 4 * block


# -- an ended write is gone on with


VICTIM = """
    import sys, time
    import numpy as np, kit

    def slow(start, stop):
        print("block", start, flush=True)
        if start:
            time.sleep(600)
        return np.arange(start, stop, dtype="float32")[:, None] * [1, 1, 2]

    kit.data.write_rows(sys.argv[1], slow, (8, 3), row_block=4, progress=False)
"""


@pytest.mark.fault
def test_a_killed_write_leaves_nothing_for_data_and_its_lock_goes_with_it(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(VICTIM), str(tmp_path / "x.npy")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout.readline() == "block 0\n"
        assert victim.stdout.readline() == "block 4\n"
        with pytest.raises(StoreLockedError):
            kit.data.write_rows(tmp_path / "x.npy", square, (8, 3), progress=False)
        os.kill(victim.pid, signal.SIGKILL)
    assert not (tmp_path / "x.npy").exists()

    def written():
        with contextlib.suppress(StoreLockedError):  # the kernel has not yet taken the lock from the dead
            return kit.data.write_rows(tmp_path / "x.npy", square, (8, 3), progress=False)

    assert np.array_equal(whole(wait_until(written)), square(0, 8))
    assert sorted(item.name for item in tmp_path.iterdir()) == ["x.npy"]


@pytest.mark.fault
def test_after_a_kill_at_any_point_finished_blocks_are_not_made_again_and_the_bytes_are_those_of_an_unbroken_write(
    tmp_path,
):
    done = subprocess.run([sys.executable, str(VICTIMS), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {result["kill"] for result in results} == {"made", "half", "written", "listed"}
    for result in results:
        how, block = result["kill"], result["block"]
        assert result["signal"] == (signal.SIGXFSZ if how == "half" else signal.SIGKILL), result
        assert not result["place"]
        finished = block + (how == "listed")
        assert result["made"] == [*range(finished, 6)], result
        assert result["equal"], result
        assert result["left"] == ["x.npy"]


class Source:
    """`square`, which notes the blocks it is asked for, and fails at a row."""

    def __init__(self, fails_at=-1, scale=1.0):
        self.fails_at, self.scale, self.blocks = fails_at, scale, []

    def __call__(self, start, stop):
        if start == self.fails_at:
            raise RuntimeError("no more rows")
        if stop - start > 1:
            self.blocks.append(start // 4)
        return square(start, stop) * self.scale


def write_again(folder, source, **changes):
    asked = {"shape": (18, 3), "row_block": 4, "progress": False, **changes}
    return whole(kit.data.write_rows(folder / "x.npy", source, **asked))


@pytest.fixture
def ended(tmp_path):
    """A folder in which a write of five blocks has failed at the fourth."""
    with pytest.raises(RuntimeError, match="no more rows") as raised:
        write_again(tmp_path, Source(fails_at=12))
    assert "3 of 5 row blocks" in raised.value.__notes__[0]
    return tmp_path


def test_an_error_keeps_what_is_written_and_the_next_call_says_how_far_it_is(ended):
    source, told = Source(), []
    found = write_again(ended, source, progress=lambda *numbers: told.append(numbers))
    assert np.array_equal(found, square(0, 18))
    assert source.blocks == [3, 4]
    assert told[0] == (3, 5, 3 * 4 * 12)
    assert [item.name for item in ended.iterdir()] == ["x.npy"]


@pytest.mark.parametrize(
    "changes", [{"shape": (17, 3)}, {"dtype": "float64"}, {"row_block": 5}, {"overwrite": True}], ids=str
)
def test_another_array_or_other_blocks_begin_anew(ended, changes):
    source = Source()
    rows = changes.get("shape", (18, 3))[0]
    assert np.array_equal(write_again(ended, source, **changes), square(0, rows))
    assert 0 in source.blocks
    assert [item.name for item in ended.iterdir()] == ["x.npy"]


def damaged(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


HARMS = {
    "a flipped bit": (lambda data: damaged(data, 128 + 48 + 5), "partial", [1, 2, 3, 4]),
    "a torn block": (lambda data: data[: 128 + 2 * 48 + 7], "partial", [2, 3, 4]),
    "another header": (lambda data: damaged(data, 20), "partial", [0, 1, 2, 3, 4]),
    "bytes beyond": (lambda data: data + b"beyond", "partial", [3, 4]),
    "nothing": (lambda data: b"", "partial", [0, 1, 2, 3, 4]),
    "a torn line": (lambda data: data[:-4], "blocks", [2, 3, 4]),
    "no text": (lambda data: b"\xff\xfe", "blocks", [0, 1, 2, 3, 4]),
    "no lines": (lambda data: b"", "blocks", [0, 1, 2, 3, 4]),
    "too many lines": (lambda data: data + data[-9:] * 9, "blocks", [3, 4]),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_list_is_never_believed_without_the_bytes(ended, harm):
    change, name, made = HARMS[harm]
    path = ended / f".x.npy.{name}"
    path.write_bytes(change(path.read_bytes()))
    source = Source()
    assert np.array_equal(write_again(ended, source), square(0, 18))
    assert source.blocks == made


def test_rows_of_another_source_are_not_mixed_in(ended):
    with pytest.raises(BuildError, match=r"row 8 .*different .*overwrite=True"):
        write_again(ended, Source(scale=2.0))
    rounded = Source(scale=1 + 1e-6)  # as a row alone may be rounded otherwise than in its block
    write_again(ended, rounded)
    assert rounded.blocks == [3, 4]


def test_a_disk_needs_room_only_for_the_rest(ended, monkeypatch):
    monkeypatch.setattr(write, "free_disk_bytes", lambda _: 6 * 12 - 1)
    with pytest.raises(BuildError, match="the rest .*72 B .*71 B .*free"):
        write_again(ended, square)
    monkeypatch.setattr(write, "free_disk_bytes", lambda _: 6 * 12)
    assert np.array_equal(write_again(ended, square), square(0, 18))


def test_drawn_rows_go_on_as_they_would_have_been_drawn(tmp_path):
    rows = kit.data.open_rows(numbers())
    expected = whole(kit.data.write_rows(tmp_path / "whole.npy", rows, 50, row_block=8, progress=False))

    def stop(done, total, number_of_bytes):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kit.data.write_rows(tmp_path / "x.npy", rows, 50, row_block=8, progress=stop)
    assert np.array_equal(
        whole(kit.data.write_rows(tmp_path / "x.npy", rows, 50, row_block=8, progress=False)), expected
    )
