"""Which families of models have fused forms of their modules: found by reading transformers' code, checked at load.

A family that is not here, or whose code in the installed version of transformers computes something else, runs with its
own modules.
"""

from __future__ import annotations

from typing import NamedTuple


class Fusions(NamedTuple):
    """What is replaced in the models of a family.

    Attributes:
        norms: names of its RMS norms, which are replaced wherever they are in the decoder.
        norms_add_one: 1 is added to the weights of norms, and the product is rounded once (Gemma).
        mlp: modules with `gate_proj`, `up_proj`, `down_proj` and `act_fn` compute down(act(gate(x)) * up(x)).
        attention: `q_proj`, `k_proj` and `v_proj` of `self_attn` give whole heads, which `q_norm` and `k_norm` norm if
            it has them, and whose halves are rotated; `o_proj` ends it.
        decoder: layers are those of Llama: `input_layernorm`, `self_attn` and its residual, `post_attention_layernorm`,
            `mlp` and its residual; `norm` follows the last. All layers get the same rotation.
    """

    norms: tuple[str, ...]
    norms_add_one: bool = False
    mlp: bool = True
    attention: bool = True
    decoder: bool = False


_PRE = ("input_layernorm", "post_attention_layernorm", "norm")
_POST = ("post_attention_layernorm", "post_feedforward_layernorm", "norm")
_HEADS = ("q_norm", "k_norm")
_GEMMA = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

_LLAMA = Fusions(_PRE, decoder=True)
_QWEN3 = Fusions((*_PRE, *_HEADS), decoder=True)

FAMILIES: dict[str, Fusions] = {
    **dict.fromkeys(
        ("cwm", "llama", "ministral", "mistral", "mixtral", "qwen2", "qwen2_moe", "seed_oss", "solar_open"), _LLAMA
    ),
    **dict.fromkeys(("dots1", "qwen3", "qwen3_moe"), _QWEN3),
    # Rotated in other ways, or not in all layers; with latent keys; or norms behind the rotation or over all heads.
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "helium", "ministral3"),
        Fusions(_PRE, attention=False, decoder=True),
    ),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe", "olmoe", "smollm3"), Fusions(_PRE, attention=False, decoder=True)
    ),
    "arcee": Fusions(_PRE, mlp=False, decoder=True),
    # Residuals of other forms.
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), Fusions(_PRE)),
    "bitnet": Fusions(_PRE, mlp=False, attention=False),
    **dict.fromkeys(("glm", "glm4", "phi3"), Fusions(_PRE, mlp=False, attention=False)),
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), Fusions(_POST, attention=False)),
    "gemma": Fusions(_PRE, norms_add_one=True, decoder=True),
    "gemma2": Fusions((*_GEMMA, "norm"), norms_add_one=True),
    "gemma3_text": Fusions((*_GEMMA, *_HEADS, "norm"), norms_add_one=True),
    "vaultgemma": Fusions(("input_layernorm", "pre_feedforward_layernorm", "norm"), norms_add_one=True),
}
"""By the model type of transformers."""
