//! Messages of a chat as the text that a model has been trained on, by the template that it comes with.

use std::io::Write;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error as Fault, ErrorKind, Value as Said};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use serde_json::{Map, Value, json};

use super::tokens::{special_tokens, token_text};
use crate::error::{Error, Result};
use crate::model::{Made, config_beside, text_beside};

/// The file of a template.
const FILE: &str = "chat_template.jinja";
const SETTINGS: &str = "tokenizer_config.json";
/// Instructions of a template at most: anybody may have written it.
const FUEL: u64 = 10_000_000;

/// Something that somebody says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who: `user`, `system` or `assistant`.
    pub role: String,
    /// What.
    pub content: String,
}

/// Messages of a data set with whatever a template knows of them, and the tools that they may call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chat {
    pub messages: Value,
    pub tools: Value,
}

/// The template of a model (Jinja), as transformers has it: blocks leave no empty lines, `raise_exception` refuses messages.
pub struct ChatTemplate {
    text: String,
    /// The one for chats in which tools may be called, where there is another.
    with_tools: Option<String>,
    /// Special tokens by the names that templates know them by.
    tokens: Map<String, Value>,
    folder: String,
}

impl ChatTemplate {
    /// The template of a folder, or of what a file of weights holds of one (`made`): a file of its own, or what `tokenizer_config.json` holds.
    ///
    /// # Errors
    /// There is none, or a file cannot be read.
    pub fn open(folder: &Path, made: &Made) -> Result<ChatTemplate> {
        let settings = config_beside(folder, made, SETTINGS)?;
        let own = text_beside(folder, made, FILE)?;
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
            hint: format!("put {FILE} beside the model, or go without chats: `generate` without --chat, data with texts"),
        })?;
        let tokens = special_tokens(folder, made, settings.values())?;
        let tokens = tokens.iter().filter_map(|(name, value)| Some((name.clone(), json!(token_text(value)?)))).collect();
        Ok(ChatTemplate { text: without_generation_blocks(&text), with_tools, tokens, folder: folder.display().to_string() })
    }

    /// The text of messages, with the beginning of an answer.
    ///
    /// # Errors
    /// The template is broken, takes too long, or refuses the messages.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        self.made_of(&json!(messages), &Value::Null, true)
    }

    /// The text of a whole chat.
    pub(super) fn whole(&self, chat: &Chat) -> Result<String> {
        self.made_of(&chat.messages, &chat.tools, false)
    }

    fn made_of(&self, messages: &Value, tools: &Value, answer: bool) -> Result<String> {
        let failed = |e: Fault| {
            let dated = e.to_string().contains("strftime_now");
            let hint = if dated { "the template asks for the date, with which answers change from day to day: put a date into its text" } else { "" };
            Error::run(format!("{}: the chat template", self.folder), e, hint)
        };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(failed)?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |reason: String| Err::<Said, _>(Fault::new(ErrorKind::InvalidOperation, reason)));
        environment.add_filter("tojson", |value: Said, options: Kwargs| {
            let indent: Option<usize> = options.get("indent")?;
            options.assert_all_used()?;
            as_python(&value, indent).map_err(|e| Fault::new(ErrorKind::BadSerialization, e.to_string()))
        });
        let mut context = self.tokens.clone();
        // transformers passes all of them always.
        let given = [("messages", messages.clone()), ("tools", tools.clone()), ("documents", Value::Null), ("add_generation_prompt", json!(answer))];
        context.extend(given.map(|(name, value)| (name.to_owned(), value)));
        let text = self.with_tools.as_ref().filter(|_| !tools.is_null()).unwrap_or(&self.text);
        environment.render_str(text, Serde(context)).map_err(failed)
    }
}

/// A template without the marks of what an assistant has said, which transformers trains by: `{% generation %}` to `{% endgeneration %}`.
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

/// JSON as Python's `json.dumps` spells it.
fn as_python(value: &Said, indent: Option<usize>) -> serde_json::Result<String> {
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
        let said = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
        ChatTemplate::open(folder.path(), &Made::new())?.render(&[said("user", "  Who <b> are you? "), said("assistant", "ä")])
    }

    /// What `apply_chat_template` of transformers gives.
    #[test]
    fn messages_are_rendered_as_in_transformers() {
        let template = "{{ bos_token }}{% for message in messages %}\n    {%- if message['role'] == 'user' %}\n[U] {{ message['content'].strip() | tojson }}\n    {% else %}\n[A] {{ message.content }}{{ eos_token }}\n    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n[A]{% endif %}";
        let settings = json!({ "bos_token": { "content": "<s>" }, "eos_token": "</s>", "chat_template": [{ "name": "default", "template": template }] });
        assert_eq!(rendered(&settings).unwrap(), "<s>[U] \"Who <b> are you?\"\n[A] ä</s>\n[A]");
    }

    #[test]
    fn what_transformers_passes_and_trains_by_is_known() {
        let rendered = |template: &str| rendered(&json!({ "chat_template": template })).unwrap();
        assert_eq!(rendered("{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}x"), "x");
        assert_eq!(rendered("{%- generation -%} a {%- endgeneration %}\nb{% generation %}c{% endgeneration %}"), "ab c".replace(' ', ""));
        assert_eq!(rendered("{{ {'a': [1, 'ä'], 'b': none} | tojson }}"), "{\"a\": [1, \"ä\"], \"b\": null}");
        assert_eq!(rendered("{{ {'a': [1]} | tojson(indent=2) }}"), "{\n  \"a\": [\n    1\n  ]\n}");
        let folder = tempfile::tempdir().unwrap();
        let named = json!({ "chat_template": [{ "name": "default", "template": "plain" }, { "name": "tool_use", "template": "{{ tools[0].b }}" }] });
        std::fs::write(folder.path().join(SETTINGS), named.to_string()).unwrap();
        let template = ChatTemplate::open(folder.path(), &Made::new()).unwrap();
        let whole = |tools| template.whole(&Chat { messages: json!([]), tools }).unwrap();
        assert_eq!((whole(Value::Null).as_str(), whole(json!([{ "b": "tool" }])).as_str()), ("plain", "tool"));
        // As old files of transformers say it.
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(SETTINGS), json!({ "chat_template": "{{ bos_token }}{{ eos_token }}", "eos_token": "e" }).to_string()).unwrap();
        std::fs::write(folder.path().join("special_tokens_map.json"), json!({ "bos_token": { "content": "b" }, "eos_token": "other" }).to_string()).unwrap();
        assert_eq!(ChatTemplate::open(folder.path(), &Made::new()).unwrap().render(&[]).unwrap(), "be");
    }

    #[test]
    fn templates_that_fail_are_told() {
        let told = |template: &str| rendered(&json!({ "chat_template": template })).unwrap_err().to_string();
        assert!(told("{{ raise_exception('roles must alternate') }}").contains("roles must alternate"));
        assert!(told("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}").contains("fuel"));
        assert!(told("{% if %}").contains("the chat template"));
        assert!(rendered(&json!({})).unwrap_err().to_string().contains("a chat without chat_template.jinja"));
    }
}
