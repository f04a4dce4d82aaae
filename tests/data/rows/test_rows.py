"""Rows are the same wherever they are kept, open in each process by themselves, and refuse what is no array."""

import itertools
import pickle
import re

import numpy as np
import psutil
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from row_files import PLACES, numbers, put

import kit
from kit.data.rows.page_cache import PAGE_BYTES, cached_bytes, drop_cached, gather, runs_of, table_of
from kit.errors import ConfigError, CorruptChunkError, MissingChunkError, MissingRowsError, RowsError


@pytest.fixture(params=PLACES)
def rows(request, tmp_path):
    opened = kit.data.open_rows(put(request.param, tmp_path, numbers()))
    yield opened
    opened.close()


@pytest.mark.parametrize("chosen", [[5, 1, 5, 52], range(3, 20), slice(None), [], np.array([7]), torch.tensor([2, 0])])
def test_rows_come_as_asked_from_any_place(rows, chosen):
    places = [*range(53)[chosen]] if isinstance(chosen, slice) else np.asarray(chosen, np.int64)
    taken = rows.take(chosen)
    assert taken.dtype == torch.float32
    assert np.array_equal(taken.numpy(), numbers()[places])


def test_rows_are_indexed_like_a_dataset(rows):
    assert np.array_equal(rows[3], numbers()[3])
    assert np.array_equal(rows[np.int64(52)], numbers()[52])
    assert np.array_equal(rows[50:60], numbers()[50:])
    assert np.array_equal(rows[[4, 4, 0]], numbers()[[4, 4, 0]])
    assert np.array_equal(torch.stack([*rows]), numbers())
    batches = [*torch.utils.data.DataLoader(rows, batch_size=20)]
    assert [len(batch) for batch in batches] == [20, 20, 13]
    assert np.array_equal(torch.cat(batches), numbers())


@pytest.mark.parametrize(("asked", "why"), [
    (53, "no row 53"), (-1, "no row -1"), (1.0, "whole numbers"), (None, "whole numbers"), (True, "whole numbers"),
    ((1, 2), r"take rows\[1\] first"),
])  # fmt: skip
def test_what_is_no_row_is_an_error_of_indexing(asked, why):
    with pytest.raises(IndexError, match=why):
        kit.data.open_rows(numbers())[asked]


def test_a_block_is_memory_of_its_own(rows):
    rows.take([3]).fill_(-1)
    rows.take(slice(2, 5)).fill_(-1)
    assert np.array_equal(rows.take([3]).numpy(), numbers()[[3]])


def test_a_description_travels_without_its_handle(rows):
    rows.take([0])
    copy = pickle.loads(pickle.dumps(rows))
    assert getattr(copy.source, "_opened", None) is None
    assert getattr(copy.source, "_engine", None) is None
    assert torch.equal(copy.take([4, 2]), rows.take([4, 2]))
    copy.close()


def test_what_it_is_is_said_in_one_line(rows):
    assert (rows.shape, len(rows), rows.row_bytes, rows.nbytes) == ((53, 7), 53, 28, 53 * 28)
    assert re.match(r"Rows 53 × 7 float32, 1.45 KiB, ", str(rows))


@pytest.mark.parametrize("place", [".npy", ".pt"])
def test_a_file_is_mapped_when_a_row_is_asked_for_and_never_read_whole(tmp_path, place):
    file = put(place, tmp_path, np.ones((16 << 10, 1 << 10), "float32"))
    before = psutil.Process().memory_info().rss
    rows = kit.data.open_rows(file)
    assert (rows.file, rows.source._opened) == (file, None)
    assert rows.take([5, 16000]).sum() == 2048
    assert psutil.Process().memory_info().rss - before < rows.nbytes // 4
    rows.close()


def test_an_old_file_is_read_whole_and_says_so(tmp_path):
    assert "cannot be mapped" in str(kit.data.open_rows(put("old .pt", tmp_path, numbers())))
    assert not kit.data.open_rows(put(".pt", tmp_path, numbers())).note


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("stored", "given"), [
    ("float64", torch.float32), ("float16", torch.float32), ("int64", torch.int64), ("int8", torch.int8),
    ("uint8", torch.uint8), ("bool", torch.bool),
])  # fmt: skip
def test_floats_are_given_as_float32_and_whole_numbers_as_they_are(tmp_path, place, stored, given):
    values = numbers(dtype=stored)
    rows = kit.data.open_rows(put(place, tmp_path, values))
    taken = rows.take([9, 0, 1])
    assert taken.dtype == given
    assert np.array_equal(taken.numpy(), values[[9, 0, 1]])
    rows.close()


