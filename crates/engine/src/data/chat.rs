//! Chat templates: render the messages of a chat to the text format that a model was trained on.

use std::io::Write;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error as TemplateError, ErrorKind, Value as TemplateValue};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use serde_json::{Map, Value, json};

use super::tokens::{special_tokens, token_text};
use crate::error::{Error, Result};
use crate::model::{SynthesizedFiles, open_auxiliary_config, read_auxiliary_text};

/// File with the template.
const FILE: &str = "chat_template.jinja";
const SETTINGS: &str = "tokenizer_config.json";
/// Names of the reasoning of a message. Templates read the first one.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Maximum number of template instructions, since templates are untrusted.
const FUEL: u64 = 10_000_000;

/// A message of a chat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Role of the author: `user`, `system` or `assistant`.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

/// Messages of a data set as JSON, with all keys, and the available tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chat {
    pub messages: Value,
    pub tools: Value,
}

/// A Jinja chat template with the semantics of transformers: `trim_blocks` and `lstrip_blocks` are set,
/// and `raise_exception` is available.
pub struct ChatTemplate {
    text: String,
    /// A separate template for chats with tools, if there is one.
    with_tools: Option<String>,
    /// Special tokens by their names in templates, such as `bos_token`.
    tokens: Map<String, Value>,
    folder: String,
}

impl ChatTemplate {
    /// Opens the template of a folder, or of the files synthesized from a weight file:
    /// `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`.
    pub fn open(folder: &Path, synthesized: &SynthesizedFiles) -> Result<ChatTemplate> {
        let settings = open_auxiliary_config(folder, synthesized, SETTINGS)?;
        let own = read_auxiliary_text(folder, synthesized, FILE)?;
        let stored = |name: &str| match settings.get("chat_template")? {
            Value::String(text) => Some(text.clone()).filter(|_| name == "default"),
            Value::Array(all) => {
                let named = all.iter().find(|template| template.get("name").and_then(Value::as_str) == Some(name))?;
                named.get("template")?.as_str().map(str::to_owned)
            }
            _ => None,
        };
        let with_tools = stored("tool_use").filter(|_| own.is_none()).map(|text| without_generation_blocks(&text));
        let text = own.or_else(|| stored("default")).ok_or_else(|| Error::Unsupported {
            what: format!("{}: a chat without {FILE} and without `chat_template` in {SETTINGS}", folder.display()),
            hint: format!("add {FILE} to the model's folder, or use plain texts instead of chats"),
        })?;
        let tokens = special_tokens(folder, synthesized, settings.values())?;
        let tokens = tokens.iter().filter_map(|(name, value)| Some((name.clone(), json!(token_text(value)?)))).collect();
        Ok(ChatTemplate { text: without_generation_blocks(&text), with_tools, tokens, folder: folder.display().to_string() })
    }

    /// Renders messages followed by the generation prompt. Fails if the template exceeds the instruction
    /// limit or rejects the messages.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        self.render_with(&json!(messages), &Value::Null, true)
    }

    /// Renders a complete chat, without a generation prompt.
    pub(super) fn render_complete(&self, chat: &Chat) -> Result<String> {
        self.render_with(&chat.messages, &chat.tools, false)
    }

    fn render_with(&self, messages: &Value, tools: &Value, add_generation_prompt: bool) -> Result<String> {
        let failed = |e: TemplateError| {
            let uses_date = e.to_string().contains("strftime_now");
            let hint =
                if uses_date { "the template uses the current date, which makes results change from day to day: replace it by a fixed date" } else { "" };
            Error::run(format!("{}: the chat template", self.folder), e, hint)
        };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(failed)?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |reason: String| Err::<TemplateValue, _>(TemplateError::new(ErrorKind::InvalidOperation, reason)));
        environment.add_filter("tojson", |value: TemplateValue, options: Kwargs| {
            let indent: Option<usize> = options.get("indent")?;
            options.assert_all_used()?;
            as_python(&value, indent).map_err(|e| TemplateError::new(ErrorKind::BadSerialization, e.to_string()))
        });
        let mut context = self.tokens.clone();
        // transformers always passes all of these.
        let variables = [
            ("messages", normalize_messages(messages)),
            ("tools", tools.clone()),
            ("documents", Value::Null),
            ("add_generation_prompt", json!(add_generation_prompt)),
        ];
        context.extend(variables.map(|(name, value)| (name.to_owned(), value)));
        let text = self.with_tools.as_ref().filter(|_| !tools.is_null()).unwrap_or(&self.text);
        environment.render_str(text, Serde(context)).map_err(failed)
    }
}

