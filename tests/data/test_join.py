"""Several stores are one dataset: years, members and static fields, of other writers, without a copy."""

from __future__ import annotations

import ast
import pickle
import re

import numpy as np
import pytest
import zarr

import kit
from kit.config import Config
from kit.data.open_dataset import open_dataset
from kit.data.sampling import sample_plan
from kit.data.stores.counters import Counters
from kit.data.stores.http import HttpClient
from kit.data.stream.fetch import EachItsOwn, ThreadClient, open_client
from kit.errors import ConfigError, MissingChunkError

SHAPE = (8, 12, 18)


def field(seed):
    return np.random.default_rng(seed).normal(size=SHAPE).astype("float32")


def with_xarray(folder, number, zarr_format=3, first=0):
    xarray = pytest.importorskip("xarray")
    times = np.arange(SHAPE[0]) + SHAPE[0] * number + first
    made = xarray.Dataset(
        {"sst": (("time", "lat", "lon"), field(number))},
        {"time": ("time", times, {"units": "days since 2001-01-01"}), "lat": np.arange(SHAPE[1])},
    )
    path = folder / f"{number}.zarr"
    encoding = {"sst": {"chunks": (4, 6, 6)}}
    made.to_zarr(path, encoding=encoding, zarr_format=zarr_format, consolidated=zarr_format == 2)
    return path


def netcdf(folder, number):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    made = xarray.Dataset({"sst": (("time", "lat", "lon"), field(number))})
    made.to_netcdf(folder / f"{number}.nc", engine="h5netcdf", encoding={"sst": {"chunksizes": (4, 6, 6)}})
    return folder / f"{number}.nc"


def sharded(folder, number):
    group = zarr.open_group(str(folder / f"{number}.zarr"), mode="w")
    array = group.create_array(
        "sst", shape=SHAPE, chunks=(2, 6, 6), shards=(4, 12, 18), dtype="float32",
        dimension_names=("time", "lat", "lon"),
    )  # fmt: skip
    array[:] = field(number)
    return folder / f"{number}.zarr"


def icechunk(folder, number):
    library = pytest.importorskip("icechunk")
    place = folder / f"ice{number}"
    session = library.Repository.create(library.local_filesystem_storage(str(place))).writable_session("main")
    array = zarr.open_group(session.store, mode="w").create_array(
        "sst", shape=SHAPE, chunks=(4, 6, 6), dtype="float32", dimension_names=("time", "lat", "lon")
    )
    array[:] = field(number)
    session.commit("written")
    return place


def version2(folder, number):
    return with_xarray(folder, number, zarr_format=2)


MAKERS = {maker.__name__: maker for maker in (with_xarray, version2, netcdf, sharded, icechunk)}


def config_of(**changes):
    return Config().replace(
        {
            "data.url": "none", "data.patch": {"time": 3, "lat": 4, "lon": 5}, "data.samples_per_epoch": 24,
            "loader.batch_size": 4, "data.standardize": False, **changes,
        }
    )  # fmt: skip


def check(config, given, whole):
    """Every patch has the values of the array that the stores make together; returns what was counted."""
    data = kit.data.PatchData(config, given)
    loader = data.train_dataloader()
    for step, batch in enumerate(loader):
        for offset, values in zip(loader.plan.batch(0, step, 0), batch["values"].numpy(), strict=True):
            where = tuple(slice(at, at + side) for at, side in zip(offset, loader.plan.patch, strict=True))
            assert np.array_equal(values[0], whole[where])
    data.teardown()
    return loader.counters()


@pytest.mark.parametrize("kind", MAKERS)
def test_years_follow_one_another_whoever_wrote_them(tmp_path, kind):
    places = [MAKERS[kind](tmp_path, number) for number in range(3)]
    joined = kit.data.join(places, "time")
    assert joined.arrays["sst"].shape == (24, *SHAPE[1:])
    check(config_of(), joined, np.concatenate([field(number) for number in range(3)]))
    assert "3 stores along time" in str(joined)


