//! Messages about invalid arguments.

use std::num::{IntErrorKind, ParseFloatError, ParseIntError};

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::error::redact;

/// Tips for unknown arguments: the command, or any if it is empty; the option, or a value if it is empty; and
/// the tip.
const TIPS: [(&str, &str, &str); 6] = [
    ("", "--bits", "a scheme specifies the bits: `compress quantize MODEL -o DIR --scheme W4A16`"),
    ("eval", "--dtype", "the option is `--precision`"),
    ("", "--dtype", "types are changed with `--to`: `compress cast MODEL -o DIR --to bf16`"),
    ("eval", "--eval", "the option is `--data`"),
    ("eval", "", "samples need an option: `--data FILE`"),
    ("generate", "", "a prompt needs an option: `--prompt TEXT`"),
];

/// Exits with the message of a clap error: invalid arguments, or the requested help.
pub(super) fn exit(mut error: clap::Error) -> ! {
    replace_tip(&mut error);
    let error = explain_number(&error).unwrap_or(error);
    let text = error.to_string();
    match redact(&text) {
        clean if clean == text => error.exit(),
        clean => clap::Error::raw(error.kind(), clean.trim_start_matches("error: ")).exit(),
    }
}

/// Replaces the tips about an unknown argument: arguments after `--` would be values, which are rarely meant,
/// and similar names may have other meanings.
fn replace_tip(error: &mut clap::Error) {
    if error.kind() != ErrorKind::UnknownArgument {
        return;
    }
    let text = |kind| error.get(kind).map(ToString::to_string).unwrap_or_default();
    let (argument, usage) = (text(ContextKind::InvalidArg), text(ContextKind::Usage));
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
    let is_meant = |name: &str| if name.is_empty() { is_value } else { name == argument };
    let row = TIPS.iter().find(|(of, name, _)| (of.is_empty() || *of == command) && is_meant(name));
    row.map(|(_, _, tip)| (*tip).to_owned())
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
