"""Arguments and output of python -m cpdhpc study, batch, programs and scripts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import store
from ...config import UserError, suggest
from ...lazy import Late
from ..settings import add_settings, options, seconds
from ..study.cases import Batch, batches, case_time_s, expand, load_study, shown
from ..study.folder import Folder, recorded
from ..study.site import Site, load_site
from ..study.spec import Study
from ..study_data import SHAPE, Case

if TYPE_CHECKING:
    from ...world.mpi import World
    from ..study import batch, collect, discover, run_here, status, submit
    from ..study.status import Standing
else:
    batch, collect, discover, run_here, status, submit = (
        Late(f"cpdhpc.lab.study.{name}")
        for name in ("batch", "collect", "discover", "run_here", "status", "submit")
    )

RESULTS = Path("results")
HASH = 8  # hexadecimal digits in the name of a folder


def add_study(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all actions."""
    add = options(parser)
    add("study STUDY.toml", "the study's file, or its folder", Path)
    add_settings(
        parser, "replace a value of the file, for example sweep.ranks=[1,2]; may be repeated"
    )
    add("--out DIR", "folder of the study (default: results/ + NAME)", Path)


def add_site(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the profile of a cluster."""
    options(parser)("--site FILE.toml", "profile of the cluster (docs/reference/sites.md)", Path)


def add_study_and_site(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of actions that use the profile of a cluster."""
    add_study(parser)
    add_site(parser)


def study_of(arguments: argparse.Namespace) -> tuple[Study, Folder]:
    """Return the study that the arguments name, and its folder, which may not exist yet.

    Raises ConfigError if the file is wrong.
    """
    if arguments.study.is_dir():
        folder = Folder(arguments.study)
        return load_study(folder.study_toml, arguments.set), folder
    study = load_study(arguments.study, arguments.set)
    return study, Folder(arguments.out or RESULTS / study.name)


def folder_of(arguments: argparse.Namespace) -> tuple[Study, Folder]:
    """Return the study and its folder. Raises FolderError if that is missing or another study's."""
    study, folder = study_of(arguments)
    folder.check(study)
    return study, folder


add_plan = add_submit = add_resume = add_study_and_site
add_run = add_collect = add_extend = add_cancel = add_study


def run_plan(arguments: argparse.Namespace) -> None:
    """Print the plan."""
    study, folder = study_of(arguments)
    folder.check_path()
    expansion = expand(study)
    jobs = batches(study, expansion.cases)  # numbered as they are on any site
    refused = []
    if arguments.site is not None:
        site = load_site(arguments.site)
        every = [(job, site.refusal(job.nodes, job.ppn, job.has_gpus)) for job in jobs]
        jobs = [job for job, why in every if why is None]
        refused = [(case, why) for job, why in every if why is not None for case in job.cases]
    lines = [*totals(study, jobs), *refusals([*expansion.impossible, *refused])]
    several = sum(len(job.cases) for job in jobs if job.nodes > 1)
    if several and arguments.site is None:
        lines.append(
            f"{several} of {len(expansion.cases)} cases need several nodes (ppn: most ranks on a "
            "node): `study run` skips them, `study submit` submits them"
        )
    print(*plan_table(study, jobs), "", *lines, _kept(folder, expansion.cases), sep="\n")


def _kept(folder: Folder, cases: Sequence[Case]) -> str:
    """Return the folder of a study, and how many of its cases are in it."""
    if not folder.study_toml.exists():
        return f"folder: {folder.path}"
    there = {case.id for case in expand(folder.study()).cases}
    new = sum(case.id not in there for case in cases)
    more = f": study extend adds {new} case(s)" if new else ""
    old = len(cases) - new
    return f"folder: {folder.path}, whose study has {old} of these cases{more}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> Iterator[str]:
    """Yield the lines of a table; words: the column aligned to the left, of others than numbers."""
    # Rich takes 2 ms a row to find the widths, which is 15 s for a study of thousands of cases.
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, ["-" * width for width in widths], *rows):
        cells = zip(row, widths, strict=True)
        padded = (c.ljust(n) if i == words else c.rjust(n) for i, (c, n) in enumerate(cells))
        yield "  ".join(padded).rstrip()


def plan_table(study: Study, jobs: Sequence[Batch]) -> Iterator[str]:
    """Return the lines of a table: cases by batch, with the factors that vary."""
    cases = [(str(job.number), case) for job in jobs for case in job.cases]
    names = varying([case for _, case in cases])
    rows = [
        [
            batch,
            case.id,
            *(shown_factor(study, case, name) for name in names),
            f"{case_time_s(study, case):.3g}",
        ]
        for batch, case in cases
    ]
    return _table(["batch", "case", *names, "about s"], rows, 1)


def varying(cases: Sequence[Case]) -> list[str]:
    """Return the names of the shape, and of the factors that differ between cases."""
    names = dict.fromkeys(name for case in cases for name in case.factors)
    several = [name for name in names if len({case.factors.get(name) for case in cases}) > 1]
    return ["nodes", "ppn", "ranks", *several]


