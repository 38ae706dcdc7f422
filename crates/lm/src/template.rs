//! Chat templates: messages to the text that a model was trained to answer.

use crate::load::read_json;
use crate::tokenizer::{Tokenizer, token_text};
use crate::{Error, Result};
use minijinja::value::{Value as Jinja, ValueKind};
use minijinja::{Environment, ErrorKind, Output, State, UndefinedBehavior, context};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }
}

/// A day, for templates that write one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Date {
    /// Year, such as 2026.
    pub year: u16,
    /// Month, from 1.
    pub month: u8,
    /// Day of the month, from 1.
    pub day: u8,
}

/// A checkpoint's chat template, in the language Jinja.
///
/// Templates come with checkpoints, from anywhere: the steps that one may take and the text that it may make are bounded, so that an
/// endless loop is an error. (One step isn't: to compare or to join as text lists of lists of lists that share their items.) They have no
/// access to files, and not to the clock either: the same messages give the same text. Where a template wants a date
/// (`strftime_now`), give it with [`with_date`](Self::with_date); without, the function isn't there, and templates use the date that they
/// hold.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

const NAME: &str = "chat";
/// Work that a template may do, in minijinja's unit (an instruction, or 64 bytes of text), beside one unit for each byte of the
/// messages. Real templates need a few hundred a message.
const FUEL: u64 = 1_000_000;
/// Far above any template.
const MOST_BYTES: usize = 4 << 20;

impl ChatTemplate {
    /// A template with the texts of the tokens that begin and end a text (empty where there is none).
    ///
    /// # Errors
    /// [`Error::Template`] if it can't be parsed.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self> {
        if source.len() > MOST_BYTES {
            return Err(Error::Template { reason: format!("it is longer than {MOST_BYTES} bytes") });
        }
        let mut environment = Environment::new();
        // As Hugging Face's library sets Jinja up.
        let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| report(&e))?);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_formatter(write_value);
        // Else errors would carry the values of all variables, in full.
        environment.set_debug(false);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, without_generation_marks(source)).map_err(|e| report(&e))?;
        Ok(Self { environment, source: source.to_owned(), bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// Reads a checkpoint's folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` (of several, the one
    /// called `default`). None if it has neither.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`]; [`Error::Template`] if it can't be parsed.
    pub fn from_hugging_face(folder: &Path) -> Result<Option<Self>> {
        let config = folder.join("tokenizer_config.json");
        let config = if config.exists() { read_json(&config)? } else { Value::Null };
        let file = folder.join("chat_template.jinja");
        let source = if file.exists() {
            Some(std::fs::read_to_string(&file).map_err(|source| Error::Io { path: file, source })?)
        } else {
            default_of(&config)?
        };
        let mark = |field| token_text(&config, field).unwrap_or("");
        source.map(|source| Self::new(&source, mark("bos_token"), mark("eos_token"))).transpose()
    }

    /// With a date for templates that write today's.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a month or day that no year has.
    pub fn with_date(mut self, date: Date) -> Result<Self> {
        if !(1..=12).contains(&date.month) || !(1..=31).contains(&date.day) {
            return Err(Error::invalid("date", "a month from 1 to 12 and a day from 1 to 31", format!("{date:?}")));
        }
        self.environment.add_function("strftime_now", move |format: &str| strftime(format, date));
        Ok(self)
    }

    /// The template as the checkpoint has it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a conversation; with `add_generation_prompt`, up to where the model's answer begins. Encode it without adding special
    /// tokens: the template writes them.
    ///
    /// # Errors
    /// [`Error::Template`] if the template refuses the messages, is wrong, or takes too long.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let length: usize = messages.iter().map(|m| m.role.len() + m.content.len()).sum();
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(FUEL.saturating_add(length as u64)));
        let template = environment.get_template(NAME).map_err(|e| report(&e))?;
        let message = |m: &Message| context! { role => m.role.as_str(), content => m.content.as_str() };
        let values = context! {
            messages => messages.iter().map(message).collect::<Vec<_>>(),
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        template.render(values).map_err(|e| report(&e))
    }

    /// The special token that the template writes after an answer, such as `<|im_end|>`, if it does: generation should stop there.
    pub fn end_token(&self, tokenizer: &Tokenizer) -> Option<u32> {
        // A text that no template contains.
        const ANSWER: &str = "thisistheanswer";
        let text = self.render(&[Message::user("question"), Message::new("assistant", ANSWER)], false).ok()?;
        let (_, after) = text.rsplit_once(ANSWER)?;
        let first = *tokenizer.encode(after.trim_start(), false).ok()?.first()?;
        tokenizer.is_special(first).then_some(first)
    }
}

