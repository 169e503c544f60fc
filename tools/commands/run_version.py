"""Compile a rung of the ladder or a reference, run it, check it, measure it, and log what came of it.

flashladder run 02                        on the GPU of this machine, or on the emulator
flashladder run 02 --config block_m=128 num_warps=8 --seqlen 1024
flashladder run triton --causal           a reference, on the GPU or on the CPU
flashladder run --list                    the ladders and the references, a line each
flashladder run --list 26                 what a rung is, takes, and can be configured with
flashladder run my_idea --watch           beside the editor: a trial at every save
flashladder run my_idea --against 24      the verdict, which goes to the rung's log of what was tried
flashladder run my_idea --against 24 --drop                 the same, which goes to the log of rung 24
flashladder run 37 --against 37 --config num_stages=3       a configuration beside the default one
flashladder run 51 --mask "k <= q && q - k < far" --tensor far=64     checks a mask: which rows see no key?
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.console import EXIT_ERROR, Parser, UsageError, aside, console, warn
from flashladder.common.errors import ConfigError
from flashladder.common.report import display, listing
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.problem.config import Value
    from flashladder.common.studies.single import Outcome


def parser() -> Parser:
    """The options; what needs torch is imported later, so that a wrong one is reported at once."""
    made = Parser(__doc__)
    made.add_argument("version", nargs="?", help="a rung: 02, swizzling, or LADDER/03; or a reference: triton")
    made.add_argument("--list", action="store_true", help="what there is: all, or of a ladder or rung")
    options.add_config(made)
    options.add_device(made)
    options.add_problem(made)
    options.add_no_lse(made)
    options.add_timing(made)
    made.add_argument("--untuned", action="store_true", help="the rung's default, not what was tuned for the GPU")
    made.add_argument("--no-measure", action="store_true", help="run once and check, no timing")
    made.add_argument("--verbose", action="store_true", help="all that the emulator counts, line by line")
    made.add_argument("--no-log", action="store_true", help="write no row to results/runs.csv")
    options.add_json(made)
    options.add_expressions(made)
    idea = made.add_argument_group("trials of an idea")
    idea.add_argument("--against", metavar="RUNG", help="compare with it, and keep the verdict with the rung")
    idea.add_argument("--watch", action="store_true", help="a trial at every save, against the rung's parent")
    idea.add_argument("--drop", action="store_true", help="the idea ends here: the verdict is kept with that rung")
    idea.add_argument("--note", default="", metavar="TEXT", help="what was tried, for the log's table")
    return made


def main(arguments: argparse.Namespace) -> int:
    if arguments.json and (arguments.list or arguments.watch or arguments.against):
        raise ConfigError("--json is for a run: leave out --list, --watch and --against")
    if arguments.list:
        return _list(arguments.version)
    if arguments.version is None:
        raise UsageError
    if arguments.drop and not arguments.against:
        raise ConfigError("--drop keeps a verdict with the rung compared with: add --against RUNG")
    kernel = catalog.find_implementation(arguments.version)
    values = options.config_values(arguments.config)
    has_expressions = arguments.mask is not None or arguments.score is not None or bool(arguments.tensor)
    if has_expressions or not (arguments.watch or arguments.against):
        return _run(kernel, values, arguments, has_expressions)
    if isinstance(kernel, catalog.Reference):
        raise ConfigError(f"{kernel.name} is a reference: --watch and --against are for rungs, such as 24")
    return _try(kernel, values, arguments)


def _list(name: str | None) -> int:
    """All ladders and the references, or what is called so; a ladder that cannot be read hides no other."""
    if name is not None and name not in catalog.ladders():
        console.print(listing.details(catalog.find_implementation(name)))
        return 0
    code = 0
    for ladder in [name] if name else catalog.ladders():
        try:
            console.print(listing.ladder(ladder))
        except ConfigError as error:
            warn(f"the ladder {ladder} cannot be shown: {error}")
            code = EXIT_ERROR
    if not name:
        console.print(listing.references())
        console.print("`flashladder run --list 26` tells more of one; `flashladder explain 26`, what limits it.")
    return code


def _run(
    kernel: catalog.Version | catalog.Reference,
    values: dict[str, Value],
    arguments: argparse.Namespace,
    has_expressions: bool,
) -> int:
    """Runs, shows and logs it. Raises VerificationError where its output was wrong."""
    from flashladder.common.studies import single

    outcome = (_checked if has_expressions else _outcome)(kernel, values, arguments)
    for remark in outcome.remarks():
        warn(remark)
    for part in display.outcome(kernel, outcome, arguments.verbose):
        console.print(part)
    if not (arguments.no_log or has_expressions):
        aside(f"logged to {single.log(kernel, outcome)}")
    if arguments.json:
        from flashladder.common.report import answer

        name = kernel.address if isinstance(kernel, catalog.Version) else kernel.name
        arguments.json.add([answer.of_outcome(name, outcome)], answer.faults_of(name, outcome.check))
        return 0 if outcome.check.passed else EXIT_ERROR
    outcome.check.require(f"{kernel.name} with {outcome.kernel.config.name}")
    return 0


def _checked(
    kernel: catalog.Version | catalog.Reference, values: dict[str, Value], arguments: argparse.Namespace
) -> Outcome:
    """A mask and a score on the emulator, with the rows that see no key."""
    if isinstance(kernel, catalog.Reference) or arguments.watch or arguments.against:
        raise ConfigError("--mask, --score and --tensor are for a run of a rung, without --watch and --against")
    if arguments.device not in ("auto", "emulator"):
        raise ConfigError(f"expressions are checked on the emulator: leave out --device {arguments.device}")
    from flashladder.common.api import mask_check
    from flashladder.common.compiler import build_one
    from flashladder.common.console import progress
    from flashladder.common.expression import given
    from flashladder.common.runtime import target
    from flashladder.common.studies import single

    place = target.resolve("emulator", arguments.gpu)
    plain = options.problem(arguments, kernel.operation, "small")
    tensors = given.tensors(arguments.tensor, plain.seed)
    problem, asked = mask_check.of_problem(plain, arguments.mask, arguments.score, tensors)
    artifact = build_one(kernel, kernel.config_for(problem, place.gpu, **values), place.arch)
    with progress("emulated CTAs") as update:
        found = mask_check.checked(artifact, problem, asked, update)
    return single.Outcome(
        artifact, problem, found.check, {}, {"rows": str(found)}, found.report, device=place.title,
        unseeing=found.num_unseeing,
    )  # fmt: skip


def _outcome(
    kernel: catalog.Version | catalog.Reference, values: dict[str, Value], arguments: argparse.Namespace
) -> Outcome:
    from flashladder.common.catalog import winners
    from flashladder.common.measure.entrants import Entrant, ReferenceEntrant
    from flashladder.common.measure.timing import TimingSettings
    from flashladder.common.runtime import target
    from flashladder.common.studies import single

    ask = partial(options.problem, arguments, kernel.operation, options=options.needed(kernel))
    settings = None if arguments.no_measure else TimingSettings(arguments.mode, arguments.rounds)
    if isinstance(kernel, catalog.Reference):
        return single.run_reference(ReferenceEntrant(kernel.name, kernel, values), ask, arguments.device, settings)
    place = target.resolve(arguments.device, arguments.gpu)
    tuned_for = None if values or arguments.untuned else winners.source(place.gpu, kernel.home)
    return single.run(Entrant(kernel.address, kernel, values, tuned_for), ask, place, settings)


def _try(version: catalog.Version, values: dict[str, Value], arguments: argparse.Namespace) -> int:
    """A trial beside another rung: one, or one at every save."""
    from flashladder.common.report import sass as show
    from flashladder.common.runtime import target
    from flashladder.common.workshop import trial, tried, verdict, watch
    from flashladder.tuner import pair

    place = target.resolve(arguments.device, arguments.gpu)

    def idea(rung: catalog.Version) -> trial.Idea:
        problem = options.problem(arguments, rung.operation, options=options.needed(rung))
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
    console.print(f"{version.address}: {verdict.in_words(held)}", style="bold", soft_wrap=True)
    if untried := verdict.untried(first):
        console.print(untried, style="dim", soft_wrap=True)
    if not arguments.no_log:
        aside(f"logged to {tried.record(held, arguments.note, arguments.drop)}")
    return 0
