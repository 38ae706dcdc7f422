//! What GGUF calls the tensors, and how a tensor of the model is cut out of one of the file.

use crate::config::ModelConfig;

/// A tensor of the model within one of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// Name in the file.
    pub(super) name: String,
    /// Which of equal parts of the first dimension it is, and of how many: experts, and GPT-2's q, k and v.
    pub(super) part: (usize, usize),
    /// Whether its rows are in the order for RoPE on neighbouring pairs.
    pub(super) permuted: bool,
}

/// Parts of a layer: Hugging Face's name of the Llama family, GGUF's name.
const LAYER: [(&str, &str); 9] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

const OUTER: [(&str, &str); 4] = [
    ("model.embed_tokens", "token_embd"),
    ("model.embed_positions", "position_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
];

/// Mixtral's maps of an expert.
const EXPERT: [(&str, &str); 3] = [("w1", "ffn_gate"), ("w2", "ffn_down"), ("w3", "ffn_up")];

/// The names of one file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    /// GPT-2 has q, k and v in one tensor.
    fused: bool,
    /// The converter turned the rows of q and k round for the architecture `llama`, and for it only. Getting this wrong gives
    /// fluent text of a much worse model.
    permuted: bool,
    /// Number of experts if they are stacked in one tensor.
    stacked: Option<usize>,
}

impl Names {
    /// For a file of `architecture` that has a tensor where `has` says so.
    pub(super) fn new(architecture: &str, config: &ModelConfig, has: impl Fn(&str) -> bool) -> Self {
        let stacked = config.moe.as_ref().map(|moe| moe.experts).filter(|_| has("blk.0.ffn_gate_exps.weight"));
        Self { fused: architecture == "gpt2", permuted: architecture == "llama", stacked }
    }

    /// Where the file has the model's tensor `name`; none for a name that isn't one.
    pub(super) fn place(&self, name: &str) -> Option<Place> {
        let (module, kind) = name.rsplit_once('.')?; // kind: weight, bias
        if let Some((_, theirs)) = OUTER.iter().find(|(ours, _)| *ours == module) {
            return Some(whole(format!("{theirs}.{kind}")));
        }
        let (layer, part) = module.strip_prefix("model.layers.")?.split_once('.')?;
        if let Some(part) = part.strip_prefix("block_sparse_moe.") {
            return self.expert(layer, part, kind);
        }
        let third = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].iter().position(|p| *p == part);
        if let Some(third) = third.filter(|_| self.fused) {
            return Some(Place { name: format!("blk.{layer}.attn_qkv.{kind}"), part: (third, 3), permuted: false });
        }
        let (_, theirs) = LAYER.iter().find(|(ours, _)| *ours == part)?;
        let permuted = self.permuted && matches!(third, Some(0 | 1));
        Some(Place { name: format!("blk.{layer}.{theirs}.{kind}"), part: (0, 1), permuted })
    }

    fn expert(&self, layer: &str, part: &str, kind: &str) -> Option<Place> {
        if part == "gate" {
            return Some(whole(format!("blk.{layer}.ffn_gate_inp.{kind}")));
        }
        let (number, map) = part.strip_prefix("experts.")?.split_once('.')?;
        let (_, theirs) = EXPERT.iter().find(|(ours, _)| *ours == map)?;
        let number: usize = number.parse().ok()?;
        Some(match self.stacked {
            Some(experts) => {
                Place { name: format!("blk.{layer}.{theirs}_exps.{kind}"), part: (number, experts), permuted: false }
            }
            None => whole(format!("blk.{layer}.{theirs}.{number}.{kind}")),
        })
    }
}

/// Whether a tensor that the model doesn't need may be in a file: tables that are computed here.
pub(super) fn may_be_ignored(name: &str) -> bool {
    name == super::config::ROPE_DIVISORS || name.ends_with(".attn_rot_embd") || name.ends_with(".rope_freqs.weight")
}

