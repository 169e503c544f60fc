"""What a version.yaml says, as the fields of a rung or a reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashladder.common import own
from flashladder.common.catalog import schema
from flashladder.common.catalog.configurable import choices_of
from flashladder.common.errors import ConfigError
from flashladder.common.paths import OPERATIONS
from flashladder.common.problem.rules import Rule


def of_rung(path: Path, name: str) -> dict[str, Any]:
    """The fields of the rung of this name, but for its ladder and root. ConfigError says what is wrong in the file."""
    declared = schema.read(path, schema.RungDeclaration)
    own_fields = schema.RungDeclaration.model_fields.keys() - schema.Declaration.model_fields.keys()
    return _shared(path.parent, name, declared, "kernel.cu") | {field: getattr(declared, field) for field in own_fields}


def of_reference(path: Path) -> dict[str, Any]:
    """The fields of a reference, but for its root. ConfigError says what is wrong in the file."""
    declared = schema.read(path, schema.ReferenceDeclaration)
    shared = _shared(path.parent, path.parent.name, declared, "kernel.py")
    return shared | {"devices": declared.devices, "requires": declared.requires}


@contextmanager
def named_in_errors(path: Path) -> Iterator[Path]:
    """Every ConfigError begins with the file that it comes from."""
    try:
        yield path
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _usual_operation(rung: Path) -> str:
    """What a rung computes that does not say: its ladder's own operation, where it has one."""
    ladder = rung.parent
    its_own = (OPERATIONS / f"{ladder.name}.py", ladder / own.OPERATION_FILE)
    return ladder.name if any(path.is_file() for path in its_own) else own.FIRST


def _shared(directory: Path, name: str, declared: schema.Declaration, kernel: str) -> dict[str, Any]:
    """What every implementation has."""
    return {
        "name": name,
        "title": declared.title,
        "idea": declared.idea,
        "directory": directory,
        "kernel": (directory / (declared.kernel or kernel)).resolve(),
        "supports": declared.supports,
        "operation": declared.operation or _usual_operation(directory),
        "choices": choices_of(declared),
        "rules": tuple(Rule(rule.require, rule.why) for rule in declared.rules),
        "defaults": declared.defaults,
        "defaults_apart": declared.defaults_apart,
        "defaults_with": declared.defaults_with,
        "defaults_narrower": declared.defaults_narrower,
        "small_sm": declared.small_sm,
        "apart": declared.supports.apart,
    }
