"""Laws of scaling: shares that are known are found, intervals as another fit gives them."""

from dataclasses import replace
from math import isnan
from pathlib import Path

import h5py
import numpy as np
import pytest
from synthetic_study import write_study

from cpdhpc.lab.report.fits import LAWS, LEVELS, isoefficiency, serial_share, work_for
from cpdhpc.lab.report.points import seed_groups
from cpdhpc.lab.study.report import study_report
from cpdhpc.lab.study_data.study_file import load_study_file

SHARE_COLUMNS = "serial share %", "95 % CI", "greatest misfit %"
RATIOS = np.array([1.0, 2, 4, 8, 16, 64])


@pytest.mark.parametrize("scaling", LAWS)
def test_a_share_is_found_with_its_interval(scaling: str) -> None:
    """Exact speed-ups give it back; of noisy ones, SciPy's fit of y = s x says the same."""
    from scipy.optimize import curve_fit
    from scipy.stats import t

    law, share = LAWS[scaling], 0.07
    exact = law.speedup(share, RATIOS)
    found = serial_share(law, RATIOS, exact, 0.95)
    assert found == pytest.approx((share,) * 3, rel=1e-12)
    noisy = exact * np.random.default_rng(1).lognormal(0, 0.05, len(exact))
    r, s = RATIOS[1:], noisy[1:]
    if scaling == "strong":
        x, y, sigma = 1 - 1 / r, 1 / s - 1 / r, 1 / s
    else:
        x, y, sigma = r - 1, r - s, s
    value, covariance = curve_fit(lambda x, a: a * x, x, y, p0=[0.1], sigma=sigma)
    reach = t.ppf(0.975, len(r) - 1) * covariance[0, 0] ** 0.5
    expected = (value[0], value[0] - reach, value[0] + reach)
    # curve_fit stops at a relative step of 1e-8 and differentiates by differences.
    assert serial_share(law, RATIOS, noisy, 0.95) == pytest.approx(expected, rel=1e-6)


def test_a_share_that_cannot_be_said_is_unknown() -> None:
    law = LAWS["strong"]
    for ratios, speedups in (
        ([1.0, 2.0], [1.0, 1.5]),
        ([1.0, 2.0, 4.0], [1.0, np.nan, 2.0]),
        ([1.0, 2.0, 4.0], [1.0, 0.9, 0.8]),
        ([1.0, 2.0, 4.0], [0.0, 0.0, 0.0]),
    ):
        assert isnan(serial_share(law, np.array(ratios), np.array(speedups), 0.95).value)


@pytest.mark.parametrize(
    ("scaling", "speedups", "fits"),
    [
        ("weak", [1.0, 1.9, 3.8, 7.4], True),
        ("weak", [1.0, 1.1, 0.4, 0.3], False),  # a share above 100 %, missed by far
        ("weak", [1.0, 0.99, 0.97, 1.01], True),  # all serial, as far as can be said
        ("weak", [1.0, 2.2, 4.6, 9.4], False),  # below 0 %
        ("weak", [1.0, 1.99, 4.02, 8.01], True),  # none, as far as can be said
        ("strong", [1.0, 1.8, 1.0, 0.5], False),
    ],
)
def test_a_law_that_does_not_fit_is_said_so(
    tmp_path: Path, scaling: str, speedups: list[float], fits: bool
) -> None:
    """No share, no interval, no line of it; the misfit is told."""
    ranks = (2, 4, 8, 16)
    path = tmp_path / "t.h5"
    write_study(path, "allreduce", scaling, ranks=ranks, sizes=[4096], algorithms=(), noise=0.0)
    with h5py.File(path, "r+") as file:
        assert file["samples/ranks"][:].tolist() == [*ranks]
        work = np.array(ranks) / 2 if scaling == "weak" else 1.0
        file["samples/time_s"][...] = (work / np.array(speedups))[:, None]
        file["summary/median_s"][...] = work / np.array(speedups)
        for name in ("speedup", "speedup_low", "speedup_high"):
            file[f"summary/{name}"][...] = speedups
    report = study_report(load_study_file(path))
    (table,) = (each for each in report.tables if each.title == LAWS[scaling].name)
    (row,) = table.rows
    share, interval, misfit = (row[table.headings.index(name)] for name in SHARE_COLUMNS)
    assert (share == "does not fit", interval == "-") == (not fits, not fits)
    assert float(misfit) >= 0
    (chart,) = (each for each in report.charts if each.name == "speedup")
    lines = [each for panel in chart.panels for each in panel.series if each.join == "fit"]
    assert len(lines) == fits


