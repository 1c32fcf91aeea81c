//! Filters, operators and methods of templates.

use minijinja::machinery::{CodeGenerator, eval, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};

use super::json::to_json;
use super::memory::{Memory, Text, require_small};
use super::python::{call_method, escape, is_sequence, write_text};
use super::rewriting::{APPLY, COUNT, parse_rewritten};

/// Maximum number of template instructions, since templates are untrusted.
const FUEL: u64 = 10_000_000;
/// Filters that do not exist in Jinja2.
const OTHER_FILTERS: [&str; 6] = ["bool", "chain", "lines", "split", "zip", "debug"];
/// Maximum number of blanks, columns or lists that the arguments of a filter specify.
const WIDTH: usize = 1 << 16;

/// An environment for templates whose operators are [rewritten](super::rewriting).
pub(super) fn environment<'s>(memory: &Memory) -> Environment<'s> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    OTHER_FILTERS.into_iter().for_each(|name| environment.remove_filter(name));
    let used = memory.clone();
    environment.set_formatter(move |out, _, value| {
        let text = text(&used, [value])?;
        out.write_str(&text).map_err(Error::from)
    });
    let used = memory.clone();
    environment.set_unknown_method_callback(move |state, value, method, args| {
        let values: Vec<Value> = [value].into_iter().chain(args).cloned().collect();
        prepare(&used, method, &values)?;
        used.count(call_method(state, value, method, args)?)
    });
    let used = memory.clone();
    environment.add_filter(APPLY, move |state: &mut State, value: Value, name: &str, args: Rest<ValueOrKwargs>| {
        apply(&used, state, name, [value].into_iter().chain(args.into_values()).collect())
    });
    let used = memory.clone();
    environment.add_filter(COUNT, move |value: Value| used.count(value));
    let used = memory.clone();
    environment.add_filter("tojson", move |value: Value, args: Rest<ValueOrKwargs>| to_json(&used, &value, args));
    let used = memory.clone();
    environment.add_filter("~", move |left: Value, right: Value| text(&used, [&left, &right]));
    let used = memory.clone();
    environment.add_filter("+", move |state: &mut State, left: Value, right: Value| add(&used, state, &left, &right));
    let used = memory.clone();
    environment.add_filter("*", move |state: &mut State, left: Value, right: Value| multiply(&used, state, &left, &right));
    let used = memory.clone();
    environment.add_filter("%", move |state: &mut State, left: Value, right: Value| remainder(&used, state, left, right));
    environment.add_test("sequence", |value: Value| is_sequence(&value));
    environment
}

/// Renders a template with the variables of `context`.
pub(super) fn render(environment: &Environment, text: &str, context: Value) -> Result<String, Error> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    let mut generator = CodeGenerator::new("<string>", text);
    generator.compile_stmt(&parse_rewritten(text, syntax)?);
    let ((instructions, blocks), mut rendered) = (generator.finish(), String::new());
    let mut out = make_string_output(&mut rendered);
    eval(environment, &instructions, context, &blocks, &mut out, AutoEscape::None)?;
    drop(out);
    Ok(rendered)
}

fn unsupported(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{what} is not supported"))
}

/// The texts of values, one after the other.
fn text<'v>(memory: &Memory, values: impl IntoIterator<Item = &'v Value>) -> Result<String, Error> {
    let mut out = Text::new(memory);
    values.into_iter().try_for_each(|value| write_text(&mut out, value))?;
    Ok(out.text)
}

/// Applies a filter.
fn apply(memory: &Memory, state: &mut State, name: &str, values: Vec<Value>) -> Result<Value, Error> {
    prepare(memory, name, &values)?;
    if let ("map", [list, filter, rest @ ..]) = (name, values.as_slice())
        && let Some(filter) = filter.as_str()
    {
        let each = |item: Value| apply(memory, state, filter, [item].into_iter().chain(rest.iter().cloned()).collect());
        return memory.count(list.try_iter()?.map(each).collect::<Result<Vec<Value>, Error>>()?.into());
    }
    match name {
        "string" => text(memory, &values).map(Value::from),
        "join" => join(memory, state, &values),
        "e" | "escape" if values.len() == 1 && !values.iter().any(Value::is_safe) => memory.count(escape(&text(memory, &values)?)),
        _ => memory.count(state.apply_filter(name, &values)?),
    }
}

