"""Figures as CSV and as Prometheus' text, read back by the csv module and by Prometheus' own parser."""

from __future__ import annotations

import csv
import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

import jaxmem_callbacks as jm
from jaxmem_callbacks.analysis.figures import Spread, Window
from jaxmem_callbacks.records.presets import MonitorSettings
from jaxmem_callbacks.writers.metric_files import prometheus_text
from tests.sample_records import EVENT, WINDOW

GIB, MIB = 2**30, 2**20


def table(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def values(text: str) -> dict[str, float]:
    """Name, with its labels, -> value."""
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {each.name + "".join(f"[{label}]" for label in each.labels.values()): each.value for each in samples}


def test_rows_of_csv_are_the_figures_below_one_head(tmp_path):
    path = tmp_path / "memory.csv"
    for _ in range(2):
        writer = jm.CsvWriter(path)
        writer.write(WINDOW)
        writer.write(EVENT)
        writer.close()
    rows = table(path)
    assert len(rows) == 2 * len(WINDOW.scalars())
    assert {row["tag"]: float(row["value"]) for row in rows} == WINDOW.scalars()
    assert {(int(row["step"]), float(row["time_s"])) for row in rows} == {(WINDOW.step, WINDOW.time_s)}


def test_names_that_are_no_plain_text_stay_in_their_cell(tmp_path):
    odd = Window(step=1, time_s=0.0, spreads={'train/a,"b"\n': Spread(low=1.0, mean=1.0, high=1.0, count=1)})
    jm.CsvWriter(tmp_path / "a.csv").write(odd)
    (row,) = table(tmp_path / "a.csv")
    assert row["tag"] == 'train/a,"b"\n'


def test_prometheus_parses_the_file_and_has_bytes(tmp_path):
    path = tmp_path / "jaxmem.prom"
    writer = jm.PrometheusWriter(path)
    writer.write(EVENT)
    writer.write(WINDOW)
    found = values(path.read_text())
    assert found["jaxmem_memory_in_use_bytes"] == 2 * GIB
    assert found["jaxmem_memory_in_use_bytes_max"] == 4 * GIB
    assert found["jaxmem_train_loss"] == 0.5
    assert found["jaxmem_step"] == WINDOW.step
    assert found["jaxmem_events_total[near_oom]"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["jaxmem.prom"]


def test_prometheus_takes_values_that_are_no_number_and_names_that_meet():
    scalars = {
        "train/a b": math.nan,
        "train/a_b": 1.0,
        "train/up": math.inf,
        "memory/program_gib/f_gib": 1.0,
        "memory/program_mib/g": 1.0,
    }
    found = values(prometheus_text(3, scalars, {}))
    assert math.isnan(found["jaxmem_train_a_b"])
    assert found["jaxmem_train_up"] == math.inf
    assert found["jaxmem_memory_program_bytes_f_gib"] == GIB, "the unit is the tag's, whatever the program's name"
    assert found["jaxmem_memory_program_bytes_g"] == MIB


@pytest.mark.core
def test_a_run_writes_both(tmp_path):
    writers = [jm.CsvWriter(tmp_path / "a.csv"), jm.PrometheusWriter(tmp_path / "a.prom")]
    with jm.MemoryMonitor(MonitorSettings(on_error="raise"), writer=writers) as monitor:
        monitor(0)
    tags = {row["tag"] for row in table(tmp_path / "a.csv")}
    assert "memory/host_mib" in tags
    assert values((tmp_path / "a.prom").read_text())["jaxmem_memory_host_bytes"] > 0


def test_a_folder_that_is_not_there_switches_one_off_alone(tmp_path, capfd):
    seen = []
    writers = [jm.CsvWriter(tmp_path / "none" / "a.csv"), lambda step, scalars: seen.append(step)]
    with jm.MemoryMonitor(writer=writers) as monitor:
        monitor(0)
    assert seen
    own = [line for line in capfd.readouterr().err.splitlines() if "is switched off" in line]
    assert len(own) == 1
    assert "CsvWriter" in own[0]


@pytest.mark.parametrize("kind", [jm.CsvWriter, jm.PrometheusWriter])
def test_what_is_no_path_is_refused(kind):
    with pytest.raises(TypeError, match=kind.__name__):
        kind(3)
