"""Model families: one file each with all that distinguishes its models."""

from pixelis.config.references import Registry

FAMILIES = Registry(
    "policy.family",
    {
        name: f"pixelis.families.{name}:FAMILY"
        for name in (
            "gemma4",
            "internvl",
            "qwen2",
            "qwen2_5_vl",
            "qwen2_vl",
            "qwen3",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_vl",
            "qwen3_vl_moe",
        )
    },
)
"""`model_type` of a config.json -> its family, imported when first looked up."""

GENERIC = "generic"
"""Value of policy.family for `pixelis.families.generic`, which also takes transformers' other vision-language models."""
DEFAULT = "qwen2_5_vl"
NANO = "qwen3_vl"
