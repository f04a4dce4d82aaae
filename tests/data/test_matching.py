"""Stores of other resolutions lie beside the first, matched by coordinates: xarray and pandas say what is right."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import kit
from kit.config import Config
from kit.data.open_dataset import open_dataset
from kit.data.sampling import sample_plan
from kit.data.splits import split_of, widest_of
from kit.data.stores.url import open_store
from kit.errors import ConfigError

xarray = pytest.importorskip("xarray")
pandas = pytest.importorskip("pandas")

HOURS, DAYS, LAT, LON = 120, 5, np.arange(-6, 6, 0.5), np.arange(0, 8, 0.5)
START = np.datetime64("2001-03-01", "ns")


def hourly(without=()):
    times = START + np.delete(np.arange(HOURS), without) * np.timedelta64(1, "h")
    shape = (len(times), len(LAT), len(LON))
    values = np.random.default_rng(1).normal(size=shape).astype("float32")
    return xarray.Dataset(
        {"wind": (("time", "lat", "lon"), values)}, {"time": times.astype("datetime64[ns]"), "lat": LAT, "lon": LON}
    )


def daily(lat=LAT, lon=LON, days=range(DAYS)):
    times = START + np.array(days) * np.timedelta64(1, "D")
    values = np.random.default_rng(2).normal(size=(len(times), len(lat), len(lon))).astype("float32")
    return xarray.Dataset(
        {"wind": (("time", "lat", "lon"), values)}, {"time": times.astype("datetime64[ns]"), "lat": lat, "lon": lon}
    )


COARSE = {"lat": np.arange(5.25, -6, -1.0), "lon": np.arange(0.25, 8, 1.0)}  # a degree, from north to south


def zarr3(path, data, chunks):
    encoding = {"wind": {"chunks": chunks}, "time": {"units": "hours since 1999-12-31"}}
    data.to_zarr(path, encoding=encoding, zarr_format=3, consolidated=False)


def zarr2(path, data, chunks):
    packed = {"dtype": "int16", "scale_factor": 2**-10, "_FillValue": -32768}
    encoding = {"wind": {"chunks": chunks, **packed}, "time": {"units": "days since 2001-01-01", "dtype": "float64"}}
    data.to_zarr(path, encoding=encoding, zarr_format=2, consolidated=True)


def sharded(path, data, chunks):
    shards = tuple(2 * side for side in chunks)
    encoding = {"wind": {"chunks": chunks, "shards": shards}, "time": {"units": "seconds since 1970-01-01"}}
    data.to_zarr(path, encoding=encoding, zarr_format=3, consolidated=False)


def netcdf(path, data, chunks):
    sides = tuple(min(pair) for pair in zip(chunks, data["wind"].shape, strict=True))
    encoding = {"wind": {"chunksizes": sides}, "time": {"units": "minutes since 2000-01-01"}}
    data.to_netcdf(path, engine="h5netcdf", encoding=encoding)


def kerchunk(path, data, chunks):
    import json

    from kerchunk.hdf import SingleHdf5ToZarr

    netcdf(path.with_suffix(".nc"), data, chunks)
    references = SingleHdf5ToZarr(str(path.with_suffix(".nc"))).translate()
    path.write_text(json.dumps(references))


WRITERS = {zarr3: ".zarr", zarr2: ".zarr", sharded: ".zarr", netcdf: ".nc", kerchunk: ".json"}


def written(folder, name, data, write=zarr3, chunks=(7, 5, 6)):
    path = folder / f"{name}{WRITERS[write]}"
    write(path, data, chunks)
    return str(path)


def config_of(*places, **changes):
    return Config().replace(
        {
            "data.url": places[0], "data.more": places[1:], "data.match": {"time": "last"},
            "data.variables": ("wind", "wind_2"), "data.patch": {"time": 30, "lat": 7, "lon": 6},
            "data.samples_per_epoch": 24, "loader.batch_size": 4, "data.standardize": False,
            **{path.replace("__", "."): value for path, value in changes.items()},
        }
    )  # fmt: skip


def check(config, *truths, given=None):
    """Every patch has what xarray has there, for each variable; NaN is missing."""
    data = kit.data.PatchData(config, given)
    loader = data.train_dataloader()
    for step, batch in enumerate(loader):
        for number, offset in enumerate(loader.plan.batch(0, step, 0)):
            where = tuple(slice(at, at + side) for at, side in zip(offset, loader.plan.patch, strict=True))
            for variable, truth in enumerate(truths):
                wanted = truth.transpose("time", "lat", "lon").values[where]
                assert np.array_equal(batch["valid"][number, variable].numpy(), np.isfinite(wanted))
                found = batch["values"][number, variable].numpy()
                np.testing.assert_allclose(found, np.nan_to_num(wanted), atol=1e-3)
    data.teardown()
    return loader


@pytest.mark.parametrize(
    ("write", "order"), [*((write, "random") for write in WRITERS), (zarr3, "grid"), (sharded, "block")]
)
def test_days_beside_hours_whoever_wrote_them(tmp_path, write, order):
    places = written(tmp_path, "hours", hourly()), written(tmp_path, "days", daily(), write, (2, 9, 4))
    truth = daily().reindex(time=hourly().time, method="ffill")
    loader = check(config_of(*places, data__order=order), hourly().wind, truth.wind)
    assert loader.counters()["chunks_decoded"]
    assert "5 along time matched" in str(open_dataset(config_of(*places)))


@pytest.mark.parametrize("write", WRITERS)
def test_a_degree_beside_a_half_from_north_to_south(tmp_path, write):
    days = daily(**COARSE)
    places = written(tmp_path, "fine", hourly(), write), written(tmp_path, "coarse", days, write, (2, 3, 3))
    config = config_of(*places, data__match={"time": "last", "lat": "nearest", "lon": "nearest"})
    nearest = {"method": "nearest", "tolerance": 0.5}
    truth = days.reindex(time=hourly().time, method="ffill").reindex(lat=LAT, **nearest).reindex(lon=LON, **nearest)
    check(config, hourly().wind, truth.wind, given=pickle.loads(pickle.dumps(open_dataset(config))))
    assert not truth.wind.isnull().any()


@pytest.mark.parametrize("how", ["equal", "last", "nearest"])
def test_gaps_and_odd_times_match_as_pandas_does(how):
    from kit.data.places import match_values

    dice = np.random.default_rng(3)
    for _ in range(40):
        mine, theirs = (np.unique(dice.integers(0, 400, dice.integers(2, 60))) for _ in range(2))
        steps = np.diff(theirs)
        if not len(steps):
            continue
        step = steps[steps <= 1.5 * np.median(steps)].max()
        tolerance, direction = {"equal": (0, "backward"), "last": (step - 1, "backward")}.get(
            how, (step // 2, "nearest")
        )
        right = pandas.DataFrame({"at": theirs, "place": np.arange(len(theirs))})
        truth = pandas.merge_asof(
            pandas.DataFrame({"at": mine}), right, on="at", direction=direction, tolerance=int(tolerance)
        )["place"]
        if how == "nearest":  # of two as near pandas takes the earlier; xarray the later, as here
            later = pandas.Index(theirs).get_indexer(mine, method="nearest", tolerance=step / 2)
            truth = pandas.Series(np.where(later < 0, np.nan, later))
        for turned in (False, True):
            found = match_values(mine, theirs[::-1] if turned else theirs, how)
            known = np.ones(len(mine), bool) if found.known is None else found.known
            assert np.array_equal(known, truth.notna())
            place = len(theirs) - 1 - found.index if turned else found.index
            assert np.array_equal(place[known], truth[known])


def test_what_has_no_match_is_refused_masked_or_left_out_and_counted(tmp_path):
    hours, days = hourly(without=range(30, 40)), daily(days=(0, 1, 3, 4))
    places = written(tmp_path, "hours", hours), written(tmp_path, "days", days)
    with pytest.raises(ConfigError, match=r"unmatched: 24 of 110 .*hours.*2001-03-03T00.*days.* 1 day.*leave-out"):
        open_dataset(config_of(*places))
    masked = config_of(*places, data__unmatched="missing")
    tolerance = np.timedelta64(86_399, "s")
    truth = days.reindex(time=hours.time, method="ffill", tolerance=tolerance)
    assert int(truth.wind.isnull().any(("lat", "lon")).sum()) == 24
    check(masked, hours.wind, truth.wind)
    left_out = masked.replace({"data.unmatched": "leave-out", "data.samples_per_epoch": 200})
    check(left_out, hours.wind, truth.wind)
    dataset = open_dataset(left_out)
    assert "24 of 110" in str(dataset)
    plan = sample_plan(left_out, dataset, 1)
    begins = {int(at) for step in range(plan.batches_per_epoch) for at in plan.batch(0, step, 0)[:, 0]}
    assert begins == {*range(9), *range(62, 81)}
    both = left_out.replace({"data.gap_dimension": "time", "data.patch": {"time": 10}, "data.samples_per_epoch": 2000})
    plan = sample_plan(both, dataset, 1)
    begins = {int(at) for step in range(plan.batches_per_epoch) for at in plan.batch(0, step, 0)[:, 0]}
    assert begins == {*range(21), *range(62, 101)}
    with pytest.raises(ConfigError, match="unmatched: no patch of 60"):
        sample_plan(both.replace({"data.patch": {"time": 60}}), dataset, 1)


@pytest.mark.parametrize("split", ["end", "regions"])
def test_no_day_is_shared_by_two_parts(tmp_path, split):
    days = daily(**COARSE)
    places = written(tmp_path, "hours", hourly(), chunks=(20, 12, 8)), written(tmp_path, "days", days)
    config = config_of(
        *places, data__match={"time": "last", "lat": "nearest", "lon": "nearest"}, data__validation_fraction=0.4,
        data__split=split, data__patch={"time": 6, "lat": 3, "lon": 2}, data__split_region={"time": 60, "lat": 12},
        data__samples_per_epoch=2000,
    )  # fmt: skip
    dataset = open_dataset(config)
    index = [one.index for one in dataset.arrays["wind_2"].matched]
    touched = []
    for part in ("train", "validation"):
        plan, cells = sample_plan(config, dataset, 1, part=part), set()
        offsets = np.concatenate([plan.batch(0, step, 0) for step in range(plan.batches_per_epoch)])
        for offset in offsets.tolist():
            sides = [{*one[at : at + side].tolist()} for one, at, side in zip(index, offset, plan.patch, strict=True)]
            cells |= {(t, y, x) for t in sides[0] for y in sides[1] for x in sides[2]}
        touched.append(cells)
    assert touched[0]
    assert touched[1]
    assert not touched[0] & touched[1]
    assert max(split_of(config, widest_of(dataset, config)).guard) == 23


def test_statistics_are_those_of_what_is_read_and_an_epoch_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hours, days = hourly(), daily(days=(0, 1, 3, 4))
    places = written(tmp_path, "hours", hours), written(tmp_path, "days", days, zarr2)
    config = config_of(*places, data__unmatched="missing", data__standardize=True, loader__cache_bytes=1 << 20)
    found = kit.data.statistics(config, progress=False)
    truth = days.reindex(time=hours.time, method="ffill", tolerance=np.timedelta64(86_399, "s"))
    for number, values in enumerate((hours.wind, truth.wind)):
        wanted = float(values.mean()), float(values.std())
        assert found.mean_and_deviation(number) == pytest.approx(wanted, abs=1e-3)
    scaled = [(one - one.mean()) / one.std() for one in (hours.wind, truth.wind)]
    check(config, *scaled)
    whole, begun = (kit.data.PatchData(config).train_dataloader() for _ in range(2))
    batches = [batch["values"].numpy() for batch in whole]
    (first := iter(begun), next(first), next(first))
    rest = kit.data.PatchData(config).train_dataloader()
    rest.load_state_dict(begun.state_dict())
    assert all(np.array_equal(a["values"].numpy(), b) for a, b in zip(rest, batches[2:], strict=True))
    for loader in (whole, begun, rest):
        loader.close()


def test_what_a_trial_will_request_is_played_with_the_chunks_that_match(tmp_path):
    from kit.data.build.layout import predict_reading, price_store

    places = written(tmp_path, "hours", hourly()), written(tmp_path, "days", daily(), zarr3, (2, 9, 4))
    config = config_of(*places, trial__max_steps=6, trial__warmup_steps=0)
    dataset = open_dataset(config)
    loader = check(config, hourly().wind, given=dataset)
    predicted = predict_reading(config, dataset)["requests_per_sample"]
    assert predicted == pytest.approx(loader.counters()["requests"] / 24, rel=0.15)
    alone = config.replace({"data.variables": ("wind",)})
    priced = [sum(cost.requests_made_per_batch for cost in price_store(one, dataset)) for one in (config, alone)]
    played = predicted / predict_reading(alone, dataset)["requests_per_sample"]
    assert priced[0] / priced[1] == pytest.approx(played, rel=0.3)


@pytest.mark.parametrize("kind", ["matched", "years"])
def test_stores_in_a_bucket_that_are_joined_are_asked_once_for_each_chunk(cloud, tmp_path, kind):
    parts = {"matched": [hourly(), daily()], "years": [daily(), daily(days=range(5, 10))]}[kind]
    places = [cloud.url(f"{kind}/{number}.zarr") for number in range(2)]
    for place, part in zip(places, parts, strict=True):
        part.to_zarr(open_store(place, read_only=False), encoding={"wind": {"chunks": (5, 8, 8)}}, consolidated=False)
    changes = {"cache.size_bytes": 1 << 24, "cache.folder": str(tmp_path / "kept")}
    if kind == "years":
        changes |= {"data.match": {}, "data.join": "time", "data.variables": (), "data.patch": {"time": 3, "lat": 7}}
    config = config_of(*places).replace(changes)
    truths = [parts[0].wind, parts[1].reindex(time=parts[0].time, method="ffill").wind]
    truths = truths if kind == "matched" else [xarray.concat(parts, "time").wind]
    first = check(config, *truths).counters()
    kit.data.prefetch(config, progress=False)
    again = check(config, *truths).counters()
    assert first["bytes_read"]
    assert again["bytes_read"] == 0
    assert again["read_cache_bytes"]


@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_times_of_a_calendar_match_in_other_units_and_not_those_of_another(tmp_path, calendar):
    pytest.importorskip("cftime")

    def place(name, values, units, calendar=calendar):
        data = xarray.Dataset(
            {name: (("time", "lat"), np.zeros((len(values), 8), np.float32))},
            {"time": ("time", values, {"units": units, "calendar": calendar})},
        )
        data.to_zarr(tmp_path / f"{name}.zarr", consolidated=False)
        return tmp_path / f"{name}.zarr"

    hours = place("hours", np.arange(96) + 24.0 * 57, "hours since 2000-01-01")
    days = place("days", np.arange(4) + 57.5, "days since 2000-01-01 00:00:00")
    joined = kit.data.join([hours, days], match={"time": "nearest"})
    matched = joined.arrays["days"].matched[0]
    assert np.array_equal(matched.index, np.arange(96) // 24)
    other = place("other", np.arange(4) + 57.5, "days since 2000-01-01", "standard")
    with pytest.raises(ConfigError, match=r"match: time is times .*convert_calendar"):
        kit.data.join([hours, other], match={"time": "last"})


def test_what_cannot_be_matched_is_refused_with_the_way_out(tmp_path):
    fine, coarse = written(tmp_path, "fine", hourly()), written(tmp_path, "coarse", daily(**COARSE))
    with pytest.raises(ConfigError, match=r"match: lat has 24 .* and 12 .*nearest"):
        kit.data.join([fine, coarse], match={"time": "last"})
    with pytest.raises(ConfigError, match=r"match: .*'tim'"):
        kit.data.join([fine, coarse], match={"tim": "last"})
    with pytest.raises(ConfigError, match="follow one another"):
        kit.data.join([fine, coarse], "time", match={"time": "last"})
    tangled = hourly().isel(time=[3, 1, 2])
    with pytest.raises(ConfigError, match="neither rises nor falls"):
        kit.data.join([fine, written(tmp_path, "tangled", tangled)], match={"time": "last"})
    bare = tmp_path / "bare.zarr"
    daily().drop_vars("time").to_zarr(bare, consolidated=False)
    with pytest.raises(ConfigError, match="no coordinate 'time'"):
        kit.data.join([fine, bare], match={"time": "last"})
    joined = kit.data.join([fine, written(tmp_path, "days", daily())], match={"time": "last"})
    with pytest.raises(ConfigError, match="variables: wind_2"):
        joined.select(["wind_2"])