/// The messages as transformers 5 passes them to a template: without keys whose value is null, and with the
/// reasoning of a message as `reasoning_content` and, for gpt-oss, as `thinking`.
fn normalize_messages(messages: &Value) -> Value {
    let normalize = |message: &Value| {
        let Value::Object(message) = message else { return message.clone() };
        let stored = message.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.clone(), value.clone()));
        let reasoning = REASONING.iter().find_map(|key| message.get(*key).filter(|value| !value.is_null()));
        let Some(reasoning) = reasoning else { return Value::Object(stored.collect()) };
        // A `thinking` of the message itself takes precedence.
        let mut normalized = Map::from_iter([("thinking".to_owned(), reasoning.clone())]);
        normalized.extend(stored);
        normalized.insert("reasoning_content".to_owned(), reasoning.clone());
        Value::Object(normalized)
    };
    match messages {
        Value::Array(messages) => messages.iter().map(normalize).collect(),
        other => other.clone(),
    }
}

/// Replaces `{% generation %}` blocks, which mark assistant messages for training in transformers, by
/// unconditional blocks.
fn without_generation_blocks(text: &str) -> String {
    let mut rest = text;
    let mut out = String::with_capacity(text.len());
    while let Some((before, inside, after)) =
        rest.split_once("{%").and_then(|(before, rest)| rest.split_once("%}").map(|(inside, after)| (before, inside, after)))
    {
        let name = inside.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        let inside = match name {
            "generation" => inside.replace(name, "if true"),
            "endgeneration" => inside.replace(name, "endif"),
            _ => inside.to_owned(),
        };
        out.extend([before, "{%", &inside, "%}"]);
        rest = after;
    }
    out + rest
}

