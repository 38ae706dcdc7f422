"""Makes the tiny random checkpoints of crates/lm/tests/data with transformers, with the logits that it computes for them.

    python lm_checkpoints.py FOLDER

For each family: FOLDER/<name>/{config.json, model.safetensors} as `save_pretrained` writes them, and
FOLDER/<name>/expected.safetensors with `ids` [batch, time], `logits` [batch, time, vocab], and for a left-padded batch
`padded_ids`, `padded_mask`, `padded_logits`. Weights are larger than transformers' own start, so that attention isn't flat.
"""

import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

VOCAB = 61
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)

FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-untied-bias": lambda: transformers.LlamaConfig(
        **SMALL, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, head_dim=16
    ),
    "llama-linear": lambda: transformers.LlamaConfig(**SMALL, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama-dynamic": lambda: transformers.LlamaConfig(
        **{**SMALL, "max_position_embeddings": 8}, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    ),
    "llama3": lambda: transformers.LlamaConfig(
        **SMALL,
        rope_theta=500.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
}


def randomize(model: torch.nn.Module) -> None:
    """Norms and biases start at 1 and 0, where a mistake in them wouldn't show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))


def main(folder: str) -> None:
    for number, (name, config) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float32).eval()
        randomize(model)
        place = pathlib.Path(folder) / name
        shard = {"max_shard_size": "20KB"} if name == "llama-untied-bias" else {}
        model.save_pretrained(place, **shard)
        (place / "generation_config.json").unlink(missing_ok=True)
        time = 14
        ids = torch.randint(3, VOCAB, (2, time))
        padded = torch.randint(3, VOCAB, (3, time))
        mask = torch.ones_like(padded)
        for row, padding in enumerate([0, 5, 11]):
            mask[row, :padding] = 0
            padded[row, :padding] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids).logits
            of_padded = model(padded, attention_mask=mask, position_ids=positions).logits
        expected = {
            "ids": ids,
            "logits": logits.contiguous(),
            "padded_ids": padded,
            "padded_mask": mask,
            "padded_logits": of_padded.contiguous(),
        }
        save_file(expected, place / "expected.safetensors")
        print(name, sorted(p.name for p in place.iterdir()), float(logits.abs().max()))


if __name__ == "__main__":
    main(sys.argv[1])