def test_work_between_two_that_were_measured() -> None:
    works, efficiencies = [1.0, 4.0, 16.0], [0.2, 0.6, 0.8]
    assert work_for(0.4, works, efficiencies) == pytest.approx(2.0)
    assert work_for(0.6, works, efficiencies) == 4.0
    assert isnan(work_for(0.9, works, efficiencies)) and isnan(work_for(0.1, works, efficiencies))
    assert work_for(0.4, works, [0.2, float("nan"), 0.6]) == pytest.approx(4.0)


@pytest.mark.filterwarnings("ignore:invalid value")  # of times of 0 that are replaced
def test_isoefficiency_of_a_model(tmp_path: Path) -> None:
    """Time W / p + log2 p: p log2 p / (1 / E - 1) has the efficiency E, whatever p is."""
    path = write_study(
        tmp_path / "i.h5",
        ranks=(1, 2, 4, 8),
        sizes=[4 * 2**i for i in range(9)],
        algorithms=(),
        noise=0.0,
    )
    with h5py.File(path, "r+") as file:
        p, size = file["samples/ranks"][:], file["samples/size_bytes"][:]
        work = size / 4
        time = work / p + np.log2(p)
        file["samples/time_s"][...] = time[:, None]
        index = {(a, b): i for i, (a, b) in enumerate(zip(p, size, strict=True))}
        base = np.array([index[1, each] for each in size])
        file["summary/base_point"][...] = base
        file["summary/median_s"][...] = time
        file["summary/speedup"][...] = time[base] / time
    study = load_study_file(path)
    (section,) = isoefficiency(study, seed_groups(study))
    assert section.tables[0].headings[0] == "ranks", "one method has no name"
    rows = {int(row[0]): row[1:] for row in section.tables[0].rows}
    assert set(rows) == {2, 4, 8}
    for ranks, cells in rows.items():
        for level, cell in zip(LEVELS, cells, strict=True):
            exact = 4 * ranks * np.log2(ranks) / (1 / level - 1)
            # Over u = ln W the model's E is logistic, |E''| <= 0.097, and sizes are ln 2 apart: a
            # straight line is off by 0.0058 at most, u by that over E (1 - E): at 0.9 by 0.065.
            if cell != "-":
                assert float(cell.split()[0].replace(",", "")) == pytest.approx(exact, rel=0.07)
    assert rows[8][0] != "-" and rows[8][1] != "-"


def test_laws_and_energy_are_shown_where_they_are_known(tmp_path: Path) -> None:
    """Two series of three points; energy in a column, in joules, as the file has it."""
    path = write_study(tmp_path / "t.h5", "train", ranks=(1, 2, 4), seeds=(0,))
    study = load_study_file(path)
    points = [replace(p, outcomes={**p.outcomes, "energy_j": p.index + 1.0}) for p in study.points]
    report = study_report(replace(study, points=tuple(points)))
    tables = {table.title: table for table in report.tables}
    assert len(tables["Amdahl's law"].rows) == 9
    column = tables["Scaling"].headings.index("energy J")
    shown = {float(row[column]) for row in tables["Scaling"].rows}
    assert shown == {float(i + 1) for i in range(len(points))}
    charts = {chart.name: chart for chart in report.charts}
    assert charts["energy"].panels[0].y.label == "energy of a repeat / J"
    fitted = [s for s in charts["speedup"].panels[0].series if s.join == "fit"]
    assert len(fitted) == 9 and all(s.y[0] == pytest.approx(1.0) for s in fitted)