def shown_factor(study: Study, case: Case, name: str) -> str:
    """Return a factor with its unit, "" if the case has none."""
    value = case.all_factors.get(name)
    known = SHAPE | dict(study.factors)
    return "" if value is None else shown(value, known[name].units)


def totals(study: Study, jobs: Sequence[Batch]) -> list[str]:
    """Return lines on the time and the ranks of the whole study."""
    cases = [case for job in jobs for case in job.cases]
    hours = sum(job.rank_hours for job in jobs)
    longest_s = max((job.time_s for job in jobs), default=0.0)
    limit_s = max((job.limit_s for job in jobs), default=0.0)
    ranks = {case.ranks for case in cases}
    lines = [
        f"{study.name}: {study.scaling} scaling of {study.kind}: {len(cases)} cases in {len(jobs)} "
        f"batch(es), about {hours:.3g} rank hours (ranks x time) and {longest_s:.0f} s a batch; "
        f"the limit is {limit_s:.0f} s a batch"
    ]
    asked = Counter((job.nodes, job.ppn) for job in jobs if job.has_gpus)
    for (nodes, ppn), count in asked.items():
        each = f"{nodes} node{'s' * (nodes > 1)}, {ppn} a node"
        lines.append(f"GPUs: {count} batch(es) ask for {nodes * ppn} on {each}")
    if study.scaling != "throughput" and len(ranks) == 1:
        lines.append(f"{study.scaling} scaling, but all cases have {ranks.pop()} rank(s)")
    if cases and not any(study.of_kind.time_s(case.factors, case.ranks, 1) for case in cases):
        assumed = "run.case_time_s" if study.run.case_time_s else "a guess: set run.case_time_s"
        lines.append(f"time of a case: {assumed}")
    return lines


def refusals(impossible: Sequence[tuple[Case, str]]) -> list[str]:
    """Return a line for each reason, with the number of impossible cases."""
    reasons = Counter(reason for _, reason in impossible)
    return [f"impossible, {count} case(s): {reason}" for reason, count in reasons.items()]


def run_render(arguments: argparse.Namespace) -> None:
    """Print all scripts, each under its name, or the one of --script."""
    study, folder = study_of(arguments)
    folder.check_path()
    print(render(study, folder, load_site(arguments.site), arguments.script), end="")