fn whole(name: String) -> Place {
    Place { name, part: (0, 1), permuted: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::names::wanted;
    use std::collections::BTreeSet;

    fn place(names: &Names, name: &str) -> (String, (usize, usize), bool) {
        let place = names.place(name).unwrap();
        (place.name, place.part, place.permuted)
    }

    #[test]
    fn names_lead_to_the_files_names() {
        let config = ModelConfig::llama(10, 8, 2, 2, 1, 16);
        let llama = Names::new("llama", &config, |_| false);
        let qwen2 = Names::new("qwen2", &config, |_| false);
        let gpt2 = Names::new("gpt2", &config, |_| false);
        let one = (0, 1);
        for (names, ours, expected) in [
            (&llama, "model.embed_tokens.weight", ("token_embd.weight", one, false)),
            (&llama, "model.norm.weight", ("output_norm.weight", one, false)),
            (&llama, "lm_head.weight", ("output.weight", one, false)),
            (&llama, "model.layers.0.input_layernorm.weight", ("blk.0.attn_norm.weight", one, false)),
            (&llama, "model.layers.12.post_attention_layernorm.weight", ("blk.12.ffn_norm.weight", one, false)),
            (&llama, "model.layers.1.self_attn.q_proj.weight", ("blk.1.attn_q.weight", one, true)),
            (&llama, "model.layers.1.self_attn.k_proj.bias", ("blk.1.attn_k.bias", one, true)),
            (&llama, "model.layers.1.self_attn.v_proj.weight", ("blk.1.attn_v.weight", one, false)),
            (&qwen2, "model.layers.1.self_attn.q_proj.weight", ("blk.1.attn_q.weight", one, false)),
            (&llama, "model.layers.1.mlp.gate_proj.weight", ("blk.1.ffn_gate.weight", one, false)),
            (&gpt2, "model.embed_positions.weight", ("position_embd.weight", one, false)),
            (&gpt2, "model.layers.7.self_attn.k_proj.weight", ("blk.7.attn_qkv.weight", (1, 3), false)),
            (&gpt2, "model.layers.7.self_attn.v_proj.bias", ("blk.7.attn_qkv.bias", (2, 3), false)),
            (&gpt2, "model.layers.7.mlp.up_proj.bias", ("blk.7.ffn_up.bias", one, false)),
        ] {
            let (name, part, permuted) = expected;
            assert_eq!(place(names, ours), (name.to_owned(), part, permuted), "{ours}");
        }
        for unknown in ["weight", "model.layers.0.mlp.weight", "model.layers.x", "transformer.wte.weight"] {
            assert_eq!(llama.place(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn experts_are_parts_of_a_stack_or_tensors_of_their_own() {
        let config = ModelConfig::llama(10, 8, 2, 2, 1, 16).mixtral(4, 2);
        let stacked = Names::new("llama", &config, |_| true);
        let apart = Names::new("llama", &config, |_| false);
        let w2 = "model.layers.1.block_sparse_moe.experts.3.w2.weight";
        assert_eq!(place(&stacked, w2), ("blk.1.ffn_down_exps.weight".to_owned(), (3, 4), false));
        assert_eq!(place(&apart, w2), ("blk.1.ffn_down.3.weight".to_owned(), (0, 1), false));
        let gate = "model.layers.1.block_sparse_moe.gate.weight";
        assert_eq!(place(&stacked, gate).0, "blk.1.ffn_gate_inp.weight");
    }

    #[test]
    fn every_tensor_of_every_family_has_a_place_of_its_own() {
        let llama = ModelConfig { tied: false, qkv_bias: true, ..ModelConfig::llama(10, 8, 2, 2, 1, 16) };
        let mut gpt2 = ModelConfig { rope: None, ffn_bias: true, output_bias: true, qkv_bias: true, ..llama.clone() };
        gpt2.architecture = crate::config::Architecture::Gpt2;
        for (architecture, config) in [("llama", &llama), ("llama", &llama.clone().mixtral(3, 2)), ("gpt2", &gpt2)] {
            for has in [true, false] {
                let names = Names::new(architecture, config, |_| has);
                let wanted = wanted(config);
                let places: BTreeSet<_> = wanted.iter().map(|(name, _)| place(&names, name)).collect();
                assert_eq!(places.len(), wanted.len());
            }
        }
    }
}