/// The template of a `tokenizer_config.json`: a string, or a list of named ones.
fn default_of(config: &Value) -> Result<Option<String>> {
    let bad =
        |reason: &str| Err(Error::Template { reason: format!("`chat_template` of tokenizer_config.json {reason}") });
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(named)) => {
            let default = named.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
            match default.and_then(|t| t.get("template")).and_then(Value::as_str) {
                Some(source) => Ok(Some(source.to_owned())),
                None => bad("is a list without one called `default`"),
            }
        }
        Some(_) => bad("is neither a string nor a list"),
    }
}

/// Hugging Face's blocks that mark what the model said change no text, but aren't Jinja.
fn without_generation_marks(source: &str) -> String {
    let mut out = source.to_owned();
    for (mark, same) in [("generation", "if true"), ("endgeneration", "endif")] {
        for (open, close) in [("{%", "%}"), ("{%-", "%}"), ("{%", "-%}"), ("{%-", "-%}")] {
            out = out.replace(&format!("{open} {mark} {close}"), &format!("{open} {same} {close}"));
        }
    }
    out
}

fn report(error: &minijinja::Error) -> Error {
    let reason = match error.kind() {
        ErrorKind::OutOfFuel => "it does more than a template needs to: it was stopped".to_owned(),
        _ => error.to_string(),
    };
    Error::Template { reason }
}

fn raise_exception(message: &str) -> std::result::Result<Jinja, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// What `{{ … }}` writes: as Python does, but no lists and maps, which it writes in a way of its own (and whose text may be endless).
fn write_value(out: &mut Output, state: &mut State, value: &Jinja) -> std::result::Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::None => Ok(out.write_str("None")?),
        ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => Err(minijinja::Error::new(
            ErrorKind::InvalidOperation,
            "a list or a map is written into the text; the filter tojson would do it",
        )),
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// JSON as Python writes it: with spaces after commas and colons, nothing escaped for HTML. minijinja's own filter escapes, and has
/// no bound for a list of lists that share their items.
#[allow(clippy::needless_pass_by_value)] // as minijinja wants it
fn to_json(value: &Jinja, options: minijinja::value::Kwargs) -> std::result::Result<Jinja, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let mut out = String::new();
    // Nobody indents by more, and it would let a template make long texts with little work.
    write_json(value, indent.map(|n| n.min(16)), 0, &mut out)?;
    Ok(Jinja::from_safe_string(out))
}

fn write_json(
    value: &Jinja,
    indent: Option<usize>,
    depth: usize,
    out: &mut String,
) -> std::result::Result<(), minijinja::Error> {
    const MOST_DEPTH: usize = 64;
    let bad = |why: &str| Err(minijinja::Error::new(ErrorKind::BadSerialization, format!("tojson: {why}")));
    if depth > MOST_DEPTH || out.len() > MOST_BYTES {
        return bad("the value is too large");
    }
    let comma = |out: &mut String, first: bool, depth: usize| match indent {
        Some(n) => {
            out.push_str(if first { "\n" } else { ",\n" });
            out.push_str(&" ".repeat(n * depth));
        }
        None if !first => out.push_str(", "),
        None => {}
    };
    let text = |value: &str| Value::from(value).to_string();
    let simple = match value.kind() {
        ValueKind::Map | ValueKind::Seq | ValueKind::Iterable => None,
        ValueKind::Undefined | ValueKind::None => Some("null".to_owned()),
        ValueKind::String => Some(text(value.as_str().unwrap_or(""))),
        ValueKind::Bool | ValueKind::Number => Some(value.to_string()),
        _ => return bad("the value has no form in JSON"),
    };
    if let Some(simple) = simple {
        out.push_str(&simple);
        return Ok(());
    }
    let (open, close) = if value.kind() == ValueKind::Map { ('{', '}') } else { ('[', ']') };
    out.push(open);
    let mut first = true;
    for item in value.try_iter()? {
        comma(out, first, depth + 1);
        first = false;
        if open == '{' {
            out.push_str(&text(&item.to_string()));
            out.push_str(": ");
            write_json(&value.get_item(&item)?, indent, depth + 1, out)?;
        } else {
            write_json(&item, indent, depth + 1, out)?;
        }
    }
    if !first && indent.is_some() {
        comma(out, true, depth);
    }
    out.push(close);
    Ok(())
}

