"""Reading YAML: what every room does the same way."""

from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML has it, is several times as fast


MOST_DEPTH = 16  # of what a stranger writes: libyaml dies of some ten thousand brackets


def check_plain(text: str | bytes) -> None:
    """Refuses, by yaml.YAMLError, what would take a stack or a memory: deep nesting, and aliases, which multiply."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH or isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases, and more than {MOST_DEPTH} levels, are not taken here")


def parsed(text: str | bytes) -> Any:
    """What a YAML document says; yaml.YAMLError where it is none."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, OverflowError) as error:  # a date or a number that is none
        raise yaml.YAMLError(str(error)) from None