@pytest.mark.parametrize(("stored", "wanted"), [
    ("uint16", torch.int32), ("uint32", torch.int64), (">f4", torch.float32), (">i8", torch.int64),
])  # fmt: skip
def test_unsigned_and_foreign_numbers_lose_nothing(tmp_path, stored, wanted):
    values = np.array([[0, 1], [65535, 7]]).astype(stored)
    np.save(tmp_path / "x.npy", values)
    taken = kit.data.open_rows(tmp_path / "x.npy").take([1, 0])
    assert taken.dtype == wanted
    assert taken.tolist() == values[[1, 0]].tolist()


def test_a_type_can_be_asked_for_where_it_holds_the_numbers(tmp_path):
    values = numbers(dtype="int32")
    assert kit.data.open_rows(values, dtype="bfloat16").take([1]).dtype == torch.bfloat16
    torch.save(torch.from_numpy(values).to(torch.bfloat16), tmp_path / "b.pt")
    assert torch.equal(kit.data.open_rows(tmp_path / "b.pt").take([3]), torch.from_numpy(values[[3]]).float())
    with pytest.raises(ConfigError, match="int8 cannot hold .*int32"):
        kit.data.open_rows(values, dtype="int8")
    with pytest.raises(ConfigError, match="did you mean 'float32'"):
        kit.data.open_rows(values, dtype="flaot32")


def test_rows_count_by_their_place_in_the_selection():
    rows = kit.data.open_rows(numbers(), [50, 3, 3, 20])
    assert rows.shape == (4, 7)
    assert np.array_equal(rows.take([3, 1]).numpy(), numbers()[[20, 3]])
    assert rows.subset([3, 0]).indices.tolist() == [20, 50]
    assert kit.data.open_rows(rows, [1]).indices.tolist() == [3]


def test_an_empty_selection_is_not_all_rows():
    with pytest.raises(ConfigError, match="empty selection"):
        kit.data.open_rows(numbers(), [])


@pytest.mark.parametrize("indices", [[53], [-1], [0.5], [[1]], ["a"]])
def test_an_index_that_there_is_not_is_refused(indices):
    with pytest.raises(ConfigError, match="in memory"):
        kit.data.open_rows(numbers(), indices)
    with pytest.raises(IndexError):
        kit.data.open_rows(numbers()).take(indices)


def _pickled(file):
    np.save(file, np.array([{}, None], object), allow_pickle=True)


def _cut(file):
    np.save(file, numbers())
    file.write_bytes(file.read_bytes()[:-40])