/// The parts of a date that templates write.
fn strftime(format: &str, date: Date) -> std::result::Result<String, minijinja::Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    // Checked by `with_date`.
    let month = MONTHS[usize::from(date.month - 1)];
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let part = match rest.next() {
            Some('Y') => date.year.to_string(),
            Some('y') => format!("{:02}", date.year % 100),
            Some('m') => format!("{:02}", date.month),
            Some('d') => format!("{:02}", date.day),
            Some('B') => month.to_owned(),
            Some('b') => month[..3].to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let part = other.map(String::from).unwrap_or_default();
                let message = format!("`%{part}` of strftime_now isn't known; known are %Y %y %m %d %B %b %%");
                return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message));
            }
        };
        out.push_str(&part);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

    fn render(source: &str) -> Result<String> {
        ChatTemplate::new(source, "<s>", "</s>")?.render(&[Message::user("Hi <b>&")], true)
    }

    fn refusal(source: &str) -> String {
        render(source).unwrap_err().to_string()
    }

    #[test]
    fn chatml_is_rendered_with_and_without_a_system_prompt() {
        let template = ChatTemplate::new(CHATML, "", "").unwrap();
        let hi = Message::user("Hi");
        assert_eq!(
            template.render(std::slice::from_ref(&hi), true).unwrap(),
            "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        );
        assert_eq!(
            template.render(&[Message::new("system", "Be short."), hi], false).unwrap(),
            "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        );
    }

    #[test]
    fn what_real_templates_use_is_there() {
        for (source, text) in [
            ("{{ bos_token }}{{ messages[0].content | trim }}{{ eos_token }}", "<s>Hi <b>&</s>"),
            ("{{ missing }}{% if tools %}x{% endif %}{% if tools is defined %}y{% endif %}", ""),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "1",
            ),
            ("{{ messages[0]['content'].split(' ')[0].lower() }}", "hi"),
            ("{% for m in messages %}\n  {% if true %}\na\n  {% endif %}\n{% endfor %}", "a\n"),
            (
                "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
                "02",
            ),
            ("{{ {'a': [1, '<é>']} | tojson }}", "{\"a\": [1, \"<é>\"]}"),
            ("{{ none }}{{ true }}{{ 1.5 }}{{ 7 // 2 }}", "NoneTrue1.53"),
            ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
            ("{% generation %}{{ messages[0].role }}{%- endgeneration -%}", "user"),
            ("{{ messages[1:] | length }}{{ 'a' if strftime_now is defined else 'b' }}", "0b"),
        ] {
            assert_eq!(render(source).unwrap(), text, "{source}");
        }
    }

    #[test]
    fn a_template_can_refuse_messages_in_its_own_words() {
        let message = refusal("{{ raise_exception('Roles must alternate.') }}");
        assert!(message.contains("Roles must alternate."), "{message}");
    }

    #[test]
    fn malformed_templates_are_errors() {
        assert!(refusal("{% for m in messages %}").contains("The chat template reports"));
        assert!(refusal("{{ messages[0].content.nonsense() }}").contains("nonsense"));
        assert!(refusal("{% include 'other' %}").contains("other"));
        assert!(refusal(&" ".repeat(MOST_BYTES + 1)).contains("longer"));
        assert!(refusal("{{ [1] | tojson(indent=2, x=1) }}").contains('x'));
    }

    fn shared(end: &str) -> String {
        let double = "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}";
        format!("{{% set ns = namespace(a=[1]) %}}{double}{end}")
    }

    #[test]
    fn hostile_templates_are_stopped() {
        for source in [
            "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ 'x' * 1000000000000 }}",
            "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "{{ '%1000000000s' | format('x') }}",
            "{{ range(1000000000000) | list | length }}",
            // Lists that share their items: small in memory, endless when written out.
            &shared("{{ ns.a | tojson }}"),
            &shared("{{ ns.a }}"),
        ] {
            assert!(render(source).is_err(), "{source}");
        }
        let nested = format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000));
        assert!(render(&nested).is_err());
        let nested = format!("{}{}", "{% if true %}".repeat(10_000), "{% endif %}".repeat(10_000));
        let _ = render(&nested);
    }

    #[test]
    fn long_messages_are_no_reason_to_stop() {
        let template = ChatTemplate::new(CHATML, "", "").unwrap();
        let long = Message::user("word ".repeat(1 << 20));
        assert!(template.render(&[long.clone(), long], true).unwrap().len() > 10 << 20);
        let many = vec![Message::user("x"); 10_000];
        assert!(template.render(&many, true).is_ok());
    }

    #[test]
    fn a_date_is_given_or_not_there() {
        let template = ChatTemplate::new("{{ strftime_now('%d %b %Y, %B %m %y %%') }}", "", "").unwrap();
        assert!(template.render(&[], false).is_err());
        let date = Date { year: 2026, month: 7, day: 4 };
        assert_eq!(template.with_date(date).unwrap().render(&[], false).unwrap(), "04 Jul 2026, July 07 26 %");
        let template = ChatTemplate::new("{{ strftime_now('%H') }}", "", "").unwrap();
        assert!(template.with_date(date).unwrap().render(&[], false).is_err());
        let template = ChatTemplate::new("", "", "").unwrap();
        assert!(template.with_date(Date { month: 13, ..date }).is_err());
    }

    #[test]
    fn of_several_templates_the_default_is_taken() {
        let named = |name: &str| serde_json::json!({ "chat_template": [{ "name": name, "template": "t" }] });
        assert_eq!(default_of(&named("default")).unwrap(), Some("t".to_owned()));
        assert!(default_of(&named("rag")).is_err());
        assert!(default_of(&serde_json::json!({ "chat_template": 3 })).is_err());
        assert_eq!(default_of(&Value::Null).unwrap(), None);
    }
}
