"""The form holds a valid Config at all times, and says beside the field why an edit waits."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.config import Config
from kit.errors import ConfigError, Problem
from kit.widgets.controls import label, make_control, read_control, show, write_control
from kit.widgets.form import SHOWN, ConfigForm

FIELDS = {info.path: info for info in Config.fields()}


@pytest.fixture
def form():
    return ConfigForm(Config().replace({"data.patch": {"time": 2, "lat": 64, "lon": 64}}))


def note(form, path):
    return form._notes[path].value if path in form._notes else ""


def test_every_field_has_a_labelled_control_with_the_sentence_of_its_declaration(form):
    for path, info in FIELDS.items():
        assert form.controls[path].description == label(info)
        assert form.controls[path].tooltip == info.help
    assert form.controls.keys() == FIELDS.keys()


def test_labels_carry_the_unit_instead_of_the_suffix():
    assert label(FIELDS["chunking.latency_seconds"]) == "latency, s"
    assert label(FIELDS["chunking.bandwidth_bytes_per_second"]) == "bandwidth, bytes/s"
    assert label(FIELDS["chunking.target_shard_bytes"]) == "target shard"
    assert label(FIELDS["loader.requests_in_flight"]) == "requests in flight"


@pytest.mark.parametrize("text", ["64 MiB", "80 MB", "1 TiB", "1025"])
def test_a_size_is_shown_in_its_shortest_exact_form(text):
    info = FIELDS["chunking.target_shard_bytes"]
    control = make_control(info, Config().get(info.path))
    control.value = text
    assert show(info, read_control(info, control)) == text


def test_every_shown_field_exists():
    assert {f"{section}.{name}" for section, names in SHOWN.items() for name in names} <= set(FIELDS)


def test_a_change_replaces_the_config_and_tells_the_listeners(form):
    heard = []
    forget = form.on_change(heard.append)
    form.controls["loader.batch_size"].value = 4
    assert form.config.loader.batch_size == 4
    assert heard == [form.config]
    forget()
    form.controls["loader.batch_size"].value = 8
    assert len(heard) == 1


def test_a_bad_text_is_explained_beside_its_field_and_the_last_valid_config_stays(form):
    before = form.config
    form.controls["data.patch"].value = "time 2"
    assert form.config == before
    assert "not a size" in note(form, "data.patch")
    assert "role='alert'" in note(form, "data.patch")
    form.controls["data.patch"].value = "time: 4"
    assert form.config.data.patch == {"time": 4}
    assert note(form, "data.patch") == ""


def test_edits_that_only_fit_together_wait_for_each_other(form):
    form.controls["hardware.strategy"].value = "ddp"
    assert form.config.hardware.strategy == "none"
    assert "at least 2 devices" in note(form, "hardware.strategy")
    form.controls["hardware.devices"].value = "2"
    assert (form.config.hardware.strategy, form.config.hardware.devices) == ("ddp", 2)
    assert not form.problems


def test_a_field_whose_edit_waits_for_another_says_so_and_others_hear_of_it(form):
    heard = []
    form.on_rejected(lambda: heard.append(form.rejected))
    form.controls["hardware.devices"].value = "8"
    assert form.config.hardware.devices == "auto"
    assert re.search("not taken over.*hardware.strategy", note(form, "hardware.devices"))
    form.controls["hardware.strategy"].value = "ddp"
    assert note(form, "hardware.devices") == ""
    assert [bool(problems) for problems in heard] == [True, False]


def test_one_bad_field_does_not_hold_up_the_others(form):
    form.controls["chunking.target_shard_bytes"].value = "a lot"
    form.controls["loader.batch_size"].value = 3
    assert form.config.loader.batch_size == 3
    assert [problem.path for problem in form.problems] == ["chunking.target_shard_bytes"]


def test_an_out_of_bounds_size_is_reported_beside_its_field(form):
    form.controls["data.patch"].value = "time: 0"
    assert "equal to 1" in note(form, "data.patch")


def test_messages_are_escaped(form):
    form.controls["data.patch"].value = "<img src=x>"
    assert "<img" not in note(form, "data.patch")


def test_setting_the_config_updates_every_control_and_clears_problems(form):
    form.controls["data.patch"].value = "nonsense"
    other = Config().replace({"hardware.strategy": "fsdp:2:2", "hardware.devices": 4, "loader.shuffle": False})
    form.config = other
    assert form.config == other
    assert not form.problems
    assert form.controls["hardware.strategy"].value == "fsdp:2:2"
    assert form.controls["data.patch"].value == ""


def test_hints_stand_beside_their_field_until_an_error_takes_their_place(form):
    form.show_hints({"hardware.devices": "the CPU: no GPU found"})
    assert "no GPU found" in note(form, "hardware.devices")
    form.controls["hardware.devices"].value = "0"
    assert "cannot train" in note(form, "hardware.devices")
    form.controls["hardware.devices"].value = "auto"
    assert "no GPU found" in note(form, "hardware.devices")


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("hardware.devices", "auto", "auto"),
        ("hardware.devices", "-1", -1),
        ("hardware.devices", "0, 1", [0, 1]),
        ("hardware.devices", "[3]", [3]),
        ("chunking.chunk", "auto", "auto"),
        ("chunking.shard", "none", "none"),
        ("chunking.chunk", "time: 2, lat: 64", {"time": 2, "lat": 64}),
        ("chunking.target_shard_bytes", "1 GiB", 1 << 30),
        ("training.gradient_clip_norm", "", None),
        ("training.gradient_clip_norm", "1e-3", 1e-3),
        ("data.source", "", None),
        ("data.variables", "u, v", ["u", "v"]),
        ("data.arguments", "size: 3, name: no", {"size": 3, "name": "no"}),
        ("data.arguments", '{"deep": {"list": [1, 2]}}', {"deep": {"list": (1, 2)}}),
    ],
)
def test_texts_are_read_as_people_write_them(path, text, value):
    info = FIELDS[path]
    control = make_control(info, Config().get(path))
    control.value = text
    assert read_control(info, control) == value


@pytest.mark.parametrize(
    ("path", "text"), [("data.stride", "time: 2, time: 3"), ("training.gradient_clip_norm", "much")]
)
def test_a_text_that_does_not_parse_names_its_field(path, text):
    control = make_control(FIELDS[path], Config().get(path))
    control.value = text
    with pytest.raises(ConfigError) as caught:
        read_control(FIELDS[path], control)
    assert caught.value.problems[0].path == path


names = st.text("abcxyz_", min_size=1, max_size=6)
sizes = st.dictionaries(names, st.integers(1, 10**9), max_size=4)
scalars = st.one_of(
    st.integers(-(2**40), 2**40), st.booleans(), names, st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = {
    "hardware.devices": st.one_of(
        st.just("auto"), st.integers(-1, 64), st.lists(st.integers(0, 9), min_size=1, max_size=3)
    ),
    "chunking.target_shard_bytes": st.integers(1024, 1 << 40),
    "chunking.shard": st.one_of(st.sampled_from(["auto", "none"]), sizes.filter(bool)),
    "data.patch": sizes,
    "data.variables": st.lists(names, max_size=3),
    "data.arguments": st.dictionaries(names, scalars, max_size=3),
    "training.gradient_clip_norm": st.one_of(st.none(), st.floats(1e-9, 1e9)),
}


@given(st.sampled_from(sorted(VALUES)).flatmap(lambda path: st.tuples(st.just(path), VALUES[path])))
def test_every_text_shown_reads_back_as_the_same_value(example):
    path, value = example
    info = FIELDS[path]
    control = make_control(info, Config().get(path))
    write_control(info, control, value)
    assert read_control(info, control) == value, show(info, value)


def shown_in(form):
    """The fields whose rows are in sight."""
    seen, waiting = set(), [form.ui]
    while waiting:
        part = waiting.pop()
        if "kit-hidden" not in part._dom_classes:
            seen.add(part)
            waiting += getattr(part, "children", ())
    return {path for path, control in form.controls.items() if control in seen}


def test_what_differs_is_marked_and_taken_back_one_by_one_or_all(form):
    form.edit({"loader.batch_size": 4, "hardware.precision": "bf16-mixed"})
    assert set(form.changed) == {"loader.batch_size", "hardware.precision"}
    assert "kit-changed" in form.row("loader.batch_size")._dom_classes
    back = form.row("loader.batch_size").children[-1]
    assert "back to 16" in back.tooltip
    back.click()
    assert form.config.loader.batch_size == 16
    assert "kit-changed" not in form.row("loader.batch_size")._dom_classes
    assert back.layout.display == "none"
    form.reset()
    assert form.changed == ()
    assert form.config == Config().replace({"data.patch": {"time": 2, "lat": 64, "lon": 64}})


def test_a_mark_leaves_the_control_where_it_is(form):
    before = form.row("loader.batch_size").children
    form.controls["loader.batch_size"].value = 4
    assert form.row("loader.batch_size").children[: len(before)] == before


def test_the_settings_most_changed_are_in_sight_and_a_search_finds_the_others(form):
    first = {f"{section}.{name}" for section, names in SHOWN.items() for name in names}
    assert shown_in(form) == first
    form.search.value = "latency"
    assert "chunking.latency_seconds" in shown_in(form)
    assert "loader.batch_size" not in shown_in(form)
    for words, path in (
        ("batchsize", "loader.batch_size"),
        ("fp16", "hardware.precision"),
        ("learning rate", "model.arguments"),
        ("lr", "model.arguments"),
    ):
        form.search.value = words
        assert path in shown_in(form)
        assert len(shown_in(form)) <= 3
    form.search.value = "zebra"
    assert shown_in(form) == set()
    said = form.ui.children[1]
    assert "zebra" in said.value
    assert said.layout.display != "none"
    form.search.value = ""
    assert shown_in(form) == first
    assert said.layout.display == "none"


def test_groups_fold_and_unfold_and_count_their_changes(form):
    group = next(group for group in form._groups if group._name == "chunking")
    (title,) = group.ui.children[0].children
    title.click()
    assert "chunking.shard" in shown_in(form)
    form.edit({"chunking.shard": "none"})
    assert "1 changed" in title.description
    title.click()
    assert "chunking.shard" not in shown_in(form)
    loader = next(group for group in form._groups if group._name == "loader")
    more = loader.ui.children[0].children[1]
    more.click()
    assert "loader.seed" not in form.controls
    assert "loader.pin_memory" in shown_in(form)
    more.click()
    assert "loader.pin_memory" not in shown_in(form)


SEEN_AT_FIRST = {f"{section}.{name}" for section, names in SHOWN.items() for name in names}


def test_only_what_is_seen_is_made(form):
    assert form.controls.keys() == SEEN_AT_FIRST
    form.config = form.config.replace({"loader.batch_size": 4, "chunking.shard": "none"})
    form.reset("loader.batch_size", "training.seed")
    form.show_hints({"chunking.chunk": "one chunk a patch"})
    assert form.controls.keys() == SEEN_AT_FIRST
    form.search.value = "latency deviation"
    assert form.controls.keys() == SEEN_AT_FIRST | {"chunking.latency_deviation_seconds"}
    form.edit({"training.gradient_clip_norm": 0.5})
    assert "training.gradient_clip_norm" in form.controls


def test_a_control_that_is_made_late_says_what_it_would_have_said(form):
    form.config = form.config.replace({"chunking.shard": "none", "training.max_epochs": 3})
    form.show_hints({"chunking.shard": "as large as a chunk", "chunking.chunk": "one chunk a patch"})
    form.show_problems([Problem("chunking.chunk", "does not divide the array")])
    group = next(group for group in form._groups if group._name == "chunking")
    assert "1 changed" in group._title.description
    group._title.click()
    assert form.controls["chunking.shard"].value == "none"
    assert "as large as a chunk" in note(form, "chunking.shard")
    assert "does not divide" in note(form, "chunking.chunk")
    assert "kit-changed" in form.row("chunking.shard")._dom_classes
    form._backs["chunking.shard"].click()
    assert form.changed == ("training.max_epochs",)
    form.reset()
    assert form.changed == ()


def test_rows_made_one_by_one_stand_in_the_order_of_the_fields(form):
    form.search.value = "shard"
    form.search.value = ""
    group = next(group for group in form._groups if group._name == "chunking")
    group._title.click()
    paths = [path for path in FIELDS if path.startswith("chunking.")]
    assert group.ui.children[1:] == tuple(form.row(path) for path in paths)


def test_an_edit_that_does_not_fit_waits_in_a_control_that_nobody_has_seen(form):
    form.edit({"trial.warmup_steps": 10_000, "data.validation_fraction": 7.0})
    assert "data.validation_fraction" in {problem.path for problem in form.problems}
    with pytest.raises(ConfigError, match="validation_fraction"):
        form.check()
    form.search.value = "validation fraction"
    assert form.controls["data.validation_fraction"].value == "7.0"
    assert "data.validation_fraction" in shown_in(form)


def test_an_edit_takes_sizes_as_text_and_names_a_path_that_is_no_field(form):
    form.edit({"chunking.target_shard_bytes": "3 MiB"})
    assert form.config.chunking.target_shard_bytes == 3 << 20
    for path, words in (("loader.batchsize", "mean loader.batch_size"), ("model.arguments.width", "part of a field")):
        with pytest.raises(ConfigError, match=words):
            form.edit({path: 3})
