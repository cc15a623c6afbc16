"""What a user meets in the configuration: overrides, files, mistakes and what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pixelis import config
from pixelis.config.base import RENAMED, SYNONYMS, leaf_keys
from pixelis.config.command_line import SECTIONS
from pixelis.config.references import EMBEDDED
from pixelis.config.root import recipe_files
from pixelis.errors import BadConfig, MissingFile

CONFIGS = recipe_files()


@pytest.mark.parametrize(
    "text",
    ["/d/set #1/train.jsonl", "/d/a: b/c+d, e.json", "[old]", "*best", "'7'", "2024", "1e5", "no", " x", ""],
)
def test_a_text_on_the_command_line_is_taken_as_it_is(text: str) -> None:
    c = config.load(None, [f"data.train={text}", f"policy.adapter={text}", f"evaluate.sets.mine={text}"])
    assert (c.data.train, c.policy.adapter, c.evaluate.sets["mine"]) == (text, text, text)


def test_lists_and_maps_on_the_command_line_are_yaml() -> None:
    sources, sets = 'refinement.holdout.sources=["/d/set #1", b]', "evaluate.sets={a: '/d: 2'}"
    c = config.load(None, [sources, sets, "learner.betas=[0.5, 1e-1]"])
    assert (c.refinement.holdout.sources, c.evaluate.sets) == (["/d/set #1", "b"], {"a": "/d: 2"})
    assert c.learner.betas == (0.5, 0.1)
    for text in ("zoom_in", "[a #1, b]", "/d/set #1"):
        with pytest.raises(BadConfig, match="no list or map in YAML"):
            config.load(None, [f"toolbox.operations={text}"])


def test_paths_of_settings_and_with_colons_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("lr=0.1/config.yaml", "shots: day 1/rows.jsonl"):
        Path(file).parent.mkdir()
        Path(file).write_text("run: {name: again}")
    words = ["lr=0.1/config.yaml", "run.seed=3", "data.train=shots: day 1/rows.jsonl?media=a: b"]
    c = config.from_command_line("Doc.", "rft", words)
    assert (c.run.name, c.run.seed) == ("again", 3)
    assert c.data.train == f"{tmp_path}/shots: day 1/rows.jsonl?media=a: b"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("learner.lrr=3", "did you mean `learner.lr`"),
        ("gamma=1", "`gamma`"),
        ("rewards.preset=r1-v", "did you mean `r1v`"),
        ("learner.lr=fast", "learner.lr"),
        ("learner.lr=-1", "learner.lr"),
        ("learner.lr=inf", "finite number"),
        ("rft.group_size=1", "rft.group_size"),
        ("serve.sampling.temperature=0.001", "serve.sampling.temperature 0.001"),
        ("engine.name=vllm rft.sampling.temperature=3", "rft.sampling.temperature 3"),
        ("rft.sampling.top_p=0.9 rft.loss.kl=0.1 rft.loss.kl_in=reward rft.loss.kl_estimator=k1", "rft.loss.kl_in=loss"),
        ("rft.sampling.top_p=0.9 rft.loss.importance=none", "rft.loss.importance=truncate"),
        ("policy.lora=3", "policy.lora"),
        ("dialogue.crop.max_pixels=10", "min_pixels 4096 is above max_pixels 10"),
        ("learner.row_tokens=64", "an episode must fit into a row"),
        ("learner.workers=3", "rft.prompts_per_step 32"),
        ("rft.advantage.min_group=9", "rft.advantage.min_group 9 is above rft.group_size 8"),
        ("nonsense", "is not an override"),
        ("run.dir=s3://bucket/run", "run.dir s3://bucket/run is no folder: mount a filesystem"),
        ("memory.dir=gs://bucket/memory", "memory.dir gs://bucket/memory is no folder"),
        ("engine.tensor_parallel=2 engine.gpus=1", "engine.tensor_parallel 2 needs as many engine.gpus, not 1"),
        ("engine.colocate=true rft.max_off_policy_steps=1", "set rft.max_off_policy_steps=0"),
        ("engine.colocate=true engine.gpus=1", "needs 1 for engine.gpus, learner.gpus"),
        ("engine.colocate=true engine.gpus=1 learner.gpus=1 engine.workers=2", "as many engine.workers"),
        ("learner.min_workers=2", "learner.min_workers 2 is above learner.workers 1"),
        ("learner.sequence_parallel=2", "learner.workers 1 is no multiple of learner.sequence_parallel 2"),
        ("engine.workers=3 engine.max_workers=2", "engine.max_workers 2 is below engine.workers 3"),
        ("engine.workers={min: 1}", "engine.workers is a number or has the keys min and max, not min"),
        ("engine.max_workers=2 engine.colocate=true", "unset engine.max_workers"),
        ("engine.urls=[http://a:1]", "names the servers of engine.name=vllm_server"),
        ("engine.name=vllm_server", "set engine.urls"),
        ("engine.name=vllm_server engine.urls=[http://a:1,http://b:1]", "set engine.workers=2"),
        ("engine.name=vllm_server engine.urls=[http://a:1] engine.gpus=1", "set engine.gpus=0"),
        ("engine.name=vllm_server engine.urls=[http://a:1] policy.full=true", "set policy.full=false"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_key(override: str, told: str) -> None:
    with pytest.raises(BadConfig) as caught:
        config.load(None, [override] if "{" in override else override.split())
    assert told in str(caught.value)


def test_a_range_of_generators_is_a_number_to_start_with_and_a_maximum(tmp_path: Path) -> None:
    (tmp_path / "elastic.yaml").write_text("engine: {workers: {min: 2, max: 8}}\n")
    engine = config.load(tmp_path / "elastic.yaml", []).engine
    assert (engine.workers, engine.max_workers, engine.most_workers) == (2, 8, 8)
    assert config.load(None, ["engine.workers=3"]).engine.most_workers == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [("extends: it.yaml", "extends itself"), ("- 1", "not a mapping of sections"), ("a: [1", "not YAML")],
)
def test_a_file_that_cannot_be_used_is_explained(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "it.yaml").write_text(text)
    with pytest.raises(BadConfig, match=told):
        config.load(tmp_path / "it.yaml")
    with pytest.raises(MissingFile, match="no configuration file"):
        config.load(tmp_path / "absent.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_shipped_configuration_is_valid_and_its_models_can_be_fetched(path: Path) -> None:
    c = config.load(path)
    assert c.run.name
    assert c.policy.model in EMBEDDED or "policy.model" in c.hub_models
    assert c.engine.model is None or "engine.model" in c.hub_models


def printed(capsys: pytest.CaptureFixture[str], *argv: str, job: str = "rft") -> str:
    with pytest.raises(SystemExit) as left:
        config.from_command_line("Doc.", job, argv, default="configs/nano/rft.yaml")
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("job", SECTIONS)
def test_help_of_a_job_is_its_own_sections_in_two_screens(
    capsys: pytest.CaptureFixture[str], job: str
) -> None:
    text = printed(capsys, "--help", job=job)
    assert len(text.splitlines()) <= 104  # of 52 lines
    for section in config.Config.model_fields:
        assert f"\n{section}: " in text or f"\n  {section} " in text
    assert f"--help {SECTIONS[job][0]}" in text or f"\n  {SECTIONS[job][0]}." in text


def test_help_explains_a_section_a_key_or_everything(capsys: pytest.CaptureFixture[str]) -> None:
    section = printed(capsys, "--help", "rft.advantage")
    assert "rft.advantage.baseline=" in section
    assert "learner.lr" not in section
    assert "peak learning rate" in printed(capsys, "--help", "learner.lr")
    everything = printed(capsys, "--help", "--all")
    for key in ("learner.lr", "rewards.curiosity.alpha", "rft.sampling.temperature", "serve.api_key_env"):
        assert f"\n{key}=" in everything
    with pytest.raises(SystemExit) as left:
        config.from_command_line("Doc.", "rft", ["--help", "rft.advantag"])
    assert left.value.code == 2
    assert "did you mean `rft.advantage`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "override"), [(["--lr", "3"], "learner.lr=3"), (["--group_size=4"], "rft.group_size=4")]
)
def test_a_flag_is_answered_with_the_override_it_means(
    capsys: pytest.CaptureFixture[str], flags: list[str], override: str
) -> None:
    with pytest.raises(SystemExit):
        config.from_command_line("Doc.", "rft", flags)
    assert f"did you mean {override}?" in capsys.readouterr().err


def test_steps_on_the_command_line_replace_epochs_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("sft: {epochs: 3, batch: 8}")
    assert config.load(tmp_path / "a.yaml").sft.epochs == 3
    chosen = config.load(tmp_path / "a.yaml", ["sft.steps=2"]).sft
    assert (chosen.steps, chosen.epochs, chosen.batch) == (2, 0, 8)
    with pytest.raises(BadConfig, match=r"sft\.steps and sft\.epochs contradict"):
        config.load(None, ["sft.steps=2", "sft.epochs=1"])


def test_null_restores_the_default_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("learner: {lr: 0.5}\npolicy: {adapter: here}")
    chosen = config.load(tmp_path / "a.yaml", ["learner.lr=null", "policy.adapter=null"])
    assert (chosen.learner.lr, chosen.policy.adapter) == (config.Config().learner.lr, None)
    with pytest.raises(BadConfig, match=r"learner\.lrr"):
        config.load(None, ["learner.lrr=null"])


def test_a_recipe_is_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = config.load("configs/qwen2_5_vl_7b/rft.yaml")
    monkeypatch.chdir(tmp_path)
    for name in ("configs/qwen2_5_vl_7b/rft.yaml", "qwen2_5_vl_7b/rft.yaml", "qwen2_5_vl_7b/rft"):
        assert config.load(name) == here
    assert Path(str(config.absolute(here).learner.deepspeed)).is_file()
    for outside in ("../../pyproject.toml", "configs/../jobs/rft.py"):
        with pytest.raises(MissingFile):
            config.load(outside)


def test_a_file_may_extend_several(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("learner: {lr: 0.5, rows: 2}\nrewards: {weights: {format: 0.5}}")
    (tmp_path / "b.yaml").write_text("learner: {lr: 0.25}\nrewards: {preset: r1v}")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml, b.yaml]\nlearner: {keep: 7}")
    chosen = config.load(tmp_path / "c.yaml")
    assert (chosen.learner.lr, chosen.learner.rows, chosen.learner.keep) == (0.25, 2, 7)
    assert chosen.rewards == config.load(None, ["rewards.preset=r1v"]).rewards
    (tmp_path / "d.yaml").write_text("extends: [a.yaml, nowhere.yaml]")
    with pytest.raises(MissingFile, match=r"d\.yaml extends nowhere\.yaml"):
        config.load(tmp_path / "d.yaml")


def test_a_bad_command_line_exits_with_two_and_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--lr", "3"], ["a.yaml", "b.yaml"], ["configs/nano/rtf.yaml"], ["learner.lrr=1"]):
        with pytest.raises(SystemExit) as left:
            config.from_command_line("Doc.", "rft", argv)
        assert left.value.code == 2
        assert "fix:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "absolute"),
    [
        ("packaged:coins?count=3", "packaged:coins?count=3"),
        ("/data/q.jsonl", "/data/q.jsonl"),
        ("s3://bucket/rows.parquet?format=r1v", "s3://bucket/rows.parquet?format=r1v"),
        ("coco:data/coco?split=val2017", "coco:{here}/data/coco?split=val2017"),
        ("rows.parquet?format=r1v&media=images", "{here}/rows.parquet?format=r1v&media=images"),
    ],
)
def test_paths_become_absolute_and_names_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, absolute: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = [f"data.train={source}", f"evaluate.sets.id={source}"]
    c = config.absolute(config.load(None, ["run.dir=runs/a", "policy.adapter=runs/b", *sources]))
    assert [c.data.train, c.evaluate.sets["id"]] == [absolute.format(here=tmp_path)] * 2
    assert (c.run.dir, c.policy.adapter) == (f"{tmp_path}/runs/a", f"{tmp_path}/runs/b")
    assert (c.policy.model, c.learner.deepspeed) == ("nano", None)
    assert config.absolute(c) == c


def test_a_key_that_had_another_name_is_refused_with_its_new_one():
    keys = {path for path, *_ in leaf_keys(config.Config)}
    sections = {path.rsplit(".", 1)[0] for path in keys}
    assert keys | sections >= set(RENAMED.values()) | set(SYNONYMS.values())
    for old in ("telemetry.wandb", "rewards.own_timeout_s", "synthesis.imitation"):
        with pytest.raises(BadConfig, match=f"`{old}` \\(did you mean `{RENAMED[old]}`"):
            config.load(None, [f"{old}=1"])


@pytest.mark.parametrize(
    ("key", "suggested"),
    [
        ("learner.learning_rate", "learner.lr"),
        ("rft.num_generations", "rft.group_size"),
        ("output_dir", "run.dir"),
    ],
)
def test_the_name_another_system_has_for_a_key_is_understood(key: str, suggested: str) -> None:
    with pytest.raises(BadConfig, match=f"`{key}` \\(did you mean `{suggested}`"):
        config.load(None, [f"{key}=1"])