@pytest.mark.parametrize("kind", MAKERS)
def test_members_of_an_ensemble_are_a_dimension_of_their_own(tmp_path, kind):
    places = [MAKERS[kind](tmp_path, number) for number in range(2)]
    joined = kit.data.join(places, "member", align="override")  # their times are others
    assert joined.arrays["sst"].dims == ("member", "time", "lat", "lon")
    whole = np.stack([field(number) for number in range(2)])
    check(config_of(**{"data.patch": {"member": 2, "time": 3, "lat": 4, "lon": 5}}), joined, whole)


# -- members as several stores, and as a dimension of one


DIMS = ("time", "lat", "lon")


def member(place, values, dims=DIMS, chunks=(4, 6, 6)):
    """Written by zarr, with land, a coordinate and a static field."""
    group = zarr.open_group(str(place), mode="w")
    for name, data, cut, along in (
        ("sst", values, chunks, dims), ("depth", field(9)[0], (6, 6), DIMS[1:]),
        ("time", np.arange(SHAPE[0]), (SHAPE[0],), DIMS[:1]),
    ):  # fmt: skip
        group.create_array(
            name, shape=data.shape, chunks=cut, dtype=data.dtype, fill_value=data.dtype.type(0), dimension_names=along
        )[...] = data
    return str(place)


