//! The reference checkpoint: its configuration, its tokens, its logits, by the specification's golden values.

mod common;

use lm::config::{Architecture, Rope};
use lm::gguf::{Gguf, Weights};
use lm::model::{Model, Pass};
use lm::template::Message;
use lm::tokenizer::Tokenizer;
use tensor::tch::{Device, Kind, Tensor, no_grad_guard};

const SENTENCE: &str = "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the \
    engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889.";

fn open() -> Option<Gguf> {
    common::smollm2().map(|path| Gguf::open(&path).unwrap())
}

fn tokenizer() -> Option<Tokenizer> {
    open().map(|file| file.tokenizer().unwrap())
}

#[test]
fn the_configuration_is_the_papers() {
    let Some(mut file) = open() else { return };
    let config = file.config().unwrap();
    assert_eq!(config.architecture, Architecture::Llama);
    let sizes = (config.layers, config.width, config.heads, config.kv_heads, config.head_dim, config.ffn);
    assert_eq!(sizes, (30, 576, 9, 3, 64, 1536));
    assert_eq!((config.vocab, config.context, config.tied), (49_152, 8192, true));
    assert_eq!(config.rope, Some(Rope { theta: 1e5, scaling: None }));
    // 1e-5 as f32.
    assert!((config.norm_epsilon - 1e-5).abs() < 1e-12);
    assert_eq!((config.bos, config.eos), (Some(1), vec![2]));
    assert!(!config.qkv_bias && !config.output_bias && !config.ffn_bias && config.moe.is_none());
}

#[test]
fn texts_have_the_golden_tokens_and_come_back() {
    let Some(tokenizer) = tokenizer() else { return };
    assert_eq!(tokenizer.vocab(), 49_152);
    assert_eq!(tokenizer.special().collect::<Vec<_>>(), (0..17).collect::<Vec<_>>());
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    assert_eq!((tokenizer.token(2), tokenizer.id("<|endoftext|>")), (Some("<|im_end|>"), Some(0)));
    let golden: [(&str, &[u32]); 6] = [
        ("Hello, world!", &[19556, 28, 905, 17]),
        ("  two spaces\n\nnewline\ttab", &[216, 827, 5600, 198, 198, 28160, 197, 15999]),
        ("naïve café – 東京 🙂", &[3546, 46494, 37366, 816, 17097, 247, 126, 16736, 122, 47526]),
        ("I'll don't we've", &[57, 3060, 1326, 982, 392, 3543]),
        ("<|im_start|>user\nHi<|im_end|>\n", &[1, 4093, 198, 26843, 2, 198]),
        ("Once upon a time", &[6403, 1980, 253, 655]),
    ];
    for (text, ids) in golden {
        for add_special in [false, true] {
            assert_eq!(tokenizer.encode(text, add_special).unwrap(), ids, "{text}");
        }
        assert_eq!(tokenizer.decode(ids, false).unwrap(), text);
        let mut stream = tokenizer.decode_stream(false);
        let pieces: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        assert_eq!(pieces + &stream.finish().unwrap(), text);
    }
    assert_eq!(tokenizer.decode(&[1, 4093, 198, 26843, 2, 198], true).unwrap(), "user\nHi\n");
    assert_eq!(tokenizer.first_difference(&tokenizer), None);
}

#[test]
fn the_chat_template_writes_chatml_with_a_system_prompt_of_its_own() {
    let Some(file) = open() else { return };
    let tokenizer = file.tokenizer().unwrap();
    let template = file.template(&tokenizer).unwrap().unwrap();
    let hi = Message::user("Hi");
    assert_eq!(
        template.render(std::slice::from_ref(&hi), true).unwrap(),
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let talk = [Message::new("system", "Be brief."), hi, Message::new("assistant", "Hello.")];
    assert_eq!(
        template.render(&talk, false).unwrap(),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    );
    assert_eq!(template.end_token(&tokenizer), Some(2));
}

#[test]
fn the_sentence_has_the_golden_likelihood_and_logits() {
    let Some(mut file) = open() else { return };
    let ids: Vec<i64> = file.tokenizer().unwrap().encode(SENTENCE, false).unwrap().into_iter().map(i64::from).collect();
    assert_eq!(ids.len(), 52);
    let _no_grad = no_grad_guard();
    let model = Model::from_gguf(&mut file, Weights::Dense, Kind::Float, Device::Cpu).unwrap();
    let ids = Tensor::from_slice(&ids).view([1, -1]);
    let logits = model.logits(&ids, &mut Pass::default()).unwrap();
    let loss = logits.squeeze_dim(0).narrow(0, 0, 51).cross_entropy_for_logits(&ids.view([-1]).narrow(0, 1, 51));
    let loss = loss.double_value(&[]);
    assert!((loss - 1.83366).abs() < 2e-4, "{loss}");

    let last = logits.get(0).get(51);
    let (values, tokens) = last.topk(5, 0, true, true);
    assert_eq!(Vec::<i64>::try_from(tokens).unwrap(), [378, 657, 198, 2, 414]);
    let values = Vec::<f64>::try_from(values.to_kind(Kind::Double)).unwrap();
    for (got, expected) in values.iter().zip([15.678, 14.815, 14.687, 13.868, 13.555]) {
        assert!((got - expected).abs() < 2e-3, "{values:?}");
    }
    assert!((last.logsumexp([0], false).double_value(&[]) - 16.838).abs() < 2e-3);
}
