"""Print the shell completion of `pixelis`: jobs, recipes, configuration keys and their choices.

usage: eval "$(pixelis completion bash)"     # in ~/.bashrc, or with zsh in ~/.zshrc
"""

from __future__ import annotations

from string import Template

from pixelis.config.base import leaf_keys
from pixelis.config.root import RECIPES, Config, ablation_files, recipe_files
from pixelis.jobs.cli import JOBS
from pixelis.jobs.command import command

BASH = Template(
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
    keys = leaf_keys(Config)
    values = []
    for path, kind, *_ in keys:
        if choices := "true false" if kind == "bool" else kind.replace("|", " ") if "|" in kind else "":
            values.append(f'            {path}) COMPREPLY=($(compgen -W "{choices}" -- "$word")) ;;')
    recipes = [f"configs/{file.relative_to(RECIPES)}" for file in [*recipe_files(), *ablation_files()]]
    text = BASH.substitute(
        jobs=" ".join(JOBS),
        keys=" ".join(path for path, *_ in keys),
        recipes=" ".join(recipes),
        values="\n".join(values),
    )
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + text


def main() -> None:
    with command("completion", __doc__) as parser:
        parser.add_argument("shell", choices=("bash", "zsh"))
        print(script(parser.parse_args().shell), end="")


if __name__ == "__main__":
    main()
