//! The names of a model's tensors, with their shapes: Hugging Face's of the Llama family, used here for every family.

use crate::config::{Architecture, ModelConfig};

/// The prefix of a layer's tensors.
pub(crate) fn layer(number: usize) -> String {
    format!("model.layers.{number}")
}

/// Every tensor of the model, with its shape, in a fixed order.
pub(crate) fn wanted(config: &ModelConfig) -> Vec<(String, Vec<i64>)> {
    let mut list = List { out: Vec::new(), norm_bias: config.architecture == Architecture::Gpt2 };
    let (width, ffn) = (config.width, config.ffn);
    let (query, key) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    list.push("model.embed_tokens.weight", &[config.vocab, width]);
    if config.rope.is_none() {
        list.push("model.embed_positions.weight", &[config.context, width]);
    }
    for number in 0..config.layers {
        let at = layer(number);
        list.norm(&format!("{at}.input_layernorm"), width);
        list.linear(&format!("{at}.self_attn.q_proj"), query, width, config.qkv_bias);
        list.linear(&format!("{at}.self_attn.k_proj"), key, width, config.qkv_bias);
        list.linear(&format!("{at}.self_attn.v_proj"), key, width, config.qkv_bias);
        list.linear(&format!("{at}.self_attn.o_proj"), width, query, config.output_bias);
        list.norm(&format!("{at}.post_attention_layernorm"), width);
        if let Some(moe) = &config.moe {
            list.push(&format!("{at}.block_sparse_moe.gate.weight"), &[moe.experts as i64, width]);
            for expert in 0..moe.experts {
                let at = format!("{at}.block_sparse_moe.experts.{expert}");
                list.push(&format!("{at}.w1.weight"), &[ffn, width]);
                list.push(&format!("{at}.w2.weight"), &[width, ffn]);
                list.push(&format!("{at}.w3.weight"), &[ffn, width]);
            }
        } else {
            if config.architecture != Architecture::Gpt2 {
                list.linear(&format!("{at}.mlp.gate_proj"), ffn, width, config.ffn_bias);
            }
            list.linear(&format!("{at}.mlp.up_proj"), ffn, width, config.ffn_bias);
            list.linear(&format!("{at}.mlp.down_proj"), width, ffn, config.ffn_bias);
        }
    }
    list.norm("model.norm", width);
    if !config.tied {
        list.push("lm_head.weight", &[config.vocab, width]);
    }
    list.out
}

struct List {
    out: Vec<(String, Vec<i64>)>,
    norm_bias: bool,
}

impl List {
    fn push(&mut self, name: &str, shape: &[i64]) {
        self.out.push((name.to_owned(), shape.to_vec()));
    }

    fn linear(&mut self, name: &str, out: i64, inner: i64, bias: bool) {
        self.push(&format!("{name}.weight"), &[out, inner]);
        if bias {
            self.push(&format!("{name}.bias"), &[out]);
        }
    }

    fn norm(&mut self, name: &str, width: i64) {
        self.push(&format!("{name}.weight"), &[width]);
        if self.norm_bias {
            self.push(&format!("{name}.bias"), &[width]);
        }
    }
}