/// Fails if the result of a filter or method, applied to the first one of the values, would be too large.
fn prepare(memory: &Memory, name: &str, values: &[Value]) -> Result<(), Error> {
    require_small(values)?;
    let mut texts = values.iter().map(|value| value.as_str().unwrap_or_default());
    let first = texts.next().unwrap_or_default();
    match name {
        "replace" => {
            let (old, new) = (texts.next().unwrap_or_default(), texts.next().unwrap_or_default());
            memory.reserve(first.matches(old).count().saturating_mul(new.len()))
        }
        "join" => memory.reserve(values.get(1).and_then(|list| list.try_iter().ok()).map_or(0, Iterator::count).saturating_mul(first.len())),
        // Lists of characters.
        "list" | "map" | "reject" | "select" | "sort" | "unique" => memory.reserve(first.len().saturating_mul(size_of::<Value>())),
        "batch" | "indent" | "slice" => {
            let mut widths = values.iter().skip(1).map(largest);
            let lines = if name == "indent" { first.lines().count() } else { 0 };
            let width = widths.by_ref().max().unwrap_or(0);
            if width > WIDTH { Err(unsupported(&format!("`{name}` by {width}"))) } else { memory.reserve(lines.saturating_mul(width)) }
        }
        // Widths of fields.
        "format" if first.contains('*') || first.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > 4) => {
            Err(unsupported("`format` with a width of more than 4 digits or of an argument"))
        }
        "format" if values.iter().skip(1).any(|value| text(memory, [value]).is_ok_and(|text| text != value.to_string())) => {
            Err(unsupported("`format` of floats with exponents"))
        }
        _ => Ok(()),
    }
}

/// The largest integer of an argument, or of keyword arguments.
fn largest(value: &Value) -> usize {
    let named = value.is_kwargs().then(|| value.try_iter().ok()).flatten();
    let nested = named.into_iter().flatten().filter_map(|key| usize::try_from(value.get_item(&key).ok()?).ok()).max();
    nested.or_else(|| usize::try_from(value.clone()).ok()).unwrap_or(0)
}

fn join(memory: &Memory, state: &mut State, values: &[Value]) -> Result<Value, Error> {
    let (positional, named): (&[Value], Kwargs) = from_args(values)?;
    let argument = |at: usize, name: &str| positional.get(at).map_or_else(|| named.get::<Option<Value>>(name), |value| Ok(Some(value.clone())));
    let (separator, attribute) = (argument(1, "d")?, argument(2, "attribute")?.filter(|value| !value.is_none()));
    named.assert_all_used()?;
    let list = positional.first().cloned().unwrap_or_default();
    let list = match attribute {
        Some(attribute) => state.apply_filter("map", &[list, Kwargs::from_iter([("attribute", attribute)]).into()])?,
        None => list,
    };
    let mut out = Text::new(memory);
    for (index, item) in list.try_iter()?.enumerate() {
        separator.iter().filter(|_| index > 0).try_for_each(|separator| write_text(&mut out, separator))?;
        write_text(&mut out, &item)?;
    }
    Ok(Value::from(out.text))
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn add(memory: &Memory, state: &State, left: &Value, right: &Value) -> Result<Value, Error> {
    if left.is_safe() || right.is_safe() {
        return Err(unsupported("`+` with escaped text"));
    }
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        memory.reserve(left.len().saturating_add(right.len()))?;
        return Ok([left, right].concat().into());
    }
    if !is_list(left) || !is_list(right) || left.is_tuple() != right.is_tuple() {
        return native(state, "+", left, right);
    }
    require_small([left, right])?;
    let items: Vec<Value> = left.try_iter()?.chain(right.try_iter()?).collect();
    memory.count(if left.is_tuple() { Tuple::from(items).into() } else { items.into() })
}

fn multiply(memory: &Memory, state: &State, left: &Value, right: &Value) -> Result<Value, Error> {
    for (repeated, times) in [(left, right), (right, left)] {
        let size = repeated.as_str().map(str::len).or_else(|| repeated.len().map(|length| length.saturating_mul(size_of::<Value>())));
        memory.reserve(size.unwrap_or(0).saturating_mul(usize::try_from(times.clone()).unwrap_or(0)))?;
    }
    native(state, "*", left, right)
}

/// The remainder of numbers, or a formatted text.
fn remainder(memory: &Memory, state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    let Some(format) = left.as_str() else { return native(state, "%", &left, &right) };
    let mut arguments = if right.is_tuple() { right.try_iter()?.collect() } else { vec![right] };
    // The engine has no named arguments here, and ignores superfluous ones.
    let fields = format.replace("%%", "").matches('%').count();
    if format.contains("%(") || fields != arguments.len() {
        return Err(unsupported("`%` with other arguments than one for each field of the format"));
    }
    arguments.insert(0, left);
    apply(memory, state, "format", arguments)
}

/// Applies an operator of the engine.
fn native(state: &State, operator: &str, left: &Value, right: &Value) -> Result<Value, Error> {
    state.env().compile_expression_owned(format!("left {operator} right"))?.eval(minijinja::context! { left, right })
}
