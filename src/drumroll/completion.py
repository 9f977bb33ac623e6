"""Shell completion: overrides and keys of the config, by click. It must stay quick, so it imports no torch."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class
from typing_extensions import override

from drumroll.errors import ConfigError, did_you_mean

SHELLS = ("bash", "zsh", "fish")
INSTALL = {
    "bash": 'eval "$(drumroll completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(drumroll completion zsh)"   # in ~/.zshrc',
    "fish": "drumroll completion fish | source   # in ~/.config/fish/config.fish",
}


class Key(click.types.StringParamType):
    """A key of the config."""

    name = "key"
    ending = ""

    @override
    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from drumroll.config.keys import all_keys
        from drumroll.config.pipelines import CONFIGS

        fields = dict(pair for config in reversed(CONFIGS.values()) for pair in all_keys(config))
        key, equals, _ = incomplete.partition("=")
        if equals and self.ending:
            values = _values(fields[key].annotation) if key in fields else []
            return [CompletionItem(item) for value in values if (item := f"{key}={value}").startswith(incomplete)]
        return [
            CompletionItem(name + self.ending, help=(field.description or "").partition("\n")[0])
            for name, field in fields.items()
            if name.startswith(incomplete)
        ]


class Override(Key):
    """An override, `key=value`."""

    name = "override"
    ending = "="


def _values(annotation: Any) -> list[str]:
    """The values that a key may have, where they can be listed."""
    from typing import Literal, get_args, get_origin

    from drumroll.config.keys import choices

    found: list[str] = []
    for one in choices(annotation):
        found += map(str, get_args(one)) if get_origin(one) is Literal else ["true", "false"] if one is bool else []
    return found


def script(cli: click.Command, shell: str) -> str:
    """The script that a shell runs to complete our commands."""
    if shell not in SHELLS:
        raise ConfigError(
            f"completion of '{shell}' is not known; choose one of {', '.join(SHELLS)}.{did_you_mean(shell, SHELLS)}"
        )
    made = get_completion_class(shell)
    assert made is not None
    source = made(cli, {}, "drumroll", "_DRUMROLL_COMPLETE").source()
    if shell == "bash":  # no blank after `key=`
        source = source.replace("COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *= ]] && compopt -o nospace", 1)
    return f"# {INSTALL[shell]}\n{source}"