/// Serializes JSON like Python's `json.dumps`.
fn as_python(value: &TemplateValue, indent: Option<usize>) -> serde_json::Result<String> {
    struct Spaced;
    impl Formatter for Spaced {
        fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
            if first { Ok(()) } else { writer.write_all(b", ") }
        }

        fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
            if first { Ok(()) } else { writer.write_all(b", ") }
        }

        fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
            writer.write_all(b": ")
        }
    }
    let mut bytes = Vec::new();
    match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced))?,
        Some(width) => {
            let blanks = vec![b' '; width.min(16)];
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(&blanks)))?;
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(settings: &Value) -> Result<String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(SETTINGS), settings.to_string()).unwrap();
        let message = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
        ChatTemplate::open(folder.path(), &SynthesizedFiles::new())?.render(&[message("user", "  Who <b> are you? "), message("assistant", "ä")])
    }

    /// The expected text is the output of `apply_chat_template` of transformers.
    #[test]
    fn messages_are_rendered_as_in_transformers() {
        let template = "{{ bos_token }}{% for message in messages %}\n    {%- if message['role'] == 'user' %}\n[U] {{ message['content'].strip() | tojson }}\n    {% else %}\n[A] {{ message.content }}{{ eos_token }}\n    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n[A]{% endif %}";
        let settings = json!({ "bos_token": { "content": "<s>" }, "eos_token": "</s>", "chat_template": [{ "name": "default", "template": template }] });
        assert_eq!(rendered(&settings).unwrap(), "<s>[U] \"Who <b> are you?\"\n[A] ä</s>\n[A]");
    }

    #[test]
    fn variables_and_generation_blocks_of_transformers_are_supported() {
        let rendered = |template: &str| rendered(&json!({ "chat_template": template })).unwrap();
        assert_eq!(rendered("{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}x"), "x");
        assert_eq!(rendered("{%- generation -%} a {%- endgeneration %}\nb{% generation %}c{% endgeneration %}"), "ab c".replace(' ', ""));
        assert_eq!(rendered("{{ {'a': [1, 'ä'], 'b': none} | tojson }}"), "{\"a\": [1, \"ä\"], \"b\": null}");
        assert_eq!(rendered("{{ {'a': [1]} | tojson(indent=2) }}"), "{\n  \"a\": [\n    1\n  ]\n}");
        let folder = tempfile::tempdir().unwrap();
        let named = json!({ "chat_template": [{ "name": "default", "template": "plain" }, { "name": "tool_use", "template": "{{ tools[0].b }}" }] });
        std::fs::write(folder.path().join(SETTINGS), named.to_string()).unwrap();
        let template = ChatTemplate::open(folder.path(), &SynthesizedFiles::new()).unwrap();
        let render = |tools| template.render_complete(&Chat { messages: json!([]), tools }).unwrap();
        assert_eq!((render(Value::Null).as_str(), render(json!([{ "b": "tool" }])).as_str()), ("plain", "tool"));
        // Special tokens in a separate file, as written by old versions of transformers.
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(SETTINGS), json!({ "chat_template": "{{ bos_token }}{{ eos_token }}", "eos_token": "e" }).to_string()).unwrap();
        std::fs::write(folder.path().join("special_tokens_map.json"), json!({ "bos_token": { "content": "b" }, "eos_token": "other" }).to_string()).unwrap();
        assert_eq!(ChatTemplate::open(folder.path(), &SynthesizedFiles::new()).unwrap().render(&[]).unwrap(), "be");
    }

    /// The expected text is the output of `apply_chat_template` of transformers 5.
    #[test]
    fn null_keys_and_reasoning_are_those_of_transformers() {
        let folder = tempfile::tempdir().unwrap();
        let text = "{% for message in messages %}{{ message | tojson }}{% if message.tool_calls is defined %}T{% endif %}{% if 'name' in message %}N{% endif %}{% endfor %}";
        std::fs::write(folder.path().join(FILE), text).unwrap();
        let template = ChatTemplate::open(folder.path(), &SynthesizedFiles::new()).unwrap();
        for (message, expected) in [
            (r#"{"role": "user", "content": "a", "name": null, "tool_calls": null}"#, r#"{"role": "user", "content": "a"}"#),
            (r#"{"role": "assistant", "content": null, "tool_calls": [{"id": null}]}"#, r#"{"role": "assistant", "tool_calls": [{"id": null}]}T"#),
            (
                r#"{"role": "assistant", "content": "b", "reasoning": "r"}"#,
                r#"{"thinking": "r", "role": "assistant", "content": "b", "reasoning": "r", "reasoning_content": "r"}"#,
            ),
            (
                r#"{"role": "assistant", "thinking": "t", "content": "c", "reasoning": "r"}"#,
                r#"{"thinking": "t", "role": "assistant", "content": "c", "reasoning": "r", "reasoning_content": "t"}"#,
            ),
            (
                r#"{"role": "assistant", "content": "d", "reasoning_content": "rc", "thinking": "t"}"#,
                r#"{"thinking": "t", "role": "assistant", "content": "d", "reasoning_content": "rc"}"#,
            ),
            (
                r#"{"role": "assistant", "content": "e", "reasoning_content": null, "thinking": ""}"#,
                r#"{"thinking": "", "role": "assistant", "content": "e", "reasoning_content": ""}"#,
            ),
        ] {
            let message: Value = serde_json::from_str(message).unwrap();
            let chat = Chat { messages: json!([message]), tools: Value::Null };
            assert_eq!(template.render_complete(&chat).unwrap(), expected);
        }
    }

    #[test]
    fn template_errors_are_reported() {
        let error = |template: &str| rendered(&json!({ "chat_template": template })).unwrap_err().to_string();
        assert!(error("{{ raise_exception('roles must alternate') }}").contains("roles must alternate"));
        assert!(error("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}").contains("fuel"));
        assert!(error("{% if %}").contains("the chat template"));
        assert!(rendered(&json!({})).unwrap_err().to_string().contains("a chat without chat_template.jinja"));
    }
}