def ensemble(folder, numbers=range(4)):
    """A config of several stores, and one of a single store that holds them all."""
    fields = [field(number) + number for number in numbers]
    for values in fields:
        values[:, :2, :5] = np.nan
    places = [member(folder / f"{number}.zarr", values) for number, values in zip(numbers, fields, strict=True)]
    whole = member(folder / "all.zarr", np.stack(fields), ("member", *DIMS), (1, 4, 6, 6))
    config = config_of(**{"data.variables": ("sst", "depth"), "data.samples_per_epoch": 64})
    several = {"data.url": places[0], "data.more": tuple(places[1:]), "data.join": "member"}
    return config.replace(several), config.replace({"data.url": whole}), np.stack(fields)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"data.order": "grid"}, {"data.order": "block"}, {"data.patch": {"member": 3, "time": 3, "lat": 4}},
        {"data.validation_fraction": 0.25}, {"data.validation_fraction": 0.5, "data.validation_dimension": "time"},
        {"data.validation_fraction": 0.25, "data.split": "regions", "data.split_region": {"member": 1}},
        {"data.standardize": True, "data.variables": ("sst",)},
        {"data.standardize": True, "data.variables": ("sst",), "data.validation_fraction": 0.25},
        {"data.least_valid_fraction": 0.9, "data.weight_by": "deviation", "data.variables": ("sst",)},
    ],
)  # fmt: skip
def test_members_are_sampled_split_and_measured_alike_as_stores_and_as_a_dimension(tmp_path, changes, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where statistics of several stores are kept
    several, one, truth = ensemble(tmp_path)
    found = []
    for config in (several.replace(changes), one.replace(changes)):
        if config.data.variables == ("sst",):
            measured = kit.data.statistics(config, progress=False).mean_and_deviation(0)
            assert measured == pytest.approx((np.nanmean(truth), np.nanstd(truth)))
        data = kit.data.PatchData(config)
        loaders = [data.train_dataloader(), *([data.val_dataloader()] if config.data.validation_fraction else [])]
        batches = [[*loader] for loader in loaders]
        found.append((str(kit.data.split(config)), [[one["values"].numpy() for one in some] for some in batches]))
        data.teardown()
    assert found[0][0] == found[1][0]
    for mine, theirs in zip(*(batches for _, batches in found), strict=True):
        assert all(np.array_equal(*pair) for pair in zip(mine, theirs, strict=True))


def test_a_region_of_one_member_is_told_by_its_dimension(tmp_path):
    config = ensemble(tmp_path)[0].replace({"data.validation_fraction": 0.25, "data.split": "regions"})
    assert "48 regions of member 1 × time 4 × lat 6 × lon 6" in str(kit.data.split(config))
    assert "4 regions of member 1," in str(kit.data.split(config.replace({"data.split_region": {"member": 1}})))


def test_statistics_of_an_ensemble_are_never_those_of_another_or_of_members_built_anew(
    tmp_path, tiny_config, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where statistics of several stores are kept

    def config(*numbers):
        places = [str(tmp_path / f"{number}.zarr") for number in numbers]
        return config_of(**{
            "data.url": places[0], "data.more": tuple(places[1:]), "data.join": "member", "data.variables": ("wind",),
        })  # fmt: skip

    def build(number, seed):
        kit.build(tiny_config(str(tmp_path / f"{number}.zarr"), data__arguments={"time": 4, "seed": seed}),
                  overwrite=True, progress=False)  # fmt: skip

    def measured(*numbers):
        return kit.data.statistics(config(*numbers), progress=False).mean_and_deviation(0)

    for number in range(4):
        build(number, number)
    first = measured(0, 1, 2)
    assert measured(0, 1, 3) != first
    assert measured(0, 1, 2) == first
    build(2, 7)
    assert measured(0, 1, 2) != first


@pytest.mark.parametrize("dimension", ["member", "time"])
def test_means_of_stores_that_kit_built_are_known_of_all_together(tmp_path, tiny_config, dimension, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where statistics of several stores are kept
    places = [str(tmp_path / f"{number}.zarr") for number in range(3)]
    for seed, place in enumerate(places):
        kit.build(tiny_config(place, data__arguments={"time": 4, "seed": seed}), progress=False)
    joined = kit.data.join(places, dimension, align="override")  # all are of the same days
    config = config_of(**{
        "data.url": places[0], "data.more": tuple(places[1:]), "data.join": dimension, "data.variables": ("wind",),
        "data.align": "override",
    })  # fmt: skip
    expected = kit.data.statistics(config, progress=False).mean_and_deviation(0)
    assert (joined.arrays["wind"].mean, joined.arrays["wind"].deviation) == pytest.approx(expected)


def test_a_static_field_that_each_year_holds_is_that_of_the_first(tmp_path):
    places = [member(tmp_path / f"{number}.zarr", field(number)) for number in range(2)]
    joined = kit.data.join(places, "time", align="override")
    assert joined.arrays["depth"].dims == DIMS[1:]
    assert any("depth" in note and "not compared" in note for note in joined.notes)
    other = member(tmp_path / "2.zarr", field(2))
    group = zarr.open_group(str(other), mode="r+")
    del group["depth"]
    group.create_array("depth", data=field(9)[0].astype("float64"), dimension_names=DIMS[1:])
    unlike = kit.data.join([*places, other], "time", align="override")
    assert any("is another" in note and str(other) in note for note in unlike.notes)
    data = kit.data.PatchData(config_of(**{"data.variables": ("sst", "depth")}), joined)
    loader = data.train_dataloader()
    (first, *_) = loader
    for (_, lat, lon), values in zip(loader.plan.batch(0, 0, 0), first["values"].numpy(), strict=True):
        assert np.array_equal(values[1], np.repeat(field(9)[:1, lat : lat + 4, lon : lon + 5], 3, axis=0))
    data.teardown()


def coordinates(place, **values):
    """A store with these coordinates, `(values, attributes)` each, written by zarr, of whatever type they are."""
    group = zarr.open_group(str(place), mode="w")
    for name, (data, attributes) in values.items():
        group.create_array(name, data=np.asarray(data), dimension_names=(name,), attributes=attributes)
    shape = tuple(len(data) for data, _ in values.values())
    group.create_array("sst", data=np.zeros(shape, "float32"), chunks=(1,) * len(shape), dimension_names=(*values,))
    return str(place)


DAYS, LATITUDES = (np.arange(4), {"units": "days since 2001-01-01"}), (np.array([1.0, 2.0, 3.0]), {})
ALIKE = {
    "the same": (DAYS, LATITUDES),
    "times in other units": ((np.arange(4) * 24, {"units": "hours since 2001-01-01"}), LATITUDES),
    "another type": (DAYS, (LATITUDES[0].astype("float32"), {})),
}
OTHERS = {
    "a later year": ((DAYS[0], {"units": "days since 2002-01-01"}), LATITUDES, "time", "2002-01-01"),
    "another calendar": ((DAYS[0], DAYS[1] | {"calendar": "360_day"}), LATITUDES, "time", "360_day"),
    "turned over": (DAYS, (LATITUDES[0][::-1], {}), "lat", "2 of 3 elements, 2 apart at most; that at 0 is 3.0"),
    "rounded": (DAYS, ([1.0, 2.0, 3.0 + 1e-9], {}), "lat", "1 of 3 elements, 1e-09 apart"),
    "fewer": (DAYS, (LATITUDES[0][:2], {}), "lat", "3 elements"),
}  # fmt: skip


def refused_by_xarray(places):
    """Whether xarray, which users know, joins these with `join="exact"`."""
    xarray = pytest.importorskip("xarray")
    opened = [xarray.open_zarr(place, consolidated=False) for place in places]
    try:
        xarray.concat(opened, "member", join="exact")
    except (ValueError, TypeError):
        return True
    return False


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.parametrize("dimension", ["member", ""])
def test_members_with_equal_coordinates_are_joined_however_these_are_stored(tmp_path, case, dimension):
    time, lat = ALIKE[case]
    places = [coordinates(tmp_path / "0", time=DAYS, lat=LATITUDES), coordinates(tmp_path / "1", time=time, lat=lat)]
    assert not refused_by_xarray(places)
    if not dimension:
        zarr.open_group(places[1], mode="r+").create_array(
            "ice", data=np.zeros((4, 3), "float32"), dimension_names=("time", "lat")
        )
        del zarr.open_group(places[1], mode="r+")["sst"]
    assert "is another" not in str(kit.data.join(places, dimension))


@pytest.mark.parametrize("case", OTHERS)
def test_members_with_other_coordinates_are_refused_with_store_dimension_and_place(tmp_path, case):
    time, lat, dimension, told = OTHERS[case]
    places = [coordinates(tmp_path / str(number), time=DAYS, lat=LATITUDES) for number in range(2)]
    places.append(coordinates(tmp_path / "2", time=time, lat=lat))
    assert refused_by_xarray(places)
    config = config_of(**{"data.url": places[0], "data.more": tuple(places[1:]), "data.join": "member"})
    with pytest.raises(ConfigError) as refused:
        open_dataset(config)
    assert all(word in str(refused.value) for word in (places[2], dimension, told))
    assert places[1] not in str(refused.value)
    if case == "fewer":
        return
    assert "override" in str(refused.value)
    joined = open_dataset(config.replace({"data.align": "override"}))
    assert joined.arrays["sst"].shape == (3, 4, 3)
    assert np.array_equal(joined.coordinate("lat"), LATITUDES[0])


def test_years_on_another_grid_are_refused(tmp_path):
    later = (np.arange(4, 8), DAYS[1])
    places = [
        coordinates(tmp_path / "0", time=DAYS, lat=LATITUDES),
        coordinates(tmp_path / "1", time=later, lat=LATITUDES),
    ]
    assert kit.data.join(places, "time").coordinate("time")[-1] == np.datetime64("2001-01-08")
    places.append(coordinates(tmp_path / "2", time=later, lat=(LATITUDES[0] + 1, {})))
    with pytest.raises(ConfigError, match=r"data\.align: lat .*differs"):
        kit.data.join(places, "time")


def test_names_of_stations_are_compared_too(tmp_path):
    xarray = pytest.importorskip("xarray")
    places = []
    for number, names in enumerate((["a", "b"], ["a", "b"], ["b", "a"])):
        made = xarray.Dataset({"flow": (("station", "time"), np.zeros((2, 3), "float32"))}, {"station": names})
        made.to_zarr(tmp_path / f"{number}.zarr", encoding={"flow": {"chunks": (1, 3)}}, zarr_format=2)
        places.append(tmp_path / f"{number}.zarr")
    assert kit.data.join(places[:2], "member").arrays["flow"].shape == (2, 2, 3)
    with pytest.raises(ConfigError, match="station .* that at 0 is b and not a"):
        kit.data.join(places, "member")


def test_members_behind_plain_http_are_found_by_the_names_of_their_variables(cloud, tmp_path):
    for number in range(2):
        cloud.upload(sharded(tmp_path, number), f"plain/{number}.zarr")
    first, second = (cloud.url(f"plain/{number}.zarr", "http") for number in range(2))
    config = config_of(**{"data.url": first, "data.more": (second,), "data.join": "member", "data.variables": ("sst",)})
    check(config, None, np.stack([field(0), field(1)]))


def test_a_config_names_them_and_a_pickle_opens_them_again(tmp_path):
    places = [str(with_xarray(tmp_path, number)) for number in range(2)]
    config = config_of(**{"data.url": places[0], "data.more": (places[1],), "data.join": "time"})
    dataset = pickle.loads(pickle.dumps(open_dataset(config)))
    assert dataset.coordinate("time")[-1] == np.datetime64("2001-01-16")
    check(config.replace({"data.order": "block"}), dataset, np.concatenate([field(0), field(1)]))
    check(config, None, np.concatenate([field(0), field(1)]))


def test_a_static_field_of_another_store_lies_beside_the_others(tmp_path):
    depth = zarr.open_group(str(tmp_path / "static.zarr"), mode="w").create_array(
        "depth", shape=SHAPE[1:], chunks=(12, 9), dtype="float32", dimension_names=("lat", "lon")
    )
    depth[:] = field(7)[0]
    joined = kit.data.join([with_xarray(tmp_path, 0), tmp_path / "static.zarr"])
    config = config_of(**{"data.variables": ("sst", "depth")})
    data = kit.data.PatchData(config, joined)
    loader = data.train_dataloader()
    (first, *_) = loader
    for (time, lat, lon), values in zip(loader.plan.batch(0, 0, 0), first["values"].numpy(), strict=True):
        assert np.array_equal(values[0], field(0)[time : time + 3, lat : lat + 4, lon : lon + 5])
        assert np.array_equal(values[1], np.repeat(field(7)[:1, lat : lat + 4, lon : lon + 5], 3, axis=0))
    data.teardown()


@pytest.mark.parametrize("order", ["random", "grid", "block"])
def test_no_patch_reaches_over_a_gap_in_time(tmp_path, order):
    places = [with_xarray(tmp_path, 0), with_xarray(tmp_path, 1, first=100)]
    config = config_of(
        **{
            "data.url": str(places[0]), "data.more": (str(places[1]),), "data.join": "time", "data.order": order,
            "data.gap_dimension": "time", "data.samples_per_epoch": 200,
        }
    )  # fmt: skip
    for asked in (config, config.replace({"data.stride": {"time": 1}} if order == "grid" else {})):
        plan = sample_plan(asked, open_dataset(asked), 1)
        times = np.concatenate([plan.batch(0, step, 0)[:, 0] for step in range(plan.batches_per_epoch)])
        assert not ((times > 5) & (times < 8)).any()  # patches of 3 end at 8, or begin there
        assert {*times.tolist()} >= ({0, 3} if asked is config and order == "grid" else {0, 5, 8, 13})
    for dimension, words in (("tim", "unknown"), ("lon", "no coordinate")):
        with pytest.raises(ConfigError, match=f"gap_dimension: .*{words}"):
            sample_plan(config.replace({"data.gap_dimension": dimension}), open_dataset(config), 1)


def begins_of(places, **changes):
    """The first elements along time of a grid of patches that reach over no gap."""
    patch = {"time": 3, "lat": SHAPE[1], "lon": SHAPE[2]}
    config = config_of(**{
        "data.patch": patch, "data.order": "grid", "data.gap_dimension": "time", "loader.batch_size": 1,
        "data.stride": {"time": 1}, **changes,
    })  # fmt: skip
    plan = sample_plan(config, kit.data.join(places, "time", align=config.data.align), 1)
    return {int(plan.batch(0, step, 0)[0, 0]) for step in range(plan.batches_per_epoch)}


@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_gaps_in_times_of_other_calendars_are_seen_over_years_that_count_from_their_own_start(tmp_path, calendar):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("cftime")

    def year(name, first, since):
        times = ("time", np.arange(SHAPE[0]) + first, {"units": f"days since {since}", "calendar": calendar})
        made = xarray.Dataset({"sst": (("time", "lat", "lon"), field(0))}, {"time": times})
        made.to_zarr(tmp_path / name, encoding={"sst": {"chunks": (4, 6, 6)}}, consolidated=False)
        return tmp_path / name

    days = SHAPE[0]
    before = year("before", 0, "2001-01-01")
    assert begins_of([before, year("next", 0, f"2001-01-{days + 1:02}")]) == {*range(2 * days - 2)}
    assert begins_of([before, year("hole", days, "2003-01-01")]) == {*range(2 * days - 2)} - {days - 2, days - 1}


@pytest.mark.parametrize("back", [2, 100])
def test_no_patch_reaches_over_a_time_that_turns_back(tmp_path, back):
    places = [with_xarray(tmp_path, 0), with_xarray(tmp_path, 1, first=-back)]
    assert begins_of(places, **{"data.align": "override"}) == {*range(2 * SHAPE[0] - 2)} - {SHAPE[0] - 2, SHAPE[0] - 1}


def test_gaps_between_names_are_refused(tmp_path):
    xarray = pytest.importorskip("xarray")
    names = np.array([f"s{number}" for number in range(SHAPE[0])], dtype=object)
    made = xarray.Dataset({"sst": (("station", "lat", "lon"), field(0))}, {"station": names})
    made.to_zarr(tmp_path / "s.zarr", consolidated=False)
    config = config_of(**{"data.gap_dimension": "station", "data.patch": {"station": 2}})
    with pytest.raises(ConfigError, match=r"gap_dimension: .*s0"):
        sample_plan(config, open_dataset(str(tmp_path / "s.zarr")), 1)


def test_what_is_not_cut_alike_is_refused_with_what_differs(tmp_path):
    zarr.open_group(str(tmp_path / "other.zarr"), mode="w").create_array(
        "sst", shape=(6, *SHAPE[1:]), chunks=(4, 6, 6), dtype="float32", dimension_names=("time", "lat", "lon")
    )
    one = with_xarray(tmp_path, 0)
    with pytest.raises(ConfigError, match="chunk of 4"):
        kit.data.join([tmp_path / "other.zarr", one], "time")
    with pytest.raises(ConfigError, match="chunk .* in one store"):
        kit.data.join([one, sharded(tmp_path, 3)], "time")
    with pytest.raises(ConfigError, match="two stores have a variable 'sst'"):
        kit.data.join([one, one])


@pytest.mark.parametrize("shard", ["none", "auto"])
@pytest.mark.parametrize("chunks", [(48, 48, 48), (73, 73, 61)])
def test_years_of_other_lengths_are_joined_once_they_are_built_as_the_refusal_says(tmp_path, chunks, shard):
    """A leap year last: what follows no store may end in a chunk."""
    xarray = pytest.importorskip("xarray")
    years = [730, 730, 732]
    places = [str(tmp_path / f"{number}.zarr") for number in range(3)]
    values = np.arange(sum(years) * 6, dtype="float32").reshape(-1, 6)

    def build(chunks, shard):
        begins = [0, 730, 1460]
        for place, begin, steps, chunk in zip(places, begins, years, chunks, strict=True):
            whole = {"time": 2 * chunk["time"], "lat": 6} if shard == "auto" else shard
            times = ("time", np.arange(begin, begin + steps), {"units": "days since 2001-01-01"})
            made = xarray.Dataset({"sst": (("time", "lat"), values[begin : begin + steps])}, {"time": times})
            settings = {"data.url": place, "data.patch": {"time": 5}, "chunking.chunk": chunk, "chunking.shard": whole}
            kit.build(config_of(**settings), source=made, overwrite=True, progress=False)

    build([{"time": side, "lat": 6} for side in chunks], shard)
    with pytest.raises(ConfigError, match=r"anew with chunking\.chunk") as refused:
        kit.data.join(places, "time")
    said = dict(re.findall(r"chunking\.(\w+): (\{.*?\})", str(refused.value)))
    build([ast.literal_eval(said["chunk"])] * 3, ast.literal_eval(said["shard"]) if shard != "none" else shard)
    joined = kit.data.join(places, "time")
    config = config_of(**{"data.patch": {"time": 5, "lat": 4}})
    check(config, joined, values)


def test_what_lies_in_a_bucket_is_read_and_kept_as_if_it_were_alone(cloud, tmp_path):
    near = [with_xarray(tmp_path, number) for number in range(3)]
    far = [cloud.upload(place, f"joined/{place.name}") for place in near[:2]]
    kept = {"cache.size_bytes": 1 << 24, "cache.folder": str(tmp_path / "kept")}
    for url in far:
        kit.data.prefetch(config_of(**{"data.url": url, **kept}), progress=False)
    for places, client in ((far, HttpClient), ([*far, near[2]], EachItsOwn), (near, ThreadClient)):
        joined = kit.data.join([kit.data.join(places[:2], "time"), *places[2:]], "time") if places[2:] else None
        joined = joined or kit.data.join(places, "time")
        counts = check(config_of(**kept), joined, np.concatenate([field(number) for number in range(len(places))]))
        assert counts["read_cache_misses"] == 0
        assert bool(counts["read_cache_hits"]) == (places is not near)
        assert bool(counts["bytes_read"]) == (places is not far)
        made = open_client(joined.open_store(), joined.url, 5.0, Counters(), 8)
        made.close()
        assert isinstance(made, client)


@pytest.mark.parametrize("order", [(1, 0), (0, 2, 1), (0, 0), (0, 1, 1)])
def test_years_in_another_order_or_twice_are_refused(tmp_path, order):
    places = {number: with_xarray(tmp_path, number) for number in set(order)}
    with pytest.raises(ConfigError, match=rf"align: time of .*{order[-1]}\.zarr begins at 2001-01-.* ends at 2001-01-"):
        kit.data.join([places[number] for number in order], "time")
    joined = kit.data.join([places[number] for number in order], "time", align="override")
    check(config_of(), joined, np.concatenate([field(number) for number in order]))


def test_a_coordinate_may_fall_from_store_to_store_and_have_one_element_in_each(tmp_path):
    xarray = pytest.importorskip("xarray")
    made = {}
    for day in (3, 2, 1):
        time = np.array([f"2001-01-0{day}"], "datetime64[ns]")
        made[day] = xarray.Dataset({"sst": (("time", "lat", "lon"), field(day)[:1])}, {"time": time})
        made[day].to_zarr(tmp_path / f"{day}.zarr", encoding={"sst": {"chunks": (1, 6, 6)}}, consolidated=False)
    places = [tmp_path / f"{day}.zarr" for day in made]
    assert kit.data.join(places, "time").coordinate("time").astype("datetime64[D]").tolist()[0].day == 3
    with pytest.raises(ConfigError, match="align: time of .*2"):
        kit.data.join([places[0], places[2], places[1]], "time")


def test_ends_of_a_coordinate_are_read_without_what_is_between(cloud, tmp_path):
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w")
    for name, values, chunks in (("sst", field(0), (4, 6, 6)), ("time", np.arange(SHAPE[0]), (1,))):
        along = DIMS[: values.ndim]
        group.create_array(name, shape=values.shape, chunks=chunks, dtype=values.dtype, dimension_names=along)[...] = (
            values
        )
    dataset = open_dataset(cloud.upload(tmp_path / "s.zarr", "joined/s.zarr"))
    dataset.open_array("time")
    cloud.reset_counts()
    assert dataset.coordinate("time", ends=True).tolist() == [0, SHAPE[0] - 1]
    assert cloud.counts().kinds["read"].requests <= 4 < SHAPE[0]  # of it and its metadata


def test_a_chunk_that_is_missing_is_told_with_the_store_that_lacks_it(tmp_path):
    places = [with_xarray(tmp_path, number) for number in range(2)]
    (places[1] / "sst/c/0/1/2").unlink()
    joined = kit.data.join([open_dataset(place, strict=True) for place in places], "time")
    with pytest.raises(MissingChunkError, match=r"/1\.zarr: .* no object sst/c/0/1/2"):
        check(config_of(**{"data.patch": {"time": 16, "lat": 12, "lon": 18}}), joined, np.zeros(0))
