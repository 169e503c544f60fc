"""Compile a rung of the ladder or a reference, run it, check it, measure it, and log what came of it.

flashladder run 02                        on the GPU of this machine, or on the emulator
flashladder run 02 --config block_m=128 num_warps=8 --seqlen 1024
flashladder run triton --causal           a reference, on the GPU or on the CPU
flashladder run --list                    the ladders and the references
flashladder run my_idea --watch           beside the editor: a trial at every save
flashladder run my_idea --against 24      the verdict, which goes to the rung's log of what was tried
flashladder run my_idea --against 24 --drop                 the same, which goes to the log of rung 24
flashladder run 37 --against 37 --config num_stages=3       a configuration beside the default one
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.console import EXIT_ERROR, Parser, UsageError, console, progress, warn
from flashladder.common.errors import ConfigError
from flashladder.common.report import display
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.problem.config import Value
    from flashladder.common.studies.single import Outcome


def parser() -> Parser:
    """The options; what needs torch is imported later, so that a wrong one is reported at once."""
    made = Parser(__doc__)
    made.add_argument("version", nargs="?", help="a rung: 02, swizzling, or backward/03; or a reference: triton")
    made.add_argument("--list", action="store_true", help="show the ladders and the references")
    options.add_config(made)
    options.add_device(made)
    options.add_problem(made)
    options.add_no_lse(made)
    options.add_timing(made)
    made.add_argument("--untuned", action="store_true", help="the rung's default, not what was tuned for the GPU")
    made.add_argument("--no-measure", action="store_true", help="run once and check, no timing")
    made.add_argument("--verbose", action="store_true", help="all that the emulator counts, line by line")
    made.add_argument("--no-log", action="store_true", help="write no row to results/runs.csv")
    idea = made.add_argument_group("trials of an idea")
    idea.add_argument("--against", metavar="RUNG", help="compare with it, and keep the verdict with the rung")
    idea.add_argument("--watch", action="store_true", help="a trial at every save, against the rung's parent")
    idea.add_argument("--drop", action="store_true", help="the idea ends here: the verdict is kept with that rung")
    idea.add_argument("--note", default="", metavar="TEXT", help="what was tried, for the log's table")
    return made


def main(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return _list()
    if arguments.version is None:
        raise UsageError
    if arguments.drop and not arguments.against:
        raise ConfigError("--drop keeps a verdict with the rung compared with: add --against RUNG")
    kernel = catalog.find_implementation(arguments.version)
    values = options.config_values(arguments.config)
    if isinstance(kernel, catalog.Reference):
        if arguments.watch or arguments.against:
            raise ConfigError(f"{kernel.name} is a reference: --watch and --against are for rungs, such as 24")
        return _run_reference(kernel, values, arguments)
    if arguments.watch or arguments.against:
        return _try(kernel, values, arguments)
    return _run_rung(kernel, values, arguments)


def _list() -> int:
    """All ladders and the references; a ladder that cannot be read hides no other."""
    code = 0
    for ladder in catalog.ladders():
        try:
            console.print(display.ladder(ladder))
        except ConfigError as error:
            warn(f"the ladder {ladder or 'of this repository'} cannot be shown: {error}")
            code = EXIT_ERROR
    console.print(display.references())
    return code


def _run_rung(version: catalog.Version, values: dict[str, Value], arguments: argparse.Namespace) -> int:
    from flashladder.common.compiler import build_one
    from flashladder.common.measure.entrants import Entrant
    from flashladder.common.runtime import target
    from flashladder.common.studies import single

    place = target.resolve(arguments.device, arguments.gpu)
    problem = options.problem(arguments, version.operation, "usual" if place.on_gpu else "small")
    tuned_for = None if values or arguments.untuned else place.gpu.name
    entrant = Entrant(version.address, version, values, tuned_for)
    artifact = build_one(version, entrant.config(problem, place.gpu), place.arch)
    place.check(artifact)
    facts = {}
    if place.on_gpu:
        outcome = single.measure(artifact, problem, _settings(arguments))
    else:
        with progress("emulated CTAs") as update:
            outcome = single.emulate(artifact, problem, update)
        if outcome.report and not arguments.no_measure:
            from flashladder.common.predict import outlook

            ask = partial(options.problem, arguments, version.operation)
            facts = {"predicted": outlook.in_words(entrant, ask, place.gpu, outcome.report)}
    console.print(display.summary(version, artifact, problem, place.title, outcome.check, facts))
    _show(version, outcome, place.on_gpu, arguments)
    if entrant.winner(problem):
        said = f"configured as `flashladder search` tuned it for {tuned_for}; --untuned: the rung's default"
        console.print(said, style="dim", soft_wrap=True)
    outcome.check.require(f"{version.name} with {artifact.config.name}")
    return 0


def _try(version: catalog.Version, values: dict[str, Value], arguments: argparse.Namespace) -> int:
    """A trial beside another rung: one, or one at every save."""
    from flashladder.common.report import sass as show
    from flashladder.common.runtime import target
    from flashladder.common.workshop import trial, tried, verdict, watch
    from flashladder.tuner import pair

    place = target.resolve(arguments.device, arguments.gpu)

    def idea(rung: catalog.Version) -> trial.Idea:
        problem = options.problem(arguments, rung.operation)
        return trial.compare(rung, trial.opponent(rung, arguments.against), problem, place, values)

    first = idea(version)  # what cannot be compared is no matter of a save
    with pair.timing(place, first.problem, arguments.mode, arguments.rounds) as timer:
        if arguments.watch:
            with suppress(KeyboardInterrupt):
                watch.watch(version.name, idea, timer)
            return 0
        held = trial.hold(first, timer)
    console.print(show.resources(held.parent, held.ours))
    for note in held.timing.notes if held.timing else ():
        warn(note)
    console.print(f"{version.address}: {verdict.in_words(held)}", style="bold", markup=False, soft_wrap=True)
    if untried := verdict.untried(first):
        console.print(untried, style="dim", soft_wrap=True)
    if not arguments.no_log:
        console.print(f"[dim]logged to {tried.record(held, arguments.note, arguments.drop)}", soft_wrap=True)
    return 0


def _run_reference(reference: catalog.Reference, values: dict[str, Value], arguments: argparse.Namespace) -> int:
    import torch

    from flashladder.common import host
    from flashladder.common.measure import references
    from flashladder.common.measure.entrants import ReferenceEntrant
    from flashladder.common.studies import single

    device = references.device_for(reference, arguments.device)
    on_gpu = device == "cuda"
    problem = options.problem(arguments, reference.operation, "usual" if on_gpu else "small")
    kernel = ReferenceEntrant(reference.name, reference, values).configured(problem)
    outcome = single.measure(kernel, problem, _settings(arguments), device)
    title = torch.cuda.get_device_name() if on_gpu else host.title()
    console.print(display.reference_summary(kernel, problem, title, outcome.check, outcome.facts))
    _show(reference, outcome, on_gpu, arguments)
    outcome.check.require(f"{reference.name} with {kernel.config.name}")
    return 0


def _settings(arguments: argparse.Namespace) -> TimingSettings | None:
    from flashladder.common.measure.timing import TimingSettings

    return None if arguments.no_measure else TimingSettings(arguments.mode, arguments.rounds)


def _show(kernel: catalog.Implementation, outcome: Outcome, on_gpu: bool, arguments: argparse.Namespace) -> None:
    """What was measured or counted, and what a reader must know of it; and logs it."""
    from flashladder.common.studies import single

    for absent, reason in outcome.absent.items():
        warn(f"no ratio to {absent}: {reason}")
    if outcome.measurement:
        for note in outcome.measurement.notes():
            warn(note)
        console.print(display.times(outcome.measurement, outcome.problem, outcome.titles))
    if outcome.report:
        console.print(display.counters(outcome.report, outcome.problem, arguments.verbose))
        if traffic := display.traffic(outcome.report, arguments.verbose):
            console.print(traffic)
    if not arguments.no_log:
        console.print(f"[dim]logged to {single.log(kernel, on_gpu, outcome)}")