def add_render(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of render."""
    add_study_and_site(parser)
    options(parser)(
        "--script NAME", "print only this script, ready for the scheduler: 2x4 or collect"
    )


def render(study: Study, folder: Folder, site: Site, only: str | None = None) -> str:
    """Return the scripts of a study as text; only: the name of one.

    Raises UserError if there is no such script, or if no batch fits the site.
    """
    todo, refused = submit.fitting(batches(study, expand(study).cases), site)
    if not todo:
        raise UserError(f"render: nothing can be submitted: {refused[0][1]}")
    texts = {path.stem: text for path, text in submit.scripts(study, folder, site, todo).items()}
    if only is None:
        return "\n".join(f"==> {name} <==\n{text}" for name, text in texts.items())
    if only not in texts:
        raise UserError(f"--script {only}: {suggest(only, texts)}")
    return texts[only]


def run_submit(arguments: argparse.Namespace) -> int:
    """Submit, and keep the site's profile for resume; return 1 if the queue is full, else 0."""
    study, folder = study_of(arguments)
    _print_impossible(study)
    return 1 if submit.submit(study, folder, load_site(arguments.site)).left else 0


def _print_impossible(study: Study) -> None:
    for line in refusals(expand(study).impossible):
        print(line)


def run_run(arguments: argparse.Namespace) -> int:
    """Measure the unfinished cases; return 0 if all are finished, 130 if interrupted, else 1."""
    study, folder = study_of(arguments)
    _print_impossible(study)
    folder.prepare(study)
    return run_here.measure(study, folder)


def run_resume(arguments: argparse.Namespace) -> int:
    """Continue a study; return 0 if all cases are finished or submitted, else 1, or 130.

    It submits if --site is given or if it was submitted before, by default to the same site.
    """
    study, folder = folder_of(arguments)
    kept = folder.path / submit.SITE  # written before the first job goes in
    if arguments.site is None and not kept.exists() and not recorded(folder):
        from ..study.run_here import measure

        return measure(study, folder)
    return 1 if submit.submit(study, folder, load_site(arguments.site or kept)).left else 0


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of status."""
    add_study(parser)
    add = options(parser)
    add("--summary", "count the cases of each shape instead of listing them")
    add("--json", "print one line of JSON")
    add(
        "--watch SECONDS",
        f"repeat after SECONDS (default {WATCH_S:g}) while cases wait or run",
        seconds,
        nargs="?",
        const=WATCH_S,
    )


WATCH_S = 30.0


def run_status(arguments: argparse.Namespace) -> None:
    """Print the states of all cases, and the ends of the logs of jobs that failed."""
    study, folder = folder_of(arguments)
    while True:
        standing = status.look(study, folder)
        if arguments.json:
            print(json.dumps(_status_json(study, folder, standing, arguments.summary)))
        else:
            print(*_status_lines(study, standing, arguments.summary), sep="\n")
        if arguments.watch is None or not standing.live:
            return
        sys.stdout.flush()
        time.sleep(arguments.watch)


def _status_lines(study: Study, standing: Standing, summary: bool) -> Iterator[str]:
    if summary:
        shapes = standing.by_shape
        names = [state for state in status.STATES if standing.counts[state]]
        rows = [
            [shape, str(sum(counts.values())), *(str(counts[name]) for name in names)]
            for shape, counts in shapes.items()
        ]
        yield from _table(["nodes x ppn", "cases", *names], rows, 0)
    else:
        width = max(len(each.case.id) for each in standing.cases)
        rows = [[str(s.batch), s.case.id, s.state, s.detail] for s in standing.cases]
        for batch, case, state, why in [["batch", "case", "state", "why"], *rows]:
            yield f"{batch:>5}  {case:<{width}}  {state:<11}  {why}".rstrip()
        yield from standing.endings
    if standing.silent:
        title = standing.site.by.TITLE
        yield f"{title}: {standing.queue}: the states are those of the files"
    counts = ", ".join(f"{n} {name}" for name in status.STATES if (n := standing.counts[name]))
    yield f"{study.name}: {len(standing.cases)} cases: {counts}"


def _status_json(study: Study, folder: Folder, standing: Standing, summary: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "study": study.name,
        "folder": str(folder.path),
        standing.site.scheduler: standing.queue,
        "states": {state: standing.counts[state] for state in status.STATES},
    }
    if summary:
        return found | {"shapes": {k: dict(v) for k, v in standing.by_shape.items()}}
    return found | {
        "cases": [
            {"case": each.case.id, "batch": each.batch, "state": each.state, "why": each.detail}
            for each in standing.cases
        ]
    }


def run_cancel(arguments: argparse.Namespace) -> None:
    """Remove the study's own jobs from the queue, and print their numbers."""
    submit.cancel(folder_of(arguments)[1])


def run_extend(arguments: argparse.Namespace) -> None:
    """Add cases to the study of a folder; finished ones stay."""
    submit.extend(*study_of(arguments))


def run_collect(arguments: argparse.Namespace) -> None:
    """Write the study file. Raises FolderError if no case is finished."""
    collect.collect(*folder_of(arguments))


def add_site_action(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of site."""
    add = options(parser)
    add("what discover", "ask sinfo, scontrol and this machine", choices=["discover"])
    add("--out FILE.toml", "file of the profile", Path, default=Path("site.toml"))
    add("--partition NAME", "partition of Slurm (default: Slurm's own)")


def run_site_action(arguments: argparse.Namespace) -> None:
    """Write the profile and print it. Raises UserError if the file exists."""
    path: Path = arguments.out
    if path.exists():
        raise UserError(f"--out {path}: exists: name another file")
    text = discover.discover(arguments.partition)
    store.put(path, text)
    print(f"{path}:\n{text}", end="")


def add_freeze(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of freeze."""
    add_study(parser)
    options(parser)(
        "--by-hash",
        "append the study's hash to the folder's name, so that other settings get another folder",
    )


def run_freeze(arguments: argparse.Namespace) -> None:
    """Create the folder, or check that it is this study's, and print its path."""
    study, folder = study_of(arguments)
    if arguments.by_hash:
        folder = Folder(folder.path.with_name(f"{folder.path.name}-{study.hash[:HASH]}"))
    folder.prepare(study)
    print(folder.path)


def _add_batch(parser: argparse.ArgumentParser) -> Callable[..., None]:
    add = options(parser)
    add("folder FOLDER", "folder of the study", Path)
    add("number NUMBER", "number of the batch, from 0", int)
    return add


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of batch."""
    add = _add_batch(parser)
    add("--nodes N", "nodes of the job (default: the batch's)", int)
    add("--ppn N", "ranks per node (default: the batch's)", int)


def run_batch(arguments: argparse.Namespace, world: World) -> int:
    """Measure the unfinished cases of a study's batch. Collective."""
    shape = arguments.nodes, arguments.ppn
    return batch.measure_batch(world, arguments.folder, arguments.number, *shape)


def add_programs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of programs."""
    _add_batch(parser)(
        "--launch WORDS",
        "words of a shell that start a program on $ranks ranks, $ppn on each of $nodes nodes "
        "(default: mpirun on this machine)",
    )


def run_programs(arguments: argparse.Namespace) -> int:
    """Measure the unfinished cases of a batch of programs, from this one process."""
    launch = run_here.launch_of(arguments.launch)
    return batch.measure_batch(batch.Alone(), arguments.folder, arguments.number, launch=launch)


def add_scripts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of scripts."""
    add_site(parser)
    options(parser)("--out DIR", "folder of the scripts", Path, required=True)


def run_scripts(arguments: argparse.Namespace) -> None:
    """Write the scripts and print their paths.

    Raises UserError if the profile cannot be used, or a file cannot be written.
    """
    from ..study.site import scripts

    for name, text in scripts(load_site(arguments.site)).items():
        path = arguments.out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be created: {error.strerror}") from None
        store.put(path, text)
        print(path)
