//! Messages about invalid arguments.

use std::ffi::OsString;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};

use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::tips::{COMMAND_TIPS, INTEGERS, TIPS, gguf_type};
use crate::aliases;
use crate::error::redact;
use crate::pass::PASSES;

/// Exits with an error if the value of `-o` is attached and is probably the rest of the option's long name.
pub(super) fn check_output_option(args: &[OsString]) {
    let options: Vec<&str> = args.iter().take_while(|argument| *argument != "--").filter_map(|argument| argument.to_str()).collect();
    // Texts may begin with a dash.
    let is_text = |at: usize| at.checked_sub(1).and_then(|before| options.get(before)) == Some(&"--prompt");
    if let Some(message) = options.iter().enumerate().filter(|(at, _)| !is_text(*at)).find_map(|(_, argument)| attached_output(argument)) {
        clap::Error::raw(ErrorKind::UnknownArgument, redact(&message)).exit();
    }
}

/// The message about an argument like `-out=DIR` or `-output`, which would write to `ut=DIR` or `utput`.
fn attached_output(argument: &str) -> Option<String> {
    let rest = argument.strip_prefix("-o").filter(|rest| rest.starts_with("ut"))?;
    let option = argument.split_once('=').map_or_else(|| "--output".to_owned(), |(_, value)| format!("--output {value}"));
    Some(format!(
        "unexpected argument '{argument}' found: it would write to `{rest}`\n\n  tip: did you mean `{option}`? Otherwise write `-o {rest}`\n\nFor more information, try '--help'.\n"
    ))
}

/// Exits with the message of a clap error: invalid arguments, or the requested help.
pub(super) fn exit(mut error: clap::Error) -> ! {
    match error.kind() {
        ErrorKind::UnknownArgument => replace_tip(&mut error),
        ErrorKind::InvalidSubcommand => suggest_commands(&mut error),
        ErrorKind::InvalidValue => suggest_value(&mut error),
        _ => {}
    }
    let error = explain_number(&error).unwrap_or(error);
    let text = error.to_string();
    match redact(&text) {
        clean if clean == text => error.exit(),
        clean => clap::Error::raw(error.kind(), clean.trim_start_matches("error: ")).exit(),
    }
}

/// The text of a part of an error.
fn text(error: &clap::Error, kind: ContextKind) -> String {
    error.get(kind).map(ToString::to_string).unwrap_or_default()
}

/// Replaces the suggested commands: the most likely one comes first, and `help` has suggestions too.
fn suggest_commands(error: &mut clap::Error) {
    let name = text(error, ContextKind::InvalidSubcommand);
    error.remove(ContextKind::SuggestedSubcommand);
    error.remove(ContextKind::Suggested);
    if let Some((_, tip)) = COMMAND_TIPS.iter().find(|(command, _)| *command == name) {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![(*tip).into()]));
        return;
    }
    let command = super::command();
    let is_chained = text(error, ContextKind::Usage).contains("compress chain");
    let names = command.get_subcommands().map(clap::Command::get_name).filter(|name| !is_chained || PASSES.contains(name));
    let names: Vec<&str> = names.collect();
    let best = aliases::suggestion(&name, names.iter().copied());
    let longer = names.iter().filter(|other| other.strip_prefix(&name).is_some_and(|rest| rest.starts_with('-'))).map(|name| (*name).to_owned());
    let mut suggested: Vec<String> = best.into_iter().collect();
    suggested.extend(longer.filter(|name| suggested.first() != Some(name)).collect::<Vec<_>>());
    if !suggested.is_empty() {
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(suggested));
    }
}

/// Adds a suggestion to the possible values of an option.
fn suggest_value(error: &mut clap::Error) {
    let (option, value) = (text(error, ContextKind::InvalidArg), text(error, ContextKind::InvalidValue));
    let Some(ContextValue::Strings(valid)) = error.get(ContextKind::ValidValue) else { return };
    let best = aliases::suggestion(&value, valid.iter().map(String::as_str));
    let tip = match best {
        _ if option.starts_with("--scheme") && aliases::is_gguf_type(&value) => gguf_type(&value),
        _ if option.starts_with("--to ") && ["int8", "int4", "i8", "i4"].contains(&value.as_str()) => INTEGERS.to_owned(),
        Some(best) => format!("did you mean `{best}`?"),
        None => return,
    };
    error.remove(ContextKind::SuggestedValue);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
}

