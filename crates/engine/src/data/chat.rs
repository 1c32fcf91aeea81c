//! Chat templates: render the messages of a chat to the text format that a model was trained on.

mod environment;
mod generation_blocks;
mod json;
mod memory;
mod python;
mod rewriting;

use std::ops::Range;
use std::path::Path;

use minijinja::value::Serde;
use minijinja::{Error as TemplateError, ErrorKind, Value as TemplateValue};
use serde::Serialize;
use serde_json::{Map, Value, json};

use self::environment::{environment, render};
use self::generation_blocks::replace_generation_blocks;
use self::memory::Memory;
use super::tokens::{special_tokens, token_text};
use crate::error::{Error, Result};
use crate::model::{DEFAULT_TEMPLATE, SynthesizedFiles, chat_templates, open_auxiliary_config};

/// File with the template.
const FILE: &str = "chat_template.jinja";
const SETTINGS: &str = "tokenizer_config.json";
/// Names of the reasoning of a message. Templates read the first one.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Filter that marks the text of `{% generation %}` blocks.
const MARKING_FILTER: &str = "mark_generation";
/// Noncharacters of Unicode, of which two that do not occur in a chat mark the ends of these blocks.
const MARKERS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';
/// Role of the messages that a model is trained to write.
const ASSISTANT: &str = "assistant";

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

/// A rendered chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RenderedChat {
    pub text: String,
    /// The text of the assistant, in bytes: ranges in ascending order that are not empty.
    pub answers: Vec<Range<usize>>,
}

/// The text of a template.
struct Template {
    /// With `{% generation %}` blocks as unconditional blocks.
    plain: String,
    /// With `{% generation %}` blocks as blocks of the filter that marks them; `None` without such blocks.
    marked: Option<String>,
}

impl Template {
    fn new(text: &str) -> Template {
        // Jinja2 converts the line ends of templates, but not those of values.
        let text = &text.replace("\r\n", "\n").replace('\r', "\n");
        let marked = replace_generation_blocks(text, [&format!("filter {MARKING_FILTER}"), "endfilter"]);
        Template { plain: replace_generation_blocks(text, ["if true", "endif"]), marked: Some(marked).filter(|marked| marked != text) }
    }
}

/// A Jinja chat template with the semantics of transformers: `trim_blocks` and `lstrip_blocks` are set,
/// and `raise_exception` is available.
pub struct ChatTemplate {
    template: Template,
    /// A separate template for chats with tools, if there is one.
    with_tools: Option<Template>,
    /// Special tokens by their names in templates, such as `bos_token`.
    tokens: Map<String, Value>,
    folder: String,
}

