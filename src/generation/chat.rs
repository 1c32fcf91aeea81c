//! Messages of a chat as the text that a model has been trained on, by the template that it comes with.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error as Fault, ErrorKind, Value as Said};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::model::Config;

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

/// The template of a model (Jinja), as transformers has it: blocks leave no empty lines, `raise_exception` refuses messages.
pub struct ChatTemplate {
    text: String,
    /// Special tokens by the names that templates know them by.
    tokens: Map<String, Value>,
    folder: String,
}

impl ChatTemplate {
    /// The template of a folder: a file of its own, or what `tokenizer_config.json` holds.
    ///
    /// # Errors
    /// There is none, or a file cannot be read.
    pub fn open(folder: &Path) -> Result<ChatTemplate> {
        let settings = Config::open(&folder.join(SETTINGS))?;
        let own = match std::fs::read_to_string(folder.join(FILE)) {
            Ok(text) => Some(text),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(Error::io("read", &folder.join(FILE))(e)),
        };
        let stored = || match settings.get("chat_template")? {
            Value::String(text) => Some(text.clone()),
            Value::Array(named) => {
                let usual = named.iter().find(|template| template.get("name").and_then(Value::as_str) == Some("default"))?;
                usual.get("template")?.as_str().map(str::to_owned)
            }
            _ => None,
        };
        let text = own.or_else(stored).ok_or_else(|| Error::Unsupported {
            what: format!("{}: a chat without {FILE} and without `chat_template` in {SETTINGS}", folder.display()),
            hint: "continue the text itself, without --chat".into(),
        })?;
        let token = |(name, value): (&String, &Value)| {
            let content = value.as_str().or_else(|| value.get("content")?.as_str())?;
            name.ends_with("_token").then(|| (name.clone(), json!(content)))
        };
        Ok(ChatTemplate { text, tokens: settings.values().iter().filter_map(token).collect(), folder: folder.display().to_string() })
    }

    /// The text of messages, with the beginning of an answer.
    ///
    /// # Errors
    /// The template is broken, takes too long, or refuses the messages.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        let failed = |e: Fault| Error::run(format!("{}: the chat template", self.folder), e, "");
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(failed)?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |reason: String| Err::<Said, _>(Fault::new(ErrorKind::InvalidOperation, reason)));
        environment.add_filter("tojson", |value: Said| serde_json::to_string(&value).map_err(|e| Fault::new(ErrorKind::BadSerialization, e.to_string())));
        let mut context = self.tokens.clone();
        context.insert("messages".into(), json!(messages));
        context.insert("add_generation_prompt".into(), json!(true));
        environment.render_str(&self.text, Serde(context)).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(settings: &Value) -> Result<String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(SETTINGS), settings.to_string()).unwrap();
        let said = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
        ChatTemplate::open(folder.path())?.render(&[said("user", "  Who <b> are you? "), said("assistant", "ä")])
    }

    /// What `apply_chat_template` of transformers gives.
    #[test]
    fn messages_are_rendered_as_in_transformers() {
        let template = "{{ bos_token }}{% for message in messages %}\n    {%- if message['role'] == 'user' %}\n[U] {{ message['content'].strip() | tojson }}\n    {% else %}\n[A] {{ message.content }}{{ eos_token }}\n    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n[A]{% endif %}";
        let settings = json!({ "bos_token": { "content": "<s>" }, "eos_token": "</s>", "chat_template": [{ "name": "default", "template": template }] });
        assert_eq!(rendered(&settings).unwrap(), "<s>[U] \"Who <b> are you?\"\n[A] ä</s>\n[A]");
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
