"""The estimate of a dry run against the public models' sizes and against real small models."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import job_of, pixelis
from public_models import PUBLIC, save_configs
from tiny_policy import LORA, policy
from tiny_trainer import batch, learner_with, trainer

from pixelis import config
from pixelis.errors import BadConfig
from pixelis.jobs import plan
from pixelis.policy import architecture, estimate
from pixelis.policy.adapters import adapter_bytes
from pixelis.policy.model import load_model
from pixelis.policy.packing import segment

JOBS = {name: name for name in ("rft", "sft", "ttrl", "serve", "evaluate")}
JOBS |= {"cluster": "rft", "quickstart": "rft"}
"""Job of a recipe by the beginning of its name."""
FILES = [p for name in ("nano", "first_run", *PUBLIC) for p in sorted(Path("configs", name).glob("*.yaml"))]
RECIPES = [path for path in FILES if path.stem.split("_")[0] in JOBS]


@pytest.fixture(scope="module", autouse=True)
def _architectures_are_built_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        built = functools.cache(
            lambda model, dtype: architecture.Architecture(config.PolicyConfig(model=model), dtype)
        )
        patch.setattr(estimate, "Architecture", lambda policy, dtype: built(policy.model, dtype))
        yield


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> a folder that holds nothing but the config.json of its public model."""
    return save_configs(tmp_path_factory.mktemp("public"))


def recipe(path: str, public: dict[str, str], *more: str) -> config.Config:
    model = public.get(Path(path).parent.name)
    return config.load(f"configs/{path}", [*([f"policy.model={model}"] if model else []), *more])


