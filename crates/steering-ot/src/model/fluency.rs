//! What a continuation costs in fluency.

use crate::Result;
use lm::model::Model;
use lm::train::{Decoder, Layout, Policy};
use tensor::tch::{Kind, no_grad_guard};

/// Texts that are scored in one pass: the logits of a batch take `batch × time × vocab` numbers.
const PART: usize = 16;

/// Mean negative log-likelihood of each continuation's tokens after its prompt, nats a token, under the model as it is: without
/// hooks. Large values mean text that the model finds unlikely, which for steered text is the price of steering.
///
/// # Errors
/// As [`Layout::batch`] (empty prompts or continuations), and what the model reports.
pub fn continuation_nll(model: &Model, texts: &[(&[u32], &[u32])]) -> Result<Vec<f64>> {
    let _guard = no_grad_guard();
    let mut all = Vec::with_capacity(texts.len());
    for (part, chunk) in texts.chunks(PART).enumerate() {
        let numbered: Vec<(usize, &[u32], &[u32])> =
            chunk.iter().enumerate().map(|(i, (prompt, text))| (part * PART + i, *prompt, *text)).collect();
        let batch = Layout::default().batch(&numbered)?;
        let log_probs = Decoder::new(model, None).log_probs(&batch)?; // (texts, time − 1)
        let sums = log_probs.f_sum_dim_intlist([1i64].as_slice(), false, Kind::Double)?;
        let sums = Vec::<f64>::try_from(&sums).map_err(lm::Error::from)?;
        all.extend(sums.iter().zip(&batch.tokens).map(|(sum, tokens)| -sum / *tokens as f64));
    }
    Ok(all)
}
