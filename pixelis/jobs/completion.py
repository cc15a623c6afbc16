"""Print the shell completion of `pixelis`: jobs, recipes, configuration keys and the values of keys with a
fixed choice.

usage: eval "$(pixelis completion bash)"     # add the line to ~/.bashrc, or with zsh instead of bash to
~/.zshrc
       pixelis completion fish > ~/.config/fish/completions/pixelis.fish
"""

from __future__ import annotations

import sys
from string import Template

from pixelis.config.base import leaf_keys
from pixelis.config.root import RECIPES, Config, ablation_files, recipe_files
from pixelis.jobs.cli import JOBS

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
FISH = Template(
    """complete -c pixelis -e
complete -c pixelis -f
$jobs
complete -c pixelis -n __fish_use_subcommand -a "--help --version"
complete -c pixelis -n "not __fish_use_subcommand" -a "$words"
complete -c pixelis -n "not __fish_use_subcommand" -a "(__fish_complete_suffix .yaml)"
complete -c pixelis -n "not __fish_use_subcommand; and string match -q '*=*' (commandline -ct)" -F
"""
)


def script(shell: str) -> str:
    """The completion of ``bash``, ``zsh`` or ``fish`` as a script."""
    keys = leaf_keys(Config)
    choices = {path: kind.split("|") for path, kind, *_ in keys if "|" in kind} | {
        path: ["true", "false"] for path, kind, *_ in keys if kind == "bool"
    }
    recipes = " ".join(
        f"configs/{file.relative_to(RECIPES)}" for file in [*recipe_files(), *ablation_files()]
    )
    if shell == "fish":
        assignments = [f"{path}={value}" for path, *_ in keys for value in choices.get(path, [""])]
        return FISH.substitute(
            jobs="\n".join(
                f'complete -c pixelis -n __fish_use_subcommand -a {job} -d "{line}"'
                for job, line in JOBS.items()
            ),
            words=f"{' '.join(assignments)} --dry-run --help --all {recipes}",
        )
    values = "\n".join(
        f'            {path}) COMPREPLY=($(compgen -W "{" ".join(names)}" -- "$word")) ;;'
        for path, names in choices.items()
    )
    text = BASH.substitute(
        jobs=" ".join(JOBS),
        keys=" ".join(path for path, *_ in keys),
        recipes=recipes,
        values=values,
    )
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + text


def main() -> None:
    """Entry point of `pixelis completion`."""
    shell = sys.argv[1] if len(sys.argv) == 2 else ""
    if shell in ("bash", "zsh", "fish"):
        print(script(shell), end="")
        return
    print((__doc__ or "").strip(), file=sys.stdout if shell in ("-h", "--help") else sys.stderr)
    raise SystemExit(0 if shell in ("-h", "--help") else 2)


if __name__ == "__main__":
    main()
