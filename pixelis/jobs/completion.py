"""Print the shell completion of `pixelis`: jobs, recipes, configuration keys and the values that a key is limited to.

usage: eval "$(pixelis completion bash)"     # or zsh; put the line into ~/.bashrc or ~/.zshrc
"""

from __future__ import annotations

import sys
from string import Template

from pixelis.config.base import leaf_keys
from pixelis.config.root import RECIPES, Config
from pixelis.jobs.cli import JOBS

SCRIPT = Template(
    r"""_pixelis() {
    local word=$${COMP_WORDS[COMP_CWORD]} before=$${COMP_WORDS[COMP_CWORD-1]}
    COMPREPLY=()
    if [ "$$COMP_CWORD" = 1 ]; then
        COMPREPLY=($$(compgen -W "$jobs --help --version" -- "$$word"))
    elif [ "$$word" = "=" ] || [ "$$before" = "=" ]; then
        local key=$$before
        if [ "$$before" = "=" ]; then key=$${COMP_WORDS[COMP_CWORD-2]}; else word=""; fi
        case "$$key" in
$values
            *) compopt -o filenames 2>/dev/null; COMPREPLY=($$(compgen -f -- "$$word")) ;;
        esac
    else
        COMPREPLY=($$(compgen -W "$keys" -S = -- "$$word") $$(compgen -W "--dry-run --help --all" -- "$$word")
            $$(compgen -W "$recipes" -- "$$word") $$(compgen -f -X '!*.yaml' -- "$$word"))
        [ "$${#COMPREPLY[@]}" = 1 ] && [[ "$$COMPREPLY" == *= ]] && compopt -o nospace 2>/dev/null
    fi
}
complete -F _pixelis pixelis
"""
)


def script(shell: str) -> str:
    """The completion of ``bash`` or ``zsh`` as a script to evaluate."""
    keys = leaf_keys(Config)
    choices = {path: kind.split("|") for path, kind, *_ in keys if "|" in kind} | {
        path: ["true", "false"] for path, kind, *_ in keys if kind == "bool"
    }
    values = "\n".join(
        f'            {path}) COMPREPLY=($(compgen -W "{" ".join(names)}" -- "$word")) ;;' for path, names in choices.items()
    )
    text = SCRIPT.substitute(
        jobs=" ".join(JOBS),
        keys=" ".join(path for path, *_ in keys),
        recipes=" ".join(f"configs/{file.relative_to(RECIPES)}" for file in sorted(RECIPES.rglob("*.yaml"))),
        values=values,
    )
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + text


def main() -> None:
    """Entry point of `pixelis completion`."""
    shell = sys.argv[1] if len(sys.argv) == 2 else ""
    if shell in ("bash", "zsh"):
        print(script(shell), end="")
        return
    print((__doc__ or "").strip(), file=sys.stdout if shell in ("-h", "--help") else sys.stderr)
    raise SystemExit(0 if shell in ("-h", "--help") else 2)


if __name__ == "__main__":
    main()
