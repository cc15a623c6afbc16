"""Named algorithms and reward presets replace what a recipe says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pixelis import config
from pixelis.config.load import NAMED, SCORING_KEYS, load_with_origins
from pixelis.config.presets.algorithms import ALGORITHMS
from pixelis.config.presets.rewards import REWARD_PRESETS
from pixelis.config.root import RECIPES, recipe_files

TRAINING = [path for path in recipe_files() if path.stem.startswith(("rft", "ttrl", "quickstart"))]
SHORT = ("nano/rft_pixelis.yaml", "qwen2_5_vl_7b/rft_dapo.yaml", "qwen2_5_vl_32b/rft_deepeyes.yaml")
RECIPES_OF_ALL = [
    pytest.param(path, marks=() if str(path.relative_to(RECIPES)) in SHORT else pytest.mark.long)
    for path in TRAINING
]
"""In the ordinary gate one recipe that names nothing, one an algorithm, one a preset."""
ALGORITHM_KEYS = NAMED["rft"][2]


def differences(resolved: dict, definition: dict) -> list[str]:
    return [key for key, value in definition.items() if resolved[key] != value]


def algorithm(rft: config.RftConfig) -> dict:
    values = rft.model_dump(include=set(ALGORITHM_KEYS))
    values["loss"].pop("constant_tokens")  # resolved from the dialogue of the recipe
    return values


@pytest.mark.parametrize("path", RECIPES_OF_ALL, ids=lambda value: str(value.relative_to(RECIPES)))
def test_named_settings_over_a_recipe_equal_their_definitions(path: Path) -> None:
    for name in ALGORITHMS:
        # K is 4, and some recipes have groups of 4
        more = ["rft.group_size=64"] if name == "pass_at_k" else []
        more.append("rft.teacher.rewards=true")  # an algorithm of rewards needs some
        resolved = config.load(path, [f"rft.algorithm={name}", *more]).rft
        assert differences(algorithm(resolved), algorithm(config.RftConfig(algorithm=name))) == [], name
    # Of the recipe's judge: stays
    server = config.load(path).rewards.judge.model_dump(include={"url", "model", "api_key_env"})
    for name in REWARD_PRESETS:
        rewards = config.load(path, [f"rewards.preset={name}"]).rewards
        kept = SCORING_KEYS - REWARD_PRESETS[name].keys()
        definition = config.RewardsConfig(preset=name).model_dump(exclude=set(kept))
        if "judge" in definition:
            definition["judge"] |= server
        assert differences(rewards.model_dump(), definition) == [], name


def test_keys_beside_a_name_refine_it_and_the_batch_of_the_recipe_stays() -> None:
    overrides = ["rft.loss.kl=0.1", "rft.algorithm=gspo", "rewards.preset=pr-paper"]
    overrides.append("rewards.curiosity.alpha=2")
    for order in (overrides, overrides[::-1]):
        c = config.load("configs/qwen2_5_vl_7b/rft.yaml", order)
        loss = c.rft.loss
        expected = ("std", 3e-4, 4e-4, "sequence")
        assert (c.rft.advantage.scale, loss.clip_low, loss.clip_high, loss.aggregate) == expected
        assert (loss.kl, c.rewards.curiosity.alpha, c.rewards.weights.format) == (0.1, 2.0, 0.0)
        assert (c.rft.prompts_per_step, c.rft.max_off_policy_steps, c.rft.steps) == (64, 1, 240)


def test_a_name_in_a_file_replaces_the_files_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "rft: {algorithm: dapo, advantage: {scale: none}, filter: {max_oversampling: 2}, steps: 7}"
    )
    (tmp_path / "top.yaml").write_text("extends: base.yaml\nrft: {algorithm: grpo, loss: {clip_high: 0.3}}")
    rft = config.load(tmp_path / "top.yaml").rft
    expected = ("std", "none", 3.0, 0.3)
    assert (rft.advantage.scale, rft.filter.key, rft.filter.max_oversampling, rft.loss.clip_high) == expected
    assert rft.steps == 7
    assert config.load(tmp_path / "base.yaml").rft.advantage.scale == "none"


def test_a_preset_replaces_what_it_sets_of_the_scoring_keys(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "rewards: {judge: {required: false, url: 'http://judge/v1', model: m}, own: [a.b:c]}"
    )
    rewards = config.load(tmp_path / "a.yaml", ["rewards.preset=mini-o3"]).rewards
    assert (rewards.judge.required, rewards.judge.url, rewards.own) == (True, "http://judge/v1", {})


def test_every_value_has_an_origin(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "rft: {steps: 7, group_size: 4}\nrewards: {format: turns, tasks: {math: {format: turns}}}"
    )
    (tmp_path / "top.yaml").write_text(
        "extends: base.yaml\nrft: {algorithm: dapo, group_size: 8, filter: {max_oversampling: 2}}"
    )
    overrides = ["rft.loss.clip_high=0.4", "rft.advantage={eps: 1e-3}", "rft.steps=null"]
    _, origins = load_with_origins(tmp_path / "top.yaml", overrides)
    for origin, keys in {
        f"{tmp_path.name}/top.yaml": ["rft.algorithm", "rft.group_size", "rft.filter.max_oversampling"],
        f"{tmp_path.name}/base.yaml": ["rewards.format", "rewards.tasks"],
        "algorithm dapo": ["rft.filter.key"],
        "command line": ["rft.loss.clip_high", "rft.advantage.eps"],
    }.items():
        assert [origins[key] for key in keys] == [origin] * len(keys)
    assert not {"rft.steps", "rft.loss.entropy", "learner.lr"} & origins.keys()


def test_a_dry_run_marks_the_origins_and_loads_to_the_same_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["rft.algorithm=gspo", "rewards.preset=pixelis-steps", "run.name=a # long\nname"]
    argv = ["configs/qwen2_5_vl_7b/rft.yaml", *names]
    with pytest.raises(SystemExit) as left:
        config.from_command_line("Doc.", "rft", [*argv, "--dry-run"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    marks = {line.split(":")[0].strip(): line.rpartition("# ")[2] for line in text.splitlines()}
    assert (marks["clip_low"], marks["prompts_per_step"]) == ("algorithm gspo", "qwen2_5_vl_7b/rft.yaml")
    expected = ("default", "command line", "preset pixelis-steps")
    assert (marks["train_samples"], marks["algorithm"], marks["tool_misuse"]) == expected
    assert config.parse(yaml.safe_load(text)) == config.absolute(config.load(argv[0], argv[1:]))
