from kit.charts.rows import query_figure
from kit.charts.style import svg
from kit.data.tables.chunks import QueryModel, database_memory
from kit.data.tables.measure import QueryCheck, QuerySetting

MIB = 1 << 20


def check(*databases):
    settings = tuple(
        QuerySetting(
            count=2**place, predicted_client_bytes=80 * MIB >> place, measured_client_bytes=90 * MIB >> place,
            measured_database_bytes=database, seconds=1.0 + place,
        )
        for place, database in enumerate(databases)
    )  # fmt: skip
    failed = QuerySetting(count=64, predicted_client_bytes=9 * MIB, note="its process was ended by signal 9")
    known = {2**place: database for place, database in enumerate(databases) if database}
    model = QueryModel(rows=1000, row_bytes=40.0, database=database_memory(known))
    return QueryCheck(name="shop", phase="load", settings=(*settings, failed), model=model)


def test_every_number_has_bars_from_zero_and_the_one_that_failed_keeps_its_place():
    client, database, time = query_figure(check(8 * MIB, 4 * MIB)).axes
    heights = [bar.get_height() for bars in client.containers for bar in bars]
    assert heights == [90.0, 80.0, 45.0, 40.0, 9.0]
    assert [bar.get_height() for bars in database.containers for bar in bars] == [8.0, 4.0]
    assert [bar.get_height() for bars in time.containers for bar in bars] == [1.0, 2.0]
    for axes in (client, database, time):
        assert axes.get_ylim()[0] == 0
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "64"]
    assert [text.get_text() for text in client.texts] == ["90 MiB", "45 MiB", "did not run"]
    (said,) = client.figure.texts
    assert "memory falls from 8 MiB at 1 to 4 MiB at 2 query chunks" in said.get_text().replace("\n", " ")


def test_a_database_that_does_not_tell_keeps_its_panel():
    figure = query_figure(check(None, None))
    (said,) = figure.axes[1].texts
    assert "cannot be seen" in said.get_text()
    assert "<svg" in svg(figure, "query chunks")
