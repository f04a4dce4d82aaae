import json

import memory_grid
import pytest

from kit.machine.gpus import read_gpus

HAS_GPU = bool(read_gpus().gpus)


def row(case, predicted, measured, ran_out=False, **more):
    reserved = {"reserved_bytes": 2 * predicted, "outside_bytes": [10, 20], "verdict": "fits"}
    line = {"case": case, "device": "cuda", "model": "GPT", "settings": {}}
    line["predicted"] = {"allocated_bytes": predicted, **reserved}
    if measured is not None:
        line["measured"] = {"allocated_bytes": measured, "reserved_bytes": 2 * measured, "outside_bytes": 15}
    return line | {"ran_out": ran_out, "ran_out_replayed": measured is not None and measured > predicted, **more}


def test_the_summary_tells_the_error_of_the_prediction_from_that_of_the_allocator():
    rows = [
        row("one", 103, 100, replayed={"allocated_bytes": 100, "reserved_bytes": 198}),
        row("two", 99, 100, replayed={"allocated_bytes": 101, "reserved_bytes": 200}),
        row("three", 100, 100),
    ]
    told = memory_grid.summary(rows)
    assert told["allocated"] == {"median": pytest.approx(0.01), "worst": pytest.approx(0.03), "count": 3}
    assert told["allocator alone, allocated"]["worst"] == pytest.approx(0.01)
    assert told["allocator alone, reserved"]["worst"] == pytest.approx(-0.01)
    assert told["would have run out under the estimate"] == pytest.approx(1 / 3)
    assert told["did run out under the estimate"] is None
    assert told["outside the range foreseen for the context"] == 0


def test_a_case_that_was_said_to_fit_and_ran_out_is_counted_apart():
    told = memory_grid.summary([row("one", 100, 100), row("two", 100, None, ran_out=True)])
    assert (told["cases"], told["measured"], told["said fits and ran out"]) == (2, 1, 1)


def test_a_grid_goes_on_where_it_was_interrupted(tmp_path):
    path = tmp_path / "grid.jsonl"
    quick = memory_grid.parser().parse_args(["--device", "cpu", "--quick", "--output", str(path)])
    first, second, *rest = memory_grid.todo(quick, {})
    lines = [
        {**row(first.name, 1, 1), "device": "cpu"},
        {**row(second.name, 1, None), "device": "cpu", "error": "killed"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"case": "torn')
    left = memory_grid.todo(quick, memory_grid.read_rows(path))
    assert left == [second, *rest]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_grid_covers_models_precisions_checkpointing_and_optimizers(device):
    grid = memory_grid.cases(device)
    assert len({case.name for case in grid}) == len(grid)
    assert {case.model for case in grid} == set(memory_grid.MODELS[device])
    seen = {path: {case.settings.get(path) for case in grid} for case in grid for path in case.settings}
    assert seen["hardware.precision"] == set(memory_grid.PRECISIONS[device])
    assert seen["levers.gradient_checkpointing"] == {None, True}
    assert seen["levers.optimizer"] == {None, *memory_grid.OPTIMIZERS[1:]}
    assert all(case.config.loader.batch_size == case.parts.batch_size for case in grid)
    quick = memory_grid.cases(device, quick=True)
    assert {case.name for case in quick} < {case.name for case in grid}


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="no NVIDIA GPU.* --device cpu"):
        memory_grid.main(["--output", str(tmp_path / "grid.jsonl")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_on_the_cpu_predictions_are_compared_with_the_events_of_its_allocator(tmp_path, capsys):
    path = tmp_path / "grid.jsonl"
    command = ["--device", "cpu", "--quick", "--only", "GPT precision=32-true", "--output", str(path)]
    assert memory_grid.main(command) == 0
    (line,) = memory_grid.read_rows(path).values()
    assert line["predicted"]["allocated_bytes"] == pytest.approx(line["measured"]["allocated_bytes"], rel=0.01)
    assert sum(line["predicted"]["breakdown"].values()) == line["predicted"]["allocated_bytes"]
    assert "allocated: median error 0.0" in capsys.readouterr().out
    written = path.read_text()
    assert memory_grid.main(command) == 0
    assert path.read_text() == written


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_median_error_is_within_three_percent_and_none_beyond_ten(tmp_path):
    path = tmp_path / "grid.jsonl"
    assert memory_grid.main(["--quick", "--output", str(path)]) == 0
    told = memory_grid.summary(list(memory_grid.read_rows(path).values()))
    assert told["allocated"]["median"] <= 0.03
    assert abs(told["allocated"]["worst"]) <= 0.10
    assert told["said fits and ran out"] == 0