def test_the_public_models_have_their_parameters_and_layers(public: dict[str, str]) -> None:
    architectures = {
        family: architecture.Architecture(config.PolicyConfig(model=name)) for family, name in public.items()
    }
    targets = config.LoraConfig().targets
    # Parameters, those of the tower, adapted layers, bytes of a token: 2 * layers * kv heads * head width * 2
    assert {
        family: (a.parameters, a.vision_parameters, len(a.shapes(targets)), a.kv_token_bytes)
        for family, a in architectures.items()
    } == {
        "qwen2_5_vl_3b": (3_754_622_976, 668_684_288, 36 * 7, 36864),
        "qwen2_5_vl_7b": (8_292_166_656, 676_550_144, 28 * 7, 57344),
        "qwen2_5_vl_32b": (33_452_718_336, 688_841_984, 64 * 7, 262144),
        "qwen3_vl_8b": (8_767_123_696, 576_388_336, 36 * 7, 147456),
        "qwen3_5_4b": (4_539_265_536, 333_514_240, 8 * 7 + 24 * 8, 32768),
        "qwen3_5_9b": (9_409_813_744, 456_010_480, 8 * 7 + 24 * 8, 32768),
        "qwen3_5_27b": (27_356_728_560, 460_730_096, 16 * 7 + 48 * 8, 65536),
        # Experts are no linear layers; the shared one has three, and a gate.
        "qwen3_5_35b_a3b": (35_107_181_936, 446_571_248, 10 * 8 + 30 * 9, 20480),
    }
    # 48 layers of 48 matrices of 128 x 128 in float32, and three inputs of 10,240 channels in bfloat16
    assert architectures["qwen3_5_27b"].state_bytes == 48 * (48 * 128**2 * 4 + 3 * 10240 * 2)
    assert all(p.device.type == "meta" for a in architectures.values() for p in a.model.parameters())
    with pytest.raises(BadConfig, match="tied to its embedding"):
        architectures["qwen2_5_vl_3b"].shapes([*targets, "lm_head"])
    assert len(architectures["qwen2_5_vl_7b"].shapes([*targets, "lm_head"])) == 28 * 7 + 1
    with pytest.raises(BadConfig, match="did you mean q_proj"):
        architectures["qwen3_vl_8b"].shapes(["q_porj"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(("full", "frozen"), [(False, False), (True, False), (True, True)])
def test_weights_adapters_and_optimizer_are_exact(family: str, full: bool, frozen: bool) -> None:
    settings = policy(family, full=full, freeze_vision_tower=frozen)
    arch = architecture.Architecture(settings, torch.float32)
    with trainer(family, policy=settings, learner=learner_with(zero_stage=1)) as learner:
        learner.update(batch(2, family))
        device, host = estimate.learner_memory(arch, settings, learner.learner)
        zero = learner.model.zero
        trainable = set(map(id, zero.parameters.values()))
        sizes = [
            (p.numel() * p.element_size(), id(p) in trainable) for p in learner.model.network.parameters()
        ]
        adapters = 0 if full else sum(size for size, is_trainable in sizes if is_trainable)
        weights = sum(size for size, _ in sizes) - adapters
        moments = sum(a.nbytes for name, a in zero.moments().items() if name != "step")
        copies = sum(p.numel() * 4 for p in zero.engine.optimizer.single_partition_of_fp32_groups)
    assert (device["weights"], device.get("adapters", 0)) == (weights, adapters)
    assert device["optimizer"] == moments + copies
    assert host == {}
    if not full:
        assert adapters == adapter_bytes(arch.shapes(LORA.targets), LORA.rank)


@pytest.mark.parametrize(
    ("family", "number"),
    [("qwen2_5_vl", 0), ("qwen3_vl", 0), ("qwen3_vl_moe", 0), ("qwen3_5", 0), ("qwen3_5", 1)],
)
def test_the_activations_of_a_layer_are_those_that_it_saves(family: str, number: int) -> None:
    real, _, spec = load_model(policy(family, dtype="bfloat16"), "cpu")
    spec.family.attend_packed(real)
    inner, tokens = real.model.language_model, 256
    hidden = torch.randn(1, tokens, inner.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rotary = inner.rotary_emb(hidden, torch.arange(tokens).expand(3, 1, -1))
    layer = inner.layers[number].train()
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(hidden, position_embeddings=rotary, attention_mask=None, segments=segment([tokens // 2] * 2))
    estimated = architecture.Architecture(policy(family)).layer_bytes(tokens)[number]
    assert estimated == pytest.approx(sum(storage.nbytes() for storage in saved.values()), rel=0.2)


def test_sharding_and_offload_reduce_the_bytes_on_the_device(public: dict[str, str]) -> None:
    arch = architecture.Architecture(config.PolicyConfig(model=public["qwen3_vl_8b"]))
    full = config.PolicyConfig(full=True, gradient_checkpointing=True, dtype="bfloat16")

    def memory(stage: int, file: str | None = None) -> tuple[dict[str, int], dict[str, int]]:
        learner = config.LearnerConfig(workers=4, gpus=1, zero_stage=stage, row_tokens=16384, rows=1)
        return estimate.learner_memory(arch, full, learner.model_copy(update={"deepspeed": file}))

    (one, _), (two, _), (three, _) = memory(1), memory(2), memory(3)
    p = arch.parameters
    assert (one["weights"], one["gradients"], one["optimizer"]) == (2 * p, 2 * p, 12 * p // 4)
    assert (two["weights"], two["gradients"], two["optimizer"]) == (2 * p, p // 2, 12 * p // 4)
    assert three["weights"] == p // 2
    learner = config.LearnerConfig(workers=4, gpus=1, zero_stage=3)
    with_reference, _ = estimate.learner_memory(arch, full, learner, True)
    assert with_reference["reference"] == p  # two parts of a quarter of the weights, two bytes each
    less, host = memory(2, "configs/deepspeed/zero2_offload.json")
    assert "optimizer" not in less
    assert host["optimizer"] == 4 * p
    less, host = memory(3, "configs/deepspeed/zero3_offload.json")
    assert "weights" not in less
    assert host["weights"] == p // 2


def test_the_gradient_is_copied_twice_for_the_optimizer(public: dict[str, str]) -> None:
    """An H200 measured 83.31 GiB for 4.066 B parameters: 22 bytes each."""
    arch = architecture.Architecture(config.PolicyConfig(model=public["qwen2_5_vl_3b"]))
    learner = config.LearnerConfig(gpus=1, row_tokens=2048, rows=1)
    full = config.PolicyConfig(full=True, gradient_checkpointing=True, dtype="bfloat16")
    device, _ = estimate.learner_memory(arch, full, learner)
    assert sum(device.values()) == (14 + 2 + 6) * arch.parameters


@pytest.mark.parametrize("name", ["zero2", "zero2_offload", "zero3", "zero3_offload"])
def test_deepspeed_accepts_the_shipped_files(name: str) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section = json.loads(Path(f"configs/deepspeed/{name}.json").read_text())["zero_optimization"]
    parsed = DeepSpeedZeroConfig(**section)
    assert parsed.stage == int(name[4])
    assert (parsed.offload_optimizer is not None) == name.endswith("offload")


def findings(c: config.Config, job: Any = "rft", subject: str | None = None) -> list[estimate.Finding]:
    found = estimate.check(c, job, gpu_bytes=estimate.GPU_BYTES)
    return [finding for finding in found if subject in (None, finding.subject)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rft.minibatches=200"], "rft.minibatches 200 is above the 128 rollouts"),
        (["learner.zero_stage=3"], "learner.zero_stage is 3, but learner.deepspeed zero2.json: 2"),
        (["rft.sampling.temperature=0"], "rft.sampling.temperature 0"),
        (["engine.tensor_parallel=3", "engine.gpus=3"], "engine.tensor_parallel 3 does not divide the 28 heads"),
        (["dialogue.max_context=3000"], "the pictures of the longest prompt (2562 tokens)"),
        (["dialogue.frames=39", "dialogue.max_images=38"], "dialogue.frames 39 is above dialogue.max_images 38"),
        (["dialogue.frames=40"], "a clip's first look (16080 tokens)"),
        (["dialogue.max_context=200000", "learner.row_tokens=200000"], "above the 128000 positions of policy.model"),
        (["policy.full=true", "learner.zero_stage=1", "learner.deepspeed=null", "learner.workers=1"], "does not fit"),
        (["engine.gpu_memory_utilization=0.2"], "0 fit the rest of 80 GiB at once: raise engine.tensor_parallel"),
        (["policy.lora.targets=[q_proj,k_porj]"], "policy.lora.targets: the model has no layer 'k_porj'"),
    ],
)  # fmt: skip
def test_a_contradiction_names_its_key(public: dict[str, str], overrides: list[str], message: str) -> None:
    try:
        c = recipe("qwen2_5_vl_7b/rft.yaml", public, *overrides)
        errors = [finding.text for finding in findings(c) if finding.level == "error"]
    except BadConfig as error:
        errors = [error.message]
    assert any(message in text for text in errors), errors


def test_a_deepspeed_file_may_leave_zero_to_the_keys(tmp_path: Path) -> None:
    """Full parameters in bfloat16 are at least at stage 1, whatever learner.zero_stage says."""

    def errors(file: dict[str, object], *more: str) -> list[str]:
        (tmp_path / "ds.json").write_text(json.dumps(file))
        keys = ["policy.full=true", "learner.gpus=1", f"learner.deepspeed={tmp_path}/ds.json", *more]
        return [finding.text for finding in findings(config.load(None, keys), "sft", "deepspeed")]

    assert errors({"gradient_clipping": 0.5}, "learner.zero_stage=0") == []
    assert errors({"zero_optimization": {"stage": 1}}, "learner.zero_stage=0") == []
    (wrong,) = errors({"zero_optimization": {"stage": 2}}, "learner.zero_stage=0")
    assert wrong == "learner.zero_stage is 1, but learner.deepspeed ds.json: 2"


def test_the_rank_that_vllm_reserves_is_reported(public: dict[str, str]) -> None:
    def adapters(*more: str) -> estimate.Finding:
        (finding,) = findings(recipe("qwen3_vl_8b/rft.yaml", public, *more), subject="adapters")
        return finding

    assert (adapters().level, "as rank 64" in adapters().text) == ("ok", True)
    assert "as rank 64" in adapters("policy.lora.rank=48").text
    assert "as rank 64" in adapters("policy.lora.vision_tower=true").text
    assert adapters("policy.lora.targets=[q_proj,lm_head]").text.endswith(", merged")


@pytest.mark.parametrize("path", RECIPES, ids=str)
def test_every_recipe_fits_its_machines(public: dict[str, str], path: Path) -> None:
    job = JOBS[path.stem.split("_")[0]]
    c = recipe(str(path.relative_to("configs")), public)
    estimated = estimate.check(c, "rft" if job == "ttrl" else job)  # type: ignore[arg-type]
    found = [*estimated, *plan.check(c, job_of(job).needs(c))]
    assert [f.text for f in found if f.level == "error"] == []
    room = [f for f in found if f.subject in ("learner", "placement")]
    assert {f.level for f in room} == {"ok"}, estimate.table(found)
    assert path.parent.name == "first_run" or not any("no model in" in f.text for f in found)


def test_a_colocated_learner_must_leave_vllm_its_share(public: dict[str, str]) -> None:
    def colocated(share: float) -> estimate.Finding:
        c = recipe("qwen2_5_vl_3b/rft_24gb.yaml", public, f"engine.gpu_memory_utilization={share}")
        return next(f for f in estimate.check(c, "rft") if f.subject == "colocate")

    assert colocated(0.6).level == "ok"
    assert (colocated(0.8).level, "lower it to 0.6" in colocated(0.8).text) == ("error", True)


def test_7b_fits_a_card_of_24_gb_in_4_bit_only(public: dict[str, str]) -> None:
    for name in ("sft", "rft"):
        for quantization, fits in (("nf4", True), ("none", False)):
            c = recipe(f"qwen2_5_vl_7b/{name}_24gb.yaml", public, f"policy.quantization={quantization}")
            levels = {f.level for f in estimate.check(c, name) if f.subject in ("learner", "colocate")}  # type: ignore[arg-type]
            assert (levels == {"ok"}) is fits, (name, quantization)


def test_recipes_for_eight_gpus_use_all_of_them(public: dict[str, str]) -> None:
    for path in RECIPES:
        sized = path.parent.name in ("qwen2_5_vl_7b", "qwen3_vl_8b", "qwen3_5_9b")
        if sized and "24gb" not in path.stem:
            job, c = JOBS[path.stem.split("_")[0]], recipe(str(path.relative_to("configs")), public)
            gpus = sum(part.count * part.total("GPU") for part in job_of(job).needs(c))
            assert gpus == 8 * c.cluster.nodes.count, path
            if job == "rft":
                episodes = c.rft.prompts_per_step * c.rft.group_size
                assert episodes <= 1.5 * c.engine.workers * c.engine.max_num_seqs, "in about one wave"


def test_the_command_prints_yaml_and_the_table(
    public: dict[str, str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        return pixelis(capsys, monkeypatch, *arguments, "--dry-run")

    code, out, err = run("rft", "configs/nano/rft.yaml")
    assert (code, yaml.safe_load(out)["policy"]["model"]) == (0, "nano")
    assert "longest prompt 32 (text 14)" in err
    code, out, err = run("sft", "configs/qwen2_5_vl_7b/sft.yaml", f"policy.model={public['qwen2_5_vl_7b']}")
    assert (code, yaml.safe_load(out)["run"]["name"]) == (1, "sft-qwen2_5_vl_7b")
    for key in ("data.demonstrations=", "sft.validation=", "policy.model="):
        assert f"\n{key}" in f"\n{err.partition('pixelis sft: ')[2]}"
    assert "8.29 B parameters" in err
    assert "generator" not in err
    code, out, err = run("rft", "configs/nano/rft.yaml", "dialogue.frames=9")
    assert (code, yaml.safe_load(out)["dialogue"]["frames"]) == (2, 9)
    assert "pixelis rft: dialogue.frames 9 is above dialogue.max_images 8" in err
    code, _, err = run("rft", "configs/qwen3_vl_8b/rft.yaml")
    assert (code, "policy.model=" in err, "no model in" in err) == (1, True, True)
