"""Why is a rung slow? What limits it, the source lines, what would be left without it, and whose idea is against it.

flashladder explain 02                 on a GPU with ncu as it was sampled, otherwise as it is predicted
flashladder explain 02 --config block_m=128 num_warps=8 --gpu a100
flashladder explain 26 27              what the second has over the first, predicted
flashladder explain                    every rung of the ladder, a line each, predicted
flashladder explain 52 --mask "k <= q" what a mask by an expression costs in the loop, predicted
flashladder explain 09 --pages folder  from the pages that `flashladder profile` kept
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.console import Parser, console, progress, warn
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.predict.limits import Diagnosis


def parser() -> Parser:
    made = Parser(__doc__)
    made.add_argument("versions", nargs="*", metavar="RUNG", help="02, or swizzling; without one: the whole ladder")
    options.add_config(made)
    made.add_argument("--gpu", metavar="NAME", help="predict for this GPU (default: the one here, or h100)")
    made.add_argument("--predict", action="store_true", help="predict, though there is a GPU")
    options.add_problem(made)
    options.add_expressions(made, "compiled in; what they cost is predicted")
    options.add_json(made)
    made.add_argument("--pages", type=Path, metavar="FOLDER", help="where ncu's pages are kept, and found again")
    return made


def main(arguments: argparse.Namespace) -> int:
    from flashladder.common.report import diagnosis, difference

    versions = catalog.select(arguments.versions)
    if len(versions) == 1:
        found = _diagnose(versions[0], arguments)
        _tell(arguments, [found])
        for paragraph in diagnosis.report(found):
            console.print(paragraph, soft_wrap=False)
        _name_configurations([found], arguments)
        console.print(diagnosis.limits(found))
        return 0
    predicted = _predicted(versions, arguments)
    _tell(arguments, predicted)
    if len(versions) == 2:
        one, other = predicted
        for paragraph in difference.report(one, other):
            console.print(paragraph)
        _name_configurations(predicted, arguments)
        console.print(difference.limits(one, other))
    else:
        console.print(diagnosis.summary(predicted))
        console.print("Each in its default configuration" + (", but for --config" if arguments.config else "") + ".")
    return 0


def _name_configurations(found: Sequence[Diagnosis], arguments: argparse.Namespace) -> None:
    from flashladder.common.runtime import target

    gpu, values = target.resolve("auto", arguments.gpu).gpu, options.values_with_expressions(arguments)
    for each in found:
        config = each.code.artifact.config
        console.print(options.which_configuration(each.version, config, gpu, values), soft_wrap=True)


def _tell(arguments: argparse.Namespace, found: Sequence[Diagnosis]) -> None:
    if arguments.json:
        from flashladder.common.report import answer

        arguments.json.add(map(answer.of_diagnosis, found))


def _diagnose(version: Version, arguments: argparse.Namespace) -> Diagnosis:
    """Sampled where there are pages or a GPU with ncu, otherwise predicted."""
    from flashladder.common.compiler import build_one
    from flashladder.common.errors import ConfigError, DeviceError, ToolchainError
    from flashladder.common.predict import profiling
    from flashladder.common.predict.limits import sample
    from flashladder.common.runtime import target

    has_expressions = arguments.mask is not None or arguments.score is not None
    if arguments.pages and has_expressions:
        raise ConfigError("expressions are predicted, and not sampled: leave out --pages")
    place = target.resolve("emulator" if arguments.predict or has_expressions else "auto", arguments.gpu)
    if arguments.pages or place.on_gpu:
        problem = options.problem(arguments, version.operation, "sampled", options=options.needed(version))
        config = version.config_for(problem, place.gpu, **options.config_values(arguments.config))
        version.check(problem, config)
        try:
            with console.status(f"{version.name}: ncu and the emulator"):
                rung = profiling.run(build_one(version, config, place.arch), problem, place, arguments.pages)
            return sample(version, rung)
        except (DeviceError, ToolchainError) as error:
            if arguments.pages:
                raise
            warn(f"predicted, not sampled: {error}")
    (found,) = _predicted([version], arguments)
    return found


def _predicted(versions: Sequence[Version], arguments: argparse.Namespace) -> list[Diagnosis]:
    from flashladder.common.compiler import BuildRequest, build
    from flashladder.common.predict.limits import predict
    from flashladder.common.runtime import target

    gpu = target.resolve("auto", arguments.gpu).gpu
    values = options.values_with_expressions(arguments)
    artifacts = build([BuildRequest(version, version.config(gpu, **values), gpu.arch) for version in versions])
    found = []
    with progress("rungs") as update:
        for version, artifact in zip(versions, artifacts, strict=True):
            found.append(predict(version, artifact, gpu))
            update(len(found), len(versions), version.name)
    return found