CONTENT = {
    "objects.npy": (_pickled, "Python objects"),
    "cut.npy": (_cut, "cannot be read as one array"),
    "text.npy": (lambda file: file.write_text("hello"), "cannot be read as one array"),
    "empty.npy": (lambda file: file.write_bytes(b""), "cannot be read as one array"),
    "zero.npy": (lambda file: np.save(file, numbers()[:0]), "holds no rows"),
    "none.npy": (lambda file: np.save(file, numbers()[:, :0]), "rows without columns"),
    "single.npy": (lambda file: np.save(file, np.float32(1)), "a single number"),
    "complex.npy": (lambda file: np.save(file, numbers().astype("complex64")), "no real number"),
    "uint64.npy": (lambda file: np.save(file, numbers(dtype="uint64")), "store it as int64"),
    "names.npy": (lambda file: np.save(file, np.array(["a"])), "no real number"),
    "columns.npy": (lambda file: np.save(file, np.asfortranarray(numbers())), "column by column"),
    "columns.pt": (lambda file: torch.save(torch.ones(4, 3).t(), file), "column by column"),
    "dict.pt": (lambda file: torch.save({"x": torch.ones(2, 2)}, file), "a dict with 'x'; it must hold a single"),
    "list.pt": (lambda file: torch.save([1, 2], file), "a list"),
    "code.pt": (lambda file: torch.save(re.compile("x"), file), "nothing else is unpickled"),
    "cut.pt": (lambda file: file.write_bytes(b"PK\x03\x04cut"), "cannot be read as one tensor"),
    "complex.pt": (lambda file: torch.save(torch.ones(2, 2, dtype=torch.complex64), file), "no real number"),
    "text.csv": (lambda file: file.write_text("1,2"), "no .npy, .pt or .pth file"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTENT)
def test_wrong_content_is_refused_by_what_is_wrong(tmp_path, name):
    make, why = CONTENT[name]
    make(tmp_path / name)
    with pytest.raises(RowsError, match=re.escape(why)) as raised:
        kit.data.open_rows(tmp_path / name)
    assert isinstance(raised.value, ValueError)
    assert str(tmp_path / name) in str(raised.value)


@pytest.mark.parametrize("name", ["corups.npy", "corpus.pt", "corpuz.zarr"])
def test_a_missing_file_is_named_with_what_is_there(tmp_path, name):
    np.save(tmp_path / "corpus.npy", numbers())
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist.*mean 'corpus.npy'") as raised:
        kit.data.open_rows(tmp_path / name)
    assert isinstance(raised.value, MissingRowsError)


def test_a_tensor_elsewhere_or_of_no_rows_is_refused():
    with pytest.raises(RowsError, match=r"x.cpu\(\)"):
        kit.data.open_rows(torch.ones(2, 2, device="meta"))
    with pytest.raises(RowsError, match="single number"):
        kit.data.open_rows(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="int.*no place"):
        kit.data.open_rows(3)


def test_a_file_that_has_changed_is_not_read_as_the_old_one(tmp_path):
    rows = kit.data.open_rows(put(".npy", tmp_path, numbers()))
    np.save(tmp_path / "x.npy", numbers(9))
    with pytest.raises(RowsError, match="has changed"):
        rows.take([0])


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_column_made_of_a_line_has_rows_of_one_number(dtype):
    line = np.arange(10, dtype=dtype)
    assert kit.data.open_rows(line[:, None]).take([1, 7]).flatten().tolist() == [1, 7]


def test_an_array_that_is_not_in_order_in_memory_is_taken_all_the_same():
    values = numbers()
    assert np.array_equal(kit.data.open_rows(values.T).take([2, 0]).numpy(), values.T[[2, 0]])
    assert np.array_equal(kit.data.open_rows(values[::-1]).take([2, 0]).numpy(), values[::-1][[2, 0]])


def test_a_group_of_several_arrays_wants_a_name(tmp_path):
    group = zarr.open_group(tmp_path / "g.zarr", mode="w")
    for name in ("a", "b"):
        group.create_array(name, data=numbers() + (name == "b"), chunks=(8, 7))
    with pytest.raises(RowsError, match=r"2 arrays \(a, b\)"):
        kit.data.open_rows(tmp_path / "g.zarr")
    rows = kit.data.open_rows(tmp_path / "g.zarr", variable="b")
    assert np.array_equal(rows.take([1]).numpy(), numbers()[[1]] + 1)
    rows.close()


def test_a_packed_array_is_left_to_those_who_unpack(tmp_path):
    zarr.create_array(tmp_path / "p.zarr", data=numbers(dtype="int16"), attributes={"scale_factor": 0.1})
    with pytest.raises(RowsError, match="packed"):
        kit.data.open_rows(tmp_path / "p.zarr")


def test_a_missing_or_damaged_chunk_is_named(tmp_path):
    rows = kit.data.write_rows(tmp_path / "w.zarr", numbers(), row_block=8, progress=False)
    rows.close()
    chunks = sorted(file for file in (tmp_path / "w.zarr" / "values" / "c").rglob("*") if file.is_file())
    chunks[1].unlink()
    with pytest.raises(MissingChunkError, match=r"chunk \(1, 0\) of values"):
        rows.take([9])
    chunks[2].write_bytes(chunks[2].read_bytes()[:-4])
    with pytest.raises(CorruptChunkError, match=r"chunk \(2, 0\) of values"):
        rows.take([17])
    assert np.array_equal(rows.take([0]).numpy(), numbers()[[0]])
    rows.close()


@examples(60)
@given(st.lists(st.integers(0, 19), max_size=40), st.integers(1, 5))
def test_a_gathered_block_is_what_indexing_gives(rows, columns):
    values = np.arange(20 * columns, dtype="float32").reshape(20, columns)
    chosen = np.array(rows, np.int64)
    assert np.array_equal(gather(table_of(values), chosen).view("float32"), values[chosen])


@examples(60)
@given(st.sets(st.integers(0, 60)))
def test_runs_cover_each_number_once(found):
    runs = runs_of(np.array(sorted(found), np.int64))
    assert [number for first, last in runs.tolist() for number in range(first, last)] == sorted(found)
    assert all(first > before for (_, before), (first, _) in itertools.pairwise(runs))


def test_the_page_cache_keeps_no_more_than_it_may(tmp_path):
    pages, row_pages = 64, 2
    values = np.arange(pages * PAGE_BYTES // 4, dtype="float32").reshape(pages // row_pages, -1)
    for name in ("x.npy", "x.pt"):
        file = tmp_path / name
        np.save(file, values) if name == "x.npy" else torch.save(torch.from_numpy(values), file)
        drop_cached(file)
        if cached_bytes(file) != 0:
            pytest.skip("this file system keeps its files in memory")
        file.read_bytes()
        assert cached_bytes(file) == file.stat().st_size
        drop_cached(file)
        rows = kit.data.open_rows(file, page_cache_bytes=8 * PAGE_BYTES)
        order = np.random.default_rng(0).permutation(len(values))
        for row in [*order, *order[::-1]]:
            assert np.array_equal(rows.take([row]).numpy(), values[[row]])
        kept = cached_bytes(file)
        # Rows share pages with their neighbours, and the system reads the header's page with those that follow it.
        assert kept <= file.stat().st_size // 2
        assert kept > 0
        rows.close()