impl ChatTemplate {
    /// Opens the template of a folder, or of the files synthesized from a weight file:
    /// `chat_template.jinja` and `additional_chat_templates`, or `chat_template` in `tokenizer_config.json`
    /// or `chat_template.json`.
    pub fn open(folder: &Path, synthesized: &SynthesizedFiles) -> Result<ChatTemplate> {
        let settings = open_auxiliary_config(folder, synthesized, SETTINGS)?;
        let templates = chat_templates(folder, synthesized, settings.get("chat_template"))?;
        let named = |name: &str| templates.get(name).map(|text| Template::new(text));
        let template = named(DEFAULT_TEMPLATE).ok_or_else(|| Error::Unsupported {
            what: format!("{}: a chat without {FILE} and without `chat_template` in {SETTINGS}", folder.display()),
            hint: format!("add {FILE} to the model's folder, or use plain texts instead of chats"),
        })?;
        let tokens = special_tokens(folder, synthesized, settings.values())?;
        let tokens = tokens.iter().filter_map(|(name, value)| Some((name.clone(), json!(token_text(value)?)))).collect();
        Ok(ChatTemplate { template, with_tools: named("tool_use"), tokens, folder: folder.display().to_string() })
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

    /// Renders the messages before the first one of the assistant, followed by the generation prompt.
    pub(super) fn render_prompt(&self, chat: &Chat) -> Result<String> {
        let messages = chat.messages.as_array().map(Vec::as_slice).unwrap_or_default();
        self.render_with(&messages.iter().take_while(|message| !is_of_assistant(message)).cloned().collect(), &chat.tools, true)
    }

    /// Renders a complete chat, and finds the text of the assistant in it: the `{% generation %}` blocks of
    /// the template, or without such blocks the text that each message of the assistant adds after the
    /// generation prompt. Fails if a message adds no text at the end of the previous ones.
    pub(super) fn render_with_answers(&self, chat: &Chat) -> Result<RenderedChat> {
        let text = self.render_complete(chat)?;
        let answers = match &self.template_for(&chat.tools).marked {
            Some(marked) => self.marked_answers(marked, chat, &text)?,
            None => self.added_answers(chat, &text)?,
        };
        if answers.is_empty() {
            let what = format!("a chat without text of the assistant ({})", self.folder);
            return Err(Error::Unsupported { what, hint: "remove the chat, or set `loss_on: all`".into() });
        }
        Ok(RenderedChat { text, answers })
    }

    /// The text in `{% generation %}` blocks.
    fn marked_answers(&self, template: &str, chat: &Chat, text: &str) -> Result<Vec<Range<usize>>> {
        let unusable = |what: &str| {
            let hint = "set `loss_on: all`, or change the template".to_owned();
            Error::Unsupported { what: format!("{}: `loss_on: assistant` with {what}", self.folder), hint }
        };
        let mut unused = MARKERS.filter(|marker| !text.contains(*marker));
        let (Some(start), Some(end)) = (unused.next(), unused.next()) else { return Err(unusable("a chat that contains all noncharacters of Unicode")) };
        let marked = self.render_text(template, (&chat.messages, &chat.tools), false, Some([start, end]))?;
        let (mut answers, mut unmarked, mut starts) = (Vec::new(), String::with_capacity(text.len()), Vec::new());
        for character in marked.chars() {
            if character == start {
                starts.push(unmarked.len());
            } else if character == end {
                // Blocks within blocks belong to the outermost one.
                let start = starts.pop().filter(|_| starts.is_empty());
                answers.extend(start.map(|start| start..unmarked.len()).filter(|answer| !answer.is_empty()));
            } else {
                unmarked.push(character);
            }
        }
        if unmarked == text { Ok(answers) } else { Err(unusable("a chat template that changes the text of its generation blocks")) }
    }

    /// The text that each message of the assistant adds to the text of the previous messages, without the
    /// generation prompt.
    fn added_answers(&self, chat: &Chat, text: &str) -> Result<Vec<Range<usize>>> {
        let messages = chat.messages.as_array().map(Vec::as_slice).unwrap_or_default();
        let render = |count: usize, prompt: bool| self.render_with(&messages.iter().take(count).cloned().collect(), &chat.tools, prompt);
        let mut answers = Vec::new();
        for (before, message) in messages.iter().enumerate() {
            if !is_of_assistant(message) {
                continue;
            }
            let through = before.saturating_add(1);
            let (start, end) = (render(before, false)?, if through == messages.len() { text.to_owned() } else { render(through, false)? });
            if !text.starts_with(&end) || !end.starts_with(&start) {
                let what = format!(
                    "{}: `loss_on: assistant` with a chat template without `{{% generation %}}` blocks, in which the text of message {through} is not \
                     added after the previous messages",
                    self.folder
                );
                let hint = "put the text of the assistant between `{% generation %}` and `{% endgeneration %}` in the template, or set `loss_on: all`";
                return Err(Error::Unsupported { what, hint: hint.into() });
            }
            // The prompt of some templates differs from the beginning of a message: a prompt for reasoning.
            let prompt = render(before, true)?;
            let common = prompt.chars().zip(end.chars()).take_while(|(a, b)| a == b).map(|(character, _)| character.len_utf8()).sum::<usize>();
            answers.extend(Some(common.max(start.len())..end.len()).filter(|answer| !answer.is_empty()));
        }
        Ok(answers)
    }

    /// The template for a chat with these tools.
    fn template_for(&self, tools: &Value) -> &Template {
        self.with_tools.as_ref().filter(|_| !tools.is_null()).unwrap_or(&self.template)
    }

    fn render_with(&self, messages: &Value, tools: &Value, add_generation_prompt: bool) -> Result<String> {
        self.render_text(&self.template_for(tools).plain, (messages, tools), add_generation_prompt, None)
    }

    /// Renders a template; `markers` enclose the text of its generation blocks.
    fn render_text(&self, text: &str, (messages, tools): (&Value, &Value), add_generation_prompt: bool, markers: Option<[char; 2]>) -> Result<String> {
        let failed = |e: TemplateError| {
            let uses_date = e.to_string().contains("strftime_now");
            let hint =
                if uses_date { "the template uses the current date, which makes results change from day to day: replace it by a fixed date" } else { "" };
            Error::run(format!("{}: the chat template", self.folder), e, hint)
        };
        let mut environment = environment(&Memory::default());
        environment.add_function("raise_exception", |reason: String| Err::<TemplateValue, _>(TemplateError::new(ErrorKind::InvalidOperation, reason)));
        if let Some([start, end]) = markers {
            environment.add_filter(MARKING_FILTER, move |text: String| format!("{start}{text}{end}"));
        }
        let mut context = self.tokens.clone();
        // transformers always passes all of these.
        let variables = [
            ("messages", normalize_messages(messages)),
            ("tools", tools.clone()),
            ("documents", Value::Null),
            ("add_generation_prompt", json!(add_generation_prompt)),
        ];
        context.extend(variables.map(|(name, value)| (name.to_owned(), value)));
        render(&environment, text, Serde(context).into()).map_err(failed)
    }
}

/// Whether the assistant is the author of a message.
fn is_of_assistant(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some(ASSISTANT)
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
        let chats = || {
            let template = ChatTemplate::open(folder.path(), &SynthesizedFiles::new()).unwrap();
            [Value::Null, json!([{ "b": "tool" }])].map(|tools| template.render_complete(&Chat { messages: json!([]), tools }).unwrap())
        };
        assert_eq!(chats(), ["plain", "tool"]);
        // The files that `save_pretrained` of transformers 5 writes for several templates.
        std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        std::fs::write(folder.path().join(FILE), "file").unwrap();
        assert_eq!(chats(), ["file", "file"]);
        std::fs::write(folder.path().join("additional_chat_templates/tool_use.jinja"), "T {{ tools[0].b }}").unwrap();
        assert_eq!(chats(), ["file", "T tool"]);
        // The template of a processor.
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("chat_template.json"), json!({ "chat_template": "{{ messages | length }}" }).to_string()).unwrap();
        assert_eq!(ChatTemplate::open(folder.path(), &SynthesizedFiles::new()).unwrap().render(&[]).unwrap(), "0");
        // Special tokens in a separate file, as written by old versions of transformers. It takes precedence.
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(SETTINGS), json!({ "chat_template": "{{ bos_token }}{{ eos_token }}", "eos_token": "e" }).to_string()).unwrap();
        std::fs::write(folder.path().join("special_tokens_map.json"), json!({ "bos_token": { "content": "b" }, "eos_token": "other" }).to_string()).unwrap();
        assert_eq!(ChatTemplate::open(folder.path(), &SynthesizedFiles::new()).unwrap().render(&[]).unwrap(), "bother");
    }

    /// The expected text is that of transformers 5.17.
    #[test]
    fn line_ends_of_templates_are_converted() {
        let template = "a\n{% if true %}\nb\n{% endif %}\n{{ 'x\ny' }}\n{{ messages[0].content }}";
        for newline in ["\r\n", "\r", "\n"] {
            let settings = json!({ "chat_template": template.replace('\n', newline) });
            assert_eq!(rendered(&settings).unwrap(), "a\nb\nx\ny\n  Who <b> are you? ", "{newline:?}");
        }
        let chat = [Message { role: "user".into(), content: "x\r\ny".into() }];
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), "{{ messages[0].content }}\r\n.").unwrap();
        assert_eq!(ChatTemplate::open(folder.path(), &SynthesizedFiles::new()).unwrap().render(&chat).unwrap(), "x\r\ny\n.");
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

    /// The text of the assistant in a chat, rendered by a template.
    fn answers(template: &str, messages: Value, tools: Value) -> Result<(String, Vec<String>)> {
        let folder = tempfile::tempdir().unwrap();
        let settings = json!({ "bos_token": "<s>", "eos_token": "</s>", "chat_template": template });
        std::fs::write(folder.path().join(SETTINGS), settings.to_string()).unwrap();
        let template = ChatTemplate::open(folder.path(), &SynthesizedFiles::new())?;
        let chat = Chat { messages, tools };
        let rendered = template.render_with_answers(&chat)?;
        assert_eq!(rendered.text, template.render_complete(&chat)?);
        let answers = rendered.answers.iter().map(|answer| rendered.text[answer.clone()].to_owned()).collect();
        Ok((rendered.text, answers))
    }

    fn dialogue() -> Value {
        let message = |(role, content): (&str, &str)| json!({ "role": role, "content": content });
        [("user", "ä"), ("assistant", "no"), ("user", "no"), ("assistant", "🙂")].into_iter().map(message).collect()
    }

    #[test]
    fn answers_are_the_generation_blocks_of_a_template() {
        let turn = "{{ m.role }}: {%- generation %} {{ m.content }}{{ eos_token }} {% endgeneration -%} \n";
        let template = format!("{{% for m in messages %}}{{% if m.role == 'user' %}}[{{{{ m.content }}}}]{{% else %}}\n{turn}{{% endif %}}{{% endfor %}}");
        let (text, found) = answers(&template, dialogue(), Value::Null).unwrap();
        assert_eq!(text, "[ä]assistant: no</s> [no]assistant: 🙂</s> ");
        assert_eq!(found, [" no</s> ", " 🙂</s> "]);
        let nested = "{% generation %}a{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}{% endgeneration %}b";
        assert_eq!(answers(nested, json!([{ "role": "x" }, { "role": "y" }]), Value::Null).unwrap(), ("axyb".into(), vec!["axy".into()]));
        // In a macro, and with a marker in the text.
        let called = "{% macro say(m) %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}";
        let messages = json!([{ "role": "a", "content": "x\u{fdd0}" }, { "role": "b", "content": "" }]);
        assert_eq!(answers(called, messages, Value::Null).unwrap(), ("<x\u{fdd0}><>".into(), vec!["x\u{fdd0}".into()]));
    }

    #[test]
    fn without_generation_blocks_answers_are_what_messages_add() {
        let template = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
        assert_eq!(answers(template, dialogue(), Value::Null).unwrap().1, ["no</s>", "🙂</s>"]);
        // Without a generation prompt, and with one that differs from the text of a message.
        assert_eq!(
            answers(&template[..template.find("{% if add").unwrap()], dialogue(), Value::Null).unwrap().1,
            ["<|assistant|>no</s>", "<|assistant|>🙂</s>"]
        );
        let reasoning = template.replace("<|assistant|>{%", "<|assistant|><think>{%");
        assert_eq!(answers(&reasoning, dialogue(), Value::Null).unwrap().1, ["no</s>", "🙂</s>"]);
    }

    #[test]
    fn prompts_end_before_the_first_answer() {
        let folder = tempfile::tempdir().unwrap();
        let text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        std::fs::write(folder.path().join(FILE), text).unwrap();
        let template = ChatTemplate::open(folder.path(), &SynthesizedFiles::new()).unwrap();
        let prompt = |messages: Value| template.render_prompt(&Chat { messages, tools: Value::Null }).unwrap();
        assert_eq!(prompt(dialogue()), "<user>ä<assistant>");
        assert_eq!(prompt(json!([{ "role": "system", "content": "s" }, { "role": "user", "content": "u" }])), "<system>s<user>u<assistant>");
    }

    #[test]
    fn chats_without_identifiable_answers_are_refused() {
        let turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        let error = |template: &str, messages: Value| answers(template, messages, json!([{ "b": "tool" }])).unwrap_err().to_string();
        for dependent in [format!("{turns}{{{{ tools[0].b }}}}").as_str(), "{{ messages | length }} messages"] {
            let found = error(dependent, dialogue());
            assert!(found.contains("message 2 is not added after the previous messages"), "{found}");
        }
        let silent = json!([{ "role": "user", "content": "a" }]);
        for template in [turns, "{{ messages[0].content }}{% generation %}{% endgeneration %}"] {
            let found = error(template, silent.clone());
            assert!(found.contains("a chat without text of the assistant"), "{found}");
        }
        let found = error("{% set text %}{% generation %}a{% endgeneration %}{% endset %}{{ text[:1] }}", silent);
        assert!(found.contains("changes the text of its generation blocks"), "{found}");
    }

    #[test]
    fn memory_of_templates_is_limited() {
        let repeated = |text: &str| format!("{{% set l=[1] %}}{}", text.repeat(40));
        let long = "{% set s='abcdefghij' * 100000 %}";
        for template in [
            "{% set ns=namespace(s='aaaaaaaaaa') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}".to_owned(),
            "{% set ns=namespace(s='aaaaaaaaaa') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}".to_owned(),
            "{% set ns=namespace(s='a') %}{% for i in range(40) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}".to_owned(),
            "{% macro f(s) %}{{ f(s ~ s) }}{% endmacro %}{{ f('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' * 100000) }}".to_owned(),
            "{{ 'a'|indent(5000000000) }}".to_owned(),
            "{{ ['a']|map('indent', width=5000000000)|list }}".to_owned(),
            "{{ [1,2,3]|batch(2000000000, 0)|list|length }}".to_owned(),
            "{{ '%1000000000d'|format(1) }}".to_owned(),
            "{{ 'a' * 100000000 }}".repeat(20),
            "{{ [1] * 100000000 }}".to_owned(),
            "{{ ('a' * 90000000)|list|length }}".to_owned(),
            format!("{long}{{{{ s|replace('a', s) }}}}"),
            format!("{long}{{{{ s.replace('', s) }}}}"),
            format!("{long}{{{{ s.join(range(99999)) }}}}"),
            format!("{long}{{{{ range(99999)|join(s) }}}}"),
            format!("{long}{{{{ ([s] * 99999)|upper }}}}"),
            format!("{long}{{% set ns=namespace(l=[]) %}}{{% for i in range(9999) %}}{{% set ns.l = ns.l + [s[1:]] %}}{{% endfor %}}"),
            format!("{{% for i in range(99999) %}}{}{{% endfor %}}", "abcdefghij".repeat(2000)),
            repeated("{% set l=[l,l] %}"),
            repeated("{% set l=l+l %}"),
            repeated("{% set l=dict(a=l,b=l) %}"),
            "{% set ns=namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}".to_owned(),
            "{% set ns=namespace() %}{% set ns.a = ns %}{{ ns }}".to_owned(),
        ] {
            let error = rendered(&json!({ "chat_template": template })).unwrap_err().to_string();
            let is_limit = error.contains("too large") || error.contains("is not supported") || error.contains("a width of");
            assert!(error.contains("the chat template") && is_limit, "{template:.80}: {error}");
        }
        let summed = "{% set ns=namespace(s='', l=[]) %}{% for i in range(2000) %}{% set ns.s = ns.s ~ 'abcdefghij' %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.s|length + ns.l|length }}";
        assert_eq!(rendered(&json!({ "chat_template": summed })).unwrap(), "22000");
    }

    #[test]
    fn template_errors_are_reported() {
        let error = |template: &str| rendered(&json!({ "chat_template": template })).unwrap_err().to_string();
        assert!(error("{{ raise_exception('roles must alternate') }}").contains("roles must alternate"));
        assert!(error("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}").contains("fuel"));
        assert!(error("{% if %}").contains("the chat template"));
        assert!(error("{% include 'x' %}").contains("imports, `autoescape` and other templates are not supported"));
        assert!(rendered(&json!({})).unwrap_err().to_string().contains("a chat without chat_template.jinja"));
    }
}