/// Replaces the tips about an unknown argument: arguments after `--` would be values, which are rarely meant,
/// and similar names may have other meanings.
fn replace_tip(error: &mut clap::Error) {
    let (argument, usage) = (text(error, ContextKind::InvalidArg), text(error, ContextKind::Usage));
    let tip = tip(argument.split('=').next().unwrap_or_default(), &usage);
    let mut tips = match error.remove(ContextKind::Suggested) {
        Some(ContextValue::StyledStrs(tips)) => tips,
        _ => Vec::new(),
    };
    tips.retain(|tip| !tip.to_string().starts_with("to pass '"));
    if let Some(tip) = tip {
        tips = vec![tip.into()];
        // The usage includes the suggested argument.
        if error.remove(ContextKind::SuggestedArg).is_some() {
            error.remove(ContextKind::Usage);
        }
    }
    if !tips.is_empty() {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
}

/// The tip for an unknown argument of the command in `usage`. Passes of a chain have a usage without the name
/// of the program.
fn tip(argument: &str, usage: &str) -> Option<String> {
    let command = usage.split_whitespace().skip_while(|word| *word != "compress").nth(1).unwrap_or_default();
    let is_chained = !usage.is_empty() && command.is_empty();
    if is_chained && is_option_of_chains(argument) {
        return Some(format!("`{argument}` applies to the output: write it before the first `--`, as in: compress chain MODEL -o DIR {argument} ... -- PASS"));
    }
    let is_value = !argument.starts_with('-');
    if is_value && aliases::is_gguf_type(argument) {
        return Some(gguf_type(argument));
    }
    let plain = argument.replace('_', "-");
    let is_meant = |name: &str| if name.is_empty() { is_value } else { name == plain };
    let row = TIPS.iter().find(|(of, name, _)| (of.is_empty() || *of == command) && is_meant(name));
    let name = if is_chained { usage.split_whitespace().nth(1).unwrap_or_default() } else { command };
    row.map(|(_, _, tip)| (*tip).to_owned()).or_else(|| tip_from_options(argument, name))
}

/// The tip for an unknown argument that follows from the options of the command: the option with this
/// meaning, or `-o` for the output.
fn tip_from_options(argument: &str, command: &str) -> Option<String> {
    let all = super::command();
    let options: Vec<&str> = all.find_subcommand(command)?.get_arguments().filter_map(clap::Arg::get_long).collect();
    if let Some(option) = argument.strip_prefix("--") {
        return aliases::alias(option, options.iter().copied()).map(|option| format!("the option is `--{option}`"));
    }
    let has_output = std::env::args().any(|argument| argument.starts_with("-o") || argument.starts_with("--output"));
    let is_output = !argument.starts_with('-') && options.contains(&"output") && !has_output;
    is_output.then(|| format!("the output is an option: `-o {argument}`"))
}

/// Whether `compress chain` has this option, before its passes.
fn is_option_of_chains(argument: &str) -> bool {
    let command = super::command();
    let mut options = command.find_subcommand("chain").into_iter().flat_map(clap::Command::get_arguments);
    options.any(|option| {
        let long = option.get_long().is_some_and(|long| argument.strip_prefix("--") == Some(long));
        long || option.get_short().is_some_and(|short| argument.strip_prefix('-').is_some_and(|rest| rest.chars().eq([short])))
    })
}

/// A clearer message for an invalid number than that of the standard library.
fn explain_number(error: &clap::Error) -> Option<clap::Error> {
    let source = std::error::Error::source(error)?;
    let (argument, value) = (error.get(ContextKind::InvalidArg)?, error.get(ContextKind::InvalidValue)?.to_string());
    let reason = match (source.downcast_ref::<ParseIntError>().map(ParseIntError::kind), source.downcast_ref::<ParseFloatError>()) {
        (Some(IntErrorKind::PosOverflow | IntErrorKind::NegOverflow), _) => "the number is too large",
        (Some(_), _) if value.parse::<i128>().is_ok() => "the number must not be negative",
        (Some(_), _) => "expected a whole number",
        (None, Some(_)) => "expected a number",
        (None, None) => return None,
    };
    let message = format!("invalid value '{value}' for '{argument}': {reason}\n\nFor more information, try '--help'.\n");
    Some(clap::Error::raw(error.kind(), message))
}
